"""PageReader: another process's memory as this process sees it, and the shares of its blocks.

    asked ──Offer, checked and mapped──▶ mapped ──leave──▶ ended
      └──NotShared, a wrong offer, the connection closed──▶ ended   also from mapped: what is being read is discarded

All belongs to the loop's thread, but `connected`, for which the thread that copies may ask.

What was copied from shared slots may be used if the connection is still open after the last copy has ended: the sharer
leaves the slots of a share as they are until this process releases them, or the connection ends.
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
    FROM_SHARER,
    PROTOCOL,
    TO_SHARER,
    AskSlots,
    Closing,
    Import,
    Leave,
    NotShared,
    Offer,
    ReturnSlots,
    SharingIdentity,
    SlotsShared,
)
from services.worker.sharing.offer_check import check_offer
from services.worker.sharing.shares import SharingRefused
from services.worker.transfer.block_shape import BlockShape
from shared.errors import ProtocolError, Unavailable
from shared.hashing import ContentKey

_LEAVE = TO_SHARER.encode(Leave())

_log = logging.getLogger(__name__)


class PageReader:
    """The connection to one sharer, and the mapping of its memory."""

    def __init__(
        self,
        directory: Path,
        sharer: str,
        owner: str,
        wanted: SharingIdentity,
        own: BlockShape,
        mapper: PageMapper,
        generation: int = 0,
    ) -> None:
        """Connect to the sharer that holds the lock `sharer`, as the holder of the lock `owner` in `directory`.

        `own` is the shape of one's own blocks. Raise Unavailable if no sharer listens.
        """
        self.theirs: BlockShape | None = None
        """Where the sharer's blocks are mapped. None if they are not."""
        self.ended = ""
        """Why nothing more is shared; empty while it is."""
        self.closing = False
        """The sharer wants its memory back: release what is shared, and leave."""
        self.sharer = sharer
        self._directory = directory
        self._own = own
        self._mapper = mapper
        self._asked = Import(PROTOCOL, owner, wanted, generation)
        self._generation = 0
        self._pages: MappedPages | None = None
        self._shares: dict[int, int] = {}
        """The number of each share that is not released → its blocks that are not shared yet."""
        self._newest = 0
        """The highest number of a share so far."""
        self._socket = _connected(directory, sharer, TO_SHARER.encode(self._asked))
        self._hang_up = select.poll()
        self._hang_up.register(self._socket, select.POLLRDHUP)

    def fileno(self) -> int:
        return self._socket.fileno()

    def turn(self) -> list[SlotsShared | NotShared]:
        """Take what has come; return the answers about shares that are not released. When `ended` is set, nothing more
        is shared."""
        answers: list[SlotsShared | NotShared] = []
        while not self.ended:
            try:
                received = packets.receive(self._socket)
                if received is None:
                    break
                self._take(*received, answers)
            except (packets.ConnectionEnded, ProtocolError, SharingRefused, MapFailed) as wrong:
                self._end(str(wrong))
        return answers

    def read(self, number: int, keys: Sequence[ContentKey]) -> None:
        """Ask for blocks, once the memory is mapped. Numbers ascend."""
        assert self.theirs is not None
        assert number > self._newest
        self._newest = number
        if not self.ended:
            self._shares[number] = len(keys)
            self._send(AskSlots(number, list(keys)))

    def release(self, number: int) -> None:
        """End a share. No copy that reads it may be under way."""
        if self._shares.pop(number, None) is not None:
            self._send(ReturnSlots(number))

    @property
    def connected(self) -> bool:
        """Whether the sharer has not ended until now."""
        return not self.ended and not self._hang_up.poll(0)

    def leave(self) -> None:
        """Unmap the memory and close the connection. No copy may be under way. Idempotent.

        A sharer that has closed the connection may live, and keeps what it has shared. So it gets this on a new one.
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
            closing(_connected(self._directory, self.sharer, TO_SHARER.encode(self._asked))) as another,
        ):
            packets.send(another, _LEAVE)

    def _take(self, packet: bytes, descriptors: list[int], answers: list[SlotsShared | NotShared]) -> None:
        try:
            message = FROM_SHARER.decode(packet)
            if self._pages is None and isinstance(message, Offer):
                self._map(message, descriptors)
                return
        finally:
            packets.close_all(descriptors)
        match message:
            case NotShared(number=-1):
                raise SharingRefused(message.code, f"{self.sharer} refused: {message.reason}")
            case NotShared():
                if self._asked_for(message.number):
                    del self._shares[message.number]
                    answers.append(message)
            case SlotsShared():
                if self._asked_for(message.number):
                    self._check(message)
                    self._shares[message.number] -= len(message.slots)
                    answers.append(message)
            case Closing():
                self.closing = True
            case Offer():
                raise ProtocolError("a second offer")
            case _:
                assert_never(message)

    def _map(self, offer: Offer, descriptors: list[int]) -> None:
        check_offer(offer, self._asked, self._own, len(descriptors), self.sharer)
        self._pages = self._mapper.map(descriptors, offer.size_bytes, offer.device)
        self.theirs = placed(offer.shape, self._pages.address)
        self._generation = offer.generation

    def _asked_for(self, number: int) -> bool:
        """Return whether the share is not released. Raise ProtocolError if there was none."""
        if number > self._newest:
            raise ProtocolError(f"an answer about share {number}, which was not asked for")
        return number in self._shares

    def _check(self, shared: SlotsShared) -> None:
        assert self.theirs is not None
        if shared.generation != self._generation:
            raise SharingRefused(
                "generation", f"blocks of generation {shared.generation}, mapped is {self._generation}"
            )
        slots = self.theirs.slots
        if len(shared.slots) > self._shares[shared.number] or not all(0 <= slot < slots for slot in shared.slots):
            raise ProtocolError(f"share {shared.number} has slots that do not exist, or too many of them")

    def _send(self, message: AskSlots | ReturnSlots) -> None:
        try:
            packets.send(self._socket, TO_SHARER.encode(message))
        except packets.ConnectionEnded as wrong:
            self._end(str(wrong))

    def _end(self, why: str) -> None:
        if not self.ended:
            _log.info("%s shares this process no blocks any more: %s", self.sharer, why)
        self.ended = self.ended or why
        self._shares.clear()


def _connected(directory: Path, sharer: str, first: bytes) -> socket.socket:
    """Return a connection on which the first packet was sent. Raise Unavailable."""
    try:
        connection = packets.connected(packets.socket_of(directory, sharer))
    except OSError as wrong:
        raise Unavailable(f"{sharer} shares no blocks: {wrong}") from wrong
    try:
        if not packets.is_own_user(connection):
            raise packets.ConnectionEnded("the socket belongs to another user")
        packets.send(connection, first)
    except packets.ConnectionEnded as wrong:
        connection.close()
        raise Unavailable(f"{sharer} shares no blocks: {wrong}") from wrong
    return connection
