from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from services.worker.contracts.mover import Copy
from services.worker.transfer import host_copier
from services.worker.transfer.block_shape import BlockShape
from services.worker.transfer.host_copier import GROUP_BYTES, HostCopier
from shared.pool.format import PoolGeometry
from shared.pool.map import ArenaMap, PoolMap
from tests.kvbm.small_tmpfs import small_tmpfs
from tests.worker.pool_file import make_pool
from tests.worker.transfer.devices import BLOCK_BYTES, FRAGMENT_BYTES, HostDevice

SIZE_BYTES = 4 << 20
ARENA = PoolGeometry.of(SIZE_BYTES).arena(0, 1, BLOCK_BYTES)


@pytest.fixture
def slots(tmp_path: Path) -> Iterator[ArenaMap]:
    make_pool(tmp_path / "pool", SIZE_BYTES)
    pool = PoolMap(tmp_path / "pool")
    slots = pool.arena(ARENA)
    yield slots
    slots.close()
    pool.close()


@pytest.mark.parametrize("at", [0, FRAGMENT_BYTES - 1, FRAGMENT_BYTES, BLOCK_BYTES - 1])
def test_a_block_with_one_other_byte_differs_from_the_pools(slots: ArenaMap, at: int) -> None:
    device = HostDevice()
    block = bytearray(Random(1).randbytes(BLOCK_BYTES))
    device.write(2, bytes(block))
    device.copier.attach(slots)
    device.copier.begin([Copy(7, 2), Copy(8, 2)], loads=False).wait()
    block[at] ^= 1
    device.write(3, bytes(block))
    assert device.copier.differs([Copy(7, 2), Copy(8, 3), Copy(8, 2)]) == [False, True, False]
    device.copier.detach()


def test_bytes_after_a_block_in_its_slot_are_not_compared(slots: ArenaMap) -> None:
    device = HostDevice()
    device.copier.attach(slots)
    with slots.slot(7) as memory:
        memory[BLOCK_BYTES] = 1
    assert device.copier.differs([Copy(7, 2)]) == [False]
    device.copier.detach()


def test_copies_report_their_path(slots: ArenaMap) -> None:
    device = HostDevice()
    device.copier.attach(slots)
    pending = device.copier.begin([Copy(7, 2), Copy(8, 2)], loads=False)
    assert (pending.paths, pending.fallbacks) == ({"memmove": 2}, {})
    device.copier.detach()


@pytest.mark.parametrize(("block_bytes", "blocks"), [(GROUP_BYTES + 1, 1), (GROUP_BYTES // 2, 2), (1, GROUP_BYTES)])
def test_a_group_is_small_but_at_least_a_block(block_bytes: int, blocks: int) -> None:
    assert HostCopier(BlockShape.contiguous(0, block_bytes, 1), None).group_blocks == blocks


def test_preparing_touches_all_of_the_pool_piece_by_piece(slots: ArenaMap, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copier, "PIECE_BYTES", 1 << 20)
    copier = HostDevice().copier
    assert not copier.prepare()
    before = _resident_bytes()
    copier.attach(slots)
    pieces = 1
    while copier.prepare():
        pieces += 1
    assert pieces == -(-ARENA.size_bytes // (1 << 20))
    assert _resident_bytes() - before > 0.9 * ARENA.size_bytes
    copier.detach()


def test_a_pool_that_cannot_be_touched_is_logged_once_and_can_be_detached(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_tmpfs(tmp_path / "small") as directory:  # a hole on a full file system
        geometry = make_pool(directory / "pool", 8 << 20)
        pool = PoolMap(directory / "pool")
        slots = pool.arena(geometry.arena(0, 1, BLOCK_BYTES))
        copier = HostDevice().copier
        copier.attach(slots)
        assert not copier.prepare()
        assert not copier.prepare()
        copier.detach()
        slots.close()  # BufferError, were it still in use
        pool.close()
    [record] = caplog.records
    assert record.message == (
        "the pool's pages cannot be touched beforehand, so copies are slower: [Errno 14] Bad address"
    )


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
