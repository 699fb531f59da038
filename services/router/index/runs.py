"""Runs of blocks: pieces of prefixes that the same candidates hold. Pure.

    chain      s0 s1 s2 s3 s4 s5 s6 s7        sequence hashes: each names the whole prefix up to its block
    runs      [s0 s1 s2 s3 s4]  [s5 s6 s7]
               H1                H2           holders: one object for each distinct set

A run is a part of one chain without a hole. So a prompt that has the first and the last hash of a run has all of them,
and a lookup can jump from run to run. Runs are joined where the order of their blocks is known, and cut where holders
change. Either costs time in the number of blocks that change, or in RUN_BLOCKS. A run knows its successor only as a
hint for joining: `next_block` is never wrong, because a sequence hash has one parent, but that block may be gone.

The table is split by hash into many dicts, because a dict that grows blocks the loop: 1 ms at 90,000 blocks, 20 ms at
350,000 (benchmarks/index.py). The garbage collector tracks no object in this module for long, so that a full collection
need not walk a million blocks. A reference cycle would therefore never be freed: the list by warmth is the only cycle,
and `__del__` breaks it.

docs/decisions/0011 gives the reasons.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

RUN_BLOCKS = 256
"""Most blocks in a run, which bounds the cost of changing one block in its middle."""
SHARDS = 128
_SHARD = SHARDS - 1

Masks = tuple[int, int, int]
"""One mask of slots per tier."""
Hashes = tuple[int, ...]
"""The keys of the table themselves. The garbage collector soon stops to track a tuple of ints."""


class Holders(Struct, gc=False, eq=False):
    """One distinct set of (slot, tier) pairs."""

    masks: Masks
    any_tier: int
    """The slots that hold the blocks in any tier."""
    lower_tiers: int
    """The slots that hold the blocks, but not on the device."""
    runs: int = 0
    """Number of runs that refer to this set; at 0 the set is removed."""


class Run(Struct, gc=False, eq=False):
    """Consecutive blocks of one chain with the same holders."""

    holders: Holders
    hashes: Hashes
    size: int
    last: int
    """Copies of `len(hashes)` and `hashes[-1]`, so that `find` reads them without another memory access."""
    next_block: int | None = None
    """A block that is known to follow the last one."""
    colder: Run | None = None
    warmer: Run | None = None


class Runs:
    """All runs, by block and by warmth. Every block is in one run; no run is empty."""

    def __init__(self) -> None:
        self._shards: list[dict[int, Run]] = [{} for _ in range(SHARDS)]
        self._holder_sets: dict[Masks, Holders] = {}
        self._ends = Run(Holders((0, 0, 0), 0, 0), (), 0, 0)
        """Sentinel between the coldest run (its `warmer`) and the warmest run (its `colder`)."""
        self._ends.colder = self._ends.warmer = self._ends
        self.blocks = 0
        self.runs = 0

    def __del__(self) -> None:
        for run in [self._ends, *self.coldest_first()]:
            run.colder = run.warmer = None

    @property
    def holder_sets(self) -> int:
        """Number of distinct sets of holders."""
        return len(self._holder_sets)

    # --- lookups

    def find(self, block: int) -> Run | None:
        """Return the run that contains the block."""
        return self._shards[block & _SHARD].get(block)

    def ending_with(self, block: int) -> Run | None:
        """Return the run whose last block this is."""
        run = self._shards[block & _SHARD].get(block)
        return run if run is not None and run.last == block else None

    def holders_of(self, masks: Masks) -> Holders:
        """Return the one object for these masks; it is kept once a run refers to it."""
        known = self._holder_sets.get(masks)
        if known is not None:
            return known
        device, host, disk = masks
        return Holders(masks, device | host | disk, (host | disk) & ~device)

    def coldest(self) -> Run | None:
        """Return the run that was added or touched longest ago."""
        run = self._ends.warmer
        return None if run is self._ends else run

    # --- changes

    def add(self, hashes: Sequence[int], at: int, masks: Masks, before: Run | None) -> tuple[Run, int]:
        """Add blocks from position `at` on, after the run `before`; the first of them is in no run. Stop at the first
        block that is in a run, or when a run is full. Return the run that contains them, and their number."""
        if before is not None and before.size < RUN_BLOCKS and before.holders.masks == masks:
            run = before
            run.next_block = None
        else:
            run = self._new((), self.holders_of(masks), None, self._warmest())
            if before is not None:
                before.next_block = hashes[at]
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
        run.hashes += (*new,) if count == len(new) else (*new[:count],)
        run.size += count
        run.last = new[count - 1]
        self.blocks += count
        return run, count

    def set_holders(self, run: Run, start: int, stop: int, holders: Holders, before: Run | None = None) -> Run:
        """Set the holders of the blocks at [start, stop) of `run`, and return the run that contains them then. `before`
        is the run that ends where they start, if it is known."""
        if before is run:
            before = None  # a chain that contains itself: a source sent a forged hash
        joins = before is not None and before.holders is holders
        if stop - start == run.size and not joins:
            self._remove_user(run.holders)
            self._add_user(holders)
            run.holders = holders
            if before is not None:
                before.next_block = run.hashes[0]
            return run
        piece, after = self._cut_out(run, start, stop)
        joined = self._join_neighbour(piece, holders, before, after) or self._new(
            piece, holders, after, self._warmest()
        )
        self._assign_blocks(piece, joined)
        return joined

    def remove(self, run: Run, start: int, stop: int) -> None:
        """Remove the blocks at [start, stop) of `run`, which no candidate holds any longer."""
        piece, _ = self._cut_out(run, start, stop)
        shards = self._shards
        for block in piece:
            del shards[block & _SHARD][block]
        self.blocks -= len(piece)
        if not self.blocks:  # a dict keeps the memory of removed entries until it grows
            self._shards = [{} for _ in range(SHARDS)]

    def touch(self, run: Run) -> None:
        """Make the run the warmest."""
        self._unlink(run)
        self._link(run, self._warmest())

    # --- private

    def _join_neighbour(self, piece: Hashes, holders: Holders, before: Run | None, after: int | None) -> Run | None:
        """Add the blocks to a neighbour with the same holders and enough room; return that neighbour, or None."""
        if before is not None:
            if before.holders is holders and before.size + len(piece) <= RUN_BLOCKS:
                before.hashes += piece
                before.next_block = after
                return _with_size(before)
            before.next_block = piece[0]
        follower = None if after is None else self.find(after)
        if follower is None or follower.holders is not holders or follower.hashes[0] != after:
            return None
        if follower.size + len(piece) > RUN_BLOCKS:
            return None
        follower.hashes = piece + follower.hashes
        return _with_size(follower)

    def _cut_out(self, run: Run, start: int, stop: int) -> tuple[Hashes, int | None]:
        """Cut blocks out of a run. What is left of it stays: two runs if blocks are left on both sides. Return the
        blocks and the block that follows them. The table still maps them to `run`."""
        own = run.hashes
        piece = own[start:stop]
        after = own[stop] if stop < run.size else run.next_block
        if len(piece) == run.size:
            self._remove_user(run.holders)
            self._unlink(run)
            self.runs -= 1
            return piece, after
        if start > run.size - stop:
            if stop < run.size:
                rest = own[stop:]
                self._assign_blocks(rest, self._new(rest, run.holders, run.next_block, run))
            run.hashes = own[:start]
            run.next_block = piece[0]
        else:
            if start:
                front = own[:start]
                self._assign_blocks(front, self._new(front, run.holders, piece[0], run))
            run.hashes = own[stop:]
        _with_size(run)
        return piece, after

    def _new(self, hashes: Hashes, holders: Holders, after: int | None, colder: Run) -> Run:
        run = Run(holders, hashes, len(hashes), hashes[-1] if hashes else 0, after)
        self._add_user(holders)
        self._link(run, colder)
        self.runs += 1
        return run

    def _assign_blocks(self, blocks: Hashes, run: Run) -> None:
        shards = self._shards
        for block in blocks:
            shards[block & _SHARD][block] = run

    def _add_user(self, holders: Holders) -> None:
        if not holders.runs:
            self._holder_sets[holders.masks] = holders
        holders.runs += 1

    def _remove_user(self, holders: Holders) -> None:
        holders.runs -= 1
        if not holders.runs:
            del self._holder_sets[holders.masks]

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

    def coldest_first(self) -> list[Run]:
        """Return all runs, coldest first."""
        found = []
        run = self._ends.warmer
        while run is not None and run is not self._ends:
            found.append(run)
            run = run.warmer
        return found

    def validate(self) -> None:
        """Assert every invariant. Linear in the blocks."""
        runs = self.coldest_first()
        uses: dict[Masks, int] = {}
        for run in runs:
            assert 0 < len(run.hashes) == run.size <= RUN_BLOCKS
            assert run.last == run.hashes[-1]
            assert all(self.find(block) is run for block in run.hashes)
            assert any(run.holders.masks), "a run has no holders"
            assert self._holder_sets[run.holders.masks] is run.holders, "two objects for one set of holders"
            uses[run.holders.masks] = uses.get(run.holders.masks, 0) + 1
        assert len(runs) == self.runs
        assert sum(len(run.hashes) for run in runs) == self.blocks == sum(map(len, self._shards))
        assert uses == {masks: holders.runs for masks, holders in self._holder_sets.items()}


def match_end(own: Hashes, hashes: Sequence[int], at: int) -> int:
    """Return the position in `hashes` where a chain that enters the run `own` at its first block leaves it. Once a
    chain and a run differ, all later blocks differ."""
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


def matching_piece(run: Run, hashes: Sequence[int], at: int) -> tuple[int, int]:
    """Return (position in the run of block `at` of `hashes`, number of blocks from there on that both have)."""
    own = run.hashes
    block = hashes[at]
    start = max(0, run.size - len(hashes) + at)  # it begins here if both end at the same block
    if own[start] != block:
        start = 0 if own[0] == block else own.index(block)
    most = min(run.size - start, len(hashes) - at)
    count = 1
    while count < most and own[start + count] == hashes[at + count]:
        count += 1
    return start, count


def matching_piece_either_way(run: Run, hashes: Sequence[int], at: int) -> tuple[int, int]:
    """Do the same where `hashes` may also run from a chain's end to its beginning, as caches evict. `start` is the
    position of the earliest of them in the run."""
    own = run.hashes
    last = len(own) - 1
    if own[-1] != hashes[at]:
        start, count = matching_piece(run, hashes, at)
        if count > 1 or not start:
            return start, count
        last = start
    most = min(last + 1, len(hashes) - at)
    count = 1
    while count < most and own[last - count] == hashes[at + count]:
        count += 1
    return last + 1 - count, count


def _with_size(run: Run) -> Run:
    """Update the copies of size and last hash after the hashes changed."""
    run.size = len(run.hashes)
    run.last = run.hashes[-1]
    return run
