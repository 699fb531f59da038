"""The index of cached blocks: sequence hash → the candidates that hold the block, per tier. Pure.

    find([s0 s1 s2 s3 s4 …])     jumps from run to run (`index.runs`) and works only where holders change
         └── H1 ──┘└─ H2 ─┘         H1 = device {A, B}   H2 = device {A}, host {B}
                   └ B continues in its host tier

A sequence hash names the whole prefix, so the index needs no tree. If a block in the middle of a chain is removed, the
overlap ends there; if it is stored again, the chain is whole again. Each block counts in its best tier. The chain of a
candidate ends at the first block that it holds in no tier. The blocks of a block store are kept once, in a slot of
their own. They count for every candidate that inherits from the store (`services.router.index.inheritance`), unless
the candidate holds the block itself in a higher tier. So a chain may go from a worker's device to the store and back.

A candidate holds blocks in a *slot*, which is one bit in the holders' masks. `retire_slot` hides all blocks of a slot
at once; the caller that added its blocks removes them in slices, and the bit is used again once the slot is empty. A
block that was added n times to a slot and tier must be removed n times. The size in bytes is bounded: at the limit, the
runs that were added or touched longest ago are dropped first, for all their holders.

`benchmarks/index.py` measures it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from msgspec import Struct

from services.router.index.inheritance import CandidateId as CandidateId
from services.router.index.inheritance import Inheritance
from services.router.index.runs import (
    Hashes,
    Holders,
    Masks,
    Runs,
    match_end,
    matching_piece,
    matching_piece_either_way,
)
from services.router.index.tier_counts import TierCounts
from shared.messages.kv_events import Tier
from shared.messages.select import Overlap

TIERS: tuple[Tier, ...] = ("device", "host", "disk")
_HOST = 1

BLOCK_BYTES = 150
"""Most bytes for one sequence hash: an int, its place in a run, and 108 bytes in the dict. When keys come and go,
CPython allocates three to six times the entries that a dict needs; a dict that only grows takes half of that."""
RUN_BYTES = 150
HOLDERS_BYTES = 480
"""Bytes for one distinct set of holders with its key, two masks and its table entry, while there are few slots."""
REPEAT_BYTES = 120
"""Bytes for one block that a slot holds more than once."""

_MEMO_LIMIT_BYTES = 16 << 20
"""Limit of the memo from masks to candidates; emptying it takes up to 2 ms."""
_MEMO_ENTRY_BYTES = 150
"""Bytes for one mask and its table entry."""


class IndexStatistics(Struct, frozen=True):
    """Sizes and counts of an index."""

    blocks: int
    """Number of distinct sequence hashes."""
    pairs: dict[Tier, int]
    """Number of (block, candidate) pairs by tier. Retired slots count until their blocks are removed."""
    holder_sets: int
    bytes: int
    """Estimated size; never above the limit."""
    dropped_blocks: int
    """Number of blocks dropped at the limit since the start."""
    runs: int = 0


class Slot:
    """The place of a candidate in the index: open ──▶ retired (hidden) ──▶ freed (empty; its number is reused)."""

    __slots__ = ("candidate", "dropped_blocks", "number", "only_holder_masks", "state")

    def __init__(self, candidate: CandidateId, number: int) -> None:
        self.candidate = candidate
        self.number = number
        bit = 1 << number
        self.only_holder_masks: tuple[Masks, ...] = ((bit, 0, 0), (0, bit, 0), (0, 0, bit))
        """By tier, the masks of blocks that only this slot holds."""
        self.state: Literal["open", "retired", "freed"] = "open"
        self.dropped_blocks = 0
        """Number of its blocks that were dropped at the limit. If it is not 0, the index is incomplete for this
        candidate."""


class Index:
    """The blocks of all candidates of one model."""

    def __init__(self, *, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._runs = Runs()
        self._slots: list[Slot | None] = []
        """Slots by number; None marks a free number."""
        self._pairs: list[list[int]] = [[], [], []]
        """Number of blocks held, by tier and slot."""
        self._repeats: list[list[dict[int, int]]] = [[], [], []]
        """By tier and slot: hash → number of times it is held beyond the first."""
        self._repeats_count = 0
        self._retired = 0
        """Mask of retired slots, which `find` ignores."""
        self._inheritance = Inheritance()
        self._candidates_by_mask: dict[int, dict[CandidateId, None]] = {}
        """Mask → the candidates of its slots. It is a bounded memo, emptied when a slot changes hands."""
        self._memo_bytes = 0
        self._dropped_blocks = 0
        self._unchecked_blocks = 0
        """Number of blocks that may be added or removed before the size must be checked again."""

    # --- slots

    def open_slot(self, candidate: CandidateId) -> Slot:
        """Open a slot for the blocks of `candidate`, which has no other open slot."""
        self._clear_memo()
        if None in self._slots:
            slot = Slot(candidate, self._slots.index(None))
            self._slots[slot.number] = slot
            self._inheritance.slot_opened(candidate, slot.number)
            return slot
        slot = Slot(candidate, len(self._slots))
        self._slots.append(slot)
        self._inheritance.slot_opened(candidate, slot.number)
        for tier in range(3):
            self._pairs[tier].append(0)
            self._repeats[tier].append({})
        self._drop_coldest()  # the masks of all holders may be longer now
        self._unchecked_blocks = 0
        return slot

    def retire_slot(self, slot: Slot) -> None:
        """Hide all blocks of the slot at once. The caller then removes them in slices; the slot is freed when the last
        one is removed."""
        assert slot.state == "open"
        slot.state = "retired"
        self._retired |= 1 << slot.number
        self._inheritance.slot_retired(slot.candidate)
        self._free_if_empty(slot)

    def set_store(self, candidate: CandidateId, store: CandidateId | None) -> None:
        """From now on, count the blocks that `store` holds in host memory or on disk for `candidate` too. The store
        is a store; `find` no longer returns it. With None, only the candidate's own blocks count."""
        self._inheritance.set_store(candidate, store)

    def blocks_of(self, slot: Slot) -> int:
        """Return the number of blocks held in the slot; a block counts once per tier."""
        return 0 if slot.state == "freed" else sum(row[slot.number] for row in self._pairs)

    def _free_if_empty(self, slot: Slot) -> None:
        if slot.state == "retired" and not self.blocks_of(slot):
            slot.state = "freed"
            self._retired &= ~(1 << slot.number)
            self._slots[slot.number] = None
            self._clear_memo()

    # --- events

    def add_blocks(self, slot: Slot, tier: int, hashes: list[int], parent: int | None = None) -> None:
        """Add consecutive blocks of a chain to the slot's tier (an index into TIERS). A block that is held already is
        counted once more. `parent` is the block before them, if it is known: runs grow by it. Afterwards `hashes` are
        the index's own objects, so that callers that keep them keep each hash once, however many hold it."""
        assert slot.state == "open"
        runs = self._runs
        bit = 1 << slot.number
        before = None if parent is None else runs.ending_with(parent)
        at = added = 0
        count = len(hashes)
        while at < count:
            run = runs.find(hashes[at])
            if run is None:
                before, blocks = runs.add(hashes, at, slot.only_holder_masks[tier], before)
                added += blocks
                at += blocks
                continue
            start, blocks = matching_piece(run, hashes, at)
            hashes[at : at + blocks] = run.hashes[start : start + blocks]
            if run.holders.masks[tier] & bit:
                self._repeat(slot.number, tier, hashes[at : at + blocks])
            else:
                holders = runs.holders_of(_with(run.holders.masks, tier, bit))
                run = runs.set_holders(run, start, start + blocks, holders, before)
                added += blocks
            at += blocks
            before = run if run.last == hashes[at - 1] else None
        self._pairs[tier][slot.number] += added
        self._check_size(count)

    def remove_blocks(self, slot: Slot, tier: int, hashes: Sequence[int]) -> None:
        """Remove the blocks, given in any order, once each. Blocks that are not held are ignored, because they may have
        been dropped at the limit."""
        if slot.state == "freed":
            return
        runs = self._runs
        bit = 1 << slot.number
        repeats = self._repeats[tier][slot.number]
        at = gone = 0
        count = len(hashes)
        while at < count:
            block = hashes[at]
            run = runs.find(block)
            if run is None or not run.holders.masks[tier] & bit:
                at += 1
                continue
            if repeats:
                start, blocks = run.hashes.index(block), 1
                if self._unrepeat(repeats, block):
                    at += 1
                    continue
            else:
                start, blocks = matching_piece_either_way(run, hashes, at)
            masks = _without(run.holders.masks, tier, bit)
            if any(masks):
                runs.set_holders(run, start, start + blocks, runs.holders_of(masks))
            else:
                runs.remove(run, start, start + blocks)
            at += blocks
            gone += blocks
        if gone:
            self._pairs[tier][slot.number] -= gone
            self._free_if_empty(slot)
            self._check_size(gone)

    def touch(self, hashes: Sequence[int]) -> None:
        """Make these leading blocks of a chain the warmest, because a request asked for them."""
        at = 0
        while at < len(hashes):
            run = self._runs.find(hashes[at])
            if run is None:
                return
            self._runs.touch(run)
            at += run.size

    # --- lookup

    def find(self, hashes: Sequence[int]) -> dict[CandidateId, Overlap]:
        """Return how many leading blocks each candidate holds, per tier. Candidates that do not hold the first block
        are left out. `hashes` are the sequence hashes of one prompt, from its first block on.

        Cost: two lookups per run, up to the end of the longest chain, and some work where holders change.
        """
        found: dict[CandidateId, Overlap] = {}
        of = self._runs.find
        counts: TierCounts | None = None
        current: Holders | None = None
        alive = ~(self._retired | self._inheritance.stores)
        at = 0
        count = len(hashes)
        while at < count:
            run = of(hashes[at])
            if run is None or run.holders is not current:
                current = None if run is None else run.holders
                if current is None:
                    matching = 0
                elif current.lower_tiers or counts is not None:
                    counts = counts or TierCounts()
                    matching = self._match_tiers(counts, alive, current, at)
                else:
                    matching = alive & current.any_tier
                if at and matching != alive:
                    self._record_depth(found, alive & ~matching, at, counts)
                if run is None or not matching:
                    return found
                alive = matching
            end = at + run.size
            at = end if end <= count and hashes[end - 1] == run.last else match_end(run.hashes, hashes, at)
        if current is not None:
            self._record_depth(found, alive, count, counts)
        return found

    def find_in_memory(self, hashes: Sequence[int], start: int, slots: Iterable[int]) -> dict[CandidateId, int]:
        """Return how many blocks in a row each of these open slots holds in host memory, from `start` on. Slots that
        do not hold the first of them are left out. The cost is that of `find`."""
        found: dict[CandidateId, int] = {}
        alive = 0
        for number in slots:
            alive |= 1 << number
        at, count = start, len(hashes)
        while alive and at < count:
            run = self._runs.find(hashes[at])
            held = 0 if run is None else alive & run.holders.masks[_HOST]
            if held != alive and at > start:
                self._record_rows(found, alive & ~held, at - start)
            alive = held
            if run is None or not held:
                return found
            at += matching_piece(run, hashes, at)[1]
        if at > start:
            self._record_rows(found, alive, at - start)
        return found

    def _record_rows(self, found: dict[CandidateId, int], ended: int, blocks: int) -> None:
        for candidate in self._candidates_in(ended):
            found[candidate] = blocks

    def _match_tiers(self, counts: TierCounts, alive: int, holders: Holders, at: int) -> int:
        """Return which of the slots `alive` hold the block at `at`, and update `counts` with their tiers."""
        device, host, disk = holders.masks
        if holders.lower_tiers & self._inheritance.stores:
            host = self._inheritance.with_heirs(host)
            disk = self._inheritance.with_heirs(disk) if disk else 0
        matching = alive & (device | host | disk)
        host &= matching & ~device
        counts.update(matching, host, matching & disk & ~device & ~host, at)
        return matching

    def _record_depth(
        self, found: dict[CandidateId, Overlap], ended: int, depth: int, counts: TierCounts | None
    ) -> None:
        """Record that the chains of the slots in `ended` are `depth` blocks long."""
        if counts is not None:
            for slots, host, disk in counts.counts_at(ended, depth):
                self._assign(found, slots, Overlap(depth - host - disk, host, disk))
            ended &= ~counts.slots
        self._assign(found, ended, Overlap(depth))

    def _assign(self, found: dict[CandidateId, Overlap], slots: int, overlap: Overlap) -> None:
        names = self._candidates_in(slots)
        if not found:
            found.update(dict.fromkeys(names, overlap))  # copies the hashes of `names`: hashing a tuple is slow
            return
        for candidate in names:
            found[candidate] = overlap

    def _candidates_in(self, mask: int) -> dict[CandidateId, None]:
        names = self._candidates_by_mask.get(mask)
        if names is None:
            if self._memo_bytes >= _MEMO_LIMIT_BYTES:
                self._clear_memo()
            names = self._candidates_by_mask[mask] = dict.fromkeys(self._list_candidates(mask))
            self._memo_bytes += sys.getsizeof(names) + _MEMO_ENTRY_BYTES
        return names

    def _clear_memo(self) -> None:
        self._candidates_by_mask.clear()
        self._memo_bytes = 0

    def _list_candidates(self, mask: int) -> Iterator[CandidateId]:
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
        """Remove the block once if it is held more than once; return whether it was."""
        count = repeats.get(block)
        if count is None:
            return False
        if count > 1:
            repeats[block] = count - 1
        else:
            del repeats[block]
            self._repeats_count -= 1
        return True

    # --- size limit

    @property
    def bytes(self) -> int:
        """Estimated size in bytes."""
        runs = self._runs
        return (
            BLOCK_BYTES * runs.blocks
            + RUN_BYTES * runs.runs
            + self._holders_bytes * runs.holder_sets
            + REPEAT_BYTES * self._repeats_count
        )

    @property
    def _holders_bytes(self) -> int:
        """Bytes of one set of holders: each of its five ints has up to one bit per slot, and 30 bits take 4 bytes."""
        return HOLDERS_BYTES + 20 * len(self._slots) // 30

    @property
    def _largest_growth_bytes(self) -> int:
        """Upper bound of the index's growth in bytes when one block is added or removed."""
        return BLOCK_BYTES + 2 * RUN_BYTES + self._holders_bytes + REPEAT_BYTES

    @property
    def nearly_full(self) -> bool:
        """Whether the index is near its limit: then the blocks that requests ask for should be touched, so that they
        stay."""
        return self.bytes > self._limit_bytes * 7 // 8

    def _check_size(self, blocks: int) -> None:
        """Count blocks that were added or removed, and check the size when it may have reached the limit."""
        self._unchecked_blocks -= blocks
        if self._unchecked_blocks < 0:
            self._drop_coldest()
            self._unchecked_blocks = (self._limit_bytes - self.bytes) // self._largest_growth_bytes

    def _drop_coldest(self) -> None:
        while self.bytes > self._limit_bytes:
            run = self._runs.coldest()
            if run is None:
                return
            blocks = run.hashes
            for tier, mask in enumerate(run.holders.masks):
                while mask:
                    bit = mask & -mask
                    mask ^= bit
                    self._lose(bit.bit_length() - 1, tier, blocks)
            self._runs.remove(run, 0, len(blocks))
            self._dropped_blocks += len(blocks)

    def _lose(self, number: int, tier: int, blocks: Hashes) -> None:
        """Drop blocks of a slot in one tier."""
        repeats = self._repeats[tier][number]
        if repeats:
            for block in blocks:
                self._repeats_count -= repeats.pop(block, 0) > 0
        self._pairs[tier][number] -= len(blocks)
        slot = self._slots[number]
        assert slot is not None
        slot.dropped_blocks += len(blocks)
        self._free_if_empty(slot)

    # --- statistics and tests

    def statistics(self) -> IndexStatistics:
        """Return sizes and counts. Linear in the number of slots only."""
        return IndexStatistics(
            blocks=self._runs.blocks,
            pairs={tier: sum(self._pairs[number]) for number, tier in enumerate(TIERS)},
            holder_sets=self._runs.holder_sets,
            bytes=self.bytes,
            dropped_blocks=self._dropped_blocks,
            runs=self._runs.runs,
        )

    def validate(self) -> None:
        """Assert every invariant. Linear in the pairs."""
        self._runs.validate()
        pairs = [[0] * len(self._slots) for _ in TIERS]
        for run in self._runs.coldest_first():
            for tier, mask in enumerate(run.holders.masks):
                for number in range(len(self._slots)):
                    pairs[tier][number] += (mask >> number & 1) * len(run.hashes)
        assert pairs == self._pairs
        assert self._repeats_count == sum(len(repeats) for row in self._repeats for repeats in row)
        for number, slot in enumerate(self._slots):
            if slot is None:
                assert not any(row[number] for row in self._pairs), "a free slot holds blocks"
                assert not self._retired >> number & 1
            else:
                assert slot.number == number
                assert slot.state == ("retired" if self._retired >> number & 1 else "open")
                assert slot.state == "open" or self.blocks_of(slot), "an empty retired slot is not freed"
            for tier in range(3):
                for block, count in self._repeats[tier][number].items():
                    assert count > 0
                    home = self._runs.find(block)
                    assert home is not None, "a repeat without its block"
                    assert home.holders.masks[tier] >> number & 1, "a repeat without its block"
        self._inheritance.validate()
        owners = [slot.candidate for slot in self._slots if slot is not None and slot.state == "open"]
        assert len(owners) == len(set(owners)), "a candidate has two open slots"
        assert self.bytes <= self._limit_bytes
        assert self._memo_bytes == sum(
            sys.getsizeof(names) + _MEMO_ENTRY_BYTES for names in self._candidates_by_mask.values()
        )


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
