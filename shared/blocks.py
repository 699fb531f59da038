"""BlockPool: the slots of one tier, what they hold, and who holds them. Pure.

            allocate                 store (block is full and computed)
    free ─────────────▶ held, blank ─────────────────────────────▶ held, keyed ◀──┐
     ▲                     │                                           │          │ acquire
     │ last hold released  │                        last hold released │          │
     ├─────────────────────┘                                           ▼          │
     └──────────────────────────────── evicted by allocate ───────── cached ──────┘

            begin_load                 end_load with content
    free ──────────────▶ loading ─────────────────────────▶ held, keyed (or cached, if its sequence has gone)
     ▲                      │          end_load without content (the copy failed)
     └──────────────────────┴─────────────────────────────▶ held, blank (or free)

A hold is a hold; sequences and copies are only counted apart. A slot is never given away while anybody holds it, so a
copy that outlives its sequence keeps its bytes. `loading` means that a copy writes to the slot: nobody may read it.
A copy is no use: a block's place among those that leave is that of its last release by a sequence, and while a copy
reads it others are evicted in its stead.

Content is named by its 128-bit content key. A key is in at most one slot: where a second slot is stored with a key that
the pool has already, the caller is given the first slot instead and the second is freed. So a hash is published as
stored exactly while one slot carries it, memory is never spent twice, and a kept block's parent is kept too as long as
sequences hold whole prefixes and release them last block first (the least recently used block is then always a leaf;
only a block that a copy reads may outlive its parent, and it leaves next).

A block whose bytes may be wrong is forgotten: it cannot be found any more. Those that hold its slot hold it until they
release it, and then the slot is free. Blocks that follow it may stay without their parent.

Every operation is O(1) a block, but that an eviction passes over blocks that copies read; changes are returned as
events, in order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import filterfalse, islice
from typing import Literal

from msgspec import Struct

from shared.hashing import ContentKey, event_hash

SlotState = Literal["free", "loading", "held", "cached"]


class Content(Struct, frozen=True, gc=False):
    """What a full block holds. The garbage collector knows neither it nor its events, since they can be in no cycle:
    among many thousands of them a full collection took 20 ms of an engine's step."""

    key: ContentKey
    parent: ContentKey | None
    """The key of the block before it; None: the first of its chain."""
    tokens: bytes
    """Packed u32."""
    lora: str = ""
    salt: str = ""


class Stored(Struct, frozen=True, gc=False):
    """This content can be found from now on."""

    content: Content


class Evicted(Struct, frozen=True, gc=False):
    """This content cannot be found any more."""

    content: Content


PoolEvent = Stored | Evicted


class PoolStatistics(Struct, frozen=True):
    """Slots by state; they add up to the capacity."""

    capacity: int
    free: int
    loading: int
    held: int
    cached: int
    keyed: int
    """Held or cached slots whose content can be found."""


