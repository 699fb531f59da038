"""Sharer and reader on one socket within a process: what either does with packets that no other of ours would send."""

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
from services.worker.sharing.memory import MapFailed, offsets
from services.worker.sharing.messages import (
    FROM_SHARER,
    MOST_BLOCKS,
    MOST_PACKET_BYTES,
    PROTOCOL,
    TO_SHARER,
    AskSlots,
    Import,
    Leave,
    NotShared,
    Offer,
    ReturnSlots,
    SlotsShared,
)
from services.worker.sharing.page_reader import PageReader
from services.worker.sharing.page_sharer import ACCEPT_RETRY_S, MOST_STRANGERS, LockWatch, PageSharer
from services.worker.sharing.shares import SharingLimits
from shared.errors import Unavailable
from shared.pool.lock import HeldLock, hold_owner
from tests.resource_limits import no_descriptor_left
from tests.worker.sharing.sharing_process import IDENTITY, Settings, key_of

SHAPE = Settings("", "")
ASKED = Import(PROTOCOL, "reader", IDENTITY)


class Rig:
    """A sharer, and the locks of both."""

    def __init__(self, directory: Path) -> None:
        (directory / "owners").mkdir(mode=0o700)
        directory.chmod(0o700)
        self.directory = directory
        self.locks: list[HeldLock] = [hold_owner(directory, name) for name in ("sharer", "reader")]
        self.pages = HostPages(SHAPE.slots * SHAPE.block_bytes)
        self.shape = SHAPE.shape(self.pages.address)
        self.pinned: list[int] = []
        self.sharer = self.new_sharer("sharer")

    def new_sharer(self, owner: str) -> PageSharer:
        limits = SharingLimits(blocks=MOST_BLOCKS + 1)
        return PageSharer(self.directory, owner, self.pages, self.shape, IDENTITY, 1, self, limits)

    def share(self, keys: Sequence[bytes]) -> list[int]:
        slots = [int.from_bytes(key, "little") for key in keys]
        self.pinned += slots
        return slots

    def take_back(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.pinned.remove(slot)

    def connect(self) -> socket.socket:
        connection = packets.connected(packets.socket_of(self.directory, "sharer"))
        self.sharer.turn(0.0)
        return connection

    def heard(self, connection: socket.socket) -> object:
        """Let the sharer read; return what it says, or None if it closed the connection."""
        self.sharer.turn(0.0)
        self.sharer.sharing.validate()
        with suppress(packets.ConnectionEnded):
            received = packets.receive(connection)
            assert received is not None, "the sharer says nothing"
            packets.close_all(received[1])
            return FROM_SHARER.decode(received[0])
        return None

    def admitted(self) -> socket.socket:
        connection = self.connect()
        connection.send(TO_SHARER.encode(ASKED))
        assert isinstance(self.heard(connection), Offer)
        return connection

    def close(self) -> None:
        self.sharer.close()
        for lock in self.locks:
            lock.close(delete=True)
        self.pages.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with closing(Rig(tmp_path)) as one:
        yield one


def test_to_a_reader_that_takes_no_packets_no_further_block_is_shared(rig: Rig) -> None:
    connection = rig.admitted()
    for number in (1, 2):
        connection.send(TO_SHARER.encode(AskSlots(number, [key_of(number)])))
    connection.shutdown(socket.SHUT_RD)
    rig.sharer.turn(0.0)
    assert rig.pinned == [1], "the first answer showed it"
    connection.close()


def test_without_a_file_descriptor_readers_wait_and_the_engine_neither_ends_nor_spins(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    connection = packets.connected(packets.socket_of(rig.directory, "sharer"))
    connection.send(TO_SHARER.encode(ASKED))
    with no_descriptor_left():
        rig.sharer.turn(1.0)
        assert rig.sharer.wait_until_s == 1.0 + ACCEPT_RETRY_S
        assert not select.select([rig.sharer], [], [], 0.0)[0], "an idle engine would not sleep"
        rig.sharer.turn(1.0 + ACCEPT_RETRY_S)
        rig.sharer.turn(1.0 + 2 * ACCEPT_RETRY_S)
    assert rig.sharer.unaccepted.count == 3
    assert [record.levelname for record in caplog.records] == ["WARNING"], "it is logged once a minute"
    rig.sharer.turn(1.0 + 3 * ACCEPT_RETRY_S)
    assert rig.sharer.wait_until_s is None
    assert isinstance(rig.heard(connection), Offer)
    connection.close()


def test_a_reader_whose_lock_cannot_be_looked_at_is_not_called_dead(rig: Rig) -> None:
    connection = rig.connect()
    connection.send(TO_SHARER.encode(ASKED))
    with no_descriptor_left():
        refused = rig.heard(connection)
        with pytest.raises(OSError, match="Too many open files"):
            LockWatch.of(rig.directory, "sharer")  # a new sharer would delete the socket of this one
    assert isinstance(refused, NotShared)
    assert refused.reason == "the lock of reader: Too many open files"
    connection.close()
    rig.admitted().close()


@pytest.mark.parametrize(
    "packet",
    [
        b"\xc1",
        TO_SHARER.encode(AskSlots(1, [key_of(1)])),
        b"x" * MOST_PACKET_BYTES,
    ],
)
def test_a_stranger_that_says_something_else_first_is_cut_off(rig: Rig, packet: bytes) -> None:
    with rig.connect() as connection:
        connection.send(packet)
        assert rig.heard(connection) is None
    assert rig.sharer.sharing.readers == []


def test_a_reader_that_breaks_the_protocol_is_cut_off_and_keeps_its_shares_until_it_is_dead(rig: Rig) -> None:
    with rig.admitted() as connection:
        connection.send(TO_SHARER.encode(AskSlots(1, [key_of(1), key_of(2)])))
        assert rig.heard(connection) == SlotsShared(1, 1, [1, 2], last=True)
        connection.send(b"?")
        assert rig.heard(connection) is None
    rig.sharer.watch()
    assert (rig.sharer.sharing.readers, rig.pinned) == (["reader"], [1, 2])
    rig.locks.pop().close()
    rig.sharer.watch()
    assert (rig.sharer.sharing.readers, rig.pinned) == ([], [])


def test_a_reader_that_leaves_while_blocks_are_shared_to_it_has_left(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    connection, share = rig.admitted(), rig.share

    def share_too_late(keys: Sequence[bytes]) -> list[int]:
        connection.send(TO_SHARER.encode(Leave()))
        connection.close()
        return share(keys)

    connection.send(TO_SHARER.encode(AskSlots(1, [key_of(1)])))
    monkeypatch.setattr(rig, "share", share_too_late)
    rig.sharer.turn(0.0)
    assert (rig.sharer.sharing.readers, rig.pinned) == ([], [])


def test_a_sharer_that_has_cut_off_a_living_reader_hears_that_it_leaves(rig: Rig) -> None:
    reader = new_reader(rig)
    rig.sharer.turn(0.0)
    rig.sharer.turn(0.0)
    reader.turn()
    reader.read(1, [key_of(1)])
    rig.sharer.turn(0.0)
    assert rig.pinned == [1]
    with socket.socket(fileno=os.dup(reader.fileno())) as connection:
        connection.send(b"?")
    rig.sharer.turn(0.0)
    assert reader.turn() == [SlotsShared(1, 1, [1], last=True)]
    assert reader.ended
    assert rig.pinned == [1], "it may still be read"
    reader.leave()
    for _ in range(2):
        rig.sharer.turn(0.0)
    assert (rig.sharer.sharing.readers, rig.pinned) == ([], [])


def test_a_share_has_a_bounded_number_of_blocks(rig: Rig) -> None:
    with rig.admitted() as connection:
        connection.send(TO_SHARER.encode(AskSlots(1, [key_of(1)] * MOST_BLOCKS)))
        assert isinstance(rig.heard(connection), SlotsShared)
        connection.send(TO_SHARER.encode(AskSlots(2, [key_of(1)] * MOST_BLOCKS)))
        refused = rig.heard(connection)
        assert isinstance(refused, NotShared)
        assert (refused.code, refused.number) == ("limit", 2)
        connection.send(TO_SHARER.encode(ReturnSlots(1)))
        connection.send(TO_SHARER.encode(AskSlots(3, [key_of(1)] * (MOST_BLOCKS + 1))))
        assert rig.heard(connection) is None
    assert rig.pinned == []


def test_strangers_are_bounded_and_do_not_keep_a_reader_out_for_good(rig: Rig) -> None:
    strangers = [rig.connect() for _ in range(MOST_STRANGERS)]
    with rig.connect() as late:
        assert rig.heard(late) is None
    for each in strangers:
        each.close()
    rig.sharer.turn(0.0)
    rig.admitted().close()


def test_a_reader_that_does_not_read_is_cut_off_and_keeps_its_shares(rig: Rig) -> None:
    def read_without_end() -> None:
        for number in count(1):
            connection.send(TO_SHARER.encode(AskSlots(number, [key_of(1)] * 500)))
            rig.sharer.turn(0.0)
            assert rig.pinned
            connection.send(TO_SHARER.encode(ReturnSlots(number)))

    with rig.admitted() as connection, pytest.raises((BrokenPipeError, ConnectionResetError)):
        read_without_end()
    rig.sharer.watch()
    assert rig.sharer.sharing.readers == ["reader"]
    assert len(rig.pinned) == rig.sharer.sharing.blocks > 0


def test_descriptors_that_a_reader_sends_are_closed(rig: Rig) -> None:
    gc.collect()  # files of tests before
    with rig.connect() as connection:
        before = len(list(Path("/proc/self/fd").iterdir()))
        socket.send_fds(connection, [TO_SHARER.encode(ASKED)], [0, 1])
        assert isinstance(rig.heard(connection), Offer)
        # One more than before: the descriptor by which the sharer watches the reader's lock.
        assert len(list(Path("/proc/self/fd").iterdir())) == before + 1


def test_the_socket_of_a_dead_sharer_is_deleted_and_that_of_a_living_one_is_not(rig: Rig) -> None:
    packets.listening(packets.socket_of(rig.directory, "dead")).close()
    rig.locks.append(hold_owner(rig.directory, "second"))
    rig.new_sharer("second").close()
    left = sorted(path.name for path in (rig.directory / packets.SHARERS).iterdir())
    assert left == ["sharer"]


def new_reader(rig: Rig, sharer: str = "sharer") -> PageReader:
    return PageReader(rig.directory, sharer, "reader", IDENTITY, rig.shape, HostMapper())


def test_without_a_sharer_a_reader_says_so(rig: Rig) -> None:
    with pytest.raises(Unavailable, match="nobody shares no blocks"):
        new_reader(rig, "nobody")


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ([b"?"], "packet from a sharer"),
        ([FROM_SHARER.encode(SlotsShared(1, 1, [1]))], "share 1, which was not asked for"),
        ([FROM_SHARER.encode(NotShared("limit", "enough", 4))], "share 4, which was not asked for"),
    ],
)
def test_a_reader_leaves_a_sharer_that_says_what_none_of_ours_would(rig: Rig, answers: list[bytes], why: str) -> None:
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
    ("shared", "why"),
    [
        (SlotsShared(1, 2, [1]), "generation 2"),
        (SlotsShared(1, 1, [1, 2]), "too many"),
        (SlotsShared(1, 1, [SHAPE.slots]), "do not exist"),
        (SlotsShared(1, 1, [-1]), "do not exist"),
    ],
)
def test_a_share_of_other_slots_than_there_are_ends_the_exchange(rig: Rig, shared: SlotsShared, why: str) -> None:
    offer = Offer(PROTOCOL, "false", IDENTITY, 1, "", rig.pages.size_bytes, offsets(rig.shape, rig.pages.address))
    with packets.listening(packets.socket_of(rig.directory, "false")) as listening:
        reader = new_reader(rig, "false")
        connection, _ = listening.accept()
        with connection:
            socket.send_fds(connection, [FROM_SHARER.encode(offer)], rig.pages.descriptors())
            reader.turn()
            assert reader.theirs is not None
            reader.read(1, [key_of(1)])
            connection.send(FROM_SHARER.encode(shared))
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
