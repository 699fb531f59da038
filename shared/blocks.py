"""BlockPool: the slots of one tier, a prefix cache with eviction, and the sequences and copies that hold them. Pure.

            allocate                 store (block is full and computed)
    free ─────────────▶ held, blank ─────────────────────────────▶ held, keyed ◀──┐
     ▲                     │                                           │          │ acquire
     │ last hold released  │                        last hold released │          │
     ├─────────────────────┘                                           ▼          │
     └──────────────────────────────── evicted by allocate ───────── cached ──────┘

            begin_load                 end_loads with content
    free ──────────────▶ loading ─────────────────────────▶ held, keyed (or cached, if its sequence has ended)
     ▲                      │          end_loads without content (the copy failed)
     └──────────────────────┴─────────────────────────────▶ held, blank (or free)

Sequences and copies hold slots in the same way; they are only counted separately. A slot is never reused while it is
held, so a copy that outlives its sequence keeps its bytes. `loading` means that a copy writes to the slot: nothing may
read it. A copy does not count as a use: the order of eviction is that of the last releases by sequences. While a copy
reads a block, other blocks are evicted in its place.

Content is named by its 128-bit content key, and a key is in at most one slot. If a second slot is stored with a key
that the pool has already, the caller gets the first slot and the second one is freed. So a hash is published as stored
exactly while one slot has it, and memory is never used twice.

A cached block's parent is cached too, as long as sequences hold whole prefixes and release the last block first: then
the least recently used block is always a leaf. Only a block that a copy reads may outlive its parent; it is evicted
next. Blocks that were loaded for a sequence that had ended may outlive theirs for longer.

A block whose bytes may be wrong is forgotten: it can no longer be found. Its slot is free once everything that holds it
has released it. Blocks that follow it may stay without their parent.

Every operation is O(1) per block, except that an eviction skips blocks that copies read. Changes are returned as
events, in order.

docs/decisions/0009 gives the reasons.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import filterfalse, islice, zip_longest
from operator import xor
from typing import Literal

from msgspec import Struct

from shared.hashing import KEY_BYTES, ContentKey, event_hash, event_hashes

SlotState = Literal["free", "loading", "held", "cached"]


class Content(Struct, frozen=True, gc=False):
    """The content of a full block.

    The garbage collector tracks neither it nor its events, since they cannot be in a cycle: with many thousands of them
    a full collection took 20 ms of an engine's step."""

    key: ContentKey
    parent: ContentKey | None
    """The key of the block before it. None if it is the first of its chain."""
    tokens: bytes
    """The token ids, packed u32."""
    lora: str = ""
    salt: str = ""
    extra: bytes = b""
    """What the key covers next to the tokens, as `image_extras` has it. Empty if no image has tokens in the block."""


class ContentStored(Struct, frozen=True, gc=False):
    """A content can be found from now on."""

    content: Content


class ContentEvicted(Struct, frozen=True, gc=False):
    """A content can no longer be found."""

    content: Content


PoolEvent = ContentStored | ContentEvicted


class PoolStatistics(Struct, frozen=True):
    """The number of slots in each state; the states add up to the capacity."""

    capacity: int
    free: int
    loading: int
    held: int
    cached: int
    keyed: int
    """The number of held or cached slots whose content can be found."""


