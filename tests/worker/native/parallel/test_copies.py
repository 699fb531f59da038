"""Blocks that several ranks copy, each its heads: the twin in host memory, over a real pool and real connections."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from random import Random

import numpy as np
import pytest

from services.worker.contracts.mover import Copy
from services.worker.contracts.runner import AttachedPool
from services.worker.kv_connector.pool_attachment import OwnerName
from services.worker.native.parallel.copies import CopyEnds, GroupCopier, RankCopies
from services.worker.native.parallel.peers import RankLost
from services.worker.transfer.block_shape import BlockShape, SlotPart
from services.worker.transfer.copier import Pending
from services.worker.transfer.errors import DeviceFailed
from services.worker.transfer.host_copier import HostCopier
from shared.pool.format import PoolGeometry, PoolUnfit
from shared.pool.lock import OWNERS, POOL
from shared.pool.map import ArenaMap, PoolMap
from tests.integration.stack import eventually
from tests.worker.pool_file import make_pool

ROWS, HEAD_BYTES, HEADS = 12, 40, 4
"""Rows of a block, of `HEADS` heads each."""
BLOCK_BYTES = ROWS * HEADS * HEAD_BYTES
SLOTS = 16
LIMIT_S = 60.0
SIZE_BYTES = 4 << 20
ARENA = PoolGeometry.of(SIZE_BYTES).arena(0, 1, BLOCK_BYTES)


class Rank:
    """The device of one rank: its heads of each block, in host memory."""

    def __init__(self, heads: slice) -> None:
        self.heads = heads
        own = heads.stop - heads.start
        self.memory = np.zeros((SLOTS, ROWS, own * HEAD_BYTES), np.uint8)
        shape = BlockShape.of_heads(self.memory.ctypes.data, ROWS, own * HEAD_BYTES, SLOTS)
        part = SlotPart(heads.start * HEAD_BYTES, HEADS * HEAD_BYTES, BLOCK_BYTES)
        self.copier = HostCopier(shape, self.memory, part)

    def part(self, block: bytes) -> bytes:
        """Return this rank's heads of a whole block."""
        rows = np.frombuffer(block, np.uint8).reshape(ROWS, HEADS * HEAD_BYTES)
        return rows[:, self.heads.start * HEAD_BYTES : self.heads.stop * HEAD_BYTES].tobytes()


class FailingCopier(HostCopier):
    """Fails as a GPU does that is lost."""

    def begin(self, copies: Sequence[Copy], *, loads: bool) -> Pending:  # type: ignore[override]
        raise DeviceFailed("cudaErrorECCUncorrectable: it is lost")


class GroupRig:
    """A group of ranks in threads, and a pool."""

    def __init__(self, directory: Path, opened: ExitStack, parts: Sequence[slice], stores: Sequence[bool]) -> None:
        self.directory = directory
        directory.chmod(0o700)
        (directory / OWNERS).mkdir(mode=0o700)
        make_pool(directory / POOL, SIZE_BYTES)
        self.name = OwnerName(directory, "w1", shared=True)
        self.owner = self.name.hold()
        opened.callback(self.name.release, delete=True)
        pool = PoolMap(directory / POOL)
        opened.callback(pool.close)
        self.file = pool.about.st_dev, pool.about.st_ino
        self.slots: ArenaMap = pool.arena(ARENA)
        opened.callback(self.slots.close)
        self.ranks = [Rank(heads) for heads in parts]
        pairs = [CopyEnds.pair() for _ in parts[1:]]
        self.ends = [own for own, _ in pairs]
        self.theirs = [theirs for _, theirs in pairs]
        self.numbers = [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) for _ in parts[1:]]
        self.copies = [
            RankCopies(number, rank.copier, theirs, self.numbers[number - 1], stores=saves)
            for number, (rank, theirs, saves) in enumerate(zip(self.ranks[1:], self.theirs, stores[1:], strict=True), 1)
        ]
        self.ended: list[int] = []
        self.copier = GroupCopier(
            self.ranks[0].copier, BLOCK_BYTES, self.ends, self.place, self.ended.append, limit_s=LIMIT_S
        )
        opened.callback(self.hang_up)

    def place(self) -> AttachedPool:
        return AttachedPool(str(self.directory), self.owner, self.file)

    def in_pool(self, slot: int) -> bytes:
        with self.slots.slot(slot) as memory:
            return bytes(memory[:BLOCK_BYTES])

    def hang_up(self) -> None:
        """End the ranks, as rank 0's end does."""
        for ends in self.ends:
            ends.close()
        for copies in self.copies:
            copies.close()
        for number in self.numbers:
            with suppress(OSError):  # the lock had this number
                os.close(number)


