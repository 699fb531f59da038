"""Who caches what: sequence hash → the candidates that hold the block, per tier. Pure.

    find([s0 s1 s2 s3 s4 …])          a jump from run to run (`services.router.index.runs`), and work where holders
    change:
         └── H1 ──┘└─ H2 ─┘              H1 = device {A, B}   H2 = device {A}, host {B}
                   └ B goes on in its host tier

A sequence hash names the whole prefix, so an index needs no tree: a block that leaves the middle of a chain ends the
overlap there, one that comes back joins the chain again. Each block counts in its best tier; the chain of a
candidate ends at the first block it holds in none. What a block store holds is told once, in a slot of its own, and
counts for every candidate that borrows from it (`services.router.index.shared_stores`), where that has not the block
itself higher up: so a chain may go from a worker's device to the store and back.

A candidate holds blocks in a *slot*, one bit in the holders' masks. `retire` hides all of a slot at once; whoever
stored its blocks removes them in slices, and the bit is used again once it is empty. A block stored n times in a slot
and tier must be removed n times. Bytes are bounded: at the limit the runs that were stored or touched longest ago go
first, for all their holders.

`benchmarks/index.py` measures it.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from typing import Literal

from msgspec import Struct

from services.router.index.runs import Holders, Masks, Runs, leaves, piece, piece_either_way
from services.router.index.shared_stores import CandidateId as CandidateId
from services.router.index.shared_stores import Lending
from services.router.index.tier_counts import Lower
from shared.messages import Overlap, Tier

TIERS: tuple[Tier, ...] = ("device", "host", "disk")

BLOCK_BYTES = 150
"""One sequence hash at the most: an int, its place in a run, and 108 of the dict. CPython gives a dict in which keys
come and go three to six times the places they need; one that only grows takes half of that."""
RUN_BYTES = 150
HOLDERS_BYTES = 480
"""One distinct set of holders with its key, two masks and its place in the table, for few slots."""
REPEAT_BYTES = 120
"""One block that a slot holds more than once."""

_NAMED_LIMIT_BYTES = 16 << 20
"""Of names remembered by mask; forgotten within 2 ms."""
_NAMED_BYTES = 150
"""One mask, and its place among them."""


class IndexStatistics(Struct, frozen=True):
    """Sizes and counts of an index."""

    blocks: int
    """Distinct sequence hashes."""
    pairs: dict[Tier, int]
    """(block, candidate) pairs, retired slots included until their blocks are removed."""
    holder_sets: int
    bytes: int
    """Estimate; at most the limit."""
    dropped_blocks: int
    """Blocks given up at the limit since the start."""
    runs: int = 0


class Slot:
    """A candidate's place in the index: open ──▶ retired (hidden) ──▶ freed (empty, its number is another's)."""

    __slots__ = ("alone", "candidate", "dropped_blocks", "number", "state")

    def __init__(self, candidate: CandidateId, number: int) -> None:
        self.candidate = candidate
        self.number = number
        bit = 1 << number
        self.alone: tuple[Masks, ...] = ((bit, 0, 0), (0, bit, 0), (0, 0, bit))
        """By tier: the masks of blocks that only this slot holds."""
        self.state: Literal["open", "retired", "freed"] = "open"
        self.dropped_blocks = 0
        """Given up at the limit: the picture is incomplete if there are any."""


class Index:
    """The blocks of all candidates of one model."""

    def __init__(self, *, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._runs = Runs()
        self._slots: list[Slot | None] = []
        """By number; None: free."""
        self._pairs: list[list[int]] = [[], [], []]
        """By tier and slot: blocks held."""
        self._repeats: list[list[dict[int, int]]] = [[], [], []]
        """By tier and slot: hash → how often it is held beyond the first."""
        self._repeats_count = 0
        self._retired = 0
        """Mask of slots that `find` does not see."""
        self._lending = Lending()
        self._named: dict[int, dict[CandidateId, None]] = {}
        """Mask → the candidates of its slots; a bounded memo, emptied when a slot changes hands."""
        self._named_bytes = 0
        self._dropped_blocks = 0
        self._unchecked_blocks = 0
        """Blocks that may be stored or removed before the size must be looked at."""

    # --- slots

    def open(self, candidate: CandidateId) -> Slot:
        """A slot for the blocks of `candidate`, which has no other open one."""
        self._forget_names()
        if None in self._slots:
            slot = Slot(candidate, self._slots.index(None))
            self._slots[slot.number] = slot
            self._lending.opened(candidate, slot.number)
            return slot
        slot = Slot(candidate, len(self._slots))
        self._slots.append(slot)
        self._lending.opened(candidate, slot.number)
        for tier in range(3):
            self._pairs[tier].append(0)
            self._repeats[tier].append({})
        self._drop_coldest()  # all holders' masks may be longer now
        self._unchecked_blocks = 0
        return slot

    def retire(self, slot: Slot) -> None:
        """Hide all that the slot holds, at once. The caller removes its blocks after that, at leisure; when the last
        is gone the slot is freed."""
        assert slot.state == "open"
        slot.state = "retired"
        self._retired |= 1 << slot.number
        self._lending.retired(slot.candidate)
        self._free_if_empty(slot)

    def borrow(self, candidate: CandidateId, lender: CandidateId | None) -> None:
        """What `lender` holds in host memory or on disk counts for `candidate` too from now on. The lender, which is a
        store, is not found any more. None: only what it holds itself counts."""
        self._lending.borrow(candidate, lender)

    def blocks_of(self, slot: Slot) -> int:
        """Blocks held in the slot, each tier counted."""
        return 0 if slot.state == "freed" else sum(row[slot.number] for row in self._pairs)

    def _free_if_empty(self, slot: Slot) -> None:
        if slot.state == "retired" and not self.blocks_of(slot):
            slot.state = "freed"
            self._retired &= ~(1 << slot.number)
            self._slots[slot.number] = None
            self._forget_names()

    # --- events

    def stored(self, slot: Slot, tier: int, hashes: Sequence[int], parent: int | None = None) -> None:
        """Consecutive blocks of a chain are held in the slot's tier (an index into TIERS), once more than before.
        `parent` is the block before them, where it is known: runs grow by it."""
        assert slot.state == "open"
        runs = self._runs
        bit = 1 << slot.number
        before = None if parent is None else runs.ending(parent)
        at = added = 0
        count = len(hashes)
        while at < count:
            run = runs.of(hashes[at])
            if run is None:
                before, blocks = runs.add(hashes, at, slot.alone[tier], before)
                added += blocks
                at += blocks
                continue
            start, blocks = piece(run, hashes, at)
            if run.holders.masks[tier] & bit:
                self._repeat(slot.number, tier, hashes[at : at + blocks])
            else:
                holders = runs.holders(_with(run.holders.masks, tier, bit))
                run = runs.change(run, start, start + blocks, holders, before)
                added += blocks
            at += blocks
            before = run if run.last == hashes[at - 1] else None
        self._pairs[tier][slot.number] += added
        self._count(count)

    def removed(self, slot: Slot, tier: int, hashes: Sequence[int]) -> None:
        """The blocks, in any order, are held once less; those not held are ignored (they may have been dropped)."""
        if slot.state == "freed":
            return
        runs = self._runs
        bit = 1 << slot.number
        repeats = self._repeats[tier][slot.number]
        at = gone = 0
        count = len(hashes)
        while at < count:
            block = hashes[at]
            run = runs.of(block)
            if run is None or not run.holders.masks[tier] & bit:
                at += 1
                continue
            if repeats:
                start, blocks = run.hashes.index(block), 1
                if self._unrepeat(repeats, block):
                    at += 1
                    continue
            else:
                start, blocks = piece_either_way(run, hashes, at)
            masks = _without(run.holders.masks, tier, bit)
            if any(masks):
                runs.change(run, start, start + blocks, runs.holders(masks))
            else:
                runs.drop(run, start, start + blocks)
            at += blocks
            gone += blocks
        if gone:
            self._pairs[tier][slot.number] -= gone
            self._free_if_empty(slot)
            self._count(gone)

    def touch(self, hashes: Sequence[int]) -> None:
        """These leading blocks of a chain were asked for: they are the warmest now."""
        at = 0
        while at < len(hashes):
            run = self._runs.of(hashes[at])
            if run is None:
                return
            self._runs.touch(run)
            at += run.size

    # --- the question

    def find(self, hashes: Sequence[int]) -> dict[CandidateId, Overlap]:
        """How many leading blocks each candidate holds, per tier; candidates without the first are left out. `hashes`
        are the sequence hashes of one prompt, from its first block on.

        Cost: two lookups a run, up to where the last candidate's chain ends, and work where holders change.
        """
        found: dict[CandidateId, Overlap] = {}
        of = self._runs.of
        lower: Lower | None = None
        current: Holders | None = None
        alive = ~(self._retired | self._lending.lenders)
        at = 0
        count = len(hashes)
        while at < count:
            run = of(hashes[at])
            if run is None or run.holders is not current:
                current = None if run is None else run.holders
                if current is None:
                    left = 0
                elif current.below or lower is not None:
                    lower = lower or Lower()
                    left = self._descend(lower, alive, current, at)
                else:
                    left = alive & current.any
                if at and left != alive:
                    self._settle(found, alive & ~left, at, lower)
                if run is None or not left:
                    return found
                alive = left
            end = at + run.size
            at = end if end <= count and hashes[end - 1] == run.last else leaves(run.hashes, hashes, at)
        if current is not None:
            self._settle(found, alive, count, lower)
        return found

    def _descend(self, lower: Lower, alive: int, holders: Holders, at: int) -> int:
        """Which of the slots `alive` hold the blocks from `at` on; `lower` has heard in which tiers."""
        device, host, disk = holders.masks
        if holders.below & self._lending.lenders:
            host = self._lending.widened(host)
            disk = self._lending.widened(disk) if disk else 0
        left = alive & (device | host | disk)
        host &= left & ~device
        lower.changed(left, host, left & disk & ~device & ~host, at)
        return left

    def _settle(self, found: dict[CandidateId, Overlap], ended: int, depth: int, lower: Lower | None) -> None:
        """The chains of the slots in `ended` are `depth` blocks long."""
        if lower is not None:
            for slots, host, disk in lower.ended(ended, depth):
                self._name(found, slots, Overlap(depth - host - disk, host, disk))
            ended &= ~lower.slots
        self._name(found, ended, Overlap(depth))

    def _name(self, found: dict[CandidateId, Overlap], slots: int, overlap: Overlap) -> None:
        names = self._names(slots)
        if not found:
            found.update(dict.fromkeys(names, overlap))  # takes the hashes of `names` over: a tuple's is dear
            return
        for candidate in names:
            found[candidate] = overlap

    def _names(self, mask: int) -> dict[CandidateId, None]:
        names = self._named.get(mask)
        if names is None:
            if self._named_bytes >= _NAMED_LIMIT_BYTES:
                self._forget_names()
            names = self._named[mask] = dict.fromkeys(self._each_name(mask))
            self._named_bytes += sys.getsizeof(names) + _NAMED_BYTES
        return names

    def _forget_names(self) -> None:
        self._named.clear()
        self._named_bytes = 0

    def _each_name(self, mask: int) -> Iterator[CandidateId]:
        while mask:
            number = mask.bit_length() - 1
            mask ^= 1 << number
            slot = self._slots[number]
            assert slot is not None
            yield slot.candidate

    # --- blocks held more than once

    def _repeat(self, number: int, tier: int, blocks: Sequence[int]) -> None:
        repeats = self._repeats[tier][number]
        before = len(repeats)
        for block in blocks:
            repeats[block] = repeats.get(block, 0) + 1
        self._repeats_count += len(repeats) - before

    def _unrepeat(self, repeats: dict[int, int], block: int) -> bool:
        """Whether the block was held more than once, and is once less now."""
        count = repeats.get(block)
        if count is None:
            return False
        if count > 1:
            repeats[block] = count - 1
        else:
            del repeats[block]
            self._repeats_count -= 1
        return True

    # --- the bound

    @property
    def bytes(self) -> int:
        """Estimated size."""
        runs = self._runs
        return (
            BLOCK_BYTES * runs.blocks
            + RUN_BYTES * runs.runs
            + self._holders_bytes * runs.sets
            + REPEAT_BYTES * self._repeats_count
        )

    @property
    def _holders_bytes(self) -> int:
        """One set: five ints have a bit for every slot at most, and 30 bits take 4 bytes."""
        return HOLDERS_BYTES + 20 * len(self._slots) // 30

    @property
    def _most_bytes(self) -> int:
        """By which one block stored or removed can make the index larger."""
        return BLOCK_BYTES + 2 * RUN_BYTES + self._holders_bytes + REPEAT_BYTES

    @property
    def crowded(self) -> bool:
        """Near the limit: what is asked for should be touched, so that it stays."""
        return self.bytes > self._limit_bytes * 7 // 8

    def _count(self, blocks: int) -> None:
        """So many blocks were stored or removed."""
        self._unchecked_blocks -= blocks
        if self._unchecked_blocks < 0:
            self._drop_coldest()
            self._unchecked_blocks = (self._limit_bytes - self.bytes) // self._most_bytes

    def _drop_coldest(self) -> None:
        while self.bytes > self._limit_bytes:
            run = self._runs.coldest()
            if run is None:
                return
            blocks = run.hashes[:]
            for tier, mask in enumerate(run.holders.masks):
                while mask:
                    bit = mask & -mask
                    mask ^= bit
                    self._lose(bit.bit_length() - 1, tier, blocks)
            self._runs.drop(run, 0, len(blocks))
            self._dropped_blocks += len(blocks)

    def _lose(self, number: int, tier: int, blocks: array[int]) -> None:
        """A slot's blocks are given up in one tier."""
        repeats = self._repeats[tier][number]
        if repeats:
            for block in blocks:
                self._repeats_count -= repeats.pop(block, 0) > 0
        self._pairs[tier][number] -= len(blocks)
        slot = self._slots[number]
        assert slot is not None
        slot.dropped_blocks += len(blocks)
        self._free_if_empty(slot)

    # --- for people and tests

    def statistics(self) -> IndexStatistics:
        """Sizes and counts, in constant time but for the number of slots."""
        return IndexStatistics(
            blocks=self._runs.blocks,
            pairs={tier: sum(self._pairs[number]) for number, tier in enumerate(TIERS)},
            holder_sets=self._runs.sets,
            bytes=self.bytes,
            dropped_blocks=self._dropped_blocks,
            runs=self._runs.runs,
        )

    def validate(self) -> None:
        """Assert every invariant. Linear in the pairs."""
        self._runs.validate()
        pairs = [[0] * len(self._slots) for _ in TIERS]
        for run in self._runs.each():
            for tier, mask in enumerate(run.holders.masks):
                for number in range(len(self._slots)):
                    pairs[tier][number] += (mask >> number & 1) * len(run.hashes)
        assert pairs == self._pairs
        assert self._repeats_count == sum(len(repeats) for row in self._repeats for repeats in row)
        for number, slot in enumerate(self._slots):
            if slot is None:
                assert not any(row[number] for row in self._pairs), "a free slot is empty"
                assert not self._retired >> number & 1
            else:
                assert slot.number == number
                assert slot.state == ("retired" if self._retired >> number & 1 else "open")
                assert slot.state == "open" or self.blocks_of(slot), "an empty retired slot is freed"
            for tier in range(3):
                for block, count in self._repeats[tier][number].items():
                    assert count > 0
                    home = self._runs.of(block)
                    assert home is not None, "a repeat without its block"
                    assert home.holders.masks[tier] >> number & 1, "a repeat without its block"
        self._lending.validate()
        owners = [slot.candidate for slot in self._slots if slot is not None and slot.state == "open"]
        assert len(owners) == len(set(owners)), "one open slot a candidate"
        assert self.bytes <= self._limit_bytes
        assert self._named_bytes == sum(sys.getsizeof(names) + _NAMED_BYTES for names in self._named.values())


def _with(masks: Masks, tier: int, bit: int) -> Masks:
    device, host, disk = masks
    if tier == 0:
        return device | bit, host, disk
    return (device, host | bit, disk) if tier == 1 else (device, host, disk | bit)


def _without(masks: Masks, tier: int, bit: int) -> Masks:
    device, host, disk = masks
    if tier == 0:
        return device & ~bit, host, disk
    return (device, host & ~bit, disk) if tier == 1 else (device, host, disk & ~bit)
