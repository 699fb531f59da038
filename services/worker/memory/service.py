"""MemoryService: carries out what the `Ledger` decides, on a Unix socket. It needs no CUDA: it holds descriptors.

    DIR/lock      held by the directory's memory service
    DIR/socket    where engines ask; only processes of this user are answered

The memory of a descriptor lives until its last mapping and descriptor is gone, in whatever process. So weights
outlive the engines that made them here, and outlive this service in the engines that map them.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import assert_never

from services.worker.memory.ledger import (
    CloseConnection,
    KeepMemory,
    Ledger,
    LedgerAction,
    LedgerLimits,
    ReleaseMemory,
    SendPacket,
)
from services.worker.memory.messages import (
    AskWeights,
    CommitWeights,
    FreeWeights,
    NotMapped,
    ShowWeights,
    WeightsIdentity,
    decode_to_service,
    encode_from_service,
)
from services.worker.sharing import packets
from services.worker.sharing.host_pages import IMMUTABLE, memory_fault
from shared.errors import ConfigError, ProtocolError
from shared.pool.lock import LOCK, SOCKET, HeldLock, LockTaken
from shared.rate_limited_log import RateLimitedLog
from shared.regular_file import ownership_fault

MOST_CONNECTIONS = 256
"""The most connections at once. One more is closed."""
ACCEPT_RETRY_S = 0.25
"""Seconds until the next try after a connection could not be accepted, since no file descriptor was left."""

_log = logging.getLogger(__name__)


class MemoryService:
    """Serves one directory until `stop`. It belongs to one thread."""

    def __init__(self, directory: Path, limits: LedgerLimits) -> None:
        """Listen. Raise ConfigError if the directory cannot be used, or another memory service does."""
        self.ledger = Ledger(limits)
        self._lock = _hold(directory)
        self._path = directory / SOCKET
        try:
            self._path.unlink(missing_ok=True)  # of a service that was killed
            self._listening = packets.listening(self._path)
        except OSError as wrong:
            self._lock.close()
            raise ConfigError(f"directory: {self._path}: {wrong.strerror}") from None
        self._connections: dict[int, socket.socket] = {}
        """Number → connection. Numbers are not used twice."""
        self._numbers: dict[int, int] = {}
        """Descriptor → number of the connection."""
        self._newest = 0
        self._memory: dict[int, list[int]] = {}
        """Number of a memory → its descriptors."""
        self._accept_s: float | None = None
        """When to accept connections again. None means now."""
        self._refused = RateLimitedLog(clock=time.monotonic)
        self._stopped = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = select.epoll()
        for descriptor in (self._listening.fileno(), self._stopped):
            self._poller.register(descriptor, select.EPOLLIN)

    def stop(self) -> None:
        """End `run`. A signal handler may call it."""
        os.eventfd_write(self._stopped, 1)

    def run(self) -> None:
        """Serve until `stop`."""
        while self._turn():
            pass

    def close(self) -> None:
        """Close the socket, all connections and all memory. Engines keep what they have mapped."""
        for connection in self._connections.values():  # not by the ledger, which would let others write
            connection.close()
        for descriptors in self._memory.values():
            packets.close_all(descriptors)
        self._listening.close()
        self._path.unlink(missing_ok=True)
        self._poller.close()
        os.close(self._stopped)
        self._lock.close()

    def _turn(self) -> bool:
        """Wait for an event, and handle all that have come. Return False after `stop`."""
        due_s = [due_s for due_s in (self.ledger.due_s, self._accept_s) if due_s is not None]
        wait_s = max(0.0, min(due_s) - time.monotonic()) if due_s else None
        for descriptor, _ in self._poller.poll(wait_s):
            if descriptor == self._stopped:
                return False
            if descriptor == self._listening.fileno():
                self._accept()
            elif descriptor in self._numbers:
                self._read(self._numbers[descriptor])
        if self._accept_s is not None and time.monotonic() >= self._accept_s:
            self._accept_s = None
            self._poller.register(self._listening, select.EPOLLIN)
        self._do(self.ledger.tick(time.monotonic()))
        return True

    def _accept(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as wrong:  # the socket stays readable, so look away
            self._refused.warn("an engine waits", wrong.strerror or str(wrong))
            self._poller.unregister(self._listening)
            self._accept_s = time.monotonic() + ACCEPT_RETRY_S
            return
        connection.setblocking(False)
        if not packets.is_own_user(connection):
            connection.close()
            return
        if len(self._connections) >= MOST_CONNECTIONS:
            with suppress(packets.ConnectionEnded):
                full = NotMapped("full", f"there are {MOST_CONNECTIONS} connections already")
                packets.send(connection, encode_from_service(full))
            connection.close()
            return
        self._newest += 1
        self._connections[self._newest] = connection
        self._numbers[connection.fileno()] = self._newest
        self._poller.register(connection, select.EPOLLIN)

    def _read(self, number: int) -> None:
        """Take one packet; if there are more, the next turn takes them."""
        descriptors: list[int] = []
        try:
            received = packets.receive(self._connections[number])
            if received is None:
                return
            packet, descriptors = received
            self._take(number, packet, descriptors)
        except ProtocolError as wrong:
            self._refused.warn("a connection was closed, as it sent nonsense", str(wrong))
            self._close(number)
        except packets.ConnectionEnded:
            self._close(number)
        finally:
            packets.close_all(descriptors)

    def _take(self, number: int, packet: bytes, descriptors: list[int]) -> None:
        """Handle one packet. Descriptors that are kept are taken out of the list."""
        message, now_s = decode_to_service(packet), time.monotonic()
        match message:
            case AskWeights():
                self._do(self.ledger.ask(number, message, now_s))
            case CommitWeights():
                fault = self._fault(number, message.identity, descriptors)
                self._do(self.ledger.commit(number, message.identity, fault, now_s), descriptors)
            case FreeWeights():
                self._do(self.ledger.free(number, message.model))
            case ShowWeights():
                pids = {each: packets.process_of(connection) for each, connection in self._connections.items()}
                self._do([SendPacket(number, self.ledger.show(pids))])
            case _:
                assert_never(message)

    def _fault(self, number: int, identity: WeightsIdentity, descriptors: Sequence[int]) -> str:
        """Return what is wrong with the memory that a writer commits. Empty if nothing is, or that cannot be seen."""
        if identity.device:  # only CUDA could tell more
            return "" if len(descriptors) == 1 else f"device memory has one descriptor; these are {len(descriptors)}"
        size_bytes = self.ledger.written_bytes(number)
        fault = memory_fault(descriptors, size_bytes, IMMUTABLE)
        if not fault and (held_bytes := os.fstat(descriptors[0]).st_size) > size_bytes:
            fault = f"the memory has {held_bytes} bytes, more than the {size_bytes} that count"
        return fault

    def _do(self, actions: Iterable[LedgerAction], descriptors: list[int] | None = None) -> None:
        """Carry actions out, and what follows from a connection that ends meanwhile."""
        ahead = deque(actions)
        while ahead:
            action = ahead.popleft()
            match action:
                case KeepMemory(memory):
                    assert descriptors is not None
                    self._memory[memory] = list(descriptors)
                    descriptors.clear()
                case ReleaseMemory(memory):
                    packets.close_all(self._memory.pop(memory))
                case SendPacket(connection, message, memory):
                    self._log_packet(connection, message)
                    sent = [] if memory is None else self._memory[memory]
                    try:
                        if connection in self._connections:
                            packets.send(self._connections[connection], encode_from_service(message), sent)
                    except packets.ConnectionEnded:
                        ahead += self._forget(connection)
                case CloseConnection(connection):
                    ahead += self._forget(connection)
                case _:
                    assert_never(action)

    def _close(self, number: int) -> None:
        self._do(self._forget(number))

    def _forget(self, number: int) -> list[LedgerAction]:
        """Close a connection; return what the ledger makes of it."""
        connection = self._connections.pop(number, None)
        if connection is None:
            return []
        del self._numbers[connection.fileno()]
        self._poller.unregister(connection)
        connection.close()
        return self.ledger.connection_closed(number, time.monotonic())

    def _log_packet(self, number: int, message: object) -> None:
        connection = self._connections.get(number)
        if isinstance(message, NotMapped) and connection is not None:
            process = packets.process_of(connection)
            self._refused.warn(f"no weights ({message.code})", f"process {process}: {message.reason}")


def _hold(directory: Path) -> HeldLock:
    """Lock the directory, which is made if it is missing. Raise ConfigError."""
    try:
        with suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        if fault := ownership_fault(directory.lstat(), "directory", "open"):
            raise ConfigError(f"directory: {directory} {fault}")
        return HeldLock.acquire(directory / LOCK, f"{os.getpid()}\n")
    except LockTaken as taken:
        raise ConfigError(f"directory: another memory service runs in {directory}: process {taken.note}") from None
    except OSError as wrong:
        raise ConfigError(f"directory: {wrong.filename or directory}: {wrong.strerror}") from None
