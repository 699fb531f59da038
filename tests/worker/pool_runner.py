"""A runner whose KV memory is copied to and from a pool, and a mover that copies when a test says so.

Each position's "KV" is a fingerprint of its LoRA and of all tokens up to it, 8 bytes; a step looks at all of it. So
whatever a kvbm gave that is not the bytes of exactly this prefix fails the test.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from math import inf

import numpy as np
from msgspec import Struct
from xxhash import xxh3_64_intdigest

from services.worker.contracts.messages import EngineOperation, MemoryUse, Ready
from services.worker.contracts.mover import Copied, Copy, Slots
from services.worker.contracts.runner import Drawn, Work
from services.worker.transfer.host_copier import HostCopier
from services.worker.transfer.mover import TransferMover
from shared.hashing import pack_tokens
from shared.messages.cards import KvLayout
from shared.messages.frames import NOT_FINITE
from tests.worker.fake_runner import EOS, VOCABULARY, next_token

BLOCK_SIZE = 2
LAYOUT = KvLayout(dtype="float32", layers=1, kv_heads=1, head_dim=1, block_size=BLOCK_SIZE)


def fingerprints(tokens: Sequence[int], start: int, lora: str = "") -> bytes:
    """The right bytes of the positions from `start` on, whatever the machine."""
    return b"".join(
        xxh3_64_intdigest(lora.encode() + pack_tokens(tokens[: position + 1])).to_bytes(8, "little")
        for position in range(start, len(tokens))
    )


class PoolRunner:
    """A Runner."""

    def __init__(self, capacity_blocks: int, context_length: int) -> None:
        self.facts = Ready(
            context_length=context_length,
            vocab_size=VOCABULARY,
            eos_token_ids=(EOS,),
            block_size=BLOCK_SIZE,
            capacity_blocks=capacity_blocks,
            kv_layout=LAYOUT,
            weights="the same",
        )
        self.memory = np.zeros((capacity_blocks, LAYOUT.block_bytes), dtype=np.uint8)
        self.computed_tokens = 0
        self.suspects = False
        """Whether wrong bytes are numbers that are not finite; else they fail the test."""

    def operate(self, operation: EngineOperation, name: str, path: str, level: int) -> str:
        """Sleep loses all bytes; a copy that reads or writes them meanwhile is seen by the next step that uses them."""
        if operation == "sleep":
            self.memory[:] = 0xEE
        return ""

    def memory_use(self) -> MemoryUse | None:
        return None

    def mover(self, clock: Callable[[], float]) -> TransferMover:
        copier = HostCopier.over(self.memory.reshape(-1).data, LAYOUT.block_bytes)
        return TransferMover(copier, clock, most_blocks=1, verify=True)

    def step(self, works: Sequence[Work]) -> list[Drawn | None]:
        return [self._compute(work) for work in works]

    def close(self) -> None:
        pass

    def _compute(self, work: Work) -> Drawn | None:
        wrong = False
        right = np.frombuffer(fingerprints(work.history[: work.end], 0, work.lora), dtype=np.uint8).reshape(-1, 8)
        kv = self.memory.reshape(-1, BLOCK_SIZE, 8)
        for position in range(work.end):
            there = kv[work.blocks[position // BLOCK_SIZE], position % BLOCK_SIZE]
            if position < work.start:
                wrong |= not (there == right[position]).all()
                assert self.suspects or not wrong, f"wrong bytes at position {position}"
            else:
                there[:] = right[position]
        self.computed_tokens += work.end - work.start
        if wrong and work.draws:
            return Drawn(0, error=NOT_FINITE, suspect=True)
        return Drawn(next_token(work.history)) if work.draws else None


class _CopyBatch(Struct):
    number: int
    copies: Sequence[Copy]
    loads: bool
    until_s: float
    good: list[bool]
    half: bool = False
    cancelled: bool = False


class HandMover:
    """A Mover that goes on by half a block each time the test says so, so that anything may happen in between."""

    def __init__(self, memory: np.ndarray[tuple[int, int], np.dtype[np.uint8]], clock: Callable[[], float]) -> None:
        self._memory = memory
        self._clock = clock
        self._slots: Slots | None = None
        self._batches: deque[_CopyBatch] = deque()
        self._ended: list[Copied] = []
        self.trouble = ""
        """Why the next batch that goes on fails. Empty if it does not."""

    def attach(self, slots: Slots) -> None:
        assert self._slots is None
        self._slots = slots

    def detach(self) -> None:
        assert not self._batches
        self._slots = None

    def save(self, batch: int, copies: Sequence[Copy], until_s: float) -> None:
        self._batches.append(_CopyBatch(batch, copies, False, until_s, []))

    def load(self, batch: int, copies: Sequence[Copy]) -> None:
        self._batches.append(_CopyBatch(batch, copies, True, inf, []))

    def cancel(self, batch: int) -> None:
        for waiting in self._batches:
            if waiting.number == batch:
                waiting.cancelled = True

    def ended(self) -> list[Copied]:
        told, self._ended = self._ended, []
        return told

    def fileno(self) -> int:
        return -1

    @property
    def ends_s(self) -> float | None:
        return None

    def close(self) -> None:
        self._batches.clear()
        self._slots = None

    @property
    def idle(self) -> bool:
        return not self._batches

    def go_on(self, pick: int) -> None:
        """Half a block of one of the batches."""
        if not self._batches:
            return
        batch = self._batches[pick % len(self._batches)]
        slots = self._slots
        assert slots is not None
        if self.trouble:
            self._batches.remove(batch)
            self._ended.append(Copied(batch.number, [False] * len(batch.copies), 0, 0.0, self.trouble))
            self.trouble = ""
            return
        if not batch.half and batch.cancelled:
            batch.good += [False] * (len(batch.copies) - len(batch.good))
        if len(batch.good) < len(batch.copies):
            self._half(batch, batch.copies[len(batch.good)], slots)
        if len(batch.good) == len(batch.copies):
            self._batches.remove(batch)
            self._ended.append(Copied(batch.number, batch.good, sum(batch.good) * LAYOUT.block_bytes, 0.001))

    def _half(self, batch: _CopyBatch, copy: Copy, slots: Slots) -> None:
        if not batch.half and self._clock() >= batch.until_s:
            batch.good.append(False)
            return
        size = LAYOUT.block_bytes
        part = slice(size // 2, size) if batch.half else slice(0, size // 2)
        begin = copy.pool_slot * slots.arena.slot_bytes
        pool = np.frombuffer(slots.bytes, dtype=np.uint8)[begin : begin + size]
        device = self._memory[copy.device_slot]
        if batch.loads:
            device[part] = pool[part]
        else:
            pool[part] = device[part]
        if batch.half:
            batch.good.append(not batch.loads or slots.generation(copy.pool_slot) == copy.generation)
        batch.half = not batch.half