class BlockPool:
    """See the module. Callers ask `available` before they allocate; asking for more is a programmer's error."""

    def __init__(self, capacity_blocks: int) -> None:
        if capacity_blocks < 1:
            raise ValueError(f"a pool of {capacity_blocks} blocks")
        self.capacity = capacity_blocks
        self._free = list(range(capacity_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Can be found, and no sequence holds them: least recently used first."""
        self._read = 0
        """How many of these copies read; they are held, and stay."""
        self._loading: set[int] = set()
        self._sequences = [0] * capacity_blocks
        self._copies = [0] * capacity_blocks
        self._content: list[Content | None] = [None] * capacity_blocks
        self._slot_of: dict[ContentKey, int] = {}
        self._forgotten: set[int] = set()
        """Held slots whose content was forgotten."""
        self._digest = 0
        self.evictions = 0
        """So far."""

    # --- questions

    @property
    def available(self) -> int:
        """How many blocks `allocate` could give now: the free ones and the cached ones."""
        return len(self._free) + len(self._cached) - self._read

    @property
    def free(self) -> int:
        """How many of these are free."""
        return len(self._free)

    @property
    def digest(self) -> int:
        """XOR of the event hashes of everything that can be found."""
        return self._digest

    def state(self, slot: int) -> SlotState:
        """The state of one slot, as drawn above."""
        if slot in self._loading:
            return "loading"
        if self._sequences[slot] or self._copies[slot]:
            return "held"
        return "free" if self._content[slot] is None else "cached"

    def content(self, slot: int) -> Content | None:
        """What the slot holds; None while it is blank."""
        return self._content[slot]

    def is_forgotten(self, slot: int) -> bool:
        """Whether the slot is held for a content that was forgotten."""
        return slot in self._forgotten

    def __contains__(self, key: ContentKey) -> bool:
        return key in self._slot_of

    def find(self, key: ContentKey) -> int | None:
        """The slot with this content."""
        return self._slot_of.get(key)

    def next_evicted(self, count: int) -> list[int]:
        """Slots whose content would be evicted if `count` blocks were allocated now, the first to go first."""
        evicted = max(count - len(self._free), 0)
        if not self._read:
            return list(islice(self._cached, evicted))
        return list(islice(filterfalse(self._copies.__getitem__, self._cached), evicted))

    def longest_prefix(self, keys: Iterable[ContentKey]) -> int:
        """How many of the leading `keys` can be found."""
        found = 0
        for key in keys:
            if key not in self._slot_of:
                break
            found += 1
        return found

    def held_prefix(self, keys: Iterable[ContentKey]) -> int:
        """How many of those that `longest_prefix` counts are held: to `acquire` them leaves as many available."""
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
        """Counts by state, in O(1)."""
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
        """Everything that can be found, each block after its parent where the parent is there."""
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
        """The `count` that were stored last and can still be found, in that order: parents before their children, but
        for what only a copy had kept. O(count)."""
        slots = list(islice(reversed(self._slot_of.values()), count))
        return [content for slot in reversed(slots) if (content := self._content[slot]) is not None]

    # --- sequences: blank blocks, filled by computing

    def allocate(self, count: int) -> tuple[list[int], list[Evicted]]:
        """`count` blank slots, each held once by a sequence; free ones first, then the least recently used."""
        assert count <= self.available, f"{count} blocks asked for, {self.available} available"
        slots: list[int] = []
        evicted: list[Evicted] = []
        leaving = iter(self.next_evicted(count))
        for _ in range(count):
            if self._free:
                slot = self._free.pop()
            else:
                slot = next(leaving)
                del self._cached[slot]
                evicted.append(Evicted(self._forget(slot)))
            self._sequences[slot] = 1
            slots.append(slot)
        return slots, evicted

    def store(self, slot: int, content: Content) -> tuple[int, list[Stored]]:
        """A held, blank slot is full: it can be found from now on.

        Returns the slot that carries the content. Where that is another slot, the caller's hold has moved to it.
        """
        assert slot not in self._loading, f"slot {slot} is loading"
        assert self._sequences[slot] == 1, f"blank slot {slot} has {self._sequences[slot]} sequences"
        assert self._content[slot] is None, f"slot {slot} is stored twice"
        if content.key in self._slot_of:
            self.release(slot)
            return self.acquire(content.key), []
        self._keep(slot, content)
        return slot, [Stored(content)]

    def acquire(self, key: ContentKey) -> int:
        """One more sequence holds the slot with this content, which must be there."""
        [slot] = self.acquire_prefix((key,))
        return slot

    def acquire_prefix(self, keys: Iterable[ContentKey]) -> list[int]:
        """`acquire`, of those that `longest_prefix` counts: 512 in a third of the time that a call for each takes, for
        which a first token waits."""
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
        """A sequence lets go. Sequences release their last block first."""
        assert self._sequences[slot] > 0, f"no sequence holds slot {slot}"
        self._sequences[slot] -= 1
        self._settle(slot)

    def forget(self, key: ContentKey) -> list[Evicted]:
        """The block cannot be found any more; one that is not there is ignored. Its slot is free once nothing holds
        it."""
        slot = self._slot_of.get(key)
        if slot is None:
            return []
        if slot in self._cached:
            del self._cached[slot]
            self._read -= self._copies[slot] > 0
        content = self._forget(slot)
        self._forgotten.add(slot)
        self._settle(slot)
        return [Evicted(content)]

    # --- copies: hold what they read, and fill what is loading

    def hold_for_copy(self, slot: int) -> None:
        """A copy reads the slot; it stays as it is until `release_copies`."""
        assert self.state(slot) in ("held", "cached"), f"slot {slot} is {self.state(slot)}"
        self._read += slot in self._cached and not self._copies[slot]
        self._copies[slot] += 1

    def release_copies(self, slots: Iterable[int]) -> None:
        """The copies that read these slots are done."""
        for slot in slots:
            assert slot not in self._loading, f"slot {slot} is loading: end_load"
            assert self._copies[slot] > 0, f"no copy holds slot {slot}"
            self._copies[slot] -= 1
            self._read -= slot in self._cached and not self._copies[slot]
            if slot in self._forgotten:
                self._settle(slot)

    def begin_load(self, count: int) -> tuple[list[int], list[Evicted]]:
        """`count` slots to be written by copies, each held by its sequence and by its copy.

        The sequence may `release` before the copy ends; the slot is reused only after `end_load`.
        """
        slots, evicted = self.allocate(count)
        self._loading.update(slots)
        for slot in slots:
            self._copies[slot] = 1
        return slots, evicted

    def end_load(self, slot: int, content: Content | None) -> tuple[int, list[Stored]]:
        """The copy into a loading slot has ended; `content` is None where it failed.

        Returns the slot that the sequence (if it still holds one) has to use from now on, as `store` does.
        """
        assert slot in self._loading, f"slot {slot} is {self.state(slot)}"
        self._loading.remove(slot)
        self._copies[slot] = 0
        if content is not None and content.key not in self._slot_of:
            self._keep(slot, content)
            self._settle(slot)
            return slot, [Stored(content)]
        if content is not None and self._sequences[slot]:
            self.release(slot)
            return self.acquire(content.key), []
        self._settle(slot)
        return slot, []

    # --- inside

    def _keep(self, slot: int, content: Content) -> None:
        self._content[slot] = content
        self._slot_of[content.key] = slot
        self._digest ^= event_hash(content.key)

    def _forget(self, slot: int) -> Content:
        content = self._content[slot]
        assert content is not None
        self._content[slot] = None
        del self._slot_of[content.key]
        self._digest ^= event_hash(content.key)
        self.evictions += 1
        return content

    def _settle(self, slot: int) -> None:
        """If no sequence holds the slot any more it is cached if it can be found; else, once nothing loads, free."""
        if self._sequences[slot]:
            return
        if self._content[slot] is not None:
            self._cached[slot] = None
            self._read += self._copies[slot] > 0
        elif not self._copies[slot]:
            self._forgotten.discard(slot)
            self._free.append(slot)

    def validate(self) -> None:
        """Raises AssertionError where the pool contradicts itself. O(capacity)."""
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
