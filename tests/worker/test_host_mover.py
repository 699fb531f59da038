"""Copies between an engine's memory and a real pool file. A clock that the mover reads at each copy holds it there."""

from __future__ import annotations

import logging
import mmap
import os
import select
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from services.worker import host_mover
from services.worker.copies import Copied, Copy
from services.worker.host_mover import HostMover
from shared.pool_format import Geometry, PoolUnfit
from shared.pool_map import PoolMap
from tests.kvbm.small_tmpfs import small_tmpfs
from tests.worker.pool_file import make_pool

LIMIT_S = 20.0
BLOCK_BYTES = 5000
"""Less than a slot, and no whole pages."""
DEVICE_SLOTS = 16
SIZE_BYTES = 4 << 20
GEOMETRY = Geometry.of(SIZE_BYTES)
SLOTS = GEOMETRY.arena(0, 1, BLOCK_BYTES).slots


class Clock:
    """Says `now_s`; closed, it lets the mover's thread wait at its next look, and says so."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.looks = 0
        self.seen: Callable[[], None] = lambda: None
        self._open = threading.Event()
        self._reached = threading.Event()
        self._open.set()

    def __call__(self) -> float:
        self.looks += 1
        self.seen()
        self._reached.set()
        assert self._open.wait(LIMIT_S)
        return self.now_s

    def shut(self) -> None:
        self._open.clear()
        self._reached.clear()

    def reached(self) -> None:
        assert self._reached.wait(LIMIT_S)

    def release(self) -> None:
        self._open.set()


class Rig:
    """A pool, mapped as the kvbm maps it and as an engine does, and a mover of that engine."""

    def __init__(self, path: Path) -> None:
        self.path = path
        make_pool(path, SIZE_BYTES)
        self._pools = [PoolMap(path, grants=True), PoolMap(path)]
        arena = GEOMETRY.arena(0, 1, BLOCK_BYTES)
        self.kvbm, self.engine = (pool.arena(arena) for pool in self._pools)
        self.device = memoryview(mmap.mmap(-1, DEVICE_SLOTS * BLOCK_BYTES))
        self.clock = Clock()
        self.mover = HostMover(self.device, BLOCK_BYTES, self.clock)

    def fill(self, device_slot: int, seed: int) -> bytes:
        block = Random(seed).randbytes(BLOCK_BYTES)
        self.device[device_slot * BLOCK_BYTES : (device_slot + 1) * BLOCK_BYTES] = block
        return block

    def on_device(self, slot: int) -> bytes:
        return bytes(self.device[slot * BLOCK_BYTES : (slot + 1) * BLOCK_BYTES])

    def in_pool(self, slot: int) -> bytes:
        with self.kvbm.slot(slot) as memory:
            return bytes(memory)

    def ended(self, count: int = 1) -> list[Copied]:
        """The next `count` batches that end."""
        told: list[Copied] = []
        while len(told) < count:
            readable, _, _ = select.select([self.mover], [], [], LIMIT_S)
            assert readable, "nothing has ended"
            told.extend(self.mover.ended())
        assert len(told) == count
        return told

    def all_touched(self) -> None:
        mover = self.mover
        with mover._work:
            assert mover._work.wait_for(lambda: not (mover._untouched or mover._touching), LIMIT_S)

    def close(self) -> None:
        self.clock.release()
        self.mover.close()
        for arena in (self.kvbm, self.engine):
            arena.close()
        for pool in self._pools:
            pool.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path / "pool")
    yield rig
    rig.close()


@pytest.fixture
def attached(rig: Rig) -> Rig:
    rig.mover.attach(rig.engine)
    return rig


def test_what_is_saved_from_one_slot_is_loaded_into_another(attached: Rig) -> None:
    blocks = [attached.fill(slot, slot) for slot in range(4)]
    attached.mover.save(7, [Copy(100 + slot, slot) for slot in range(4)], 1.0)
    assert attached.ended() == [Copied(7, [True] * 4, 4 * BLOCK_BYTES, 0.0)]
    attached.mover.load(8, [Copy(100 + slot, 15 - slot, attached.kvbm.generation(100 + slot)) for slot in range(4)])
    assert attached.ended() == [Copied(8, [True] * 4, 4 * BLOCK_BYTES, 0.0)]
    assert [attached.on_device(15 - slot) for slot in range(4)] == blocks
    assert [attached.in_pool(100 + slot)[:BLOCK_BYTES] for slot in range(4)] == blocks


def test_nothing_but_the_block_is_written(attached: Rig) -> None:
    attached.fill(3, 1)
    attached.mover.save(1, [Copy(5, 3)], 1.0)
    attached.ended()
    assert not any(attached.in_pool(4))
    assert not any(attached.in_pool(5)[BLOCK_BYTES:])
    assert not any(attached.in_pool(6))


def test_a_load_from_a_slot_that_is_granted_meanwhile_is_not_good(attached: Rig) -> None:
    attached.clock.shut()
    copies = [Copy(slot, slot, attached.kvbm.generation(slot)) for slot in range(3)]
    attached.mover.load(1, copies)
    attached.clock.reached()
    attached.kvbm.grant(1)
    attached.clock.release()
    assert attached.ended() == [Copied(1, [True, False, True], 3 * BLOCK_BYTES, 0.0)]


def test_loads_go_before_the_saves_that_wait_and_before_the_rest_of_one_under_way(attached: Rig) -> None:
    attached.clock.shut()
    attached.mover.save(1, [Copy(slot, slot) for slot in range(3)], 1.0)
    attached.mover.save(2, [Copy(3, 3)], 1.0)
    attached.clock.reached()
    attached.mover.load(3, [Copy(10, 10), Copy(11, 11)])
    attached.mover.load(4, [Copy(12, 12)])
    attached.clock.release()
    assert [copied.batch for copied in attached.ended(4)] == [3, 4, 1, 2]


def test_a_cancelled_batch_ends_after_the_copy_under_way_with_what_was_made(attached: Rig) -> None:
    attached.clock.shut()
    attached.mover.save(1, [Copy(slot, slot) for slot in range(3)], 1.0)
    attached.clock.reached()
    attached.mover.load(2, [Copy(5, 5)])
    attached.mover.cancel(1)
    attached.clock.release()
    told = {copied.batch: copied for copied in attached.ended(2)}
    assert told[1].good == [True, False, False]
    assert told[2].good == [True]


def test_a_cancelled_batch_that_waits_ends_without_a_copy(attached: Rig) -> None:
    attached.clock.shut()
    attached.mover.load(1, [Copy(1, 1)])
    attached.clock.reached()
    attached.mover.load(2, [Copy(2, 2), Copy(3, 3)])
    attached.mover.cancel(2)
    attached.clock.release()
    assert attached.ended(2)[1] == Copied(2, [False, False], 0, 0.0)


def test_cancelling_what_is_not_there_does_nothing(attached: Rig) -> None:
    attached.mover.cancel(1)
    attached.mover.load(1, [Copy(1, 1)])
    assert attached.ended()[0].good == [True]
    attached.mover.cancel(1)
    assert attached.mover.ended() == []


def test_no_save_begins_at_or_after_its_end(attached: Rig) -> None:
    looks = iter([9.0, 9.5, 10.0, 10.0, 10.5, 10.5])  # before and after each copy

    def tick() -> None:
        attached.clock.now_s = next(looks)

    attached.clock.seen = tick
    attached.fill(1, 1)
    attached.mover.save(1, [Copy(0, 0), Copy(1, 1), Copy(2, 2)], 10.0)
    assert attached.ended() == [Copied(1, [True, False, False], BLOCK_BYTES, 0.5)]
    assert not any(attached.in_pool(1))


def test_a_batch_of_no_copies_ends(attached: Rig) -> None:
    attached.mover.load(1, [])
    assert attached.ended() == [Copied(1, [], 0, 0.0)]


def test_a_batch_that_fails_says_why_once_with_its_traceback_and_others_go_on(
    attached: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        for batch in (1, 2):
            attached.mover.save(batch, [Copy(0, 0), Copy(SLOTS, 1)], 1.0)
            [copied] = attached.ended()
            assert copied.good == [False, False]
            assert copied.failed == f"PoolUnfit: slot {SLOTS} of an arena of {SLOTS}"
    [record] = caplog.records
    assert record.exc_info is not None
    attached.mover.load(3, [Copy(0, 0)])
    assert attached.ended()[0].good == [True]


def test_it_is_readable_only_while_something_has_ended(attached: Rig) -> None:
    assert attached.mover.ended() == []
    attached.mover.load(1, [Copy(1, 1)])
    attached.ended()
    assert select.select([attached.mover], [], [], 0) == ([], [], [])
    assert attached.mover.ends_s is None


def test_it_is_not_readable_for_what_ended_while_others_were_told_and_was_told_with_them(
    attached: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, read = attached.clock, os.eventfd_read
    reached = {3: threading.Event(), 5: threading.Event()}  # the first look of the second batch, of the third

    def seen() -> None:
        if clock.looks in reached:
            clock.shut()
            reached[clock.looks].set()

    def read_slowly(descriptor: int) -> int:
        count = read(descriptor)
        clock.release()
        assert reached[5].wait(LIMIT_S)
        return count

    clock.seen = seen
    for batch in (1, 2, 3):
        attached.mover.load(batch, [Copy(0, 0)])
    assert reached[3].wait(LIMIT_S)
    monkeypatch.setattr(os, "eventfd_read", read_slowly)
    assert [copied.batch for copied in attached.mover.ended()] == [1, 2]
    assert select.select([attached.mover], [], [], 0) == ([], [], [])  # an engine that sleeps would spin
    clock.release()
    assert attached.ended()[0].batch == 3


def test_slots_smaller_than_a_block_are_refused(rig: Rig) -> None:
    mover = HostMover(rig.device, 8193, rig.clock)
    with pytest.raises(PoolUnfit, match="slots of 8192 bytes for blocks of 8193"):
        mover.attach(rig.engine)
    mover.close()


def test_the_pool_is_touched_when_it_is_attached(rig: Rig) -> None:
    before = _resident_bytes()
    rig.mover.attach(rig.engine)
    rig.all_touched()
    assert _resident_bytes() - before > 0.9 * rig.engine.arena.size_bytes


def test_a_pool_that_cannot_be_touched_is_said_once_and_let_go_like_any_other(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_mover, "PIECE_BYTES", 1 << 20)
    with small_tmpfs(tmp_path / "small") as directory:  # a hole on a full file system
        geometry = make_pool(directory / "pool", 8 << 20)
        pool = PoolMap(directory / "pool")
        slots = pool.arena(geometry.arena(0, 1, BLOCK_BYTES))
        rig.mover.attach(slots)
        rig.all_touched()
        rig.mover.detach()
        slots.close()
        pool.close()
    [record] = caplog.records
    assert (
        record.message == "the pool's pages are not touched beforehand, copies will be slower: [Errno 14] Bad address"
    )


def test_copies_go_before_touching(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_mover, "PIECE_BYTES", 4096)
    left: list[int] = []
    rig.clock.seen = lambda: left.append(len(rig.mover._untouched))
    with rig.mover._work:  # its thread sees both at once
        rig.mover.attach(rig.engine)
        rig.mover.load(1, [Copy(1, 1)])
    rig.ended()
    assert left[0] == rig.engine.bytes.nbytes // 4096


def test_it_lets_go_of_the_pool_at_once_and_takes_another(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_mover, "PIECE_BYTES", 65536)
    for number in range(20):
        pool = PoolMap(rig.path)
        slots = pool.arena(rig.engine.arena)
        rig.mover.attach(slots)
        if number % 2:
            rig.mover.load(1, [Copy(1, 1)])
            rig.ended()
        rig.mover.detach()
        slots.close()  # BufferError, were it still in use
        pool.close()


def test_closing_makes_no_more_copies(rig: Rig) -> None:
    mover = HostMover(rig.device, BLOCK_BYTES, rig.clock)
    mover.attach(rig.engine)
    rig.clock.shut()
    mover.save(1, [Copy(0, 0), Copy(1, 1)], 1.0)
    mover.save(2, [Copy(2, 2)], 1.0)
    rig.clock.reached()
    closing = threading.Thread(target=mover.close)
    closing.start()
    with mover._work:
        assert mover._work.wait_for(lambda: mover._closed, LIMIT_S)
    rig.clock.release()
    closing.join(LIMIT_S)
    assert rig.clock.looks == 2  # around the copy under way


def test_every_batch_ends_once_and_good_copies_are_the_blocks_whatever_is_cancelled(attached: Rig) -> None:
    draw = Random(4)
    blocks = [attached.fill(slot, slot) for slot in range(8)]
    saves = {batch: [Copy(8 * batch + slot, slot) for slot in range(8)] for batch in range(60)}
    loads = {1000 + batch: [Copy(SLOTS - 1 - batch % 8, 8 + batch % 8)] for batch in range(60)}
    for save, load in zip(saves.items(), loads.items(), strict=True):
        attached.mover.save(*save, 1.0)
        attached.mover.load(*load)
        attached.mover.cancel(draw.choice([save[0], load[0], save[0] - 1]))
    told = attached.ended(120)
    assert sorted(copied.batch for copied in told) == sorted([*saves, *loads])
    for copied in told:
        assert copied.moved_bytes == BLOCK_BYTES * sum(copied.good)
        for copy, good in zip(saves.get(copied.batch, []), copied.good, strict=False):
            assert attached.in_pool(copy.pool_slot)[:BLOCK_BYTES] == (blocks[copy.device_slot] if good else bytes(5000))


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
