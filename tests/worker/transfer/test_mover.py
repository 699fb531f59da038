"""The mover over both copiers, and a real pool file. A clock that it reads before each group holds it there."""

from __future__ import annotations

import ctypes
import logging
import os
import select
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.copies import Copied, Copy
from services.worker.transfer import host_copier
from services.worker.transfer.host_copier import Done, HostCopier
from services.worker.transfer.mover import TransferMover
from shared.pool_format import Geometry, PoolUnfit
from shared.pool_map import PoolMap
from tests.worker.pool_file import make_pool
from tests.worker.transfer.devices import BLOCK_BYTES, SLOTS, Device, HostDevice, opened

LIMIT_S = 20.0
SIZE_BYTES = 4 << 20
GEOMETRY = Geometry.of(SIZE_BYTES)
ARENA = GEOMETRY.arena(0, 1, BLOCK_BYTES)


class Clock:
    """Says `now_s`; closed, it lets a lane wait at its next look, and says so."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.step_s = 0.0
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
        self.now_s += self.step_s
        return self.now_s

    def shut(self) -> None:
        self._open.clear()
        self._reached.clear()

    def reached(self) -> None:
        assert self._reached.wait(LIMIT_S)

    def release(self) -> None:
        self._open.set()


class Rig:
    """A pool, mapped as the kvbm maps it and as an engine does, and a mover whose groups are single blocks."""

    def __init__(self, path: Path, device: Device, *, verify: bool = False, most_blocks: int = 1) -> None:
        make_pool(path, SIZE_BYTES)
        self.path = path
        self._pools = [PoolMap(path, grants=True), PoolMap(path)]
        self.kvbm, self.engine = (pool.arena(ARENA) for pool in self._pools)
        self.device = device
        self.clock = Clock()
        self.mover = TransferMover(device.copier, self.clock, most_blocks=most_blocks, verify=verify)
        self.mover.attach(self.engine)
        self.closed = False

    def fill(self, device_slot: int, seed: int) -> bytes:
        block = Random(seed).randbytes(BLOCK_BYTES)
        self.device.write(device_slot, block)
        return block

    def in_pool(self, slot: int) -> bytes:
        with self.kvbm.slot(slot) as memory:
            return bytes(memory)

    def ended(self, count: int = 1) -> list[Copied]:
        """The next `count` batches that end, without the ways that they took."""
        told: list[Copied] = []
        while len(told) < count:
            readable, _, _ = select.select([self.mover], [], [], LIMIT_S)
            assert readable, "nothing has ended"
            told.extend(self.mover.ended())
        assert len(told) == count
        assert all(sum(copied.paths.values()) * BLOCK_BYTES == copied.moved_bytes for copied in told)
        assert not any(copied.fallbacks for copied in told)
        return [msgspec.structs.replace(copied, paths={}) for copied in told]

    def close(self) -> None:
        self.clock.release()
        if not self.closed:
            self.mover.close()
        for arena in (self.kvbm, self.engine):
            arena.close()
        for pool in self._pools:
            pool.close()


def rigged(kind: str, tmp_path: Path, *, verify: bool) -> Iterator[Rig]:
    # Linux pins no file of a disk's file system for as long as CUDA would.
    place = "/dev/shm" if kind == "cuda" else tmp_path
    with opened(kind) as device, TemporaryDirectory(dir=place) as directory:
        rig = Rig(Path(directory) / "pool", device, verify=verify)
        yield rig
        rig.close()


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    yield from rigged(request.param, tmp_path, verify=False)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Rig]:
    yield from rigged("host", tmp_path, verify=False)


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def verifying(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    yield from rigged(request.param, tmp_path, verify=True)


def test_what_is_saved_from_one_slot_is_loaded_into_another(rig: Rig) -> None:
    blocks = [rig.fill(slot, slot) for slot in range(4)]
    rig.mover.save(7, [Copy(100 + slot, slot) for slot in range(4)], 1.0)
    assert rig.ended() == [Copied(7, [True] * 4, 4 * BLOCK_BYTES, 0.0)]
    rig.mover.load(8, [Copy(100 + slot, 15 - slot, rig.kvbm.generation(100 + slot)) for slot in range(4)])
    assert rig.ended() == [Copied(8, [True] * 4, 4 * BLOCK_BYTES, 0.0)]
    assert [rig.device.read(15 - slot) for slot in range(4)] == blocks
    assert [rig.in_pool(100 + slot)[:BLOCK_BYTES] for slot in range(4)] == blocks


def test_nothing_but_the_block_is_written(rig: Rig) -> None:
    rig.fill(3, 1)
    rig.mover.save(1, [Copy(5, 3)], 1.0)
    rig.mover.load(2, [Copy(5, 8)])
    rig.ended(2)
    assert not any(rig.in_pool(4))
    assert not any(rig.in_pool(5)[BLOCK_BYTES:])
    assert not any(rig.in_pool(6))
    assert not any(rig.device.read(7) + rig.device.read(9))


def test_a_load_from_a_slot_that_is_granted_meanwhile_is_not_good(rig: Rig) -> None:
    rig.clock.shut()
    copies = [Copy(slot, slot, rig.kvbm.generation(slot)) for slot in range(3)]
    rig.mover.load(1, copies)
    rig.clock.reached()
    rig.kvbm.grant(1)
    rig.clock.release()
    assert rig.ended() == [Copied(1, [True, False, True], 3 * BLOCK_BYTES, 0.0)]


def test_a_load_does_not_wait_for_saves(rig: Rig) -> None:
    rig.mover.save(1, [Copy(slot % 20, slot % SLOTS) for slot in range(100)], 1.0)
    rig.mover.load(2, [Copy(30, 1)])
    assert {copied.batch for copied in rig.ended(2)} == {1, 2}


def test_between_host_memories_loads_go_before_saves_that_wait_and_the_rest_of_one_under_way(host: Rig) -> None:
    host.clock.shut()
    host.mover.save(1, [Copy(slot, slot) for slot in range(3)], 1.0)
    host.mover.save(2, [Copy(3, 3)], 1.0)
    host.clock.reached()
    host.mover.load(3, [Copy(10, 10), Copy(11, 11)])
    host.mover.load(4, [Copy(12, 12)])
    host.clock.release()
    assert [copied.batch for copied in host.ended(4)] == [3, 4, 1, 2]


def test_a_cancelled_batch_that_waits_ends_without_a_copy(rig: Rig) -> None:
    rig.clock.shut()
    rig.mover.load(1, [Copy(1, 1)])
    rig.clock.reached()
    rig.mover.load(2, [Copy(2, 2), Copy(3, 3)])
    rig.mover.cancel(2)
    rig.clock.release()
    assert rig.ended(2)[1] == Copied(2, [False, False], 0, 0.0)


def test_a_cancelled_batch_ends_with_what_was_handed_over(rig: Rig) -> None:
    rig.clock.shut()
    rig.mover.save(1, [Copy(slot, slot) for slot in range(3)], 1.0)
    rig.clock.reached()
    rig.mover.cancel(1)
    rig.clock.release()
    [copied] = rig.ended()
    assert copied.good in ([False, False, False], [True, False, False])


def test_cancelling_what_is_not_there_does_nothing(rig: Rig) -> None:
    rig.mover.cancel(1)
    rig.mover.load(1, [Copy(1, 1)])
    assert rig.ended()[0].good == [True]
    rig.mover.cancel(1)
    assert rig.mover.ended() == []


def test_no_save_begins_at_or_after_its_end(rig: Rig) -> None:
    rig.fill(2, 1)
    rig.clock.step_s = 1.0
    rig.mover.save(1, [Copy(slot, slot) for slot in range(3)], 2.0)
    [copied] = rig.ended()
    assert copied.good == [True, False, False]
    assert copied.moved_bytes == BLOCK_BYTES
    assert copied.took_s > 0
    assert not any(rig.in_pool(2))


def test_a_batch_of_no_copies_ends(rig: Rig) -> None:
    rig.mover.load(1, [])
    assert rig.ended() == [Copied(1, [], 0, 0.0)]


def test_a_batch_that_fails_says_why_once_with_its_traceback_and_others_go_on(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        for batch in (1, 2):
            rig.mover.save(batch, [Copy(0, 0), Copy(ARENA.slots, 1)], 1.0)
            [copied] = rig.ended()
            assert copied.good == [False, False]
            assert copied.failed == f"PoolUnfit: slot {ARENA.slots} of an arena of {ARENA.slots}"
    [record] = caplog.records
    assert record.exc_info is not None
    rig.mover.load(3, [Copy(0, 0)])
    assert rig.ended()[0].good == [True]


def test_it_is_readable_only_while_something_has_ended(rig: Rig) -> None:
    assert rig.mover.ended() == []
    rig.mover.load(1, [Copy(1, 1)])
    rig.ended()
    assert select.select([rig.mover], [], [], 0) == ([], [], [])
    assert rig.mover.ends_s is None


def test_it_is_not_readable_for_what_ended_while_others_were_told_and_was_told_with_them(
    host: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, read = host.clock, os.eventfd_read
    reached = {5: threading.Event(), 6: threading.Event()}  # the second batch has landed, and the third

    def seen() -> None:
        if clock.looks in reached:
            clock.shut()
            reached[clock.looks].set()

    def read_slowly(descriptor: int) -> int:
        count = read(descriptor)
        clock.release()
        assert reached[6].wait(LIMIT_S)
        return count

    clock.seen = seen
    with host.mover._saves._work:  # its thread sees all of them at once
        for batch in (1, 2, 3):
            host.mover.load(batch, [Copy(0, 0)])
    assert reached[5].wait(LIMIT_S)
    monkeypatch.setattr(os, "eventfd_read", read_slowly)
    assert [copied.batch for copied in host.mover.ended()] == [1, 2]
    assert select.select([host.mover], [], [], 0) == ([], [], [])  # an engine that sleeps would spin
    clock.release()
    assert host.ended()[0].batch == 3


def test_slots_smaller_than_a_block_are_refused(rig: Rig) -> None:
    rig.mover.detach()
    pool = PoolMap(rig.path)
    slots = pool.arena(GEOMETRY.arena(0, 1, 4096))
    with pytest.raises(PoolUnfit, match=f"slots of 4096 bytes for blocks of {BLOCK_BYTES}"):
        rig.mover.attach(slots)
    slots.close()
    pool.close()


def test_the_pool_is_readied_when_there_is_nothing_to_copy(host: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copier, "PIECE_BYTES", 4096)
    host.mover.detach()
    copier = host.device.copier
    assert isinstance(copier, HostCopier)
    left: list[int] = []
    host.clock.seen = lambda: left.append(len(copier._untouched))
    with host.mover._saves._work:  # its thread sees both at once
        host.mover.attach(host.engine)
        host.mover.load(1, [Copy(1, 1)])
    host.ended()
    assert left[0] == host.engine.bytes.nbytes // 4096
    lane = host.mover._saves
    with lane._work:
        assert lane._work.wait_for(lambda: not lane._unready, LIMIT_S)
    assert not copier._untouched


def test_it_lets_go_of_the_pool_at_once_and_takes_another(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copier, "PIECE_BYTES", 65536)
    rig.mover.detach()
    for number in range(10):
        pool = PoolMap(rig.path)
        slots = pool.arena(ARENA)
        rig.mover.attach(slots)
        if number % 2:
            rig.mover.load(1, [Copy(1, 1)])
            rig.ended()
        rig.mover.detach()
        slots.close()  # BufferError, were it still in use
        pool.close()


def test_closing_makes_no_more_copies(rig: Rig) -> None:
    for slot in (1, 2):
        rig.fill(slot, slot)
    rig.clock.shut()
    rig.mover.save(1, [Copy(slot, slot) for slot in range(1, 3)], 1.0)
    rig.clock.reached()
    closing = threading.Thread(target=rig.mover.close)
    closing.start()
    lane = rig.mover._saves
    with lane._work:
        assert lane._work.wait_for(lambda: lane._closed, LIMIT_S)
    rig.clock.release()
    closing.join(LIMIT_S)
    rig.closed = True
    assert any(rig.in_pool(1))  # it was about to be copied
    assert not any(rig.in_pool(2))


def test_every_batch_ends_once_and_good_copies_are_the_blocks_whatever_is_cancelled(rig: Rig) -> None:
    draw = Random(4)
    blocks = [rig.fill(slot, slot) for slot in range(8)]
    saves = {batch: [Copy(8 * batch + slot, slot) for slot in range(8)] for batch in range(40)}
    loads = {1000 + batch: [Copy(ARENA.slots - 1 - batch % 8, 8 + batch % 8)] for batch in range(40)}
    for save, load in zip(saves.items(), loads.items(), strict=True):
        rig.mover.save(*save, 1.0)
        rig.mover.load(*load)
        rig.mover.cancel(draw.choice([save[0], load[0], save[0] - 1]))
    told = rig.ended(80)
    assert sorted(copied.batch for copied in told) == sorted([*saves, *loads])
    for copied in told:
        assert copied.moved_bytes == BLOCK_BYTES * sum(copied.good)
        for copy, good in zip(saves.get(copied.batch, []), copied.good, strict=False):
            block = blocks[copy.device_slot] if good else bytes(BLOCK_BYTES)
            assert rig.in_pool(copy.pool_slot)[:BLOCK_BYTES] == block


# --- comparing


def test_loads_that_were_made_well_are_found_so(verifying: Rig) -> None:
    blocks = [verifying.fill(slot, slot) for slot in range(4)]
    verifying.mover.save(1, [Copy(slot, slot) for slot in range(4)], 1.0)
    verifying.ended()
    verifying.mover.load(2, [Copy(slot, 8 + slot) for slot in range(4)])
    assert verifying.ended() == [Copied(2, [True] * 4, 4 * BLOCK_BYTES, 0.0)]
    assert [verifying.device.read(8 + slot) for slot in range(4)] == blocks


class FaultyCopier(HostCopier):
    """Loads `faulty` pool slots wrongly; between a load and its comparison `granted` ones become another's, who writes
    to them, and right after it `late` ones."""

    def __init__(self, device: HostDevice) -> None:
        super().__init__(device.copier.shape, device)
        self.faulty: set[int] = set()
        self.granted: set[int] = set()
        self.late: set[int] = set()
        self.grant: Callable[[int], None] = lambda _slot: None

    def begin(self, copies: Sequence[Copy], *, loads: bool) -> Done:
        done = super().begin(copies, loads=loads)
        for copy in copies:
            if loads and copy.pool_slot in self.faulty:
                last = self.shape.regions[-1] + copy.device_slot * self.shape.stride_bytes
                byte = ctypes.c_ubyte.from_address(last + self.shape.fragment_bytes - 1)
                byte.value ^= 1
        return done

    def differs(self, copies: Sequence[Copy]) -> list[bool]:
        self._become_others(copies, self.granted)
        told = super().differs(copies)
        self._become_others(copies, self.late)
        return told

    def _become_others(self, copies: Sequence[Copy], slots: set[int]) -> None:
        for copy in copies:
            if copy.pool_slot in slots:
                self.grant(copy.pool_slot)


SOME = st.sets(st.integers(0, 7))


@given(faulty=SOME, granted=SOME, late=SOME, group=st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_a_block_that_differs_is_a_fault_unless_its_slot_is_anothers_by_now(
    faulty: set[int], granted: set[int], late: set[int], group: int
) -> None:
    device = HostDevice()
    device.copier = copier = FaultyCopier(device)
    with TemporaryDirectory() as directory:
        rig = Rig(Path(directory) / "pool", device, verify=True, most_blocks=group)
        blocks = [rig.fill(slot, slot) for slot in range(8)]
        rig.mover.save(1, [Copy(slot, slot) for slot in range(8)], 1.0)
        rig.ended()

        def grant(slot: int) -> None:
            rig.kvbm.grant(slot)
            with rig.kvbm.slot(slot) as memory:
                memory[:8] = b"another\0"

        copier.faulty, copier.granted, copier.late, copier.grant = faulty, granted, late, grant
        rig.mover.load(2, [Copy(slot, 8 + slot, rig.kvbm.generation(slot)) for slot in range(8)])
        [copied] = rig.ended()
        anothers = granted | late
        assert copied.good == [slot not in faulty | anothers for slot in range(8)]
        assert copied.differing == len(faulty - anothers)
        assert all(rig.device.read(8 + slot) == blocks[slot] for slot, good in enumerate(copied.good) if good)
        rig.close()


def test_a_fault_is_said_once_and_loudly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    device = HostDevice()
    device.copier = copier = FaultyCopier(device)
    copier.faulty = {3}
    rig = Rig(tmp_path / "pool", device, verify=True)
    for batch in (1, 2):
        rig.mover.load(batch, [Copy(slot, slot) for slot in range(5)])
        assert rig.ended()[0].differing == 1
    rig.close()
    [record] = caplog.records
    assert record.levelno == logging.CRITICAL
    assert record.message.startswith("WRONG BYTES: the pool's slot 3, loaded into the device's slot 3 on one of the")


def test_what_is_not_to_be_compared_is_not(tmp_path: Path) -> None:
    device = HostDevice()
    device.copier = copier = FaultyCopier(device)
    copier.faulty = {3}
    rig = Rig(tmp_path / "pool", device)
    rig.mover.load(1, [Copy(3, 3)])
    assert rig.ended()[0].good == [True]
    rig.close()
