"""A kvbm and its copies, moved by hand, for an engine that is stepped by hand.

Bytes are a FakeRunner's: a copy that takes what it should not, or a block that is used while it loads, fails the test.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from services.worker.scheduler.kv_onboarding import FetchRequest
from shared.blocks import Content
from shared.hashing import ContentKey
from tests.worker.scheduled import Engine

Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint32]]


@dataclass
class Fetching:
    """One of `wanted`, and what became of it."""

    wanted: FetchRequest
    unwanted: bool = False
    given: int = 0
    """Slots so far."""
    loading: dict[int, tuple[int, ContentKey]] = field(default_factory=dict)
    """Index → slot, key."""


class Kvbm:
    """Keeps whatever it is offered; which of it is on disk says `on_disk`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        engine.copies = True
        self.memory = engine.runner.memory
        self.kept: dict[ContentKey, Bytes] = {}
        self.on_disk: set[ContentKey] = set()
        self.fetches: dict[int, Fetching] = {}
        self.saving: list[tuple[int, ContentKey, Bytes]] = []
        """Slot, key, its bytes when the copy began."""
        self.loaded_blocks = 0

    def up(self) -> None:
        self.engine.scheduler.kv_cache.set_connected(True)

    def down(self) -> None:
        self.engine.scheduler.kv_cache.set_connected(False)

    def turn(self) -> list[FetchRequest]:
        """Hears what is wanted and what is not any more; returns the former."""
        wanted, abandoned = self.engine.scheduler.kv_cache.fetch_changes()
        for one in wanted:
            assert one.number not in self.fetches, "asked for again before it was settled"
            assert one.keys
            self.fetches[one.number] = Fetching(one)
        for number in abandoned:
            assert not self.fetches[number].unwanted, "told twice"
            self.fetches[number].unwanted = True
        return wanted

    def begin(self, number: int, count: int) -> int:
        """Begins to load up to `count` more blocks, if they are kept; returns how many."""
        fetch = self.fetches[number]
        keys = fetch.wanted.keys[fetch.given : fetch.given + count]
        there = next((index for index, key in enumerate(keys) if key not in self.kept), len(keys))
        slots = self.engine.scheduler.kv_cache.begin_load(number, fetch.given, there)
        assert len(slots) <= there
        assert not (slots and fetch.unwanted)
        for slot, key in zip(slots, keys, strict=False):
            self.memory[slot] = 0
            fetch.loading[fetch.given] = slot, key
            fetch.given += 1
        return len(slots)

    def land(self, number: int, index: int, good: bool = True) -> None:
        """The copy of this block ends."""
        slot, key = self.fetches[number].loading.pop(index)
        if good:
            self.memory[slot] = self.kept[key]
            self.loaded_blocks += 1
        self.engine.scheduler.kv_cache.end_load(number, index, slot, good, key in self.on_disk)

    def settle(self, number: int, took_s: float = 0.0) -> None:
        assert not self.fetches.pop(number).loading
        self.engine.scheduler.kv_cache.end_fetch(number, took_s)

    def know_nothing(self) -> None:
        """Whoever waits is told that nothing is kept."""
        while self.turn() or self.fetches:
            for number in list(self.fetches):
                self.settle(number)

    def serve(self, number: int) -> None:
        """All that is kept of it, well."""
        self.begin(number, len(self.fetches[number].wanted.keys))
        for index in list(self.fetches[number].loading):
            self.land(number, index)
        self.settle(number)

    def take_offers(self, most: int = 64) -> list[Content]:
        """Begins to copy what is offered; returns it."""
        offers = self.engine.scheduler.kv_cache.offers(most)
        assert len(offers) <= most
        slots = self.engine.scheduler.kv_cache.pin([content.key for content in offers])
        for content, slot in zip(offers, slots, strict=True):
            if slot is not None:
                self.saving.append((slot, content.key, self.memory[slot].copy()))
        return offers

    def end_saves(self, count: int = 1 << 30) -> None:
        """The oldest copies end."""
        ended, self.saving = self.saving[:count], self.saving[count:]
        for slot, key, bytes_then in ended:
            assert (self.memory[slot] == bytes_then).all(), "written while it was copied"
            self.kept[key] = bytes_then
        self.engine.scheduler.kv_cache.unpin([slot for slot, _, _ in ended])

    def save(self) -> None:
        """Takes all that is offered."""
        while self.take_offers():
            self.end_saves()

    def run(self) -> None:
        """Until nothing lives, with a kvbm that answers at once."""
        for _ in range(10_000):
            while self.turn() or self.fetches:
                for number in list(self.fetches):
                    self.serve(number)
            self.save()
            if not self.engine.scheduler.busy:
                break
            self.engine.step()
        assert self.engine.scheduler.wait_until_s is None, "somebody is left behind"
        assert self.engine.scheduler.load().held_blocks == 0

    def end(self) -> None:
        """All that is under way fails."""
        self.end_saves()
        for number, fetch in list(self.fetches.items()):
            for index in list(fetch.loading):
                self.land(number, index, good=False)
            self.settle(number)
