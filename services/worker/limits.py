"""The bounds of a scheduler, and what it serves. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from services.worker.config import Offload

MAX_STEP_TOKENS = 8192
"""Most tokens that one step computes, whatever the time: runners have room for as many."""
MAX_BIASES = 300
"""Most biases of a request: runners have room for as many in each row."""
MAX_TOP_LOGPROBS = 20
"""Most likeliest tokens of a request, likewise."""
MAX_PROMPT_CHARACTERS = 32_000
"""Most characters of the prompt of a picture, and of its negative prompt."""
MAX_GUIDANCE = 100.0
MAX_PREVIEWS = 3
"""Most previews of a picture."""
STEP_S = {"cpu": 0.25, "cuda": 0.1}
"""Default of `worker.step_s`, by device. On an H200 steps of 0.1 s halve the longest pauses of 0.25 s, and cost at most
3 % of the tokens. Steps of 0.05 s cost up to 7 % if prompts are long (`benchmarks/results/gpu_steps.json`)."""
LONE_STEP_S = 0.25
"""Most seconds of a step with one prompt alone, if `worker.step_s` is not set. Only requests that come
while it is computed wait for it."""
PREFILL_STEP_S = 0.05
"""Most seconds of a step of a worker that only computes prompts. What a step has computed is stored, and loaded where
it is decoded, while the next one is computed, so only the last step's blocks are waited for."""
DECODE_STEP_S = 0.03
"""Most seconds of a step with parts of prompts, at a worker that decodes what others hand over. A GPU computes as many
tokens a second in such steps as in longer ones, and an answer goes on at the pace of reading."""
DECODE_STRETCH = 1.5
"""How much longer such a step may be than one that only decodes, where that is more: large models, slow devices."""
LEAST_STEP_TOKENS = 16
"""Tokens of a prompt that a step has room for, whatever the time, or a block's if those are fewer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """The model that a scheduler serves, and the scheduler's bounds."""

    model: str
    context_length: int
    """Most tokens of a sequence, prompt and output together."""
    eos_token_ids: frozenset[int]
    block_size: int
    """Tokens of a block."""
    capacity_blocks: int
    """Blocks of the device."""
    max_running: int = 64
    """Most sequences in a step."""
    max_waiting: int
    """Most attempts in the queue."""
    max_waiting_tokens: int = 1 << 20
    """Most uncomputed tokens in the queue; one attempt alone may be longer."""
    overtaking: float = 0.0
    """How many times the time that its own computing takes a prompt is due after its arrival. What is due earlier is
    computed first."""
    step_s: float = 0.25
    """Seconds that a step which prefills should take at most."""
    lone_step_s: float = 0.0
    """Seconds that a step should take at most in which one prompt is computed and nothing else, where that is more."""
    short_step_s: float = inf
    """Seconds that such a step should take at most, unless decoding alone takes nearly as long (`DECODE_STRETCH`)."""
    max_step_tokens: int = MAX_STEP_TOKENS
    """Most tokens of a step."""
    first_tokens_per_s: float = 256.0
    """Prefill speed, in tokens a second, that is assumed before one was measured."""
    offload: Offload = "filled"
    """Which blocks the kvbm is offered: each as soon as it is full, only those that are evicted next, or none."""
    offers_limit: int = 1024
    """Most blocks that wait to be offered; if there are more, the oldest is left out."""
    look_ahead: int = 8
    """Most waiting attempts, from the head of the queue, that may wait for blocks of the kvbm."""
    wait_s: float = 0.0
    """Most seconds that such an attempt waits. 0 means as long as computing the blocks would take."""

    @property
    def least_step_tokens(self) -> int:
        """Tokens of a prompt that each step has room for."""
        return min(self.block_size, LEAST_STEP_TOKENS)
