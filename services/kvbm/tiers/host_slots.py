"""HostSlots: the slots of one layout's host tier, which processes write to them, and which read them. Pure.

            grant                     publish              hold
    free ─────────────▶ writing ───────────────▶ ready ◀──────────▶ ready, held
     ▲                    │  │ quarantine         │      release
     │ free_slot          │  ▼                    │ evicted when a slot is needed, if no hold is on it
     ├────────────────────┘ quarantined           ▼
     ├────────────────────────┘ free_slot        free
     │
     │      load                      loaded
     ├─────────────────▶ loading, held or not ──────────▶ ready, held or not
     └──────── the read failed ──┘

    ready, held ── discard ──▶ leaving, held ── the last release ──▶ free          (ready, not held ──▶ free)

A block that may be wrong is discarded: it cannot be found any more, and its slot stays as it is for its readers. If the
block is being written or loaded, it is condemned: it is not kept when that has ended.

In three states no other writer may touch the slot: `writing` belongs to one worker, `loading` to one read of the disk,
`quarantined` to a worker that may still write though its ticket has expired. A slot leaves these only when its writer
is known to have stopped. A block is in at most one slot that is ready or loading; a worker may be writing it to a
second one, which is then not needed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from msgspec import Struct

from services.kvbm.tiers.policies import EvictionPolicy
from services.kvbm.tiers.residency import Residency
from shared.blocks import Content, ContentEvicted, ContentStored
from shared.hashing import ContentKey

SlotState = Literal["free", "writing", "loading", "ready", "leaving", "quarantined"]


class SlotStatistics(Struct, frozen=True):
    """Counts of slots by state; they add up to the capacity."""

    capacity: int
    free: int
    writing: int
    loading: int
    ready: int
    quarantined: int
    held: int
    """Slots with a hold; they are ready, loading or leaving."""
    leaving: int = 0
    """Slots whose block was discarded, and that are still held."""


class HostSlots:
    """The slots of one host tier, 0 … capacity - 1."""

    def __init__(self, policy: EvictionPolicy, capacity: int, *, quarantined: bool) -> None:
        self.capacity = capacity
        self.resident = Residency(policy, lambda slot: self._holds[slot] == 0)
        self.writing: dict[ContentKey, int] = {}
        """Blocks that workers are writing, and their slots; for reading only."""
        self.loading: dict[ContentKey, int] = {}
        """Blocks that come from disk, and their slots; for reading only."""
        self.held = 0
        """The number of slots with a hold."""
        self.abandoned = 0
        """The number of loading slots without a hold: they cannot be freed before their reads have ended."""
        self._free = [] if quarantined else list(range(capacity - 1, -1, -1))
        self._quarantined = capacity if quarantined else 0
        self._state: list[SlotState] = ["quarantined" if quarantined else "free"] * capacity
        self._content: list[Content | None] = [None] * capacity
        """The block that a slot holds or will hold; None if it is free, leaving or quarantined."""
        self._holds = [0] * capacity
        self._leaving = 0
        self._condemned: set[int] = set()
        """Writing and loading slots whose block is not to be kept."""

    # --- questions

    def state(self, slot: int) -> SlotState:
        """Return the slot's state, as drawn above."""
        return self._state[slot]

    def knows(self, key: ContentKey) -> bool:
        """Return whether the block is stored or on its way."""
        return key in self.resident.places or key in self.loading or key in self.writing

    @property
    def free(self) -> int:
        """The number of free slots."""
        return len(self._free)

    def is_held(self, slot: int) -> bool:
        """Return whether there is a hold on the slot."""
        return self._holds[slot] > 0

    def statistics(self) -> SlotStatistics:
        """Return counts by state, in O(1)."""
        return SlotStatistics(
            capacity=self.capacity,
            free=len(self._free),
            writing=len(self.writing),
            loading=len(self.loading),
            ready=len(self.resident),
            quarantined=self._quarantined,
            held=self.held,
            leaving=self._leaving,
        )

    # --- room

    def _take(self, state: SlotState, content: Content) -> tuple[int, ContentEvicted | None] | None:
        """Take a free slot, or evict a block for one; None if no block may go."""
        taken = (self._free.pop(), None) if self._free else self.resident.evict()
        if taken is not None:
            self._state[taken[0]] = state
            self._content[taken[0]] = content
        return taken

    def evict_one(self) -> ContentEvicted | None:
        """Evict the policy's victim ahead of need; None if no block may go."""
        taken = self.resident.evict()
        if taken is None:
            return None
        slot, evicted = taken
        self._set_free(slot)
        return evicted

    # --- workers write

    def grant(self, content: Content) -> tuple[int, ContentEvicted | None] | None:
        """Grant a slot for a block that is not known. Return it and the block that was evicted for it; None if there is
        no room."""
        assert not self.knows(content.key), f"{content.key.hex()} is known"
        taken = self._take("writing", content)
        if taken is not None:
            self.writing[content.key] = taken[0]
        return taken

    def publish(self, slot: int) -> ContentStored | None:
        """Publish a block that is written. None if it is condemned, or has come from disk meanwhile; the slot is free
        then."""
        condemned = slot in self._condemned
        content = self._end_write(slot)
        if condemned or content.key in self.resident.places or content.key in self.loading:
            self._set_free(slot)
            return None
        self._state[slot] = "ready"
        self._content[slot] = content
        return self.resident.add(content, slot)

    def quarantine(self, slot: int) -> None:
        """Quarantine a slot whose ticket has expired, as its writer may still write."""
        self._end_write(slot)
        self._state[slot] = "quarantined"
        self._quarantined += 1

    def free_slot(self, slot: int) -> None:
        """Free a slot whose writer has stopped; nothing is kept."""
        if self._state[slot] == "quarantined":
            self._quarantined -= 1
        else:
            self._end_write(slot)
        self._set_free(slot)

    def _end_write(self, slot: int) -> Content:
        content = self._content[slot]
        assert self._state[slot] == "writing", f"slot {slot} is {self._state[slot]}"
        assert content is not None
        del self.writing[content.key]
        self._condemned.discard(slot)
        self._content[slot] = None
        return content

    def _set_free(self, slot: int) -> None:
        assert self._holds[slot] == 0, f"slot {slot} is held"
        self._state[slot] = "free"
        self._content[slot] = None
        self._free.append(slot)

    # --- the disk's reads write

    def load(self, content: Content) -> tuple[int, ContentEvicted | None] | None:
        """Take a slot for a block that is to be read from disk; None if there is no room."""
        assert content.key not in self.resident, f"{content.key.hex()} is there"
        assert content.key not in self.loading, f"{content.key.hex()} is loading"
        taken = self._take("loading", content)
        if taken is not None:
            self.loading[content.key] = taken[0]
            self.abandoned += 1
        return taken

    def loaded(self, slot: int, *, ok: bool) -> ContentStored | None:
        """End a read. If it failed, all holds on the slot must have been released, and the slot is free."""
        content = self._content[slot]
        assert self._state[slot] == "loading", f"slot {slot} is {self._state[slot]}"
        assert content is not None
        assert not (ok and slot in self._condemned), f"slot {slot} is condemned"
        del self.loading[content.key]
        self._condemned.discard(slot)
        self.abandoned -= self._holds[slot] == 0
        if not ok:
            self._set_free(slot)
            return None
        self._state[slot] = "ready"
        return self.resident.add(content, slot)

    # --- wrong blocks

    def discard(self, slot: int) -> ContentEvicted:
        """Discard the block of a ready slot: it cannot be found any more."""
        content = self._content[slot]
        assert self._state[slot] == "ready", f"slot {slot} is {self._state[slot]}"
        assert content is not None
        evicted = self.resident.remove(content.key)
        if self._holds[slot]:
            self._state[slot] = "leaving"
            self._content[slot] = None
            self._leaving += 1
        else:
            self._set_free(slot)
        return evicted

    def condemn(self, key: ContentKey) -> None:
        """Condemn a block that is being written or loaded: it will not be kept."""
        for coming in (self.writing, self.loading):
            if key in coming:
                self._condemned.add(coming[key])

    def is_condemned(self, slot: int) -> bool:
        """Return whether the block that is being written or loaded into the slot will not be kept."""
        return slot in self._condemned

    # --- readers

    def hold(self, slot: int) -> None:
        """Add a hold to the slot, for a reader, now or when it is loaded."""
        if self._holds[slot] == 0:
            self.held += 1
            self.abandoned -= self._state[slot] == "loading"
        self._holds[slot] += 1

    def release(self, slots: Iterable[int]) -> None:
        """Remove one hold from each of these slots."""
        holds = self._holds
        for slot in slots:
            assert holds[slot] > 0, f"slot {slot} has no hold"
            holds[slot] -= 1
            if holds[slot] == 0:
                self.held -= 1
                self.abandoned += self._state[slot] == "loading"
                if self._state[slot] == "leaving":
                    self._leaving -= 1
                    self._set_free(slot)

    def validate(self, holds: dict[int, int]) -> None:
        """Raise AssertionError if the slots contradict themselves or the caller's count of holds. O(capacity)."""
        self.resident.validate()
        counts: dict[SlotState, int] = {"free": 0, "writing": 0, "loading": 0, "ready": 0}
        counts |= {"leaving": 0, "quarantined": 0}
        for slot, state in enumerate(self._state):
            counts[state] += 1
            content = self._content[slot]
            empty = state in ("free", "leaving", "quarantined")
            assert (content is None) == empty, f"slot {slot} is {state}, holds {content}"
            assert self._holds[slot] == holds.get(slot, 0), f"slot {slot} is held {self._holds[slot]} times"
            assert not self._holds[slot] or state in ("loading", "ready", "leaving"), f"slot {slot} is {state} and held"
            assert self._holds[slot] or state != "leaving", f"slot {slot} is leaving and nothing holds it"
            assert slot not in self._condemned or state in ("writing", "loading"), f"slot {slot} is condemned"
        assert sorted(self._free) == [slot for slot, state in enumerate(self._state) if state == "free"]
        whereabouts: list[tuple[SlotState, dict[ContentKey, int]]]
        whereabouts = [("writing", self.writing), ("loading", self.loading), ("ready", self.resident.places)]
        for state, known in whereabouts:
            assert len(known) == counts[state], f"{len(known)} blocks are known as {state}, {counts[state]} slots are"
            for key, slot in known.items():
                content = self._content[slot]
                assert self._state[slot] == state, f"slot {slot} is {self._state[slot]}, known as {state}"
                assert content is not None, f"slot {slot} is empty"
                assert content.key == key, f"slot {slot} holds another block"
        assert not self.loading.keys() & self.resident.places.keys(), "a block is there and loading"
        assert counts["leaving"] == self._leaving, "leaving slots are counted wrong"
        assert counts["quarantined"] == self._quarantined, "quarantined slots are counted wrong"
        assert self.held == sum(count > 0 for count in self._holds), "held slots are counted wrong"
        assert self.abandoned == sum(not self._holds[slot] for slot in self.loading.values()), "abandoned slots, too"
