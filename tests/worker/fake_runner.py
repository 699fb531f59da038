"""A runner whose tokens follow from the history alone, and whose KV memory notices a wrong block table.

Each position's "KV" is a fingerprint of all tokens up to it. A step checks the fingerprints of everything before it, so
a slot that was given away too early, shared wrongly or never filled fails the test that caused it. A mean is a checksum
that is carried on from chunk to chunk: a position that was left out or computed twice shows in it.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Sequence

import numpy as np

from services.worker.contracts.messages import EngineOperation, MemoryUse, Ready
from services.worker.contracts.runner import Drawn, Work
from services.worker.transfer.host_copier import HostCopier
from services.worker.transfer.mover import TransferMover
from shared.hashing import pack_tokens
from shared.messages.cards import KvLayout
from shared.messages.frames import PromptLogprobs, TokenLogprob

EOS = 0
VOCABULARY = 5


def next_token(history: Sequence[int]) -> int:
    """Looks random; ends a sequence after some tokens."""
    return zlib.crc32(pack_tokens(history)) % VOCABULARY


def continuation(prompt: Sequence[int], max_tokens: int, context_length: int) -> list[int]:
    """What an engine must draw for this prompt, whatever else happens."""
    tokens = list(prompt)
    while len(tokens) < context_length and len(tokens) - len(prompt) < max_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] == EOS:
            break
    return tokens[len(prompt) :]


def embedding(prompt: Sequence[int]) -> bytes:
    """What an engine must make of this prompt, whatever else happens and whichever the pooling."""
    return zlib.crc32(pack_tokens(prompt)).to_bytes(4, "little")


def prompt_logprobs(prompt: Sequence[int], first: int, count: int, likeliest: int) -> PromptLogprobs:
    """What an engine must give for `count` prompt tokens from `first` on, whatever else happens."""
    of_tokens = [-float(zlib.crc32(pack_tokens(prompt[: index + 1])) % 997) for index in range(first, first + count)]
    top = [(VOCABULARY - 1 - at, value) for value in of_tokens for at in range(likeliest)]
    return PromptLogprobs(
        first,
        array("f", of_tokens).tobytes(),
        pack_tokens([token for token, _ in top]),
        array("f", [value for _, value in top]).tobytes(),
    )


class FakeRunner:
    def __init__(self, *, block_size: int, capacity_blocks: int, context_length: int) -> None:
        self.facts = Ready(
            context_length=context_length,
            vocab_size=VOCABULARY,
            eos_token_ids=(EOS,),
            block_size=block_size,
            capacity_blocks=capacity_blocks,
            kv_layout=KvLayout(dtype="float32", layers=1, kv_heads=1, head_dim=1, block_size=block_size),
            embedding_size=1,
            prompt_logprobs=True,
        )
        self.memory = np.zeros((capacity_blocks, 2, block_size), np.uint32)
        """A fingerprint in place of a key, its inverse in place of a value: blocks are as long as the layout says."""
        self.computed_tokens = 0

    def step(self, works: Sequence[Work]) -> list[Drawn | None]:
        return [self._compute(work) for work in works]

    def operate(self, operation: EngineOperation, name: str, path: str, level: int) -> str:
        return f"{operation}: this engine cannot do it"

    def memory_use(self) -> MemoryUse | None:
        return None

    def mover(self, clock: Callable[[], float]) -> TransferMover:
        """Copies that carry fingerprints."""
        memory = self.memory.reshape(-1).view(np.uint8).data
        return TransferMover(HostCopier.over(memory, self.facts.kv_layout.block_bytes), clock)

    def close(self) -> None:
        pass

    def _compute(self, work: Work) -> Drawn | None:
        size = self.facts.block_size
        end = work.start + len(work.tokens)
        assert list(work.history[work.start : end]) == list(work.tokens)
        assert not work.ends or len(work.history) == end
        for position in range(end):
            slot, offset = work.blocks[position // size], position % size
            fingerprint = zlib.crc32(pack_tokens(work.history[: position + 1]))
            if position < work.start:
                stored = self.memory[slot, :, offset].tolist()
                assert stored == [fingerprint, fingerprint ^ 0xFFFFFFFF], f"wrong bytes at position {position}"
            else:
                self.memory[slot, :, offset] = fingerprint, fingerprint ^ 0xFFFFFFFF
        self.computed_tokens += len(work.tokens)
        if work.sampling.pooling == "mean":
            carried = work.kept if work.start else 0
            assert isinstance(carried, int), "a mean begins where its prompt does"
            work.kept = zlib.crc32(pack_tokens(work.tokens), carried)
            return Drawn(0, embedding=work.kept.to_bytes(4, "little")) if work.ends else None
        if work.sampling.pooling:
            return Drawn(0, embedding=embedding(work.history)) if work.ends else None
        prompt, scoring = None, work.scoring
        if scoring:
            likeliest = work.sampling.prompt_logprobs
            prompt = prompt_logprobs(work.history, scoring.start + 1, len(scoring), likeliest)
        if not work.draws:
            return None if prompt is None else Drawn(0, prompt_logprobs=prompt)
        logprob = TokenLogprob(-1.0) if work.sampling.logprobs >= 0 else None
        return Drawn(next_token(work.history), logprob, prompt_logprobs=prompt)
