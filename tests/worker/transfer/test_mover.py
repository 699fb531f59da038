"""The mover over both copiers, and a real pool file."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from xxhash import xxh3_64_intdigest

from services.worker.contracts.mover import Copied, Copy
from services.worker.transfer import host_copier
from services.worker.transfer.host_copier import HostCopier
from services.worker.transfer.mover import TransferMover
from shared.pool.format import PoolUnfit
from shared.pool.map import PoolMap
from tests.worker.pool_file import make_pool
from tests.worker.transfer.devices import BLOCK_BYTES, SLOTS
from tests.worker.transfer.mover_rig import ARENA, GEOMETRY, LIMIT_S, SIZE_BYTES, MoverRig, rigged


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MoverRig]:
    yield from rigged(request.param, tmp_path, verify=False)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[MoverRig]:
    yield from rigged("host", tmp_path, verify=False)


def test_a_block_saved_from_one_slot_can_be_loaded_into_another(rig: MoverRig) -> None:
    blocks = [rig.fill(slot, slot) for slot in range(4)]
    rig.mover.save(7, [Copy(100 + slot, slot) for slot in range(4)], 1.0)
    assert rig.ended() == [Copied(7, [True] * 4, 4 * BLOCK_BYTES, 0.0)]
    rig.mover.load(8, [Copy(100 + slot, 15 - slot, rig.kvbm.generation(100 + slot)) for slot in range(4)])
    assert rig.ended() == [Copied(8, [True] * 4, 4 * BLOCK_BYTES, 0.0)]
    assert [rig.device.read(15 - slot) for slot in range(4)] == blocks
    assert [rig.in_pool(100 + slot)[:BLOCK_BYTES] for slot in range(4)] == blocks


def test_only_the_blocks_bytes_are_written(rig: MoverRig) -> None:
    rig.fill(3, 1)
    rig.mover.save(1, [Copy(5, 3)], 1.0)
    rig.mover.load(2, [Copy(5, 8)])
    rig.ended(2)
    assert not any(rig.in_pool(4))
    assert not any(rig.in_pool(5)[BLOCK_BYTES:])
    assert not any(rig.in_pool(6))
    assert not any(rig.device.read(7) + rig.device.read(9))


def test_a_load_from_a_slot_that_was_granted_again_meanwhile_is_not_good(rig: MoverRig) -> None:
    rig.clock.shut()
    copies = [Copy(slot, slot, rig.kvbm.generation(slot)) for slot in range(3)]
    rig.mover.load(1, copies)
    rig.clock.reached()
    rig.kvbm.grant(1)
    rig.clock.release()
    assert rig.ended() == [Copied(1, [True, False, True], 3 * BLOCK_BYTES, 0.0)]


def test_saves_make_checksums_and_a_load_of_other_bytes_is_not_good(rig: MoverRig) -> None:
    blocks = [rig.fill(slot, slot) for slot in range(3)]
    rig.mover.save(1, [Copy(100 + slot, slot, checksum=0) for slot in range(3)], 1.0)
    (saved,) = rig.ended()
    assert saved.checksums == [xxh3_64_intdigest(block) for block in blocks]
    rig.damage(101)
    generations = [rig.kvbm.generation(100 + slot) for slot in range(3)]
    loads = map(Copy, range(100, 103), range(5, 8), generations, saved.checksums)
    rig.mover.load(2, list(loads))
    (loaded,) = rig.ended()
    assert (loaded.good, loaded.damaged, loaded.checksums) == ([True, False, True], [1], [])
    rig.mover.load(3, [Copy(101, 6, generations[1])])
    (loaded,) = rig.ended()
    assert loaded.good == [True], "nothing is compared where there is no checksum"


def test_a_load_does_not_wait_for_saves(rig: MoverRig) -> None:
    rig.mover.save(1, [Copy(slot % 20, slot % SLOTS) for slot in range(100)], 1.0)
    rig.mover.load(2, [Copy(30, 1)])
    assert {copied.batch for copied in rig.ended(2)} == {1, 2}


def test_between_host_memories_loads_go_before_waiting_saves_and_before_the_rest_of_a_running_batch(
    host: MoverRig,
) -> None:
    host.clock.shut()
    host.mover.save(1, [Copy(slot, slot) for slot in range(3)], 1.0)
    host.mover.save(2, [Copy(3, 3)], 1.0)
    host.clock.reached()
    host.mover.load(3, [Copy(10, 10), Copy(11, 11)])
    host.mover.load(4, [Copy(12, 12)])
    host.clock.release()
    assert [copied.batch for copied in host.ended(4)] == [3, 4, 1, 2]


def test_a_cancelled_batch_that_waits_ends_without_a_copy(rig: MoverRig) -> None:
    rig.clock.shut()
    rig.mover.load(1, [Copy(1, 1)])
    rig.clock.reached()
    rig.mover.load(2, [Copy(2, 2), Copy(3, 3)])
    rig.mover.cancel(2)
    rig.clock.release()
    assert rig.ended(2)[1] == Copied(2, [False, False], 0, 0.0)


def test_a_cancelled_batch_ends_after_the_groups_under_way(rig: MoverRig) -> None:
    rig.clock.shut()
    rig.mover.save(1, [Copy(slot, slot) for slot in range(3)], 1.0)
    rig.clock.reached()
    rig.mover.cancel(1)
    rig.clock.release()
    [copied] = rig.ended()
    assert copied.good in ([False, False, False], [True, False, False])


def test_cancelling_an_unknown_batch_does_nothing(rig: MoverRig) -> None:
    rig.mover.cancel(1)
    rig.mover.load(1, [Copy(1, 1)])
    assert rig.ended()[0].good == [True]
    rig.mover.cancel(1)
    assert rig.mover.ended() == []


def test_no_save_begins_at_or_after_its_end(rig: MoverRig) -> None:
    rig.fill(2, 1)
    rig.clock.step_s = 1.0
    rig.mover.save(1, [Copy(slot, slot) for slot in range(3)], 2.0)
    [copied] = rig.ended()
    assert copied.good == [True, False, False]
    assert copied.moved_bytes == BLOCK_BYTES
    assert copied.took_s > 0
    assert not any(rig.in_pool(2))


def test_the_seconds_of_batches_that_follow_each_other_count_once(rig: MoverRig) -> None:
    rig.clock.shut()
    rig.mover.load(1, [Copy(0, 0)])
    rig.clock.reached()  # holds the first batch until the others wait
    rig.mover.load(2, [Copy(1, 1)])
    rig.mover.load(3, [Copy(2, 2)])
    rig.clock.step_s = 1.0
    rig.clock.release()
    # Three groups are handed out and three end; of these six seconds the first is that of the first hand-out.
    assert sum(copied.took_s for copied in rig.ended(3)) == 5.0


def test_a_batch_of_no_copies_ends(rig: MoverRig) -> None:
    rig.mover.load(1, [])
    assert rig.ended() == [Copied(1, [], 0, 0.0)]


def test_a_batch_that_fails_says_why_once_with_its_traceback_and_others_go_on(
    rig: MoverRig, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        for batch in (1, 2):
            rig.mover.save(batch, [Copy(0, 0), Copy(ARENA.slots, 1)], 1.0)
            [copied] = rig.ended()
            assert copied.good == [False, False]
            assert copied.failed == f"PoolUnfit: there is no slot {ARENA.slots} in an arena of {ARENA.slots} slots"
    [record] = caplog.records
    assert record.exc_info is not None
    rig.mover.load(3, [Copy(0, 0)])
    assert rig.ended()[0].good == [True]


def test_the_eventfd_is_readable_only_while_a_batch_has_ended(rig: MoverRig) -> None:
    assert rig.mover.ended() == []
    rig.mover.load(1, [Copy(1, 1)])
    rig.ended()
    assert select.select([rig.mover], [], [], 0) == ([], [], [])
    assert rig.mover.ends_s is None


def test_a_batch_that_ends_while_others_are_collected_is_returned_once_and_leaves_the_eventfd_clear(
    host: MoverRig, monkeypatch: pytest.MonkeyPatch
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


def test_slots_smaller_than_a_block_are_refused(rig: MoverRig) -> None:
    rig.mover.detach()
    pool = PoolMap(rig.path)
    slots = pool.arena(GEOMETRY.arena(0, 1, 4096))
    with pytest.raises(PoolUnfit, match=f"slots of 4096 bytes are too small for blocks of {BLOCK_BYTES}"):
        rig.mover.attach(slots)
    slots.close()
    pool.close()


def test_the_pool_is_prepared_while_there_is_nothing_to_copy(host: MoverRig, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_mover_detaches_a_pool_at_once_and_attaches_another(rig: MoverRig, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_closing_makes_no_more_copies(rig: MoverRig) -> None:
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


def test_every_batch_ends_once_and_good_copies_are_the_blocks_whatever_is_cancelled(rig: MoverRig) -> None:
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


def test_a_mover_goes_on_with_another_copier_for_the_new_memory_of_its_blocks(tmp_path: Path) -> None:
    make_pool(tmp_path / "pool", SIZE_BYTES)
    pool = PoolMap(tmp_path / "pool", grants=True).arena(ARENA)
    memories = [bytearray(SLOTS * BLOCK_BYTES) for _ in range(2)]
    first, second = (HostCopier.over(memoryview(memory), BLOCK_BYTES) for memory in memories)
    mover = TransferMover(first, lambda: 0.0)
    mover.attach(pool)
    memories[0][:BLOCK_BYTES] = block = Random(1).randbytes(BLOCK_BYTES)
    mover.save(1, [Copy(7, 0)], 1.0)
    assert select.select([mover], [], [], LIMIT_S)[0]
    assert mover.ended() == [Copied(1, [True], BLOCK_BYTES, 0.0, paths={"memmove": 1})]
    mover.detach()
    mover.release()
    mover.renew(second)
    mover.attach(pool)
    mover.load(2, [Copy(7, 3, pool.generation(7))])
    assert select.select([mover], [], [], LIMIT_S)[0]
    assert [each.good for each in mover.ended()] == [[True]]
    assert memories[1][3 * BLOCK_BYTES : 4 * BLOCK_BYTES] == block
    assert not any(memories[0][BLOCK_BYTES:])
    mover.detach()
    mover.release()
    mover.close()
