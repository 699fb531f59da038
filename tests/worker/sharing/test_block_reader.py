"""BlockReader and BlockSharer of two engines in one process, over real sockets and memory."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from services.worker.contracts.mover import Copied, Copy
from services.worker.contracts.sharing import SharedSlots
from services.worker.sharing import block_reader as block_reader
from services.worker.sharing import packets
from services.worker.sharing.block_reader import MOST_SHARERS, SILENT_S, BlockReader
from services.worker.sharing.block_sharer import OPEN_RETRY_S, WATCH_INTERVAL_S, BlockSharer
from services.worker.sharing.host_pages import HostMapper, HostPages, SharedHostCopier
from services.worker.sharing.memory import SharableMemory
from services.worker.sharing.messages import SharingIdentity
from services.worker.sharing.shares import SharingLimits
from services.worker.transfer.block_shape import BlockShape
from services.worker.transfer.errors import DeviceFailed
from shared.pool.lock import HeldLock, hold_owner
from tests.resource_limits import no_descriptor_left

SLOTS, BLOCK_BYTES = 16, 4096
IDENTITY = SharingIdentity("a-model", "0123456789abcdef", "bfloat16", kind="host")
LIMIT_S = 60.0
OWNER = "decode-00000000"


def key_of(slot: int) -> bytes:
    return slot.to_bytes(16, "little")


class Memory:
    """One engine's blocks in host memory."""

    def __init__(self, fill: int) -> None:
        self.pages = HostPages(SLOTS * BLOCK_BYTES)
        self.shared: HostPages | None = self.pages
        """What others can map."""
        self.blocks = self.pages.array.reshape(SLOTS, BLOCK_BYTES)
        self.blocks[:] = np.arange(SLOTS, dtype=np.uint8)[:, None] + fill

    def seen(self) -> SharableMemory:
        shape = BlockShape.contiguous(self.pages.address, BLOCK_BYTES, SLOTS)
        return SharableMemory("host", shape, self.shared, HostMapper(), lambda theirs: SharedHostCopier(theirs, shape))


