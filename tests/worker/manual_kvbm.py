"""A kvbm and its copies, driven by hand, for an engine that is stepped by hand.

Bytes are a FakeRunner's: a copy of the wrong bytes, or a block that is used while it loads, fails the test.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from services.worker.contracts.device_blocks import FetchRequest
from shared.blocks import Content
from shared.hashing import ContentKey
from tests.worker.manual_engine import Engine

Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint32]]


@dataclass
class Fetching:
    """One fetch, and what became of it."""

    request: FetchRequest
    abandoned: bool = False
    given: int = 0
    """Number of its slots so far."""
    loading: dict[int, tuple[int, ContentKey]] = field(default_factory=dict)
    """Index → slot, key."""


class Kvbm:
    """Keeps every block that it is offered; `on_disk` says which ones are on disk."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        engine.copies = True
        self.memory = engine.runner.memory
        self.kept: dict[ContentKey, Bytes] = {}
        self.sharer = ""
        """The worker that shares what is kept. Empty if it is the kvbm's."""
        self.on_disk: set[ContentKey] = set()
        self.fetches: dict[int, Fetching] = {}
        self.saving: list[tuple[int, ContentKey, Bytes]] = []
        """Slot, key, its bytes when the copy began."""
        self.loaded_blocks = 0

    def up(self) -> None:
        self.engine.scheduler.kv_cache.set_connected(True)

    def down(self) -> None:
        self.engine.scheduler.kv_cache.set_connected(False)

    def poll(self) -> list[FetchRequest]:
        """Take up new and abandoned fetches; return the new ones."""
        new, abandoned = self.engine.scheduler.kv_cache.fetch_changes()
        for one in new:
            assert one.number not in self.fetches, "asked for again before it was settled"
            assert one.keys
            self.fetches[one.number] = Fetching(one)
        for number in abandoned:
            assert not self.fetches[number].abandoned, "reported twice"
            self.fetches[number].abandoned = True
        return new

    def begin(self, number: int, count: int) -> int:
        """Begin to load up to `count` more blocks, if they are kept; return how many."""
        fetch = self.fetches[number]
        keys = fetch.request.keys[fetch.given : fetch.given + count]
        there = next((index for index, key in enumerate(keys) if key not in self.kept), len(keys))
        slots = self.engine.scheduler.kv_cache.begin_load(number, fetch.given, there, there)
        assert len(slots) <= there
        assert not (slots and fetch.abandoned)
        for slot, key in zip(slots, keys, strict=False):
            self.memory[slot] = 0
            fetch.loading[fetch.given] = slot, key
            fetch.given += 1
        return len(slots)

    def land(self, number: int, index: int, good: bool = True) -> None:
        """End the copy of this block."""
        self.land_together(number, index, [good])

    def land_together(self, number: int, first: int, good: list[bool]) -> None:
        """End the copies of these blocks, all from memory or all from disk."""
        disk = self.fetches[number].loading[first][1] in self.on_disk
        for index, is_good in enumerate(good, first):
            slot, key = self.fetches[number].loading.pop(index)
            if is_good:
                self.memory[slot] = self.kept[key]
                self.loaded_blocks += 1
        self.engine.scheduler.kv_cache.end_loads(number, first, good, disk, self.sharer)

    def settle(self, number: int, took_s: float = 0.0) -> None:
        assert not self.fetches.pop(number).loading
        self.engine.scheduler.kv_cache.end_fetch(number, took_s)

    def know_nothing(self) -> None:
        """Answer all fetches: nothing is kept."""
        while self.poll() or self.fetches:
            for number in list(self.fetches):
                self.settle(number)

    def serve(self, number: int) -> None:
        """Load all kept blocks of this fetch, without a fault."""
        self.begin(number, len(self.fetches[number].request.keys))
        for index in list(self.fetches[number].loading):
            self.land(number, index)
        self.settle(number)

    def take_offers(self, most: int = 64) -> list[Content]:
        """Begin to copy the offered blocks; return them."""
        offers = self.engine.scheduler.kv_cache.offloading.offers(most)
        assert len(offers) <= most
        slots = self.engine.scheduler.kv_cache.pin([content.key for content in offers])
        for content, slot in zip(offers, slots, strict=True):
            if slot is not None:
                self.saving.append((slot, content.key, self.memory[slot].copy()))
        return offers

    def end_saves(self, count: int = 1 << 30) -> None:
        """End the oldest copies."""
        ended, self.saving = self.saving[:count], self.saving[count:]
        for slot, key, bytes_then in ended:
            assert (self.memory[slot] == bytes_then).all(), "written while it was copied"
            self.kept[key] = bytes_then
        self.engine.scheduler.kv_cache.unpin([slot for slot, _, _ in ended])

    def save(self) -> None:
        """Copy all offered blocks."""
        while self.take_offers():
            self.end_saves()

    def run(self) -> None:
        """Step until no attempt lives, with a kvbm that answers at once."""
        for _ in range(10_000):
            while self.poll() or self.fetches:
                for number in list(self.fetches):
                    self.serve(number)
            self.save()
            if not self.engine.scheduler.busy:
                break
            self.engine.step()
        assert self.engine.scheduler.wait_until_s is None, "a sequence still waits"
        assert self.engine.scheduler.load().held_blocks == 0

    def end(self) -> None:
        """Let everything under way fail."""
        self.end_saves()
        for number, fetch in list(self.fetches.items()):
            for index in list(fetch.loading):
                self.land(number, index, good=False)
            self.settle(number)
