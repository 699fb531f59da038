"""The router's settings."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from shared.config import DiscoveryConfig, NatsConfig, ObserveConfig

Positive = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0, le=86400)]


class IndexConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How much of what the fleet caches is known here."""

    limit_bytes: Natural = 1 << 30
    """Per model; about 7 M distinct blocks. At the limit the coldest are dropped."""
    lower_tier_limit_blocks: Natural = 1_000_000
    """Blocks that one candidate, or one layout of a kvbm, may hold in any one tier; a worker's capacity, if that is
    larger. Each takes 100 to 160 bytes, beside the index."""
    orphan_limit_blocks: Natural = 65_536
    """Blocks of one candidate that wait for their parent."""
    speculation_s: Seconds = 5.0
    """How long a routed prompt's blocks count as cached without an event that says so; 0: not at all."""
    history_s: Seconds = 120.0
    """The same for instances that send no events, since it was last of use."""
    speculation_limit_bytes: Natural = 64 << 20
    """Of each, per model; 8 bytes a block and 600 a prompt. At the limit the oldest go early."""


class LoadConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """When a reservation is given up that nobody ended, and who is passed over."""

    limit: Positive = 100_000
    """Reservations held at once, per model; at the limit the oldest goes."""
    grace_s: Seconds = 3.0
    """A worker's reports may not know a new attempt for so long."""
    unknown_s: Seconds = 10.0
    """After that, reports without it for so long release it."""
    frozen_s: Annotated[float, Meta(gt=0, le=86400)] = 5.0
    """A worker with work and without a step, or without a report, for so long is passed over while others are there."""
    ramp_s: Seconds = 10.0
    """An instance that joins others takes part in all choices only after so long."""


class SourceConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How event streams are followed."""

    held_limit_batches: Positive = 10_000
    """Batches kept while a replay or snapshot is on its way, and batches that wait to be applied."""
    replay_timeout_s: Seconds = 5.0
    snapshot_idle_timeout_s: Seconds = 5.0
    digest_s: Seconds = 60.0
    """How often a source's digest is compared with what we made of its events; 0: never."""
    silence_s: Seconds = 60.0
    """Alarm after requests computed new blocks for so long and no batch was heard; 0: never."""


class RouterConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """All of it."""

    namespace: str = "default"
    policy: str = "kv"
    """kv, round-robin, random, least-loaded, power-of-two, or module:attribute."""
    policy_budget_ms: Annotated[float, Meta(ge=0)] = 5.0
    """What one choice may take of a policy that is not built in."""
    policy_strikes: Natural = 10
    """Choices over the budget that are put up with, one more for every 100 within it; then kv chooses for good."""
    most_hashes: Positive = 131_072
    """Blocks a prompt may have."""
    explained: Natural = 1_000
    """Decisions kept for `explain`, per model; at least one."""
    nats: NatsConfig = NatsConfig()
    discovery: DiscoveryConfig = DiscoveryConfig()
    observe: ObserveConfig = ObserveConfig()
    index: IndexConfig = IndexConfig()
    load: LoadConfig = LoadConfig()
    source: SourceConfig = SourceConfig()
