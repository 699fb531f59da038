"""The router's settings."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from shared.config import ServiceConfig

Positive = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0, le=86400)]


class IndexConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of the index of cached blocks and of speculation."""

    limit_bytes: Natural = 1 << 30
    """Bytes of one model's index, some 7 million distinct blocks; at the limit, blocks that were not used for longest
    are dropped."""
    lower_tier_limit_blocks: Natural = 1_000_000
    """Blocks that one candidate, or one layout of a kvbm, may hold in any one tier; a worker's capacity, if that is
    larger. Each takes 100 to 160 bytes in addition to the index."""
    orphan_limit_blocks: Natural = 65_536
    """Blocks of one candidate that may wait for an event about their parent block; at the limit the oldest are
    dropped."""
    speculation_s: Seconds = 5.0
    """Seconds for which a routed prompt's blocks count as cached without an event that confirms it, or longer until it
    has its first token; 0 disables this."""
    history_s: Seconds = 120.0
    """Seconds for which a routed prompt's blocks count as cached, from their last use on, at workers whose KV events
    are not followed."""
    speculation_limit_bytes: Natural = 64 << 20
    """Bytes of speculation for one model, once for `speculation_s` and once for `history_s`; 8 bytes per block and 600
    per prompt. At the limit the oldest are dropped early."""


class LoadConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """When a reservation without an end is given up, and which workers are passed over."""

    limit: Positive = 100_000
    """Reservations held at once for one model; at the limit the oldest is released."""
    grace_s: Seconds = 3.0
    """Seconds for which a worker's reports may lack a new attempt."""
    unknown_s: Seconds = 10.0
    """Seconds after `grace_s` for which reports must lack an attempt before its reservation is released."""
    frozen_s: Annotated[float, Meta(gt=0, le=86400)] = 5.0
    """Seconds without a report, or with work and without an engine step, after which a worker is passed over while
    others are available."""
    ramp_s: Seconds = 10.0
    """Seconds over which an instance that joins others ramps up from no requests to its full share."""


class SourceConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How the KV event streams are followed."""

    held_limit_batches: Positive = 10_000
    """Batches held while a replay or snapshot is on its way, and batches that may wait to be applied."""
    replay_timeout_s: Seconds = 5.0
    """Seconds to wait for a replay of event batches."""
    snapshot_idle_timeout_s: Seconds = 5.0
    """Seconds without a message after which a snapshot is given up."""
    digest_s: Seconds = 60.0
    """Seconds between comparisons of a source's digest with our digest of its events; 0 disables them."""
    silence_s: Seconds = 60.0
    """Seconds in which requests compute new blocks but no batch comes, after which the source counts as silent; 0
    disables this."""


class RouterConfig(ServiceConfig, frozen=True, forbid_unknown_fields=True):
    """All settings of a router."""

    policy: str = "kv"
    """Routing policy: kv, round-robin, random, least-loaded, power-of-two, or module:attribute."""
    policy_budget_ms: Annotated[float, Meta(ge=0)] = 5.0
    """Milliseconds that one choice of a policy of your own may take."""
    policy_strikes: Natural = 10
    """Number of choices over the budget that are tolerated, one more for every 100 within it; after that kv chooses for
    good."""
    most_hashes: Positive = 131_072
    """Blocks that a prompt may have."""
    events: Literal["on", "off"] = "on"
    """Whether the router follows the KV events of workers and block stores; off: it opens no connection to them, and
    predicts what workers cache from its own choices (`index.history_s`)."""
    explained: Natural = 1_000
    """Number of decisions kept for `headrace explain`, per model; at least one."""
    index: IndexConfig = IndexConfig()
    load: LoadConfig = LoadConfig()
    source: SourceConfig = SourceConfig()
