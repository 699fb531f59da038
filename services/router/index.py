"""Who caches what: sequence hash → the candidates that hold the block, per tier. Pure.

    find([s0 s1 s2 s3 …])             Holders are shared: blocks with the same holders point to the same object,
          │  │  │  │                  so a scan compares identities and works only where the holders change:
          H1 H1 H1 H2                     H1 = device {A, B}   H2 = device {A}, host {B}
          └─ no work ─┘  └ B goes on in its host tier

A sequence hash names the whole prefix, so an index needs no tree: a block that leaves the middle of a chain ends the
overlap there, one that comes back joins the chain again. Each block counts in its best tier; the chain of a
candidate ends at the first block it holds in none.

A candidate holds blocks in a *slot*, one bit in the holders' masks. `retire` hides all of a slot at once; whoever
stored its blocks removes them in slices, and the bit is used again once it is empty. A block stored n times in a slot
and tier must be removed n times. Bytes are bounded: at the limit the blocks that were stored or touched longest ago
go first, for all their holders.

`benchmarks/index.py` measures it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Literal

from msgspec import Struct

from shared.messages import Overlap, Tier

CandidateId = tuple[str, int]
"""(instance, data-parallel rank)."""

TIERS: tuple[Tier, ...] = ("device", "host", "disk")

BLOCK_BYTES = 108
"""One sequence hash: an int of 48 bytes, and 30 to 60 of the dict, by how full it is. benchmarks/index.py measures."""
HOLDERS_BYTES = 480
"""One distinct set of holders with its key, two masks and its place in the table."""
REPEAT_BYTES = 120
"""One block that a slot holds more than once."""

_DROP_BLOCKS = 1024
_CHUNK_BLOCKS = 32
_NAMED_LIMIT = 4096


class IndexStatistics(Struct, frozen=True):
    """Sizes and counts of an index."""

    blocks: int
    """Distinct sequence hashes."""
    pairs: dict[Tier, int]
    """(block, candidate) pairs, retired slots included until their blocks are removed."""
    holder_sets: int
    bytes: int
    """Estimate; at most the limit, but for one batch of stored blocks."""
    dropped_blocks: int
    """Blocks given up at the limit since the start."""


class Slot:
    """A candidate's place in the index: open ──▶ retired (hidden) ──▶ freed (empty, its number is another's)."""

    __slots__ = ("candidate", "dropped_blocks", "number", "state")

    def __init__(self, candidate: CandidateId, number: int) -> None:
        self.candidate = candidate
        self.number = number
        self.state: Literal["open", "retired", "freed"] = "open"
        self.dropped_blocks = 0
        """Given up at the limit: the picture is incomplete if there are any."""


class _Holders:
    """One distinct set of (slot, tier) pairs; shared by all blocks held by exactly these."""

    __slots__ = ("any", "masks", "uses")

    def __init__(self, masks: tuple[int, int, int]) -> None:
        self.masks = masks
        self.any = masks[0] | masks[1] | masks[2]
        self.uses = 0


class Index:
    """The blocks of all candidates of one model."""

    def __init__(self, *, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._blocks: dict[int, _Holders] = {}
        """Sequence hash → its holders; coldest first."""
        self._holders: dict[tuple[int, int, int], _Holders] = {}
        """Every set in use, by its masks; `uses` counts the blocks that point to it."""
        self._slots: list[Slot | None] = []
        """By number; None: free."""
        self._pairs: list[list[int]] = [[], [], []]
        """By tier and slot: blocks held."""
        self._repeats: list[list[dict[int, int]]] = [[], [], []]
        """By tier and slot: hash → how often it is held beyond the first."""
        self._repeats_count = 0
        self._retired = 0
        """Mask of slots that `find` does not see."""
        self._named: dict[int, tuple[CandidateId, ...]] = {}
        """Mask → the candidates of its slots; a bounded memo, emptied when a slot changes hands."""
        self._dropped_blocks = 0

    # --- slots

    def open(self, candidate: CandidateId) -> Slot:
        """A slot for the blocks of `candidate`, which has no other open one."""
        self._named.clear()
        if None in self._slots:
            slot = Slot(candidate, self._slots.index(None))
            self._slots[slot.number] = slot
            return slot
        slot = Slot(candidate, len(self._slots))
        self._slots.append(slot)
        for tier in range(3):
            self._pairs[tier].append(0)
            self._repeats[tier].append({})
        return slot

    def retire(self, slot: Slot) -> None:
        """Hide all that the slot holds, at once. The caller removes its blocks after that, at leisure; when the last
        is gone the slot is freed."""
        assert slot.state == "open"
        slot.state = "retired"
        self._retired |= 1 << slot.number
        self._free_if_empty(slot)

    def blocks_of(self, slot: Slot) -> int:
        """Blocks held in the slot, each tier counted."""
        return 0 if slot.state == "freed" else sum(row[slot.number] for row in self._pairs)

    def _free_if_empty(self, slot: Slot) -> None:
        if slot.state == "retired" and not self.blocks_of(slot):
            slot.state = "freed"
            self._retired &= ~(1 << slot.number)
            self._slots[slot.number] = None
            self._named.clear()

    # --- events

    def stored(self, slot: Slot, tier: int, hashes: Iterable[int]) -> None:
        """The blocks are held in the slot's tier (an index into TIERS), once more than before."""
        assert slot.state == "open"
        number = slot.number
        blocks = self._blocks
        get = blocks.get
        old: _Holders | None = None
        new = self._with(None, number, tier)
        run = added = 0
        for block in hashes:
            holders = get(block)
            if holders is not old:
                self._moved(old, new, run)
                added += run
                run = 0
                old = holders
                new = self._with(old, number, tier)
            if new is old:
                self._repeat(number, tier, block)
            else:
                blocks[block] = new
                run += 1
        self._moved(old, new, run)
        self._pairs[tier][number] += added + run
        if self.bytes > self._limit_bytes:
            self._drop_coldest()

    def removed(self, slot: Slot, tier: int, hashes: Iterable[int]) -> None:
        """The blocks are held once less; those not held are ignored (they may have been dropped)."""
        if slot.state == "freed":
            return
        number = slot.number
        blocks = self._blocks
        get = blocks.get
        repeats = self._repeats[tier][number]
        old: _Holders | None = None
        new: _Holders | None = None
        held = False
        run = gone = 0
        for block in hashes:
            holders = get(block)
            if holders is not old:
                self._moved(old, new, run)
                gone += run
                run = 0
                old = holders
                held = old is not None and bool(old.masks[tier] >> number & 1)
                new = self._without(old, number, tier) if old is not None and held else None
            if not held:
                continue
            if repeats and block in repeats:
                self._unrepeat(number, tier, block)
                continue
            if new is None:
                del blocks[block]
            else:
                blocks[block] = new
            run += 1
        self._moved(old, new, run)
        if gone + run:
            self._pairs[tier][number] -= gone + run
            self._free_if_empty(slot)

    def touch(self, hashes: Iterable[int]) -> None:
        """These blocks were asked for: they are the warmest now. Only worth its time near the limit."""
        blocks = self._blocks
        for block in hashes:
            holders = blocks.pop(block, None)
            if holders is not None:
                blocks[block] = holders

    # --- the question

    def find(self, hashes: Sequence[int]) -> dict[CandidateId, Overlap]:
        """How many leading blocks each candidate holds, per tier; candidates without the first are left out.

        Cost: one dict lookup a block up to where the last candidate's chain ends, and work where holders change.
        """
        found: dict[CandidateId, Overlap] = {}
        get = self._blocks.get
        lower: dict[int, list[int]] = {}
        current: _Holders | None = None
        alive = ~self._retired
        start = 0  # of the run of `current`
        for base in range(0, len(hashes), _CHUNK_BLOCKS):
            chunk = list(map(get, hashes[base : base + _CHUNK_BLOCKS]))
            if base and chunk.count(current) == len(chunk):
                continue
            for depth, holders in enumerate(chunk, base):
                if holders is current and depth:
                    continue
                if current is not None:
                    self._count_lower(lower, alive, current, depth - start)
                start = depth
                left = alive & holders.any if holders is not None else 0
                if depth and left != alive:
                    self._settle(found, alive & ~left, depth, lower)
                if not left:
                    return found
                alive = left
                current = holders
        if current is not None:
            self._count_lower(lower, alive, current, len(hashes) - start)
            self._settle(found, alive, len(hashes), lower)
        return found

    def _count_lower(self, lower: dict[int, list[int]], alive: int, holders: _Holders, run: int) -> None:
        """A run of blocks with the same holders: those not on the device count for host or disk."""
        device, host, _ = holders.masks
        below = alive & ~device
        while below:
            bit = below & -below
            below ^= bit
            lower.setdefault(bit, [0, 0])[0 if host & bit else 1] += run

    def _settle(self, found: dict[CandidateId, Overlap], ended: int, depth: int, lower: dict[int, list[int]]) -> None:
        """The chains of the slots in `ended` are `depth` blocks long."""
        if not lower:
            overlap = Overlap(depth)
            for candidate in self._names(ended):
                found[candidate] = overlap
            return
        while ended:
            bit = ended & -ended
            ended ^= bit
            host, disk = lower.get(bit, (0, 0))
            for candidate in self._names(bit):
                found[candidate] = Overlap(depth - host - disk, host, disk)

    def _names(self, mask: int) -> tuple[CandidateId, ...]:
        names = self._named.get(mask)
        if names is None:
            if len(self._named) >= _NAMED_LIMIT:
                self._named.clear()
            names = tuple(slot.candidate for slot in self._slots if slot is not None and mask >> slot.number & 1)
            self._named[mask] = names
        return names

    # --- sets of holders

    def _with(self, holders: _Holders | None, number: int, tier: int) -> _Holders:
        return self._shared(_changed(holders.masks if holders else (0, 0, 0), tier, 1 << number, 0))

    def _without(self, holders: _Holders, number: int, tier: int) -> _Holders | None:
        masks = _changed(holders.masks, tier, 0, 1 << number)
        return self._shared(masks) if any(masks) else None

    def _shared(self, masks: tuple[int, int, int]) -> _Holders:
        """The one object for these masks. A new one is in the table only once a block points to it (`_moved`)."""
        return self._holders.get(masks) or _Holders(masks)

    def _moved(self, old: _Holders | None, new: _Holders | None, blocks: int) -> None:
        """So many blocks point to `new` now instead of `old`."""
        if not blocks:
            return
        if new is not None:
            self._holders[new.masks] = new
            new.uses += blocks
        if old is not None:
            old.uses -= blocks
            if not old.uses:
                del self._holders[old.masks]

    def _repeat(self, number: int, tier: int, block: int) -> None:
        repeats = self._repeats[tier][number]
        repeats[block] = repeats.get(block, 0) + 1
        self._repeats_count += repeats[block] == 1

    def _unrepeat(self, number: int, tier: int, block: int) -> None:
        repeats = self._repeats[tier][number]
        if repeats[block] > 1:
            repeats[block] -= 1
        else:
            del repeats[block]
            self._repeats_count -= 1

    # --- the bound

    @property
    def bytes(self) -> int:
        """Estimated size."""
        return BLOCK_BYTES * len(self._blocks) + HOLDERS_BYTES * len(self._holders) + REPEAT_BYTES * self._repeats_count

    @property
    def crowded(self) -> bool:
        """Near the limit: what is asked for should be touched, so that it stays."""
        return self.bytes > self._limit_bytes * 7 // 8

    def _drop_coldest(self) -> None:
        while self.bytes > self._limit_bytes and self._blocks:
            # Taken in batches: the front of a dict whose first entries were deleted is slow to reach.
            for block in list(islice(self._blocks, _DROP_BLOCKS)):
                if self.bytes <= self._limit_bytes:
                    break
                self._drop(block)

    def _drop(self, block: int) -> None:
        holders = self._blocks.pop(block)
        for tier, mask in enumerate(holders.masks):
            while mask:
                bit = mask & -mask
                mask ^= bit
                number = bit.bit_length() - 1
                self._repeats_count -= self._repeats[tier][number].pop(block, 0) > 0
                self._pairs[tier][number] -= 1
                slot = self._slots[number]
                assert slot is not None
                slot.dropped_blocks += 1
                self._free_if_empty(slot)
        self._moved(holders, None, 1)
        self._dropped_blocks += 1

    # --- for people and tests

    def statistics(self) -> IndexStatistics:
        """Sizes and counts, in constant time but for the number of slots."""
        return IndexStatistics(
            blocks=len(self._blocks),
            pairs={tier: sum(self._pairs[number]) for number, tier in enumerate(TIERS)},
            holder_sets=len(self._holders),
            bytes=self.bytes,
            dropped_blocks=self._dropped_blocks,
        )

    def validate(self) -> None:
        """Assert every invariant. Linear in the pairs."""
        uses: dict[tuple[int, int, int], int] = {}
        pairs = [[0] * len(self._slots) for _ in TIERS]
        for holders in self._blocks.values():
            assert self._holders[holders.masks] is holders, "holders are shared"
            uses[holders.masks] = uses.get(holders.masks, 0) + 1
            for tier, mask in enumerate(holders.masks):
                for number in range(len(self._slots)):
                    pairs[tier][number] += mask >> number & 1
        assert uses == {masks: holders.uses for masks, holders in self._holders.items()}
        assert (0, 0, 0) not in self._holders
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
                    assert self._blocks[block].masks[tier] >> number & 1, "a repeat without its block"
        owners = [slot.candidate for slot in self._slots if slot is not None and slot.state == "open"]
        assert len(owners) == len(set(owners)), "one open slot a candidate"
        assert self.bytes <= self._limit_bytes or not self._blocks


def _changed(masks: tuple[int, int, int], tier: int, set_bits: int, clear_bits: int) -> tuple[int, int, int]:
    device, host, disk = masks
    if tier == 0:
        return (device | set_bits) & ~clear_bits, host, disk
    if tier == 1:
        return device, (host | set_bits) & ~clear_bits, disk
    return device, host, (disk | set_bits) & ~clear_bits