@contextmanager
def rigged(
    directory: Path, parts: Sequence[slice], stores: Sequence[bool] = (), *, attached: bool = True
) -> Iterator[GroupRig]:
    with ExitStack() as opened:
        rig = GroupRig(directory, opened, parts, stores or [True] * len(parts))
        if attached:
            rig.copier.attach(rig.slots)
        yield rig
        rig.copier.detach()


HALVES = (slice(0, 2), slice(2, 4))
PARTS = {
    "halves": HALVES,
    "quarters": tuple(slice(head, head + 1) for head in range(4)),
    "one": (slice(0, 4),),
}


def whole(seed: int) -> bytes:
    return Random(seed).randbytes(BLOCK_BYTES)


@pytest.mark.parametrize("parts", PARTS)
def test_a_block_of_all_ranks_is_whole_in_the_pool_and_back(tmp_path: Path, parts: str) -> None:
    with rigged(tmp_path, PARTS[parts]) as rig:
        assert rig.copier.shape.block_bytes == BLOCK_BYTES
        blocks = [whole(seed) for seed in range(6)]
        for rank in rig.ranks:
            for slot, block in enumerate(blocks):
                rank.memory[slot] = np.frombuffer(rank.part(block), np.uint8).reshape(ROWS, -1)
        pendings = [rig.copier.begin([Copy(7 + slot, slot)], loads=False) for slot in range(6)]
        for pending in pendings:
            pending.wait()
        assert [rig.in_pool(7 + slot) for slot in range(6)] == blocks
        loads = [Copy(7 + slot, 15 - slot) for slot in range(6)]
        rig.copier.begin(loads, loads=True).wait()
        for rank in rig.ranks:
            assert [rank.memory[15 - slot].tobytes() for slot in range(6)] == [rank.part(block) for block in blocks]
        assert rig.copier.differs(loads) == [False] * 6


def test_heads_that_two_ranks_have_are_saved_by_one_and_loaded_by_both(tmp_path: Path) -> None:
    parts = (slice(0, 2), slice(0, 2), slice(2, 4), slice(2, 4))
    with rigged(tmp_path, parts, (True, False, True, False)) as rig:
        for number, rank in enumerate(rig.ranks):
            rank.memory[3] = number
        rig.copier.begin([Copy(0, 3)], loads=False).wait()
        rows = np.frombuffer(rig.in_pool(0), np.uint8).reshape(ROWS, HEADS * HEAD_BYTES)
        assert (rows[:, : 2 * HEAD_BYTES] == 0).all()
        assert (rows[:, 2 * HEAD_BYTES :] == 2).all()
        rig.copier.begin([Copy(0, 4)], loads=True).wait()
        assert [int(rank.memory[4].max()) for rank in rig.ranks] == [0, 0, 2, 2]


def test_a_byte_that_differs_at_any_rank_makes_the_block_differ(tmp_path: Path) -> None:
    with rigged(tmp_path, HALVES) as rig:
        loads = [Copy(slot, slot) for slot in range(3)]
        rig.copier.begin(loads, loads=True).wait()
        rig.ranks[1].memory[1, -1, -1] ^= 1
        assert rig.copier.differs(loads) == [False, True, False]
        rig.ranks[0].memory[2, 0, 0] ^= 1
        assert rig.copier.differs(loads) == [False, True, True]


