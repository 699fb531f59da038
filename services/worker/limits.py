"""What a scheduler serves, and its bounds. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Offload = Literal["filled", "evicted", "off"]
"""Which blocks the kvbm is offered; `kv_offloading` says when."""

MAX_STEP_TOKENS = 8192
"""That a step computes at most, whatever the time: runners have room for as many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What is served, and the bounds of a scheduler."""

    model: str
    context_length: int
    """Tokens a sequence may have, prompt and output together."""
    eos_token_ids: frozenset[int]
    block_size: int
    capacity_blocks: int
    max_running: int = 64
    max_waiting: int = 512
    max_waiting_tokens: int = 1 << 20
    """Uncomputed tokens in the queue; one attempt alone may be longer."""
    step_s: float = 0.25
    max_step_tokens: int = MAX_STEP_TOKENS
    first_tokens_per_s: float = 256.0
    """The prefill speed before one was measured."""
    offload: Offload = "filled"
    """What the kvbm is offered: each block once it is full; those that would leave the device next; nothing."""
    offers_limit: int = 1024
    """Blocks that wait to be offered; beyond, the oldest is left out."""
    look_ahead: int = 8
    """Waiting attempts, from the head of the queue, that may wait for blocks of the kvbm."""
    wait_s: float = 0.0
    """How long at most; 0: as long as computing them would take."""