class BlockPool:
    """The slots of one tier. A caller checks `available` before it allocates; more is a programmer's error."""

    def __init__(self, capacity_blocks: int) -> None:
        if capacity_blocks < 1:
            raise ValueError(f"a pool of {capacity_blocks} blocks")
        self.capacity = capacity_blocks
        self._free = list(range(capacity_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        """The slots that can be found and that no sequence holds, least recently used first."""
        self._read = 0
        """The number of slots in `_cached` that copies read; they are held, and stay."""
        self._loading: set[int] = set()
        self._sequences = [0] * capacity_blocks
        self._copies = [0] * capacity_blocks
        self._content: list[Content | None] = [None] * capacity_blocks
        self._slot_of: dict[ContentKey, int] = {}
        self._forgotten: set[int] = set()
        """The held slots whose content was forgotten."""
        self._digest = 0
        self.evictions = 0
        """The number of evictions so far."""

    # --- questions

    @property
    def available(self) -> int:
        """The number of blocks that `allocate` can give now: the free and the cached ones."""
        return len(self._free) + len(self._cached) - self._read

    @property
    def free(self) -> int:
        """The number of free slots."""
        return len(self._free)

    @property
    def digest(self) -> int:
        """The XOR of the event hashes of all content that can be found."""
        return self._digest

    def state(self, slot: int) -> SlotState:
        """Return the state of one slot, as drawn above."""
        if slot in self._loading:
            return "loading"
        if self._sequences[slot] or self._copies[slot]:
            return "held"
        return "free" if self._content[slot] is None else "cached"

    def content(self, slot: int) -> Content | None:
        """Return the content of a slot; None while it is blank."""
        return self._content[slot]

    def is_forgotten(self, slot: int) -> bool:
        """Return whether the slot is held for a content that was forgotten."""
        return slot in self._forgotten

    def __contains__(self, key: ContentKey) -> bool:
        return key in self._slot_of

    def find(self, key: ContentKey) -> int | None:
        """Return the slot with this content, or None."""
        return self._slot_of.get(key)

    def find_end(self, key_end: bytes) -> int | None:
        """Return the slot with the content whose key ends so, or None. O(blocks) for less than a whole key."""
        if len(key_end) == KEY_BYTES:
            return self._slot_of.get(key_end)
        return next((slot for key, slot in self._slot_of.items() if key.endswith(key_end)), None)

    def uses(self, slot: int) -> tuple[int, int, int]:
        """Return how many sequences and how many copies hold a slot, and how many cached blocks were used less
        recently. O(cached blocks)."""
        before = 0
        for other in self._cached:
            if other == slot:
                break
            before += 1
        return self._sequences[slot], self._copies[slot], before

    def next_evicted(self, count: int) -> list[int]:
        """Return the slots that would be evicted if `count` blocks were allocated now, in order."""
        evicted = max(count - len(self._free), 0)
        if not self._read:
            return list(islice(self._cached, evicted))
        return list(islice(filterfalse(self._copies.__getitem__, self._cached), evicted))

    def longest_prefix(self, keys: Iterable[ContentKey]) -> int:
        """Return how many of the leading `keys` can be found."""
        found = 0
        for key in keys:
            if key not in self._slot_of:
                break
            found += 1
        return found

    def held_prefix(self, keys: Iterable[ContentKey]) -> int:
        """Return how many blocks of the `longest_prefix` are held already: acquiring those leaves `available`
        unchanged."""
        held = 0
        find, sequences, copies = self._slot_of.get, self._sequences, self._copies
        for key in keys:
            slot = find(key)
            if slot is None:
                break
            if sequences[slot] or copies[slot]:
                held += 1
        return held

    def statistics(self) -> PoolStatistics:
        """Return the number of slots in each state, in O(1)."""
        free, cached, loading = len(self._free), len(self._cached) - self._read, len(self._loading)
        return PoolStatistics(
            capacity=self.capacity,
            free=free,
            loading=loading,
            held=self.capacity - free - cached - loading,
            cached=cached,
            keyed=len(self._slot_of),
        )

    def snapshot(self) -> list[Content]:
        """Return all content that can be found, each block after its parent if the parent can be found."""
        ordered: dict[ContentKey, Content] = {}
        for slot in self._slot_of.values():
            branch: list[Content] = []
            content = self._content[slot]
            while content is not None and content.key not in ordered:
                branch.append(content)
                above = self._slot_of.get(content.parent) if content.parent is not None else None
                content = self._content[above] if above is not None else None
            ordered.update((content.key, content) for content in reversed(branch))
        return list(ordered.values())

    def newest(self, count: int) -> list[Content]:
        """Return the `count` contents that were stored last and can still be found, in that order. O(count).

        Parents come before their children, except for blocks that only a copy had kept."""
        slots = list(islice(reversed(self._slot_of.values()), count))
        return [content for slot in reversed(slots) if (content := self._content[slot]) is not None]

    # --- sequences: blank blocks, filled by computing

    def allocate(self, count: int) -> tuple[list[int], list[ContentEvicted]]:
        """Take `count` blank slots, each held once by a sequence: free ones first, then the least recently used."""
        assert count <= self.available, f"{count} blocks asked for, {self.available} available"
        leaving = self.next_evicted(count)
        left = len(self._free) - (count - len(leaving))
        slots = [*reversed(self._free[left:]), *leaving]
        del self._free[left:]
        for slot in slots:
            self._sequences[slot] = 1
        if not leaving:
            return slots, []
        for slot in leaving:
            del self._cached[slot]
        return slots, list(map(ContentEvicted, self._forget(leaving)))

    def store(self, slot: int, content: Content) -> tuple[int, list[ContentStored]]:
        """Store the content of a held, blank slot, so that it can be found from now on.

        Return the slot that has the content. If that is another slot, the caller's hold has moved to it.
        """
        assert slot not in self._loading, f"slot {slot} is loading"
        assert self._sequences[slot] == 1, f"blank slot {slot} has {self._sequences[slot]} sequences"
        assert self._content[slot] is None, f"slot {slot} is stored twice"
        if content.key in self._slot_of:
            self.release(slot)
            return self.acquire(content.key), []
        self._content[slot] = content
        self._slot_of[content.key] = slot
        self._digest ^= event_hash(content.key)
        return slot, [ContentStored(content)]

    def acquire(self, key: ContentKey) -> int:
        """Hold the slot with this content, which must be found, for one more sequence."""
        [slot] = self.acquire_prefix((key,))
        return slot

    def acquire_prefix(self, keys: Iterable[ContentKey]) -> list[int]:
        """Hold each block of the `longest_prefix` for one more sequence.

        A first token waits for this: 512 blocks take a third of the time of 512 calls of `acquire`.
        """
        slots: list[int] = []
        find, cached, sequences, copies = self._slot_of.get, self._cached, self._sequences, self._copies
        for key in keys:
            slot = find(key)
            if slot is None:
                break
            if slot in cached:
                del cached[slot]
                self._read -= copies[slot] > 0
            sequences[slot] += 1
            slots.append(slot)
        return slots

    def release(self, slot: int) -> None:
        """End one sequence's hold of a slot. Sequences release their last block first."""
        self.release_prefix((slot,))

    def release_prefix(self, slots: Sequence[int]) -> None:
        """End one sequence's holds of its blocks, the last one first: leaves are evicted before their parents."""
        sequences, settle = self._sequences, self._settle
        for slot in reversed(slots):
            assert sequences[slot] > 0, f"no sequence holds slot {slot}"
            sequences[slot] -= 1
            settle(slot)

    def forget(self, key: ContentKey) -> list[ContentEvicted]:
        """Make a block impossible to find; an unknown key is ignored. Its slot is free once nothing holds it."""
        slot = self._slot_of.get(key)
        if slot is None:
            return []
        if slot in self._cached:
            del self._cached[slot]
            self._read -= self._copies[slot] > 0
        [content] = self._forget((slot,))
        self._forgotten.add(slot)
        self._settle(slot)
        return [ContentEvicted(content)]

    def clear(self) -> None:
        """Forget all content. A slot is free once nothing holds it."""
        for key in list(self._slot_of):
            self.forget(key)

    # --- copies: hold what they read, and fill what is loading

    def hold_for_copy(self, slot: int) -> None:
        """Hold a slot for a copy that reads it; its content stays until `release_copies`."""
        assert self.state(slot) in ("held", "cached"), f"slot {slot} is {self.state(slot)}"
        self._read += slot in self._cached and not self._copies[slot]
        self._copies[slot] += 1

    def release_copies(self, slots: Iterable[int]) -> None:
        """End the holds of copies that have read these slots."""
        for slot in slots:
            assert slot not in self._loading, f"slot {slot} is loading: end_loads"
            assert self._copies[slot] > 0, f"no copy holds slot {slot}"
            self._copies[slot] -= 1
            self._read -= slot in self._cached and not self._copies[slot]
            if slot in self._forgotten:
                self._settle(slot)

    def begin_load(self, count: int) -> tuple[list[int], list[ContentEvicted]]:
        """Take `count` slots for copies to write, each held by its sequence and by its copy.

        The sequence may `release` before the copy ends; the slot is reused only after `end_loads`.
        """
        slots, evicted = self.allocate(count)
        self._loading.update(slots)
        for slot in slots:
            self._copies[slot] = 1
        return slots, evicted

    def end_loads(self, slots: Sequence[int], contents: Sequence[Content]) -> tuple[list[int], list[ContentStored]]:
        """End the copies into loading slots. The leading slots have these contents; the other copies failed.

        Return the slots that the sequence (if it still holds them) must use from now on, as `store` does. All streams
        wait for this between two steps: 512 blocks in one call take a fifth of the time of 512 calls.
        """
        used: list[int] = []
        stored: list[ContentStored] = []
        loading, copies, sequences = self._loading, self._copies, self._sequences
        kept, slot_of = self._content, self._slot_of
        for slot, content in zip_longest(slots, contents):
            loading.remove(slot)
            copies[slot] = 0
            if content is not None and content.key not in slot_of:
                kept[slot] = content
                slot_of[content.key] = slot
                stored.append(ContentStored(content))
                if not sequences[slot]:
                    self._settle(slot)
                used.append(slot)
            elif content is not None and sequences[slot]:
                self.release(slot)
                used.append(self.acquire(content.key))
            else:
                self._settle(slot)
                used.append(slot)
        self._digest = reduce(xor, event_hashes([event.content.key for event in stored]), self._digest)
        return used, stored

    # --- inside

    def _forget(self, slots: Sequence[int]) -> list[Content]:
        forgotten: list[Content] = []
        for slot in slots:
            content = self._content[slot]
            assert content is not None
            self._content[slot] = None
            del self._slot_of[content.key]
            forgotten.append(content)
        self._digest = reduce(xor, event_hashes([content.key for content in forgotten]), self._digest)
        self.evictions += len(slots)
        return forgotten

    def _settle(self, slot: int) -> None:
        """Make a slot without sequences cached if it can be found, or else free once no copy holds it."""
        if self._sequences[slot]:
            return
        if self._content[slot] is not None:
            self._cached[slot] = None
            self._read += self._copies[slot] > 0
        elif not self._copies[slot]:
            self._forgotten.discard(slot)
            self._free.append(slot)

    def validate(self) -> None:
        """Raise AssertionError if the pool contradicts itself. O(capacity)."""
        lists: Sequence[tuple[SlotState, Iterable[int]]] = (
            ("free", self._free),
            ("cached", [slot for slot in self._cached if not self._copies[slot]]),
            ("loading", self._loading),
        )
        seen: set[int] = set()
        for state, slots in lists:
            for slot in slots:
                assert slot not in seen, f"slot {slot} is in two lists"
                assert self.state(slot) == state, f"slot {slot} is {self.state(slot)}, listed as {state}"
                seen.add(slot)
        assert self._read == sum(self._copies[slot] > 0 for slot in self._cached), "slots that copies read"
        for slot in range(self.capacity):
            unused = self._content[slot] is not None and not self._sequences[slot]
            assert (slot in self._cached) == unused, f"slot {slot} is used, or is not, and is listed otherwise"
        digest = 0
        for slot in range(self.capacity):
            assert self._sequences[slot] >= 0, f"slot {slot} has a negative count of sequences"
            assert self._copies[slot] >= 0, f"slot {slot} has a negative count of copies"
            assert slot in seen or self.state(slot) == "held", f"slot {slot} is lost"
            content = self._content[slot]
            if content is None:
                shared = self._sequences[slot] > 1 and slot not in self._forgotten
                assert not shared, f"blank slot {slot} is shared"
                continue
            assert slot not in self._forgotten, f"slot {slot} is forgotten and holds a block"
            assert slot not in self._loading, f"loading slot {slot} can be found"
            assert self._slot_of.get(content.key) == slot, f"slot {slot} cannot be found by its key"
            digest ^= event_hash(content.key)
        assert len(self._slot_of) == sum(content is not None for content in self._content)
        assert digest == self._digest, "digest differs from the content"
        assert all(self.state(slot) == "held" for slot in self._forgotten), "a forgotten slot that nothing holds"
