"""A pool's slots without bytes, for movers that move nothing."""

from __future__ import annotations

from shared.pool.format import Arena


class EmptyPool:
    def __init__(self) -> None:
        self.arena = Arena(offset=1 << 16, slot_bytes=4096, slots=8, generations=4096)
        self.bytes = memoryview(b"")
        self.generations = [0] * 8

    def generation(self, slot: int) -> int:
        return self.generations[slot]
