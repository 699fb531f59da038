"""EchoRunner: says the prompt back, token by token, then ends. No arithmetic, no embeddings; for tests and for trying
the wiring."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from services.worker.messages import Ready
from services.worker.mover import Mover
from services.worker.runner import Drawn, Work
from shared.errors import ConfigError
from shared.messages import TokenLogprob


class EchoRunner:
    """Draws token i of the prompt as token i of the output, and behind the prompt its end of sequence."""

    def __init__(self, facts: Ready) -> None:
        self.facts = msgspec.structs.replace(facts, embedding_size=0)

    def step(self, works: Sequence[Work]) -> list[Drawn | None]:
        return [self._draw(work) if work.draws else None for work in works]

    def mover(self, clock: Callable[[], float]) -> Mover:  # noqa: ARG002 - a Runner's
        """Raises ConfigError: there is no KV."""
        raise ConfigError("[kvbm] is set, but the echo engine has no KV to exchange")

    def close(self) -> None:
        pass

    def _draw(self, work: Work) -> Drawn:
        index = work.draw_index
        token = work.history[index] if index < work.prompt_tokens else self.facts.eos_token_ids[0]
        return Drawn(token, TokenLogprob(0.0) if work.sampling.logprobs >= 0 else None)
