"""PageSharer: shares this process's blocks with other processes of the machine, over a Unix socket.

`turn` and `watch` are called by the engine's loop: between steps and when the descriptor is readable, and a few times a
second. Neither waits. `sharing` decides; this module carries it out.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import select
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol, assert_never

from msgspec import Struct

from services.worker.sharing import packets
from services.worker.sharing.memory import ExportedPages, offsets
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
from services.worker.sharing.offer_check import check_import
from services.worker.sharing.shares import Shares, SharingLimits, SharingRefused
from services.worker.transfer.block_shape import BlockShape
from shared.errors import ProtocolError
from shared.hashing import ContentKey
from shared.pool.lock import OWNERS, check_directory, is_owner
from shared.rate_limited_log import RateLimitedLog
from shared.regular_file import ownership_fault

MOST_STRANGERS = 8
"""The most connections on which no reader is admitted. Further ones are closed at once."""
ACCEPT_RETRY_S = 0.25
"""Seconds until the next try after a connection could not be accepted, since this process or the machine has no file
descriptor left. Readers wait until then."""
MOST_PACKETS = 32
"""The most packets of one connection in a turn."""

_log = logging.getLogger(__name__)
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class SharableBlocks(Protocol):
    """The blocks of this process's engine."""

    def share(self, keys: Sequence[ContentKey], /) -> list[int]:
        """Return the device slots of the leading ones of these blocks, as far as they are there. They stay as they are
        until `take_back`."""
        ...

    def take_back(self, slots: Sequence[int], /) -> None:
        """The copies that read these slots have ended. Called exactly once for each slot of `share`."""
        ...


class _Connection(Struct):
    socket: socket.socket
    owner: str = ""
    """The reader that is admitted on it."""


