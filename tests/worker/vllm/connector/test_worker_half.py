"""services/worker/vllm/connector/worker_half.py: what a rank reports where a copy cannot be made, and what it holds.

The pool file, the lock, the mover and the copies are real. The orders are those that the scheduler half sends.
"""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from services.worker.contracts.mover import Copied, Copy
from services.worker.kv_connector.pool_attachment import MappedPool, OwnerName
from services.worker.transfer.block_shape import BlockShape
from services.worker.transfer.host_copier import FinishedCopies, HostCopier
from services.worker.transfer.mover import TransferMover
from services.worker.vllm.connector import worker_half
from services.worker.vllm.connector.orders import (
    RANK_REPORT,
    STEP_ORDERS,
    AttachPool,
    AwaitLoads,
    CancelOrder,
    DetachPool,
    EndLoad,
    LoadBlocks,
    Order,
    RankFacts,
    SaveBlocks,
)
from services.worker.vllm.connector.readable import readable
from services.worker.vllm.connector.worker_half import FEW_BATCHES, WorkerHalf
from shared.pool.format import PAGE_BYTES, Arena
from shared.pool.lock import OWNERS, POOL, HeldLock, hold_owner
from shared.pool.map import PoolMap
from tests.worker.pool_file import make_pool
from tests.worker.transfer.layer_major import layer_major

LIMIT_S = 60.0
POOL_BYTES = 1 << 20
BLOCK_BYTES = 2 * PAGE_BYTES
BLOCKS = 16
LATER_S = 100.0
LAST = (1 << 64) - 1


class BrokenDevice(Exception):
    """What a copier of a lost device raises."""


class BreakingCopier(HostCopier):
    """A host copier whose device is lost when a test says so."""

    broken = False

    def __init__(self, shape: BlockShape, memory: object) -> None:
        super().__init__(shape, memory)
        self.goes_on = threading.Event()
        """Cleared to hold all copies."""
        self.goes_on.set()

    def begin(self, copies: Sequence[Copy], *, loads: bool) -> FinishedCopies:
        assert self.goes_on.wait(LIMIT_S)
        if self.broken:
            raise BrokenDevice("the device is lost")
        return super().begin(copies, loads=loads)


class Rig:
    """One rank's half next to a pool, with the engine's lock."""

    def __init__(self, directory: Path) -> None:
        directory.chmod(0o700)
        (directory / OWNERS).mkdir(mode=0o700)
        self.directory = directory
        self.geometry = make_pool(directory / POOL, POOL_BYTES)
        self.arena = self.geometry.arena(0, 1, BLOCK_BYTES)
        self.lock: HeldLock = hold_owner(directory, "e-1", shared=True)
        self.memory = np.full((BLOCKS, BLOCK_BYTES), 255, np.uint8)
        shape = layer_major(self.memory.ctypes.data, 1, BLOCK_BYTES, BLOCKS)
        self.copier = BreakingCopier(shape, self.memory)
        self.mover = TransferMover(self.copier, lambda: 0.0, most_blocks=2)
        facts = RankFacts(BLOCK_BYTES, BLOCKS, "tests")
        self.half = WorkerHalf(self.mover, facts, 0, OwnerName(directory, ""), MappedPool(directory))
        self.batches: dict[int, Copied] = {}
        self.pool = PoolMap(directory / POOL, grants=True)
        self.slots = self.pool.arena(self.arena)
        self.closed = False
        first = RANK_REPORT.decode(self.half.take_report())
        assert first.facts == facts
        assert self.half.take_report() == b""

    def attach(self, **fields: object) -> AttachPool:
        said = {"owner": "e-1", "pool_bytes": POOL_BYTES, "arena": self.arena, "offsets": [0], **fields}
        return AttachPool(**said)  # type: ignore[arg-type]

    def order(self, *orders: Order) -> None:
        self.half.take_orders(STEP_ORDERS.encode(list(orders)))

    def copied(self, batch: int) -> Copied:
        """Wait for the end of a batch, and return what the scheduler half learns of it."""
        while batch not in self.batches:
            if packed := self.half.take_report():
                self.batches.update((each.batch, each) for each in RANK_REPORT.decode(packed).ended)
            else:
                assert readable(self.mover, LIMIT_S), "the batch does not end"
        return self.batches[batch]

    def generation(self, slot: int) -> int:
        return self.slots.generation(slot)

    def fill(self, slot: int) -> int:
        """Write a block into the pool's slot. Return its checksum."""
        with self.slots.slot(slot) as memory:
            memory[:BLOCK_BYTES] = bytes([slot + 1]) * BLOCK_BYTES
            return xxh3_64_intdigest(memory[:BLOCK_BYTES])

    def ends(self) -> tuple[set[str], set[int]]:
        """Return the requests that vLLM gets as loaded now, and the invalid blocks."""
        return self.half.finished_loads(), self.half.take_invalid()

    def nothing_left(self) -> None:
        """Assert that no load waits, and that the next one ends by itself."""
        assert self.ends() == (set(), set())
        self.order(EndLoad("probe", [1, 2, 3, 4], []))
        assert self.ends() == ({"probe"}, set())

    def lock_is_free(self) -> bool:
        """Whether nothing holds the lock any longer, when its maker has let go."""
        self.lock.close()
        with (self.directory / OWNERS / "e-1").open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    def close(self) -> None:
        if not self.closed:
            self.half.close()
        self.closed = True
        self.lock.close()
        self.slots.close()
        self.pool.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()


