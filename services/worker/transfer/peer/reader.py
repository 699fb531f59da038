"""PeerReader: another process's memory as this process sees it, and the loans of its blocks.

    asked ──Offer, checked and mapped──▶ mapped ──leave──▶ ended
      └──Refused, a wrong offer, the connection closed──▶ ended   also from mapped: what is being read is discarded

`turn`, `borrow`, `release` and `leave` belong to the loop's thread; `is_lent` may be asked by the thread that copies.
"""

from __future__ import annotations

import logging
import select
import socket
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import assert_never

from services.worker.mover import Copy
from services.worker.transfer.block_shape import BlockShape
from services.worker.transfer.copier import Pending
from services.worker.transfer.peer import packets
from services.worker.transfer.peer.lending import LendingRefused
from services.worker.transfer.peer.memory import MapFailed, MappedPages, PageMapper, PeerCopier, placed
from services.worker.transfer.peer.messages import (
    FROM_LENDER,
    PROTOCOL,
    TO_LENDER,
    Borrow,
    Closing,
    Import,
    Leave,
    Lent,
    Offer,
    PeerIdentity,
    Refused,
    Release,
)
from services.worker.transfer.peer.offer_check import check_offer
from shared.errors import ProtocolError, Unavailable
from shared.hashing import ContentKey

DEPTH = 2
"""The most groups of copies under way at once."""

_log = logging.getLogger(__name__)


