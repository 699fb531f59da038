"""SimulatedMover: takes the time that copies would take, and moves nothing. Pure.

A link has two directions that do not slow each other; in each of them one batch is copied after another. Loads are
checked as a real mover checks them: a load whose slot was granted again meanwhile is not good.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from math import ceil, inf

from msgspec import Struct

from services.worker.contracts.mover import Copied, Copy, Slots


class _Batch(Struct):
    number: int
    copies: Sequence[Copy]
    asked_s: float
    until_s: float
    """No copy begins from this time on: that of the request, or when it was cancelled."""


class SimulatedMover:
    """A Mover of one engine."""

    def __init__(self, block_bytes: int, bytes_per_s: float, clock: Callable[[], float]) -> None:
        """`bytes_per_s` is the speed of each direction."""
        self._block_bytes = block_bytes
        self._copy_s = block_bytes / bytes_per_s
        self._clock = clock
        self._slots: Slots | None = None
        self._saves: deque[_Batch] = deque()
        self._loads: deque[_Batch] = deque()
        self._free_s = {True: -inf, False: -inf}
        """Direction → when its last batch ended; True is the direction of loads."""

    def attach(self, slots: Slots) -> None:
        assert self._slots is None
        self._slots = slots

    def detach(self) -> None:
        assert len(self._loads) + len(self._saves) == 0, "copies are under way"
        self._slots = None

    def save(self, batch: int, copies: Sequence[Copy], until_s: float) -> None:
        assert self._slots is not None
        self._saves.append(_Batch(batch, copies, self._clock(), until_s))

    def load(self, batch: int, copies: Sequence[Copy]) -> None:
        assert self._slots is not None
        self._loads.append(_Batch(batch, copies, self._clock(), inf))

    def cancel(self, batch: int) -> None:
        for waiting in (*self._saves, *self._loads):
            if waiting.number == batch:
                waiting.until_s = min(waiting.until_s, self._clock())

    def ended(self) -> list[Copied]:
        now_s = self._clock()
        return [*self._ended(self._loads, now_s, loads=True), *self._ended(self._saves, now_s, loads=False)]

    def fileno(self) -> int:
        return -1

    @property
    def ends_s(self) -> float | None:
        heads = [(line[0], loads) for line, loads in ((self._loads, True), (self._saves, False)) if line]
        return min((self._span(batch, loads=loads)[1] for batch, loads in heads), default=None)

    def close(self) -> None:
        self._saves.clear()
        self._loads.clear()

    def validate(self) -> None:
        """Raise AssertionError if the mover contradicts itself. O(batches)."""
        now_s = self._clock()
        assert self._slots is not None or not (self._saves or self._loads)
        for loads, line in ((True, self._loads), (False, self._saves)):
            asked_s = [batch.asked_s for batch in line]
            assert asked_s == sorted(asked_s)
            assert all(at_s <= now_s for at_s in asked_s)
            assert self._free_s[loads] <= now_s, "a batch that was reported ends later"
        numbers = [batch.number for batch in (*self._loads, *self._saves)]
        assert len(numbers) == len(set(numbers))

    def _ended(self, line: deque[_Batch], now_s: float, *, loads: bool) -> list[Copied]:
        ended: list[Copied] = []
        while line:
            begins_s, ends_s, made = self._span(line[0], loads=loads)
            if ends_s > now_s:
                break
            batch = line.popleft()
            self._free_s[loads] = ends_s
            good = [index < made and (not loads or self._same(copy)) for index, copy in enumerate(batch.copies)]
            ended.append(Copied(batch.number, good, made * self._block_bytes, ends_s - begins_s))
        return ended

    def _span(self, batch: _Batch, *, loads: bool) -> tuple[float, float, int]:
        """Return when the first batch of a direction begins and ends, and how many of its copies are made."""
        begins_s = max(batch.asked_s, self._free_s[loads])
        most = len(batch.copies)
        made = most if batch.until_s == inf else min(most, max(0, ceil((batch.until_s - begins_s) / self._copy_s)))
        return begins_s, begins_s + made * self._copy_s, made

    def _same(self, copy: Copy) -> bool:
        assert self._slots is not None
        return self._slots.generation(copy.pool_slot) == copy.generation
