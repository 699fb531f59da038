"""`headrace plan` → services.virtual: a fleet to run in virtual time, and what came of it; one JSON line each. Pure."""

from __future__ import annotations

import msgspec
from msgspec import Struct


class VirtualRun(Struct, frozen=True, kw_only=True, tag=True):
    """One fleet and its load."""

    trace: str
    """The path of the load: lines of JSON in Mooncake's format."""
    block_size: int
    """The tokens of the load's blocks, and of the engines'."""
    times: str
    """The path of the engine's times, as the simulated engine reads them."""
    workers: int
    """The number of workers that do all. 0 if there are roles."""
    prefill: int = 0
    """The number of workers that compute prompts."""
    decode: int = 0
    """The number of workers that decode what others hand over."""
    machine_workers: int = 1
    """The workers of a machine. Above 1, `times` has their times while all of them compute too."""
    policy: str = "kv"
    max_running: int = 64
    step_s: float = 0.25
    """The time that a step with parts of prompts should take at most."""
    overhead_s: float = 0.0
    """The time of a first token that no step takes, messages included."""
    kv_tokens: int
    """The tokens of KV for which each worker has room."""
    store_tokens: int = 0
    """The tokens of KV for which the block store has room. 0 means no store."""
    overtakes: bool = True
    """Whether the engine computes shorter prompts first, as ours do by default."""
    late_s: float = 0.0
    """The run is given up if first tokens come later, and more of them than `late_most`. 0 means never."""
    late_most: int = 0


class Percentiles(Struct, frozen=True):
    """Nearest-rank percentiles in seconds."""

    p50: float
    p90: float
    p99: float


class VirtualResult(Struct, frozen=True, kw_only=True, tag=True):
    """What came of a run."""

    ttft_s: Percentiles
    itl_s: Percentiles
    """All times between two tokens of an answer."""
    requests_per_s: float
    output_tokens_per_s: float
    """From the first arrival to the last end."""
    hit_rate: float
    """Cached prompt tokens over prompt tokens."""
    failed: int
    given_up: bool
    """True if the run ended early: then the figures are those of its beginning."""


class VirtualFailure(Struct, frozen=True, tag=True):
    """Why a run could not be made."""

    reason: str


RUN = msgspec.json.Decoder(VirtualRun)
OUTCOME: msgspec.json.Decoder[VirtualResult | VirtualFailure] = msgspec.json.Decoder(VirtualResult | VirtualFailure)
