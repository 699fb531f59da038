"""Blocks in runs: pieces of prefixes that the same candidates hold. Pure.

    chain      s0 s1 s2 s3 s4 s5 s6 s7        sequence hashes: each names the whole prefix up to its block
    runs      [s0 s1 s2 s3 s4]  [s5 s6 s7]
               H1                H2           holders: one object for each distinct set

A run is a part of one chain without a hole, so a prompt that has its first and its last hash has all of them: whoever
asks jumps from run to run. Runs are joined where the order of their blocks is told, and cut where holders change;
either costs time in the blocks that change, or in RUN_BLOCKS. A run knows what follows it only as a hint for joining:
`after` is true for ever, because a sequence hash has one parent, but may name a block that is gone.

The table is split by hash into many dicts, because a dict that grows stalls: 1 ms at 90,000 blocks, 20 ms at 350,000
(benchmarks/index.py). Nothing here is tracked by the garbage collector: a full collection need not walk a million
blocks. So a cycle would stay for ever: the list by warmth is the only one, and `__del__` undoes it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from msgspec import Struct

RUN_BLOCKS = 256
"""A run is no longer; bounds what one block in its middle costs."""
SHARDS = 128
_SHARD = SHARDS - 1

Masks = tuple[int, int, int]
"""Of slots, by tier."""


class Holders(Struct, gc=False, eq=False):
    """One distinct set of (slot, tier) pairs."""

    masks: Masks
    any: int
    """The slots that hold in any tier."""
    below: int
    """Those that hold, but not on the device."""
    runs: int = 0
    """How many point here; at 0 the set is forgotten."""


class Run(Struct, gc=False, eq=False):
    """Consecutive blocks of one chain with the same holders."""

    holders: Holders
    hashes: array[int]
    size: int
    last: int
    """`len(hashes)` and `hashes[-1]`, where a find reads them without a look elsewhere in memory."""
    after: int | None = None
    """A block known to follow the last one."""
    colder: Run | None = None
    warmer: Run | None = None


class Runs:
    """All runs, by block and by warmth. Every block is in one run; no run is empty."""

    def __init__(self) -> None:
        self._shards: list[dict[int, Run]] = [{} for _ in range(SHARDS)]
        self._sets: dict[Masks, Holders] = {}
        self._ends = Run(Holders((0, 0, 0), 0, 0), array("Q"), 0, 0)
        """Between the coldest run (its `warmer`) and the warmest (its `colder`)."""
        self._ends.colder = self._ends.warmer = self._ends
        self.blocks = 0
        self.runs = 0

    def __del__(self) -> None:
        for run in [self._ends, *self.each()]:
            run.colder = run.warmer = None

    @property
    def sets(self) -> int:
        """Distinct sets of holders."""
        return len(self._sets)

    # --- questions

    def of(self, block: int) -> Run | None:
        """The run that the block is in."""
        return self._shards[block & _SHARD].get(block)

    def ending(self, block: int) -> Run | None:
        """The run that the block is the last of."""
        run = self._shards[block & _SHARD].get(block)
        return run if run is not None and run.last == block else None

    def holders(self, masks: Masks) -> Holders:
        """The one object for these masks; kept once a run points to it."""
        known = self._sets.get(masks)
        if known is not None:
            return known
        device, host, disk = masks
        return Holders(masks, device | host | disk, (host | disk) & ~device)

    def coldest(self) -> Run | None:
        """The run that was added or touched longest ago."""
        run = self._ends.warmer
        return None if run is self._ends else run

    # --- changes

    def add(self, hashes: Sequence[int], at: int, masks: Masks, before: Run | None) -> tuple[Run, int]:
        """Put blocks from `at` on, of which the first is in no run, behind `before`: up to the first that is in one,
        or to a full run. Returns the run that they end, and their number."""
        if before is not None and before.size < RUN_BLOCKS and before.holders.masks == masks:
            run = before
            run.after = None
        else:
            run = self._new(array("Q"), self.holders(masks), None, self._warmest())
            if before is not None:
                before.after = hashes[at]
        most = RUN_BLOCKS - run.size
        new = hashes[at : at + most] if at or len(hashes) > most else hashes
        shards = self._shards
        count = 0
        for block in new:
            shard = shards[block & _SHARD]
            if block in shard:
                break
            shard[block] = run
            count += 1
        run.hashes.extend(array("Q", new if count == len(new) else new[:count]))  # twice as fast as without `array`
        run.size += count
        run.last = new[count - 1]
        self.blocks += count
        return run, count

    def change(self, run: Run, start: int, stop: int, holders: Holders, before: Run | None = None) -> Run:
        """The blocks at [start, stop) of `run` have these holders now. `before` ends where they start, if it is known
        what does. Returns the run that they are in."""
        if before is run:
            before = None  # a chain that contains itself: somebody forged a hash
        joins = before is not None and before.holders is holders
        if stop - start == run.size and not joins:
            self._forget_use(run.holders)
            self._use(holders)
            run.holders = holders
            if before is not None:
                before.after = run.hashes[0]
            return run
        piece, after = self._cut(run, start, stop)
        joined = self._joined(piece, holders, before, after) or self._new(piece, holders, after, self._warmest())
        self._point(piece, joined)
        return joined

    def drop(self, run: Run, start: int, stop: int) -> None:
        """Nobody holds the blocks at [start, stop) of `run` any more."""
        piece, _ = self._cut(run, start, stop)
        shards = self._shards
        for block in piece:
            del shards[block & _SHARD][block]
        self.blocks -= len(piece)
        if not self.blocks:  # a dict keeps the room of what it held until it grows
            self._shards = [{} for _ in range(SHARDS)]

    def touch(self, run: Run) -> None:
        """It is the warmest now."""
        self._unlink(run)
        self._link(run, self._warmest())

    # --- inside

    def _joined(self, piece: array[int], holders: Holders, before: Run | None, after: int | None) -> Run | None:
        """The neighbour that has taken the blocks in, if one has the same holders and room."""
        if before is not None:
            if before.holders is holders and before.size + len(piece) <= RUN_BLOCKS:
                before.hashes.extend(piece)
                before.after = after
                return _measured(before)
            before.after = piece[0]
        follower = None if after is None else self.of(after)
        if follower is None or follower.holders is not holders or follower.hashes[0] != after:
            return None
        if follower.size + len(piece) > RUN_BLOCKS:
            return None
        follower.hashes[0:0] = piece
        return _measured(follower)

    def _cut(self, run: Run, start: int, stop: int) -> tuple[array[int], int | None]:
        """Takes blocks out of a run; what is left of it on either side stays, as two runs if it is on both. Returns
        the blocks and what follows them. The table still has them in `run`."""
        own = run.hashes
        piece = own[start:stop]
        after = own[stop] if stop < run.size else run.after
        if len(piece) == run.size:
            self._forget_use(run.holders)
            self._unlink(run)
            self.runs -= 1
            return piece, after
        if start > run.size - stop:
            if stop < run.size:
                rest = own[stop:]
                self._point(rest, self._new(rest, run.holders, run.after, run))
            del own[start:]
            run.after = piece[0]
        else:
            if start:
                front = own[:start]
                self._point(front, self._new(front, run.holders, piece[0], run))
            del own[:stop]
        _measured(run)
        return piece, after

    def _new(self, hashes: array[int], holders: Holders, after: int | None, colder: Run) -> Run:
        run = Run(holders, hashes, len(hashes), hashes[-1] if hashes else 0, after)
        self._use(holders)
        self._link(run, colder)
        self.runs += 1
        return run

    def _point(self, blocks: array[int], run: Run) -> None:
        shards = self._shards
        for block in blocks:
            shards[block & _SHARD][block] = run

    def _use(self, holders: Holders) -> None:
        if not holders.runs:
            self._sets[holders.masks] = holders
        holders.runs += 1

    def _forget_use(self, holders: Holders) -> None:
        holders.runs -= 1
        if not holders.runs:
            del self._sets[holders.masks]

    def _warmest(self) -> Run:
        warmest = self._ends.colder
        assert warmest is not None
        return warmest

    def _link(self, run: Run, colder: Run) -> None:
        warmer = colder.warmer
        assert warmer is not None
        run.colder, run.warmer = colder, warmer
        colder.warmer = warmer.colder = run

    def _unlink(self, run: Run) -> None:
        colder, warmer = run.colder, run.warmer
        assert colder is not None
        assert warmer is not None
        colder.warmer, warmer.colder = warmer, colder
        run.colder = run.warmer = None

    # --- for tests

    def each(self) -> list[Run]:
        """All runs, coldest first."""
        found = []
        run = self._ends.warmer
        while run is not None and run is not self._ends:
            found.append(run)
            run = run.warmer
        return found

    def validate(self) -> None:
        """Assert every invariant. Linear in the blocks."""
        runs = self.each()
        uses: dict[Masks, int] = {}
        for run in runs:
            assert 0 < len(run.hashes) == run.size <= RUN_BLOCKS
            assert run.last == run.hashes[-1]
            assert all(self.of(block) is run for block in run.hashes)
            assert any(run.holders.masks), "a block that nobody holds is gone"
            assert self._sets[run.holders.masks] is run.holders, "holders are shared"
            uses[run.holders.masks] = uses.get(run.holders.masks, 0) + 1
        assert len(runs) == self.runs
        assert sum(len(run.hashes) for run in runs) == self.blocks == sum(map(len, self._shards))
        assert uses == {masks: holders.runs for masks, holders in self._sets.items()}


def leaves(own: array[int], hashes: Sequence[int], at: int) -> int:
    """Where a chain that enters the run `own` at its first block leaves it: once they differ, they differ for good."""
    low, high = 1, min(len(own), len(hashes) - at)
    if hashes[at + high - 1] == own[high - 1]:
        return at + high
    while low < high:
        middle = (low + high) // 2
        if hashes[at + middle] == own[middle]:
            low = middle + 1
        else:
            high = middle
    return at + low


def piece(run: Run, hashes: Sequence[int], at: int) -> tuple[int, int]:
    """(where in the run block `at` of `hashes` is, how many blocks from there on are in both)."""
    own = run.hashes
    block = hashes[at]
    start = max(0, run.size - len(hashes) + at)  # it begins here if they end where the run does
    if own[start] != block:
        start = 0 if own[0] == block else own.index(block)
    most = min(run.size - start, len(hashes) - at)
    count = 1
    while count < most and own[start + count] == hashes[at + count]:
        count += 1
    return start, count


def piece_either_way(run: Run, hashes: Sequence[int], at: int) -> tuple[int, int]:
    """The same where `hashes` may also go from a chain's end to its beginning, as caches evict. `start` is the first
    of them in the run."""
    own = run.hashes
    last = len(own) - 1
    if own[-1] != hashes[at]:
        start, count = piece(run, hashes, at)
        if count > 1 or not start:
            return start, count
        last = start
    most = min(last + 1, len(hashes) - at)
    count = 1
    while count < most and own[last - count] == hashes[at + count]:
        count += 1
    return last + 1 - count, count


def _measured(run: Run) -> Run:
    """After its hashes changed."""
    run.size = len(run.hashes)
    run.last = run.hashes[-1]
    return run
