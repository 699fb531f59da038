"""Runners without arithmetic: SimulatedRunner sleeps as long as a step would take, EchoRunner takes no time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import hypot
from pathlib import Path
from struct import pack
from zlib import crc32

import msgspec
import numpy as np

from services.worker.config import SimulatedConfig
from services.worker.contracts.messages import EngineOperation, MemoryUse, Ready
from services.worker.contracts.mover import Mover
from services.worker.contracts.runner import Drawn, Work
from services.worker.native.grammars import GrammarCache
from services.worker.native.masks import Masks, MaskThread
from services.worker.simulated.mover import SimulatedMover
from services.worker.simulated.timing import Table, Timing
from shared.errors import ConfigError
from shared.hashing import pack_tokens
from shared.messages.frames import UNFOLLOWABLE, TokenLogprob

OPERATIONS: tuple[EngineOperation, ...] = ("clear", "sleep", "wake")
"""What these runners can do: all of it is done outside of them, since they hold no KV and no weights."""
_TELLING_TOKENS = 64
"""Number of the prompt's last tokens that decide how long the answer is. It exceeds the end that a chat template gives
to all prompts."""
_PATTERN_NUMBERS = 16


def embedding_of(checksum: int, size: int) -> bytes:
    """Return an embedding as Part carries it: some numbers that look random, repeated, of length 1."""
    pattern = [crc32(bytes((number,)), checksum) - (1 << 31) + 0.5 for number in range(_PATTERN_NUMBERS)]
    numbers = (pattern * -(-size // _PATTERN_NUMBERS))[:size]
    length = hypot(*numbers)
    return pack(f"<{size}f", *(number / length for number in numbers))


def unbarred(token: int, barred: Sequence[int], allowed: Sequence[int]) -> int:
    """Return the first of the allowed token ids that is not barred; `token` if all are."""
    return next((each for each in allowed if each not in barred), token)


class SimulatedModel:
    """One simulated model: seconds and tokens for the scheduler's works.

    The output repeats the prompt's tokens, from the first to the last and then from the start, without ends of
    sequence. So it is text where the prompt is text, and a continuation on another worker draws the same tokens. An
    answer ends by itself at a length that depends on the end of its prompt. An embedding depends on all of the prompt's
    tokens.
    """

    def __init__(self, facts: Ready, timing: Timing, *, output_tokens: int) -> None:
        """`output_tokens` is an answer's mean length. 0 if it ends only at its limits."""
        self.facts = facts
        self.timing = timing
        self._output_tokens = output_tokens
        self._eos = frozenset(facts.eos_token_ids)
        self._plain = next(token for token in range(facts.vocab_size + 1) if token not in self._eos)

    def draw(self, works: Sequence[Work]) -> list[Drawn | None]:
        """Return one entry per work, None for works that do not end."""
        return [
            self._embed(work) if work.sampling.pooling else self._draw(work) if work.end == len(work.history) else None
            for work in works
        ]

    def _draw(self, work: Work) -> Drawn:
        sampling = work.sampling
        token = work.history[(work.end - work.prompt_tokens) % work.prompt_tokens]
        if token in self._eos:
            token = self._plain
        barred = work.barred and work.barred_now
        if token in barred:
            token = unbarred(token, barred, range(self.facts.vocab_size))
        if self._output_tokens and not sampling.ignore_eos and self._eos and not barred and self._ends(work):
            token = self.facts.eos_token_ids[0]
        return Drawn(token) if sampling.logprobs < 0 else Drawn(token, TokenLogprob(0.0))

    def _embed(self, work: Work) -> Drawn | None:
        """Make an embedding of a checksum of all tokens. For a mean the checksum is carried on from chunk to chunk, as
        an engine's sum is."""
        if work.sampling.pooling == "mean":
            carried = work.kept if work.start else 0
            assert isinstance(carried, int), "a mean begins where its prompt does"
            checksum = work.kept = crc32(pack_tokens(work.tokens), carried)
        else:
            checksum = crc32(pack_tokens(work.history))
        return Drawn(0, embedding=embedding_of(checksum, self.facts.embedding_size)) if work.ends else None

    def _ends(self, work: Work) -> bool:
        """Return whether the answer has its length."""
        least = self._output_tokens // 2
        if work.draw_index < least:
            return False
        end = pack_tokens(work.history[max(0, work.prompt_tokens - _TELLING_TOKENS) : work.prompt_tokens])
        return work.draw_index >= least + crc32(end) % (self._output_tokens + 1)


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


def read_times(config: SimulatedConfig, *, busy: bool = False) -> Table | None:
    """Return the table of measured times, or None if the formula is used. With `busy` it is that of a profile's times
    while all workers of the machine compute. Raise ConfigError."""
    if not config.table:
        return None
    try:
        content = Path(config.table).read_bytes()
    except OSError as wrong:
        raise ConfigError(f"simulated.table {config.table}: {wrong.strerror}") from None
    return Table.parse(content, config.table, busy=busy)
