"""PageReader: another process's memory as this process sees it, and the loans of its blocks.

    asked ──Offer, checked and mapped──▶ mapped ──leave──▶ ended
      └──NotLent, a wrong offer, the connection closed──▶ ended   also from mapped: what is being read is discarded

All belongs to the loop's thread, but `connected`, for which the thread that copies may ask.

What was copied from lent slots may be used if the connection is still open after the last copy has ended: the lender
leaves the slots of a loan as they are until this process releases them, or the connection ends.
"""

from __future__ import annotations

import logging
import select
import socket
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import assert_never

from services.worker.sharing import packets
from services.worker.sharing.memory import MapFailed, MappedPages, PageMapper, placed
from services.worker.sharing.messages import (
    FROM_LENDER,
    PROTOCOL,
    TO_LENDER,
    BorrowSlots,
    Closing,
    Import,
    Leave,
    LoanIdentity,
    NotLent,
    Offer,
    ReturnSlots,
    SlotsLent,
)
from services.worker.sharing.offer_check import check_offer
from services.worker.sharing.shares import LendingRefused
from services.worker.transfer.block_shape import BlockShape
from shared.errors import ProtocolError, Unavailable
from shared.hashing import ContentKey

_LEAVE = TO_LENDER.encode(Leave())

_log = logging.getLogger(__name__)


class PageReader:
    """The connection to one lender, and the mapping of its memory."""

    def __init__(
        self,
        directory: Path,
        lender: str,
        owner: str,
        wanted: LoanIdentity,
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
        self.lender = lender
        self._directory = directory
        self._own = own
        self._mapper = mapper
        self._asked = Import(PROTOCOL, owner, wanted, generation)
        self._generation = 0
        self._pages: MappedPages | None = None
        self._loans: dict[int, int] = {}
        """The number of each loan that is not released → its blocks that are not lent yet."""
        self._newest = 0
        """The highest number of a loan so far."""
        self._socket = _connected(directory, lender, TO_LENDER.encode(self._asked))
        self._hang_up = select.poll()
        self._hang_up.register(self._socket, select.POLLRDHUP)

    def fileno(self) -> int:
        return self._socket.fileno()

    def turn(self) -> list[SlotsLent | NotLent]:
        """Take what has come; return the answers about loans that are not released. When `ended` is set, nothing more
        is lent."""
        answers: list[SlotsLent | NotLent] = []
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
        """Ask for blocks, once the memory is mapped. Numbers ascend."""
        assert self.theirs is not None
        assert number > self._newest
        self._newest = number
        if not self.ended:
            self._loans[number] = len(keys)
            self._send(BorrowSlots(number, list(keys)))

    def release(self, number: int) -> None:
        """End a loan. No copy that reads it may be under way."""
        if self._loans.pop(number, None) is not None:
            self._send(ReturnSlots(number))

    @property
    def connected(self) -> bool:
        """Whether the lender has not ended until now."""
        return not self.ended and not self._hang_up.poll(0)

    def leave(self) -> None:
        """Unmap the memory and close the connection. No copy may be under way. Idempotent.

        A lender that has closed the connection may live, and keeps what it has lent. So it gets this on a new one.
        """
        if self._socket.fileno() < 0:
            return
        if self._pages is not None:
            self._pages.close()
            self._pages = self.theirs = None
        try:
            packets.send(self._socket, _LEAVE)  # also where this process has refused the offer
        except packets.ConnectionEnded:
            self._leave_again()
        self._end("this process has left")
        self._socket.close()

    def _leave_again(self) -> None:
        with (
            suppress(Unavailable, packets.ConnectionEnded),
            closing(_connected(self._directory, self.lender, TO_LENDER.encode(self._asked))) as another,
        ):
            packets.send(another, _LEAVE)

    def _take(self, packet: bytes, descriptors: list[int], answers: list[SlotsLent | NotLent]) -> None:
        try:
            message = FROM_LENDER.decode(packet)
            if self._pages is None and isinstance(message, Offer):
                self._map(message, descriptors)
                return
        finally:
            packets.close_all(descriptors)
        match message:
            case NotLent(number=-1):
                raise LendingRefused(message.code, f"{self.lender} refused: {message.reason}")
            case NotLent():
                if self._asked_for(message.number):
                    del self._loans[message.number]
                    answers.append(message)
            case SlotsLent():
                if self._asked_for(message.number):
                    self._check(message)
                    self._loans[message.number] -= len(message.slots)
                    answers.append(message)
            case Closing():
                self.closing = True
            case Offer():
                raise ProtocolError("a second offer")
            case _:
                assert_never(message)

    def _map(self, offer: Offer, descriptors: list[int]) -> None:
        check_offer(offer, self._asked, self._own, len(descriptors), self.lender)
        self._pages = self._mapper.map(descriptors, offer.size_bytes, offer.device)
        self.theirs = placed(offer.shape, self._pages.address)
        self._generation = offer.generation

    def _asked_for(self, number: int) -> bool:
        """Return whether the loan is not released. Raise ProtocolError where there was none."""
        if number > self._newest:
            raise ProtocolError(f"an answer about loan {number}, which was not asked for")
        return number in self._loans

    def _check(self, lent: SlotsLent) -> None:
        assert self.theirs is not None
        if lent.generation != self._generation:
            raise LendingRefused("generation", f"blocks of generation {lent.generation}, mapped is {self._generation}")
        slots = self.theirs.slots
        if len(lent.slots) > self._loans[lent.number] or not all(0 <= slot < slots for slot in lent.slots):
            raise ProtocolError(f"loan {lent.number} has slots that do not exist, or too many of them")

    def _send(self, message: BorrowSlots | ReturnSlots) -> None:
        try:
            packets.send(self._socket, TO_LENDER.encode(message))
        except packets.ConnectionEnded as wrong:
            self._end(str(wrong))

    def _end(self, why: str) -> None:
        if not self.ended:
            _log.info("%s lends this process no blocks any more: %s", self.lender, why)
        self.ended = self.ended or why
        self._loans.clear()


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
