"""What an engine's loop asks of a runner, which computes steps, whatever the arithmetic: native, simulated, echo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct

from services.worker.messages import Loading, Ready
from services.worker.mover import Mover
from shared.messages import Sampling, TokenLogprob


class Work(Struct):
    """One sequence's share of a step. A sequence has one for life, which the scheduler moves on between steps.

    history   | computed before (blocks hold their KV) | computed now          | later
              0                                        start                   end
    """

    sequence: int
    """Names the sequence while it lives in the engine."""
    history: Sequence[int]
    """All token ids that are known, prompt, then output."""
    start: int
    end: int
    blocks: Sequence[int]
    """The sequence's slots, in order; they cover all positions before `end`."""
    sampling: Sampling
    prompt_tokens: int
    """Where in `history` the output begins."""
    kept: object = None
    """The runner's own, from one step with this sequence to the next; goes with it."""

    @property
    def tokens(self) -> Sequence[int]:
        """Token ids to compute now, at positions start … end - 1."""
        return self.history[self.start : self.end]

    @property
    def ends(self) -> bool:
        """Whether something comes of it now: not in the middle of a chunked prefill."""
        return self.end == len(self.history)

    @property
    def draws(self) -> bool:
        """Whether that is a token, drawn from the last position's logits, and not an embedding."""
        return self.end == len(self.history) and not self.sampling.pooling

    @property
    def draw_index(self) -> int:
        """Index in the output of the token that will be drawn; with the seed it fixes the random number."""
        return self.end - self.prompt_tokens


class Drawn(Struct, frozen=True, gc=False):
    """One drawn token, or an embedding."""

    token: int
    logprob: TokenLogprob | None = None
    """Where `sampling.logprobs` ≥ 0."""
    error: str = ""
    """Why there is no token after all: the sequence ends with it."""
    embedding: bytes = b""
    """As in Part; there is no token then."""
    suspect: bool = False
    """The error is that numbers were not finite: the blocks that they came of may be wrong, whoever computed them."""


class Runner(Protocol):
    """Computes steps. Owns the KV memory of `capacity_blocks` slots; knows no scheduling."""

    @property
    def facts(self) -> Ready: ...

    def step(self, works: Sequence[Work]) -> list[Drawn | None]:
        """One entry per work, None for those that do not end. Where the numbers of a work are not finite, its entry
        is `suspect`, and those of the others are as ever. Raises ModelError if the device fails."""
        ...

    def mover(self, clock: Callable[[], float]) -> Mover:
        """What copies between this runner's KV memory and a kvbm's pool; `clock` is the engine's. Called once at most,
        before the first step, and closed before the runner. Raises ConfigError where the runner has no KV to
        exchange."""
        ...

    def close(self) -> None: ...


LoadRunner = Callable[[Callable[[Loading], None]], Runner]
"""Builds a runner inside the engine process, telling its progress. Raises ModelError."""