class LendingEngine:
    """An engine that shares the first `computed` of its blocks, under the name of a worker."""

    def __init__(self, directory: Path, worker: str, identity: SharingIdentity = IDENTITY) -> None:
        self.owner = f"{worker}-11111111"
        self.lock = hold_owner(directory, self.owner)
        self.memory = Memory(100)
        self.computed = SLOTS
        self.shared: list[int] = []
        self.sharer = BlockSharer(directory, self.memory.seen, identity, self, SharingLimits(blocks=SLOTS))

    def turn(self) -> None:
        self.sharer.turn(self.owner, time.monotonic())

    def share(self, keys: Sequence[bytes]) -> list[int]:
        slots = [int.from_bytes(key, "little") for key in keys]
        there = [slot for slot in slots if slot < self.computed]
        self.shared += there
        return there

    def take_back(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.shared.remove(slot)

    def close(self) -> None:
        self.sharer.close()
        self.lock.close(delete=True)
        self.memory.pages.close()


class Rig:
    """A reader, and engines that share."""

    def __init__(self, directory: Path) -> None:
        (directory / "owners").mkdir(mode=0o700)
        directory.chmod(0o700)
        self.directory = directory
        self.lock: HeldLock = hold_owner(directory, OWNER)
        self.memory = Memory(0)
        self.ahead_s = 0.0
        """How far the reader's clock is ahead."""
        self.share_reader = BlockReader(directory, self.memory.seen, IDENTITY, lambda: time.monotonic() + self.ahead_s)
        self.engines: list[LendingEngine] = []
        self.answers: list[SharedSlots] = []
        self.copied: list[Copied] = []

    def engine(self, worker: str = "prefill", identity: SharingIdentity = IDENTITY) -> LendingEngine:
        self.engines.append(LendingEngine(self.directory, worker, identity))
        self.engines[-1].turn()
        return self.engines[-1]

    def copy_with(self, copier: Callable[[BlockShape], SharedHostCopier]) -> None:
        """Begin again with a reader that makes its copiers so."""
        memory = replace(self.memory.seen(), copier=copier)
        self.share_reader.close()
        self.share_reader = BlockReader(self.directory, lambda: memory, IDENTITY, time.monotonic)

    def ask(self, number: int, slots: Sequence[int], worker: str = "prefill") -> None:
        self.share_reader.ask(number, OWNER, worker, [key_of(slot) for slot in slots])

    def until(self, done: Callable[[], bool]) -> None:
        until_s = time.monotonic() + LIMIT_S
        while not done():
            assert time.monotonic() < until_s, (self.answers, self.copied)
            for engine in self.engines:
                engine.turn()
            self.answers += self.share_reader.turn()
            self.copied += self.share_reader.ended()
            select.select([self.share_reader], [], [], 0.01)

    def close(self) -> None:
        self.share_reader.close()
        for engine in self.engines:
            engine.close()
        self.lock.close(delete=True)
        self.memory.pages.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with closing(Rig(tmp_path)) as one:
        yield one


def test_blocks_are_shared_as_they_are_computed_copied_and_returned(rig: Rig) -> None:
    engine = rig.engine()
    engine.computed = 2
    rig.ask(1, [0, 1, 2, 3])
    rig.until(lambda: bool(rig.answers))
    assert rig.answers == [SharedSlots(1, [0, 1], last=False)]
    assert engine.sharer.is_shared(key_of(3))
    engine.computed = 4
    rig.until(lambda: len(rig.answers) == 2)
    assert rig.answers[1] == SharedSlots(1, [2, 3], last=True)
    rig.share_reader.load(7, 1, [Copy(0, 9), Copy(3, 5)])
    rig.until(lambda: bool(rig.copied))
    [copied] = rig.copied
    assert (copied.batch, copied.good, copied.paths) == (7, [True, True], {"peer_memmove": 2})
    assert rig.memory.blocks[9, 0] == 100
    assert rig.memory.blocks[5, 0] == 103
    assert engine.shared == [0, 1, 2, 3]
    rig.share_reader.release(1)
    rig.until(lambda: not engine.shared)


def test_an_engine_that_had_no_file_descriptor_left_shares_as_soon_as_it_has_one(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    engine = rig.engine()
    engine.sharer.close()  # it sleeps, and wakes
    with no_descriptor_left(), caplog.at_level("INFO"):
        for tries in range(3):
            now_s = 100.0 + tries * OPEN_RETRY_S
            engine.sharer.turn(engine.owner, now_s)
            assert (engine.sharer.failing, engine.sharer.failures) == (True, tries + 1)
            assert engine.sharer.wait_until_s == now_s + OPEN_RETRY_S, "an idle engine sleeps until then"
            engine.sharer.turn(engine.owner, now_s)
            assert engine.sharer.failures == tries + 1, "not at each turn"
    assert [record.message for record in caplog.records if "shares" in record.message] == [
        "this engine shares no blocks, which decode workers get from the kvbm only; it tries again every 1 s:"
        f" [Errno 24] Too many open files: '{rig.directory / 'lenders'}'"
    ]
    with caplog.at_level("INFO"):
        engine.sharer.turn(engine.owner, 200.0)
    assert caplog.records[-1].message == "this engine shares blocks again"
    assert (engine.sharer.failing, engine.sharer.failures) == (False, 3)
    assert engine.sharer.wait_until_s is None
    rig.ask(1, [0])
    rig.until(lambda: bool(rig.answers))
    assert rig.answers == [SharedSlots(1, [0], last=True)]


def test_an_engine_that_sleeps_does_not_try_to_share(rig: Rig) -> None:
    engine = rig.engine()
    engine.sharer.close()
    with no_descriptor_left():
        engine.sharer.turn(engine.owner, 100.0)
    engine.sharer.close()
    assert not engine.sharer.failing
    assert engine.sharer.wait_until_s is None


def test_an_engine_whose_memory_cannot_be_mapped_shares_nothing_until_it_can(rig: Rig) -> None:
    engine = rig.engine()
    engine.sharer.close()
    whole = engine.memory.pages
    engine.memory.shared = None
    engine.turn()
    rig.ask(1, [0])
    rig.until(lambda: bool(rig.answers))
    assert rig.answers == [SharedSlots(1, [], last=True)]
    engine.sharer.close()  # it sleeps, and wakes
    engine.memory.shared = whole
    engine.turn()
    rig.ask(2, [0])
    rig.until(lambda: len(rig.answers) == 2)
    assert rig.answers[1] == SharedSlots(2, [0], last=True)


def test_without_a_sharer_of_that_worker_the_answer_is_that_nothing_is_shared(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.engine("another")
    rig.ask(1, [0])
    assert rig.share_reader.turn() == [SharedSlots(1, [], last=True)]
    assert not caplog.records, "a worker of another machine is no fault"
    (rig.directory / packets.SHARERS / "prefill-22222222").touch()
    rig.ask(2, [0])
    assert rig.share_reader.turn() == [SharedSlots(2, [], last=True)]
    assert "prefill-22222222 shares no blocks" in caplog.text


def test_an_engine_that_sleeps_hears_that_nothing_is_shared(rig: Rig) -> None:
    rig.ask(1, [0])
    assert select.select([rig.share_reader], [], [], 0.0)[0], "nothing else would wake it"
    assert rig.share_reader.turn() == [SharedSlots(1, [], last=True)]
    rig.share_reader.load(7, 1, [Copy(0, 9)])
    assert select.select([rig.share_reader], [], [], 0.0)[0]
    assert rig.share_reader.turn() == []
    assert [copied.good for copied in rig.share_reader.ended()] == [[False]]
    assert not select.select([rig.share_reader], [], [], 0.0)[0], "it would never sleep"


def test_an_engine_whose_directory_is_not_its_own_shares_nothing_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "owners").mkdir(mode=0o700)
    tmp_path.chmod(0o700)
    with closing(LendingEngine(tmp_path, "prefill")) as engine:
        tmp_path.chmod(0o777)
        engine.turn()
        assert packets.sharers_of(tmp_path, "prefill") == []


def test_a_sharer_of_other_blocks_shares_nothing_and_is_not_asked_again_soon(rig: Rig) -> None:
    engine = rig.engine(identity=SharingIdentity("a-model", "fedcba9876543210", "bfloat16", kind="host"))
    rig.ask(1, [0])
    rig.until(lambda: bool(rig.answers))
    assert rig.answers == [SharedSlots(1, [], last=True)]
    rig.ask(2, [0])
    assert rig.share_reader.turn() == [SharedSlots(2, [], last=True)]
    assert engine.shared == []


def test_a_device_without_room_for_a_copier_reads_nothing_and_its_engine_goes_on(rig: Rig) -> None:
    def no_copier(_theirs: BlockShape) -> SharedHostCopier:
        raise DeviceFailed("cudaErrorMemoryAllocation: out of memory")

    engine = rig.engine()
    rig.copy_with(no_copier)
    rig.ask(1, [0])
    rig.until(lambda: bool(rig.answers))
    assert rig.answers == [SharedSlots(1, [], last=True)]
    rig.share_reader.release(1)
    rig.until(lambda: engine.sharer.wait_until_s is None)
    rig.ask(2, [0])
    assert rig.share_reader.turn() == [SharedSlots(2, [], last=True)], "it is not asked again soon"
    assert engine.shared == []


def test_without_a_file_descriptor_for_its_copies_an_engine_reads_nothing_and_goes_on(rig: Rig) -> None:
    with ExitStack() as opened:

        def last_descriptor(theirs: BlockShape) -> SharedHostCopier:
            opened.enter_context(no_descriptor_left())
            return SharedHostCopier(theirs, rig.memory.seen().shape)

        engine = rig.engine()
        rig.copy_with(last_descriptor)
        rig.ask(1, [0])
        rig.until(lambda: bool(rig.answers))
        assert rig.answers == [SharedSlots(1, [], last=True)]
        assert engine.shared == []
        rig.share_reader.release(1)


def test_more_than_is_shared_at_once_is_refused(rig: Rig) -> None:
    rig.engine()
    rig.ask(1, range(10))
    rig.ask(2, range(10))
    rig.until(lambda: len(rig.answers) == 2)
    assert sorted(rig.answers, key=lambda answer: answer.number) == [
        SharedSlots(1, list(range(10)), last=True),
        SharedSlots(2, [], last=True),
    ]


def test_when_the_sharer_ends_open_shares_end_and_its_copies_are_not_good(rig: Rig) -> None:
    engine = rig.engine()
    engine.computed = 2
    rig.ask(1, range(4))
    rig.until(lambda: bool(rig.answers))
    engine.sharer.close()
    assert engine.shared == [], "its memory is about to go"
    rig.share_reader.load(7, 1, [Copy(0, 9)])
    rig.engines.clear()
    rig.until(lambda: len(rig.answers) == 2 and bool(rig.copied))
    assert rig.answers[1] == SharedSlots(1, [], last=True)
    assert rig.copied[0].good == [False]
    rig.share_reader.load(8, 1, [Copy(1, 9)])
    rig.until(lambda: len(rig.copied) == 2)
    assert rig.copied[1].good == [False], "there is no such share any more"
    rig.share_reader.release(1)
    engine.close()


def test_a_sharer_has_gone_only_when_the_copies_from_it_have_ended(rig: Rig) -> None:
    engine = rig.engine()
    rig.ask(1, [0])
    rig.until(lambda: bool(rig.answers))
    rig.share_reader.load(7, 1, [Copy(0, 9)])
    engine.sharer.close()
    rig.engines.clear()
    rig.share_reader.turn()
    rig.share_reader.turn()
    assert rig.share_reader.gone_sharers() == []
    rig.until(lambda: bool(rig.copied))
    rig.share_reader.turn()
    assert rig.share_reader.gone_sharers() == ["prefill"]
    assert rig.share_reader.gone_sharers() == [], "once"
    rig.share_reader.release(1)
    engine.close()


def test_a_sharer_that_is_left_for_another_one_has_gone(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_reader, "MOST_SHARERS", 1)
    rig.engine("one")
    rig.ask(1, [0], "one")
    rig.until(lambda: bool(rig.answers))
    rig.share_reader.release(1)
    assert rig.share_reader.gone_sharers() == []
    rig.ask(2, [0], "two")
    assert rig.share_reader.gone_sharers() == ["one"]


def test_of_a_sharer_that_is_silent_nothing_more_is_awaited(tmp_path: Path) -> None:
    with closing(Rig(tmp_path)) as rig:
        engine = rig.engine()
        engine.computed = 1
        rig.ask(1, [0, 1])
        rig.until(lambda: bool(rig.answers))
        rig.ahead_s = SILENT_S / 2
        assert rig.share_reader.turn() == []
        until_s = rig.share_reader.wait_until_s
        assert until_s is not None, "an engine that sleeps would not hear of it"
        assert until_s <= time.monotonic() + SILENT_S
        rig.ahead_s = SILENT_S + LIMIT_S
        assert rig.share_reader.turn() == [SharedSlots(1, [], last=True)]
        assert rig.share_reader.wait_until_s is None
        assert engine.shared == [0], "until it is released"
        rig.share_reader.release(1)
        rig.until(lambda: not engine.shared)


def test_a_sharer_whose_memory_has_changed_is_asked_again(rig: Rig) -> None:
    engine = rig.engine()
    rig.ask(1, [0])
    rig.until(lambda: bool(rig.answers))
    engine.sharer.close()  # as before a sleep
    rig.share_reader.release(1)
    rig.until(lambda: (rig.directory / packets.SHARERS / engine.owner).exists() and not rig.share_reader.turn())
    rig.ask(2, [1])
    rig.until(lambda: len(rig.answers) == 2)
    assert rig.answers[1] == SharedSlots(2, [1], last=True)


def test_mapped_sharers_are_bounded_and_one_that_shares_nothing_makes_room(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MOST_SHARERS > 2
    monkeypatch.setattr(block_reader, "MOST_SHARERS", 2)
    for number, worker in enumerate(("one", "two"), 1):
        rig.engine(worker)
        rig.ask(number, [0], worker)
    rig.until(lambda: len(rig.answers) == 2)
    rig.engine("three")
    rig.ask(3, [0], "three")
    rig.until(lambda: len(rig.answers) == 3)
    assert rig.answers[2] == SharedSlots(3, [], last=True), "both share"
    rig.share_reader.release(1)
    rig.ask(4, [0], "three")
    rig.until(lambda: len(rig.answers) == 4)
    assert rig.answers[3] == SharedSlots(4, [0], last=True)


def test_a_reader_that_lets_go_returns_everything_and_may_ask_again(rig: Rig) -> None:
    engine = rig.engine()
    rig.ask(1, [0])
    rig.until(lambda: bool(rig.answers))
    rig.share_reader.leave()
    rig.until(lambda: not engine.shared)
    rig.ask(2, [1])
    rig.until(lambda: len(rig.answers) == 2)


def test_the_sharer_looks_at_its_readers_only_while_there_are_any(rig: Rig) -> None:
    engine = rig.engine()
    assert engine.sharer.wait_until_s is None
    rig.ask(1, [0])
    rig.until(lambda: bool(rig.answers))
    until_s = engine.sharer.wait_until_s
    assert until_s is not None
    assert until_s <= time.monotonic() + WATCH_INTERVAL_S
    rig.share_reader.leave()
    rig.until(lambda: engine.sharer.wait_until_s is None)
