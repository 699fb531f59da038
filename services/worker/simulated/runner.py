"""Runners without arithmetic, in the engine process: SimulatedRunner sleeps as long as a step would take, EchoRunner
takes no time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from services.worker.config import SimulatedConfig
from services.worker.contracts.messages import EngineOperation, MemoryUse, Ready
from services.worker.contracts.mover import Mover
from services.worker.contracts.runner import Drawn, Work
from services.worker.native.grammars import GrammarCache
from services.worker.native.masks import Masks, MaskThread
from services.worker.simulated.model import SimulatedModel, unbarred
from services.worker.simulated.mover import SimulatedMover
from services.worker.simulated.timing import Table, Timing
from shared.errors import ConfigError
from shared.messages.frames import UNFOLLOWABLE, TokenLogprob

OPERATIONS: tuple[EngineOperation, ...] = ("clear", "sleep", "wake")
"""What these runners can do: all of it is done outside of them, since they hold no KV and no weights."""


class SimulatedRunner:
    """A Runner that answers as a SimulatedModel does, in the time that a GPU would take."""

    def __init__(self, model: SimulatedModel) -> None:
        self.facts = msgspec.structs.replace(model.facts, operations=OPERATIONS)
        self.meanwhile: Callable[[Callable[[], bool]], None] | None = None
        """What is called while a step is computed, as `Overlaps` says."""
        self._model = model

    def step(self, works: Sequence[Work]) -> list[Drawn | None]:
        ends_s = time.monotonic() + self._model.timing.step_s(works)
        drawn = self._model.draw(works)
        if self.meanwhile is not None:
            self.meanwhile(lambda: time.monotonic() < ends_s)
        time.sleep(max(0.0, ends_s - time.monotonic()))
        return drawn

    def operate(self, operation: EngineOperation, name: str, path: str, level: int) -> str:  # noqa: ARG002 - a Runner's
        return ""

    def memory_use(self) -> MemoryUse | None:
        return None

    def mover(self, clock: Callable[[], float]) -> SimulatedMover:
        return self._model.timing.mover(self.facts.block_size, clock)

    def close(self) -> None:
        pass


class EchoRunner:
    """A Runner that repeats the prompt: token i of the prompt is token i of the output, then comes the end of sequence.
    With `min_tokens` it begins the prompt again instead. It makes no embeddings. It is there for tests, and for trying
    the wiring.

    A grammar ends the repetition where the prompt goes on and the grammar lets the output end. A prompt that breaks the
    grammar ends with an error. Before `min_tokens` the lowest id that is allowed and not barred takes the place of a
    token that may not be drawn.
    """

    def __init__(self, facts: Ready) -> None:
        grammars = GrammarCache.from_directory(Path(facts.path), facts.vocab_size, facts.eos_token_ids)
        self._masks = MaskThread(grammars)
        self.facts = msgspec.structs.replace(
            facts, embedding_size=0, grammars=grammars is not None, operations=OPERATIONS
        )

    def step(self, works: Sequence[Work]) -> list[Drawn | None]:
        self._masks.begin(works)
        masks = self._masks.end()
        return [self._draw(work, masks) if work.draws else None for work in works]

    def operate(self, operation: EngineOperation, name: str, path: str, level: int) -> str:  # noqa: ARG002 - a Runner's
        return ""

    def memory_use(self) -> MemoryUse | None:
        return None

    def mover(self, clock: Callable[[], float]) -> Mover:  # noqa: ARG002 - a Runner's
        """Raise ConfigError: there is no KV."""
        raise ConfigError(
            "kvbm.pool is set, but the echo engine has no KV to exchange: empty it, or choose another engine"
        )

    def close(self) -> None:
        self._masks.close()

    def _draw(self, work: Work, masks: Masks) -> Drawn:
        if work.sequence in masks.failed:
            return Drawn(0, error=masks.failed[work.sequence])
        index, end = work.draw_index, self.facts.eos_token_ids[0]
        token = work.history[index] if index < work.prompt_tokens else end
        allowed = masks.allowed.get(work.sequence)
        if barred := work.barred_now:
            token = work.history[index % work.prompt_tokens]
            if token in barred or (allowed is not None and not allowed[token]):
                ids = range(self.facts.vocab_size) if allowed is None else np.flatnonzero(allowed).tolist()
                token = unbarred(token, barred, ids)
        if allowed is not None and not allowed[token]:
            if not allowed[end]:
                return Drawn(0, error=f"{UNFOLLOWABLE}: it does not allow token {index} of the prompt")
            token = end
        return Drawn(token, TokenLogprob(0.0) if work.sampling.logprobs >= 0 else None)


def simulated_model(facts: Ready, config: SimulatedConfig) -> SimulatedModel:
    """Return the model that the settings describe; reads the table of times, if there is one. Raise ConfigError."""
    table = read_times(config)
    if config.context_length:
        facts = msgspec.structs.replace(facts, context_length=config.context_length)
    return SimulatedModel(facts, Timing(config, table), output_tokens=config.output_tokens)


def read_times(config: SimulatedConfig) -> Table | None:
    """Return the table of measured times, or None if the formula is used. Raise ConfigError."""
    if not config.table:
        return None
    try:
        content = Path(config.table).read_bytes()
    except OSError as wrong:
        raise ConfigError(f"{config.table}: {wrong.strerror}") from None
    return Table.parse(content, config.table)
