"""What routed prompts will leave where they were sent, until events say so or time is up. Pure.

    sent to A:     s0 s1 │ s2 s3 s4       A was known to hold s0 s1; the run s2 s3 s4 is expected of it
    asked next:    s0 s1   s2 s3 x4       found at A: 2 by the index and 2 by the run that begins with s2

A burst of siblings comes faster than events do: without this each would find the cache empty, and be spread. Of
candidates that send no events this is the router's whole knowledge, kept for longer, and renewed by use.

The index is not touched. A sequence hash names its whole prefix, so the first one of a run finds it, it adds to every
overlap that reaches its beginning, and a bisection tells how far it agrees with a prompt: a run costs the same however
long it is. Events confirm a run by making the index find as much without it. It hangs on the candidate's slot: when
that is cleared or closed, nothing is expected there any more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from services.router.index.index import CandidateId, Slot
from shared.messages import Overlap

RUN_BYTES = 600
"""One run beside its hashes at the most, as traced: an object, its key, and its places in two tables in which keys
come and go."""
_HASH_BYTES = 8
_NOTHING = Overlap()


class Run:
    """Blocks expected in a slot, as packed sequence hashes."""

    __slots__ = ("expires_s", "first", "packed", "slot")

    def __init__(self, slot: Slot, packed: bytes, expires_s: float) -> None:
        self.slot = slot
        self.packed = packed
        self.first = int.from_bytes(packed[:_HASH_BYTES], "little")
        self.expires_s = expires_s

    @property
    def size_bytes(self) -> int:
        return RUN_BYTES + len(self.packed)


class Speculation:
    """The runs that have not expired; at the limit the oldest go early."""

    def __init__(self, *, ttl_s: float, limit_bytes: int) -> None:
        self._ttl_s = ttl_s
        self._limit_bytes = limit_bytes
        self._runs: OrderedDict[tuple[int, Slot], Run] = OrderedDict()
        """By first hash and slot, soonest to expire first. (A plain dict is slow to find the first of many deleted.)"""
        self._starts: dict[int, list[Run]] = {}
        """The same by first hash."""
        self.bytes = 0

    def add(self, slot: Slot, packed: bytes, now_s: float) -> None:
        """Blocks that the slot will soon hold, behind those it holds or is expected to hold."""
        if self._ttl_s <= 0 or not packed or RUN_BYTES + len(packed) > self._limit_bytes:
            return
        run = Run(slot, packed, now_s + self._ttl_s)
        known = self._runs.get((run.first, slot))
        if known is not None:
            if known.expires_s > now_s and len(known.packed) >= len(packed):
                return  # the same prompt again, whose last block is never looked for
            self._drop(known)
        while self.bytes + run.size_bytes > self._limit_bytes:
            self._drop(next(iter(self._runs.values())))
        self._runs[run.first, slot] = run
        self._starts.setdefault(run.first, []).append(run)
        self.bytes += run.size_bytes

    def extend(
        self, found: dict[CandidateId, Overlap], hashes: Sequence[int], packed: bytes, now_s: float
    ) -> list[Run]:
        """Add what is expected to the overlaps `found`; the runs that added to one, in the prompt's order.

        `packed` begins with `hashes`. Cost: one lookup a block as far as the longest overlap goes.
        """
        followed: list[Run] = []
        starts = self._starts
        reach = max([overlap.blocks for overlap in found.values()], default=0)
        looked = 0
        while starts and looked <= reach and looked < len(hashes):
            ahead = hashes[looked : reach + 1]
            for first in filter(starts.__contains__, ahead):
                position = hashes.index(first, looked)
                for run in starts[first]:
                    end = _follow(run, position, found, packed, len(hashes), now_s)
                    if end:
                        followed.append(run)
                        reach = max(reach, end)
            looked += len(ahead)
        return followed

    def renew(self, runs: Sequence[Run], now_s: float) -> None:
        """These were of use. The last one first: at the limit the beginning of a chain must not go before its end."""
        for run in reversed(runs):
            run.expires_s = now_s + self._ttl_s
            self._runs.move_to_end((run.first, run.slot))

    def expire(self, now_s: float, *, runs: int) -> None:
        """Drop what is due, so many at most."""
        for _ in range(runs):
            run = next(iter(self._runs.values()), None)
            if run is None or run.expires_s > now_s:
                return
            self._drop(run)

    def _drop(self, run: Run) -> None:
        del self._runs[run.first, run.slot]
        here = self._starts[run.first]
        here.remove(run)
        if not here:
            del self._starts[run.first]
        self.bytes -= run.size_bytes

    def validate(self) -> None:
        """Assert every invariant."""
        runs = list(self._runs.values())
        assert self.bytes == sum(run.size_bytes for run in runs)
        assert not runs or self.bytes <= self._limit_bytes
        times = [run.expires_s for run in runs]
        assert times == sorted(times)
        assert sum(len(here) for here in self._starts.values()) == len(runs)
        assert all(here for here in self._starts.values())
        for run in runs:
            assert self._runs[run.first, run.slot] is run
            assert run in self._starts[run.first]


def _follow(
    run: Run, position: int, found: dict[CandidateId, Overlap], packed: bytes, blocks: int, now_s: float
) -> int:
    """Lengthen the overlap of the run's candidate by what the run, which begins at `position`, adds to it; where the
    overlap ends then, or 0 if nothing is added. `packed` begins with the `blocks` asked for."""
    candidate = run.slot.candidate
    known = found.get(candidate, _NOTHING)
    low = known.blocks
    high = min(position + len(run.packed) // _HASH_BYTES, blocks)
    if not position <= low < high or run.expires_s <= now_s or run.slot.state != "open":
        return 0

    def agree(block: int) -> bool:
        """Then they do on all before it: a sequence hash names its whole prefix."""
        at, there = _HASH_BYTES * (block - position), _HASH_BYTES * block
        return run.packed[at : at + _HASH_BYTES] == packed[there : there + _HASH_BYTES]

    if not agree(low):
        return 0
    low += 1
    while low < high:
        middle = (low + high) // 2
        if agree(middle):
            low = middle + 1
        else:
            high = middle
    found[candidate] = Overlap(known.device + low - known.blocks, known.host, known.disk)
    return low
