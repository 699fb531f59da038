"""Lender and reader on one socket within a process: what either does with packets that no other of ours would send."""

from __future__ import annotations

import gc
import os
import select
import socket
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from itertools import count
from pathlib import Path

import pytest

from services.worker.sharing import packets
from services.worker.sharing.host_pages import HostMapper, HostPages
from services.worker.sharing.lock_watch import LockWatch
from services.worker.sharing.memory import MapFailed, offsets
from services.worker.sharing.messages import (
    FROM_LENDER,
    MOST_BLOCKS,
    MOST_PACKET_BYTES,
    PROTOCOL,
    TO_LENDER,
    BorrowSlots,
    Import,
    Leave,
    NotLent,
    Offer,
    ReturnSlots,
    SlotsLent,
)
from services.worker.sharing.page_reader import PageReader
from services.worker.sharing.page_sharer import ACCEPT_RETRY_S, MOST_STRANGERS, PageLender
from services.worker.sharing.shares import LendingLimits
from shared.errors import Unavailable
from shared.pool.lock import HeldLock, hold_owner
from tests.resource_limits import no_descriptor_left
from tests.worker.sharing.sharing_process import IDENTITY, Settings, key_of

SHAPE = Settings("", "")
ASKED = Import(PROTOCOL, "reader", IDENTITY)