class PeerReader:
    """The connection to one lender, and the mapping of its memory."""

    def __init__(
        self,
        directory: Path,
        lender: str,
        owner: str,
        wanted: PeerIdentity,
        own: BlockShape,
        mapper: PageMapper,
        generation: int = 0,
    ) -> None:
        """Connect to the lender that holds the lock `lender`, as the holder of the lock `owner` in `directory`.

        `own` is the shape of one's own blocks. Raise Unavailable if no lender listens.
        """
        self.theirs: BlockShape | None = None
        """Where the lender's blocks are mapped; None: they are not."""
        self.ended = ""
        """Why nothing more is lent; empty while it is."""
        self.closing = False
        """The lender wants its memory back: release what is lent, and leave."""
        self._lender = lender
        self._own = own
        self._mapper = mapper
        self._asked = Import(PROTOCOL, owner, wanted, generation)
        self._generation = 0
        self._pages: MappedPages | None = None
        self._borrowed: dict[int, int] = {}
        """The number of blocks of each loan that was asked for and not answered."""
        self._lent: set[int] = set()
        self._socket = _connected(directory, lender, TO_LENDER.encode(self._asked))
        self._hang_up = select.poll()
        self._hang_up.register(self._socket, select.POLLRDHUP)

    def fileno(self) -> int:
        return self._socket.fileno()

    def turn(self) -> list[Lent | Refused]:
        """Take what has come; return the answers to `borrow`. A loan that is not answered when `ended` is set is not
        lent."""
        answers: list[Lent | Refused] = []
        while not self.ended:
            try:
                received = packets.receive(self._socket)
                if received is None:
                    break
                self._take(*received, answers)
            except (packets.ConnectionEnded, ProtocolError, LendingRefused, MapFailed) as wrong:
                self._end(str(wrong))
        return answers

    def borrow(self, number: int, keys: Sequence[ContentKey]) -> None:
        """Ask for blocks, once they are mapped. The number must not name another loan."""
        assert self.theirs is not None
        assert number not in self._lent
        assert number not in self._borrowed
        if not self.ended:
            self._borrowed[number] = len(keys)
            self._send(Borrow(number, list(keys)))

    def release(self, number: int) -> None:
        """Give a loan back that was answered. No copy that reads it may be under way."""
        assert number not in self._borrowed, "the lender has not answered yet"
        self._lent.discard(number)
        if not self.ended:
            self._send(Release(number))

    def is_lent(self, number: int) -> bool:
        """Return whether the blocks of this loan are still as they were: the lender has not ended until now."""
        return number in self._lent and not self.ended and not self._hang_up.poll(0)

    def leave(self) -> None:
        """Unmap the memory and close the connection. No copy may be under way. Idempotent."""
        if self._pages is not None:
            self._pages.close()
            self._pages = self.theirs = None
        with suppress(packets.ConnectionEnded):  # also where this process has refused the offer
            packets.send(self._socket, TO_LENDER.encode(Leave()))
        self._end("this process has left")
        self._socket.close()

    def _take(self, packet: bytes, descriptors: list[int], answers: list[Lent | Refused]) -> None:
        try:
            message = FROM_LENDER.decode(packet)
            if self._pages is None and isinstance(message, Offer):
                self._map(message, descriptors)
                return
        finally:
            packets.close_all(descriptors)
        match message:
            case Refused(number=-1):
                raise LendingRefused(message.code, f"{self._lender} refused: {message.reason}")
            case Refused():
                self._answered(message.number)
                answers.append(message)
            case Lent():
                asked = self._answered(message.number)
                self._check(message, asked)
                self._lent.add(message.number)
                answers.append(message)
            case Closing():
                self.closing = True
            case Offer():
                raise ProtocolError("a second offer")
            case _:
                assert_never(message)

    def _map(self, offer: Offer, descriptors: list[int]) -> None:
        check_offer(offer, self._asked, self._own, len(descriptors), self._lender)
        self._pages = self._mapper.map(descriptors, offer.size_bytes, offer.device)
        self.theirs = placed(offer.shape, self._pages.address)
        self._generation = offer.generation

    def _answered(self, number: int) -> int:
        if number not in self._borrowed:
            raise ProtocolError(f"an answer about loan {number}, which was not asked for")
        return self._borrowed.pop(number)

    def _check(self, lent: Lent, asked: int) -> None:
        assert self.theirs is not None
        if lent.generation != self._generation:
            raise LendingRefused("generation", f"blocks of generation {lent.generation}, mapped is {self._generation}")
        slots = [slot for slot in lent.slots if slot is not None]
        if len(lent.slots) != asked or not all(0 <= slot < self.theirs.slots for slot in slots):
            raise ProtocolError(f"loan {lent.number} has slots that do not exist, or another number of them")

    def _send(self, message: Borrow | Release) -> None:
        try:
            packets.send(self._socket, TO_LENDER.encode(message))
        except packets.ConnectionEnded as wrong:
            self._end(str(wrong))

    def _end(self, why: str) -> None:
        if not self.ended:
            _log.info("%s lends this process no blocks any more: %s", self._lender, why)
        self.ended = self.ended or why
        self._lent.clear()
        self._borrowed.clear()


def _connected(directory: Path, lender: str, first: bytes) -> socket.socket:
    """Return a connection on which the first packet was sent. Raise Unavailable."""
    try:
        connection = packets.connected(packets.socket_of(directory, lender))
    except OSError as wrong:
        raise Unavailable(f"{lender} lends no blocks: {wrong}") from wrong
    try:
        if not packets.is_own_user(connection):
            raise packets.ConnectionEnded("the socket belongs to another user")
        packets.send(connection, first)
    except packets.ConnectionEnded as wrong:
        connection.close()
        raise Unavailable(f"{lender} lends no blocks: {wrong}") from wrong
    return connection


def read_blocks(copier: PeerCopier, copies: Sequence[Copy], is_lent: Callable[[], bool]) -> bool:
    """Copy lent blocks, waiting for the end. Return whether they may be used; if not, all of them are discarded.

    No copy is under way then. If DeviceFailed is raised, the device is lost, and the loan must not be released.
    """
    under_way: deque[Pending] = deque()
    try:
        for first in range(0, len(copies), copier.group_blocks):
            if not is_lent():
                return False
            if len(under_way) == DEPTH:
                under_way.popleft().wait()
            under_way.append(copier.begin(copies[first : first + copier.group_blocks]))
    finally:
        while under_way:
            under_way.popleft().wait()
    return is_lent()
