"""WeightsLock: an engine's connection to the memory service. While it is open, the engine makes or maps weights."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import assert_never

from services.worker.memory.messages import (
    PROTOCOL,
    AskWeights,
    CommitWeights,
    FromService,
    MapWeights,
    NotMapped,
    WaitForWriter,
    WeightsFreed,
    WeightsIdentity,
    WeightsShown,
    WriteWeights,
    decode_from_service,
    encode_to_service,
)
from services.worker.sharing import packets
from shared.errors import HeadraceError, ProtocolError
from shared.pool.lock import SOCKET

CONNECT_RETRY_S = 0.05
"""Seconds between two tries to connect, while no service listens."""


class NoSharedWeights(HeadraceError):
    """The memory service does not have the weights for this engine, or cannot be reached. The message says why."""


class WeightsLock:
    """One connection, for one model's weights. It belongs to one thread."""

    def __init__(self, directory: Path, identity: WeightsIdentity, size_bytes: int, timeout_s: float) -> None:
        """Connect within `timeout_s`, which is also the limit of each answer. Raise NoSharedWeights."""
        self._where = f"weights.memory, {directory}"
        self._identity = identity
        self._size_bytes = size_bytes
        self._timeout_s = timeout_s
        self._socket = self._connect(directory)

    def ask(self, name: str, wait_s: float, waits: Callable[[], None]) -> list[int] | None:
        """Return the descriptors of the weights, which are the caller's. None if this engine is to make them, and to
        `commit` them.

        While another engine makes them, `waits` is called once, and at most `wait_s` pass. Raise NoSharedWeights.
        """
        self._send(AskWeights(PROTOCOL, self._identity, self._size_bytes, name))
        message, descriptors = self._receive(self._timeout_s)
        if isinstance(message, WaitForWriter):
            packets.close_all(descriptors)
            waits()
            message, descriptors = self._receive(wait_s)
        if isinstance(message, WriteWeights):
            packets.close_all(descriptors)
            return None
        self._check_mapped(message, descriptors)
        return descriptors

    def commit(self, descriptor: int) -> None:
        """Give the service the weights that this engine has made, in memory that nothing can write to any more. The
        descriptor stays the caller's. Raise NoSharedWeights."""
        self._send(CommitWeights(self._identity), [descriptor])
        message, descriptors = self._receive(self._timeout_s)
        packets.close_all(descriptors)
        self._check_mapped(message, [])

    def close(self) -> None:
        """Give the lock back. Idempotent."""
        self._socket.close()

    def _check_mapped(self, message: FromService, descriptors: list[int]) -> None:
        """Raise NoSharedWeights, after closing the descriptors, unless the message says that these weights are
        there."""
        match message:
            case MapWeights(identity, size_bytes):
                if (identity, size_bytes) == (self._identity, self._size_bytes):
                    return
                wrong = f"it has {identity.model}/{identity.layout}, not {self._identity.model}/{self._identity.layout}"
            case NotMapped(_, reason):
                wrong = reason
            case WriteWeights() | WaitForWriter() | WeightsFreed() | WeightsShown():
                wrong = "its answer is none to this question"
            case _:
                assert_never(message)
        packets.close_all(descriptors)
        raise NoSharedWeights(f"{self._where}: {wrong}")

    def _connect(self, directory: Path) -> socket.socket:
        until_s = time.monotonic() + self._timeout_s
        while True:
            try:
                connection = packets.connected(directory / SOCKET)
                break
            except OSError as wrong:
                if time.monotonic() >= until_s:
                    raise NoSharedWeights(f"{self._where}: no memory service answers: {wrong.strerror}") from None
                time.sleep(CONNECT_RETRY_S)
        if packets.is_own_user(connection):
            return connection
        connection.close()
        raise NoSharedWeights(f"{self._where}: the socket belongs to another user")

    def _send(self, message: AskWeights | CommitWeights, descriptors: list[int] | None = None) -> None:
        try:
            packets.send(self._socket, encode_to_service(message), descriptors or ())
        except packets.ConnectionEnded as wrong:
            raise NoSharedWeights(f"{self._where}: the memory service has ended: {wrong}") from None

    def _receive(self, limit_s: float) -> tuple[FromService, list[int]]:
        """Return the next message and its descriptors. Raise NoSharedWeights."""
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        until_s = time.monotonic() + limit_s
        while True:
            poller.poll(max(0.0, until_s - time.monotonic()) * 1000)
            try:
                received = packets.receive(self._socket)
                if received is not None:
                    break
            except (packets.ConnectionEnded, ProtocolError) as wrong:
                raise NoSharedWeights(f"{self._where}: the memory service has ended: {wrong}") from None
            if time.monotonic() >= until_s:
                raise NoSharedWeights(f"{self._where}: the memory service gave no answer in {limit_s:g} s")
        try:
            return decode_from_service(received[0]), received[1]
        except ProtocolError as wrong:
            packets.close_all(received[1])
            raise NoSharedWeights(f"{self._where}: {wrong}") from None