class Rig:
    """A lender, and the locks of both."""

    def __init__(self, directory: Path) -> None:
        (directory / "owners").mkdir(mode=0o700)
        directory.chmod(0o700)
        self.directory = directory
        self.locks: list[HeldLock] = [hold_owner(directory, name) for name in ("lender", "reader")]
        self.pages = HostPages(SHAPE.slots * SHAPE.block_bytes)
        self.shape = SHAPE.shape(self.pages.address)
        self.pinned: list[int] = []
        self.lender = self.new_lender("lender")

    def new_lender(self, owner: str) -> PageLender:
        limits = LendingLimits(blocks=MOST_BLOCKS + 1)
        return PageLender(self.directory, owner, self.pages, self.shape, IDENTITY, 1, self, limits)

    def lend(self, keys: Sequence[bytes]) -> list[int]:
        slots = [int.from_bytes(key, "little") for key in keys]
        self.pinned += slots
        return slots

    def take_back(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.pinned.remove(slot)

    def connect(self) -> socket.socket:
        connection = packets.connected(packets.socket_of(self.directory, "lender"))
        self.lender.turn(0.0)
        return connection

    def heard(self, connection: socket.socket) -> object:
        """Let the lender read; return what it says, or None if it closed the connection."""
        self.lender.turn(0.0)
        self.lender.lending.validate()
        with suppress(packets.ConnectionEnded):
            received = packets.receive(connection)
            assert received is not None, "the lender says nothing"
            packets.close_all(received[1])
            return FROM_LENDER.decode(received[0])
        return None

    def admitted(self) -> socket.socket:
        connection = self.connect()
        connection.send(TO_LENDER.encode(ASKED))
        assert isinstance(self.heard(connection), Offer)
        return connection

    def close(self) -> None:
        self.lender.close()
        for lock in self.locks:
            lock.close(delete=True)
        self.pages.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with closing(Rig(tmp_path)) as one:
        yield one


def test_to_a_reader_that_takes_no_packets_no_further_block_is_lent(rig: Rig) -> None:
    connection = rig.admitted()
    for number in (1, 2):
        connection.send(TO_LENDER.encode(BorrowSlots(number, [key_of(number)])))
    connection.shutdown(socket.SHUT_RD)
    rig.lender.turn(0.0)
    assert rig.pinned == [1], "the first answer showed it"
    connection.close()


def test_without_a_file_descriptor_readers_wait_and_the_engine_neither_ends_nor_spins(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    connection = packets.connected(packets.socket_of(rig.directory, "lender"))
    connection.send(TO_LENDER.encode(ASKED))
    with no_descriptor_left():
        rig.lender.turn(1.0)
        assert rig.lender.wait_until_s == 1.0 + ACCEPT_RETRY_S
        assert not select.select([rig.lender], [], [], 0.0)[0], "an idle engine would not sleep"
        rig.lender.turn(1.0 + ACCEPT_RETRY_S)
        rig.lender.turn(1.0 + 2 * ACCEPT_RETRY_S)
    assert rig.lender.unaccepted.count == 3
    assert [record.levelname for record in caplog.records] == ["WARNING"], "it is logged once a minute"
    rig.lender.turn(1.0 + 3 * ACCEPT_RETRY_S)
    assert rig.lender.wait_until_s is None
    assert isinstance(rig.heard(connection), Offer)
    connection.close()


def test_a_reader_whose_lock_cannot_be_looked_at_is_not_called_dead(rig: Rig) -> None:
    connection = rig.connect()
    connection.send(TO_LENDER.encode(ASKED))
    with no_descriptor_left():
        refused = rig.heard(connection)
        with pytest.raises(OSError, match="Too many open files"):
            LockWatch.of(rig.directory, "lender")  # a new lender would delete the socket of this one
    assert isinstance(refused, NotLent)
    assert refused.reason == "the lock of reader: Too many open files"
    connection.close()
    rig.admitted().close()


@pytest.mark.parametrize(
    "packet",
    [
        b"\xc1",
        TO_LENDER.encode(BorrowSlots(1, [key_of(1)])),
        b"x" * MOST_PACKET_BYTES,
    ],
)
def test_a_stranger_that_says_something_else_first_is_cut_off(rig: Rig, packet: bytes) -> None:
    with rig.connect() as connection:
        connection.send(packet)
        assert rig.heard(connection) is None
    assert rig.lender.lending.readers == []


def test_a_reader_that_breaks_the_protocol_is_cut_off_and_keeps_its_loans_until_it_is_dead(rig: Rig) -> None:
    with rig.admitted() as connection:
        connection.send(TO_LENDER.encode(BorrowSlots(1, [key_of(1), key_of(2)])))
        assert rig.heard(connection) == SlotsLent(1, 1, [1, 2], last=True)
        connection.send(b"?")
        assert rig.heard(connection) is None
    rig.lender.watch()
    assert (rig.lender.lending.readers, rig.pinned) == (["reader"], [1, 2])
    rig.locks.pop().close()
    rig.lender.watch()
    assert (rig.lender.lending.readers, rig.pinned) == ([], [])


def test_a_reader_that_leaves_while_blocks_are_lent_to_it_has_left(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    connection, lend = rig.admitted(), rig.lend

    def lend_too_late(keys: Sequence[bytes]) -> list[int]:
        connection.send(TO_LENDER.encode(Leave()))
        connection.close()
        return lend(keys)

    connection.send(TO_LENDER.encode(BorrowSlots(1, [key_of(1)])))
    monkeypatch.setattr(rig, "lend", lend_too_late)
    rig.lender.turn(0.0)
    assert (rig.lender.lending.readers, rig.pinned) == ([], [])


def test_a_lender_that_has_cut_off_a_living_reader_hears_that_it_leaves(rig: Rig) -> None:
    reader = new_reader(rig)
    rig.lender.turn(0.0)
    rig.lender.turn(0.0)
    reader.turn()
    reader.borrow(1, [key_of(1)])
    rig.lender.turn(0.0)
    assert rig.pinned == [1]
    with socket.socket(fileno=os.dup(reader.fileno())) as connection:
        connection.send(b"?")
    rig.lender.turn(0.0)
    assert reader.turn() == [SlotsLent(1, 1, [1], last=True)]
    assert reader.ended
    assert rig.pinned == [1], "it may still be read"
    reader.leave()
    for _ in range(2):
        rig.lender.turn(0.0)
    assert (rig.lender.lending.readers, rig.pinned) == ([], [])


def test_a_loan_has_a_bounded_number_of_blocks(rig: Rig) -> None:
    with rig.admitted() as connection:
        connection.send(TO_LENDER.encode(BorrowSlots(1, [key_of(1)] * MOST_BLOCKS)))
        assert isinstance(rig.heard(connection), SlotsLent)
        connection.send(TO_LENDER.encode(BorrowSlots(2, [key_of(1)] * MOST_BLOCKS)))
        refused = rig.heard(connection)
        assert isinstance(refused, NotLent)
        assert (refused.code, refused.number) == ("limit", 2)
        connection.send(TO_LENDER.encode(ReturnSlots(1)))
        connection.send(TO_LENDER.encode(BorrowSlots(3, [key_of(1)] * (MOST_BLOCKS + 1))))
        assert rig.heard(connection) is None
    assert rig.pinned == []


def test_strangers_are_bounded_and_do_not_keep_a_reader_out_for_good(rig: Rig) -> None:
    strangers = [rig.connect() for _ in range(MOST_STRANGERS)]
    with rig.connect() as late:
        assert rig.heard(late) is None
    for each in strangers:
        each.close()
    rig.lender.turn(0.0)
    rig.admitted().close()


def test_a_reader_that_does_not_read_is_cut_off_and_keeps_its_loans(rig: Rig) -> None:
    def borrow_without_end() -> None:
        for number in count(1):
            connection.send(TO_LENDER.encode(BorrowSlots(number, [key_of(1)] * 500)))
            rig.lender.turn(0.0)
            assert rig.pinned
            connection.send(TO_LENDER.encode(ReturnSlots(number)))

    with rig.admitted() as connection, pytest.raises((BrokenPipeError, ConnectionResetError)):
        borrow_without_end()
    rig.lender.watch()
    assert rig.lender.lending.readers == ["reader"]
    assert len(rig.pinned) == rig.lender.lending.blocks > 0


def test_descriptors_that_a_reader_sends_are_closed(rig: Rig) -> None:
    gc.collect()  # files of tests before
    with rig.connect() as connection:
        before = len(list(Path("/proc/self/fd").iterdir()))
        socket.send_fds(connection, [TO_LENDER.encode(ASKED)], [0, 1])
        assert isinstance(rig.heard(connection), Offer)
        # One more than before: the descriptor by which the lender watches the reader's lock.
        assert len(list(Path("/proc/self/fd").iterdir())) == before + 1


def test_the_socket_of_a_dead_lender_is_deleted_and_that_of_a_living_one_is_not(rig: Rig) -> None:
    packets.listening(packets.socket_of(rig.directory, "dead")).close()
    rig.locks.append(hold_owner(rig.directory, "second"))
    rig.new_lender("second").close()
    left = sorted(path.name for path in (rig.directory / packets.LENDERS).iterdir())
    assert left == ["lender"]


def new_reader(rig: Rig, lender: str = "lender") -> PageReader:
    return PageReader(rig.directory, lender, "reader", IDENTITY, rig.shape, HostMapper())


def test_without_a_lender_a_reader_says_so(rig: Rig) -> None:
    with pytest.raises(Unavailable, match="nobody lends no blocks"):
        new_reader(rig, "nobody")


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ([b"?"], "packet from a lender"),
        ([FROM_LENDER.encode(SlotsLent(1, 1, [1]))], "loan 1, which was not asked for"),
        ([FROM_LENDER.encode(NotLent("limit", "enough", 4))], "loan 4, which was not asked for"),
    ],
)
def test_a_reader_leaves_a_lender_that_says_what_none_of_ours_would(rig: Rig, answers: list[bytes], why: str) -> None:
    with packets.listening(packets.socket_of(rig.directory, "false")) as listening:
        reader = new_reader(rig, "false")
        connection, _ = listening.accept()
        with connection:
            for answer in answers:
                connection.send(answer)
            reader.turn()
            assert why in reader.ended
            assert reader.theirs is None
            reader.leave()


@pytest.mark.parametrize(
    ("lent", "why"),
    [
        (SlotsLent(1, 2, [1]), "generation 2"),
        (SlotsLent(1, 1, [1, 2]), "too many"),
        (SlotsLent(1, 1, [SHAPE.slots]), "do not exist"),
        (SlotsLent(1, 1, [-1]), "do not exist"),
    ],
)
def test_a_loan_of_other_slots_than_there_are_ends_the_exchange(rig: Rig, lent: SlotsLent, why: str) -> None:
    offer = Offer(PROTOCOL, "false", IDENTITY, 1, "", rig.pages.size_bytes, offsets(rig.shape, rig.pages.address))
    with packets.listening(packets.socket_of(rig.directory, "false")) as listening:
        reader = new_reader(rig, "false")
        connection, _ = listening.accept()
        with connection:
            socket.send_fds(connection, [FROM_LENDER.encode(offer)], rig.pages.descriptors())
            reader.turn()
            assert reader.theirs is not None
            reader.borrow(1, [key_of(1)])
            connection.send(FROM_LENDER.encode(lent))
            assert reader.turn() == []
            assert why in reader.ended
            assert not reader.connected
            reader.leave()


def test_memory_that_could_shrink_or_is_too_small_is_not_mapped() -> None:
    descriptor = os.memfd_create("shrinks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 8192)
    with pytest.raises(MapFailed, match="could shrink"):
        HostMapper().map([descriptor], 8192, "")
    os.close(descriptor)
    pages = HostPages(8192)
    with pytest.raises(MapFailed, match="fewer than 8193"):
        HostMapper().map(pages.descriptors(), 8193, "")
    with pytest.raises(MapFailed, match="one descriptor"):
        HostMapper().map([*pages.descriptors()] * 2, 8192, "")
    pages.close()