def test_a_rank_that_fails_fails_the_group_with_its_number_after_the_others_have_ended(tmp_path: Path) -> None:
    with rigged(tmp_path, PARTS["quarters"]) as rig:
        rank = rig.ranks[2]
        rig.copies[1]._copier = FailingCopier(rank.copier.shape, rank.memory)
        for loads in (False, True):
            pending = rig.copier.begin([Copy(0, 0)], loads=loads)
            with pytest.raises(DeviceFailed, match=r"^rank 2: cudaErrorECCUncorrectable: it is lost$"):
                pending.wait()
        rig.copies[1]._copier = rank.copier
        rig.copier.begin([Copy(0, 0)], loads=False).wait()


def test_a_rank_that_has_ended_fails_its_copies_once_its_process_is_gone(tmp_path: Path) -> None:
    with rigged(tmp_path, HALVES) as rig:
        rig.theirs[0].saves.shutdown(2)
        pending = rig.copier.begin([Copy(0, 0)], loads=False)
        with pytest.raises(DeviceFailed, match=r"^rank 1 has ended$"):
            pending.wait()
        assert rig.ended == [1]


def test_a_rank_that_stands_still_is_not_waited_for_when_the_pool_is_attached(tmp_path: Path) -> None:
    with rigged(tmp_path, HALVES, attached=False) as rig:
        still, silent = CopyEnds.pair()
        copier = GroupCopier(rig.ranks[0].copier, BLOCK_BYTES, [still], rig.place, rig.ended.append, limit_s=0.1)
        with pytest.raises(RankLost, match=r"^tensor_parallel: rank 1 did not answer in 0\.1 s: it stands still$"):
            copier.attach(rig.slots)
        still.close()
        silent.close()


def is_free(path: Path) -> bool:
    """Return whether a kvbm finds that the owner of this lock is gone."""
    with path.open("r+b") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def test_ranks_hold_the_engines_lock_until_the_last_of_them_is_gone(tmp_path: Path) -> None:
    path = tmp_path / OWNERS
    with ExitStack() as opened:
        rig = GroupRig(tmp_path, opened, HALVES, [True, True])
        path /= rig.owner
        rig.copier.attach(rig.slots)
        rig.name.release()  # as if rank 0 had been killed
        assert not is_free(path)
        rig.copier.detach()
        assert not is_free(path)
    assert is_free(path)


@pytest.mark.parametrize("wrong", ["owner", "file", "arena"])
def test_a_rank_that_cannot_map_what_the_engine_has_mapped_says_so(tmp_path: Path, wrong: str) -> None:
    with rigged(tmp_path, HALVES, attached=False) as rig:
        place: Callable[[], AttachedPool] = rig.place
        right = rig.copier
        if wrong == "owner":
            rig.copier._place = lambda: AttachedPool(str(tmp_path), "w9-00", rig.file)
            said = "rank 1: .*w9-00: No such file or directory"
        elif wrong == "file":
            rig.copier._place = lambda: AttachedPool(str(tmp_path), rig.owner, (0, 0))
            said = "rank 1: .*: another pool has taken the place of the engine's"
        else:
            (tmp_path / POOL).unlink()
            said = "rank 1: .*pool: No such file or directory"
        with pytest.raises(PoolUnfit, match=f"^{said}$"):
            right.attach(rig.slots)
        if wrong != "arena":
            right._place = place
            right.attach(rig.slots)
            right.begin([Copy(0, 0)], loads=False).wait()
            right.detach()


def test_ranks_prepare_their_slots_while_nothing_is_copied(tmp_path: Path) -> None:
    with rigged(tmp_path, HALVES) as rig:
        while rig.copier.prepare():
            pass
        rank = rig.ranks[1]
        eventually(lambda: not rank.copier._untouched, limit_s=LIMIT_S, what="the rank's pieces are touched")