def test_a_good_load_ends_with_its_last_copy_and_has_no_invalid_blocks(rig: Rig) -> None:
    for slot in (5, 6):
        rig.fill(slot)
    rig.order(rig.attach(), LoadBlocks(1, [Copy(slot, slot - 4, rig.generation(slot)) for slot in (5, 6)]))
    assert rig.copied(1).good == [True, True]
    assert rig.ends() == (set(), set()), "the scheduler half has not said that no more copies come"
    rig.order(EndLoad("r", [1, 2], []))
    assert rig.ends() == ({"r"}, set())
    assert [rig.memory[block, 0] for block in (1, 2)] == [6, 7]
    rig.nothing_left()


def test_a_step_that_computes_nothing_waits_for_a_load_that_is_about_to_end(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_half, "END_S", LIMIT_S)
    copies = [Copy(slot, slot, rig.generation(slot)) for slot in (5, 6)]
    rig.copier.goes_on.clear()
    rig.order(rig.attach(), LoadBlocks(1, copies), EndLoad("r", [5, 6], []))
    assert rig.ends() == (set(), set())
    rig.order(AwaitLoads())

    def waits(*args: Any) -> bool:
        rig.copier.goes_on.set()
        return readable(*args)

    monkeypatch.setattr(worker_half, "readable", waits)
    assert rig.ends() == ({"r"}, set())
    rig.nothing_left()