class PageSharer:
    """Shares the blocks of one exported memory. It belongs to one thread."""

    def __init__(
        self,
        directory: Path,
        owner: str,
        pages: ExportedPages,
        shape: BlockShape,
        identity: SharingIdentity,
        generation: int,
        blocks: SharableBlocks,
        limits: SharingLimits | None = None,
    ) -> None:
        """Listen in `directory`, where this process holds the lock of `owner`. The pages stay the caller's.

        `shape` lies in `pages`. Raise OSError, PoolUnfit.
        """
        self.sharing = Shares(limits or SharingLimits())
        self._directory = directory
        self._pages = pages
        self._offer = Offer(
            PROTOCOL, owner, identity, generation, pages.device, pages.size_bytes, offsets(shape, pages.address)
        )
        self._blocks = blocks
        self._path = packets.socket_of(directory, owner)
        check_directory(directory)
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        self._sweep()
        self._poller = select.epoll()  # before the socket, whose path would stay if this failed
        self._listening = packets.listening(self._path)
        self._poller.register(self._listening, select.EPOLLIN)
        self._connections: dict[int, _Connection] = {}
        self._watches: dict[str, LockWatch] = {}
        self._now_s = 0.0
        self._accept_s: float | None = None
        """When to accept connections again. None means now."""
        self.unaccepted = RateLimitedLog(clock=lambda: self._now_s)

    def fileno(self) -> int:
        return self._poller.fileno()

    @property
    def may_free(self) -> bool:
        """Whether no other process can read the memory any more."""
        return self.sharing.may_free

    def turn(self, now_s: float) -> None:
        """Take what has come, and share the blocks that have been computed since."""
        self._now_s = now_s
        if self._accept_s is not None and now_s >= self._accept_s:
            self._accept_s = None
            self._poller.register(self._listening, select.EPOLLIN)
        for descriptor, _ in self._poller.poll(0):
            if descriptor == self._listening.fileno():
                self._accept()
            elif descriptor in self._connections:
                self._read(descriptor)
        for descriptor, number, share in self.sharing.waiting():
            if descriptor not in self._connections:
                continue  # it ended with what was sent just now: nothing reads what is shared with it from now on
            slots = self._blocks.share(share.keys[len(share.slots) :])
            if self.sharing.add(share, slots, now_s):
                self._send(descriptor, SlotsShared(number, self._offer.generation, slots, last=not share.waits))

    @property
    def wait_until_s(self) -> float | None:
        """Time of the next `turn` if no event comes first. None if none is needed."""
        return self._accept_s

    def watch(self) -> None:
        """End the readers that are proven dead."""
        for owner, watch in list(self._watches.items()):
            if watch.is_free():
                slots = self.sharing.proven_dead(owner)
                _log.info("%s, which read blocks of this process, is dead; %d slots are free again", owner, len(slots))
                self._forget(owner)
                self._blocks.take_back(slots)

    def close_sharing(self) -> None:
        """Share nothing more, and ask all readers to leave; `may_free` says when they are gone."""
        for connection in self.sharing.close():
            self._send(connection, Closing())

    def close(self) -> None:
        """Close the socket, and end all shares. Readers that are still there keep the memory, and discard what they
        read from now on, since their connections are closed."""
        for connection in self._connections.values():
            connection.socket.close()
        for watch in self._watches.values():
            watch.close()
        self._connections.clear()
        self._watches.clear()
        self._poller.close()
        self._listening.close()
        self._path.unlink(missing_ok=True)
        self._blocks.take_back(self.sharing.end_all())

    # --- connections

    def _accept(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as wrong:  # the socket stays readable, so look away: an idle engine would not sleep
            self.unaccepted.warn("a process that wants to copy blocks waits", wrong.strerror)
            self._poller.unregister(self._listening)
            self._accept_s = self._now_s + ACCEPT_RETRY_S
            return
        connection.setblocking(False)
        strangers = sum(not each.owner for each in self._connections.values())
        if strangers >= MOST_STRANGERS or not packets.is_own_user(connection):
            connection.close()
            return
        self._connections[connection.fileno()] = _Connection(connection)
        self._poller.register(connection, select.EPOLLIN)

    def _read(self, descriptor: int) -> None:
        for _ in range(MOST_PACKETS):
            connection = self._connections.get(descriptor)
            if connection is None:
                return
            try:
                received = packets.receive(connection.socket)
                if received is None:
                    return
                packet, descriptors = received
                packets.close_all(descriptors)
                self._take(descriptor, TO_SHARER.decode(packet))
            except (packets.ConnectionEnded, ProtocolError) as wrong:
                self._drop(descriptor, str(wrong))
                return

    def _take(self, descriptor: int, message: Import | AskSlots | ReturnSlots | Leave) -> None:
        admitted = bool(self._connections[descriptor].owner)
        if admitted == isinstance(message, Import):
            raise ProtocolError("a reader says what it imports first, and once")
        match message:
            case Import():
                self._admit(descriptor, message)
            case AskSlots():
                self._open_share(descriptor, message)
            case ReturnSlots():
                self._blocks.take_back(self.sharing.release(descriptor, message.number))
            case Leave():
                slots = self.sharing.leave(descriptor)
                self._forget(self._connections[descriptor].owner)
                self._blocks.take_back(slots)
            case _:
                assert_never(message)

    def _admit(self, descriptor: int, asked: Import) -> None:
        watch: LockWatch | None = None
        try:
            check_import(asked, self._offer.identity, self._offer.generation)
            try:
                watch = LockWatch.of(self._directory, asked.owner)
            except OSError as wrong:
                raise SharingRefused("unproven", f"the lock of {asked.owner}: {wrong.strerror}") from None
            if watch is None:
                raise SharingRefused("unproven", f"no living process holds the lock of {asked.owner}")
            slots = self.sharing.admit(descriptor, asked.owner)
        except SharingRefused as refused:
            if watch is not None:
                watch.close()
            self._send(descriptor, NotShared(refused.code, str(refused)))
            self._drop(descriptor, str(refused))
            return
        self._forget(asked.owner)
        self._watches[asked.owner] = watch
        self._connections[descriptor].owner = asked.owner
        self._blocks.take_back(slots)
        self._send(descriptor, self._offer, self._pages.descriptors())

    def _open_share(self, descriptor: int, asked: AskSlots) -> None:
        try:
            self.sharing.open_share(descriptor, asked.number, asked.keys, self._now_s)
        except SharingRefused as refused:
            self._send(descriptor, NotShared(refused.code, str(refused), asked.number))

    def _send(
        self, descriptor: int, message: Offer | NotShared | SlotsShared | Closing, pages: Sequence[int] = ()
    ) -> None:
        connection = self._connections.get(descriptor)
        if connection is None:
            return
        try:
            packets.send(connection.socket, FROM_SHARER.encode(message), pages)
        except packets.ConnectionEnded as wrong:
            self._read(descriptor)  # a reader that has closed it may have said before that it leaves
            self._drop(descriptor, str(wrong))

    def _drop(self, descriptor: int, why: str) -> None:
        """Close a connection. What its reader has shared stays shared."""
        connection = self._connections.pop(descriptor, None)
        if connection is None:
            return
        if connection.owner:
            _log.info("the connection of %s, which reads blocks of this process, ended: %s", connection.owner, why)
        self.sharing.connection_closed(descriptor)
        self._poller.unregister(connection.socket)
        connection.socket.close()

    def _forget(self, owner: str) -> None:
        """Close what is left of a reader that `sharing` has ended."""
        for descriptor, connection in list(self._connections.items()):
            if connection.owner == owner:
                self._drop(descriptor, "the reader is gone")
        watch = self._watches.pop(owner, None)
        if watch is not None:
            watch.close()

    def _sweep(self) -> None:
        """Delete the sockets of sharers that are dead. Raise OSError if that cannot be seen."""
        for path in self._path.parent.iterdir():
            watch = LockWatch.of(self._directory, path.name)
            if watch is None:
                with suppress(OSError):
                    path.unlink()
            else:
                watch.close()


class LockWatch:
    """The open lock file of one process: its own lock is watched, not another file under its name.
    `shared.pool.lock` says why a free lock proves that neither the process nor its GPU reads or writes any more."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @staticmethod
    def of(directory: Path, owner: str) -> LockWatch | None:
        """Watch the lock of `owner` next to the pool in `directory`; None if no living process holds it. Raise OSError
        if that cannot be seen, since this process or the machine has no file descriptor left."""
        if not is_owner(owner):
            return None
        try:
            descriptor = os.open(directory / OWNERS / owner, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as wrong:
            if wrong.errno in _NO_DESCRIPTOR:
                raise
            return None
        watch = LockWatch(descriptor)
        if ownership_fault(os.fstat(descriptor), "file", "") or watch.is_free():
            watch.close()
            return None
        return watch

    def is_free(self) -> bool:
        """Return whether the process is dead. False also while another process looks at the same lock: ask again."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        return True

    def close(self) -> None:
        os.close(self._descriptor)