def test_no_step_waits_for_a_load_that_is_not_about_to_end_or_for_none(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.copier.goes_on.clear()
    slots = range(1, FEW_BATCHES + 2)
    loads = [LoadBlocks(slot, [Copy(slot, slot, rig.generation(slot))]) for slot in slots]
    with monkeypatch.context() as patched:
        patched.setattr(worker_half, "readable", lambda *_: pytest.fail("the step waits"))
        rig.order(rig.attach(), AwaitLoads())
        assert rig.ends() == (set(), set())
        rig.order(*loads, EndLoad("r", list(slots), []), AwaitLoads())
        assert rig.ends() == (set(), set())
        rig.order()
        assert rig.ends() == (set(), set())
    rig.copier.goes_on.set()
    for slot in slots:
        rig.copied(slot)
    assert rig.ends() == ({"r"}, set())


def test_blocks_for_which_no_copy_was_ordered_are_invalid(rig: Rig) -> None:
    rig.fill(5)
    rig.order(rig.attach(), LoadBlocks(1, [Copy(5, 1, rig.generation(5))]), EndLoad("r", [1, 2, 3], [2, 3]))
    rig.copied(1)
    assert rig.ends() == ({"r"}, {2, 3})
    rig.nothing_left()


@pytest.mark.parametrize(
    ("damage", "trouble"),
    [
        ("missing", "No such file"),
        ("size", "not the"),
        ("arena", "does not lie in a pool"),
        ("owner", "No such file"),
        ("small", "too small"),
    ],
)
def test_a_pool_that_cannot_be_used_fails_each_copy_and_names_all_blocks(rig: Rig, damage: str, trouble: str) -> None:
    wrong = rig.attach()
    match damage:
        case "missing":
            (rig.directory / POOL).rename(rig.directory / "elsewhere")
        case "size":
            wrong = rig.attach(pool_bytes=POOL_BYTES * 2)
        case "arena":
            wrong = rig.attach(arena=Arena(rig.arena.offset, BLOCK_BYTES, POOL_BYTES, rig.arena.generations))
        case "owner":
            wrong = rig.attach(owner="e-2")
        case _:
            wrong = rig.attach(arena=Arena(rig.arena.offset, PAGE_BYTES, 2, rig.arena.generations))
    rig.order(
        wrong,
        LoadBlocks(1, [Copy(5, 1), Copy(6, 2)]),
        SaveBlocks(2, [Copy(7, 3)], LATER_S),
        CancelOrder(2),
        EndLoad("r", [1, 2], []),
    )
    for batch, copies in ((1, 2), (2, 1)):
        ended = rig.copied(batch)
        assert ended.good == [False] * copies
        assert ended.failed.startswith("rank 0: ")
        assert trouble in ended.failed
        assert ended.moved_bytes == 0
    assert rig.ends() == ({"r"}, {1, 2})
    rig.nothing_left()
    rig.order(DetachPool())  # what follows from the failure


def test_a_part_that_does_not_lie_within_its_slot_is_refused(rig: Rig) -> None:
    """Else the last rank writes into the first one's part of the next slot, and beyond the pool after the last slot."""
    rig.order(
        rig.attach(offsets=[PAGE_BYTES]), SaveBlocks(1, [Copy(rig.arena.slots - 2, 1)], LATER_S), EndLoad("r", [], [])
    )
    assert "too small" in rig.copied(1).failed
    with rig.slots.slot(rig.arena.slots - 1) as memory:
        assert not any(memory)


def test_after_a_pool_that_could_not_be_used_a_good_one_is(rig: Rig) -> None:
    rig.order(rig.attach(pool_bytes=1), LoadBlocks(1, [Copy(5, 1)]), EndLoad("r1", [1], []))
    assert rig.copied(1).failed
    assert rig.ends() == ({"r1"}, {1})
    rig.fill(5)
    rig.order(DetachPool(), rig.attach(), LoadBlocks(2, [Copy(5, 1, rig.generation(5))]), EndLoad("r2", [1], []))
    assert rig.copied(2).failed == ""
    assert rig.ends() == ({"r2"}, set())


def test_a_copy_without_a_pool_fails(rig: Rig) -> None:
    rig.order(LoadBlocks(1, [Copy(5, 1)]), EndLoad("r", [1], []))
    assert rig.copied(1) == Copied(1, [False], 0, 0.0, "no pool is attached")
    assert rig.ends() == ({"r"}, {1})
    rig.nothing_left()


@pytest.mark.parametrize("beyond", [0, 1000, -LAST])
def test_an_order_for_a_slot_beyond_the_pool_fails_and_the_next_batch_is_copied(rig: Rig, beyond: int) -> None:
    slot = rig.arena.slots + beyond if beyond >= 0 else -1
    rig.fill(5)
    good = Copy(5, 1, rig.generation(5))
    rig.order(rig.attach(), LoadBlocks(1, [good, Copy(slot, 2)]), EndLoad("r1", [1, 2], []))
    ended = rig.copied(1)
    assert "there is no slot" in ended.failed
    assert ended.good == [False, False]
    assert rig.ends() == ({"r1"}, {1, 2})
    rig.order(SaveBlocks(2, [Copy(slot, 2)], LATER_S))
    assert "there is no slot" in rig.copied(2).failed
    rig.order(LoadBlocks(3, [good]), EndLoad("r3", [1], []))
    assert rig.copied(3).failed == ""
    assert rig.ends() == ({"r3"}, set())
    rig.nothing_left()


def test_an_order_for_a_block_beyond_the_devices_fails(rig: Rig) -> None:
    rig.order(rig.attach(), LoadBlocks(1, [Copy(5, BLOCKS)]), EndLoad("r", [BLOCKS], []))
    assert rig.copied(1).failed
    assert rig.ends() == ({"r"}, {BLOCKS})


def test_a_block_with_another_checksum_is_invalid_and_reported_as_damaged(rig: Rig) -> None:
    checksums = [rig.fill(slot) for slot in (5, 6, 7)]
    with rig.slots.slot(6) as memory:
        memory[9] ^= 1
    copies = [
        Copy(slot, slot - 4, rig.generation(slot), checksum)
        for slot, checksum in zip((5, 6, 7), checksums, strict=True)
    ]
    rig.order(rig.attach(), LoadBlocks(1, copies), EndLoad("r", [1, 2, 3], []))
    ended = rig.copied(1)
    assert (ended.good, ended.damaged, ended.failed) == ([True, False, True], [1], "")
    assert rig.ends() == ({"r"}, {2})
    rig.nothing_left()


def test_a_slot_that_was_granted_again_meanwhile_is_invalid(rig: Rig) -> None:
    rig.fill(5)
    rig.order(rig.attach(), LoadBlocks(1, [Copy(5, 1, rig.generation(5) + 2)]), EndLoad("r", [1], []))
    ended = rig.copied(1)
    assert (ended.good, ended.damaged) == ([False], [])
    assert rig.ends() == ({"r"}, {1})


def test_a_lost_device_fails_loads_and_saves_and_they_work_again_after_it(rig: Rig) -> None:
    rig.fill(5)
    good = Copy(5, 1, rig.generation(5))
    rig.copier.broken = True
    rig.order(
        rig.attach(),
        LoadBlocks(1, [good]),
        SaveBlocks(2, [Copy(8, 3), Copy(9, 4)], LATER_S),
        EndLoad("r", [1, 2], [2]),
    )
    assert rig.copied(1).failed == "BrokenDevice: the device is lost"
    assert rig.copied(2).good == [False, False]
    assert rig.ends() == ({"r"}, {1, 2})
    rig.nothing_left()
    rig.copier.broken = False
    rig.order(LoadBlocks(3, [good]), EndLoad("r", [1], []))
    assert rig.copied(3).good == [True]
    assert rig.ends() == ({"r"}, set())


def test_bad_blocks_of_one_load_are_not_those_of_another(rig: Rig) -> None:
    rig.fill(5)
    rig.order(rig.attach(), LoadBlocks(1, [Copy(rig.arena.slots, 1)]), LoadBlocks(2, [Copy(5, 2, rig.generation(5))]))
    rig.copied(1)
    rig.copied(2)
    rig.order(EndLoad("good", [2], []))
    assert rig.ends() == ({"good"}, set())
    rig.order(EndLoad("bad", [1], []))
    assert rig.ends() == ({"bad"}, {1})
    rig.nothing_left()


def test_an_end_leaves_no_lock_and_no_mapping(rig: Rig) -> None:
    rig.fill(5)
    rig.order(rig.attach(), LoadBlocks(1, [Copy(5, 1, rig.generation(5))]))
    rig.copied(1)
    assert mapped(rig.directory) == 1 + MAPPINGS_OF_THE_RIG
    rig.half.close()
    rig.closed = True
    assert mapped(rig.directory) == MAPPINGS_OF_THE_RIG
    assert rig.lock_is_free()


def test_a_rank_keeps_the_engines_lock_until_it_ends(rig: Rig) -> None:
    rig.order(rig.attach())
    assert not rig.lock_is_free()
    rig.order(DetachPool())
    assert not rig.lock_is_free(), "another attach may follow"
    rig.half.close()
    rig.closed = True
    assert rig.lock_is_free()


def test_a_pool_that_failed_leaves_no_lock_after_the_end(rig: Rig) -> None:
    rig.order(rig.attach(pool_bytes=1))
    rig.half.close()
    rig.closed = True
    assert rig.lock_is_free()


MAPPINGS_OF_THE_RIG = 1


def mapped(directory: Path) -> int:
    """Return how many times the slots of the pool are mapped by this process."""
    path = str(directory / POOL)
    sizes = [line.split()[2] for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(path)]
    return sum(int(size, 16) >= PoolMap(directory / POOL).geometry.slots_at for size in sizes)
