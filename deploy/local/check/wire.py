"""Messages and bytes over one blocking socket, each with a deadline.

A thread serves one socket; the kernel's calls do not hold Python's lock, so that several streams fill a fast network.
"""

from __future__ import annotations

import os
import socket
import time

from deploy.local.check.frames import LENGTH_BYTES, MESSAGE_S, TRANSFER_S, Answer, Question, body_bytes, encode

PIECE_BYTES = 1 << 20
_BYTES = memoryview(os.urandom(PIECE_BYTES))  # random, as a network may compress
Address = tuple[str, int]


def parse_address(text: str) -> Address | None:
    """Return the host and the port of HOST:PORT or [HOST]:PORT; None if it is neither."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    return (host, int(port)) if host and port.isascii() and port.isdigit() and int(port) < 1 << 16 else None


class Wire:
    """One connection. All methods raise OSError; TimeoutError is one."""

    def __init__(self, connection: socket.socket, until_s: float) -> None:
        """Use `connection`; everything ends at `until_s` of the monotonic clock."""
        self._connection = connection
        self._until_s = until_s
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: Question | Answer) -> None:
        """Send a message."""
        self._limit(MESSAGE_S)
        self._connection.sendall(encode(message))

    def receive(self) -> bytes:
        """Return the next message's body. Raise ProtocolError, and EOFError at the end of the stream."""
        until_s = time.monotonic() + MESSAGE_S
        return self._exactly(body_bytes(self._exactly(LENGTH_BYTES, until_s)), until_s)

    def send_bytes(self, size_bytes: int) -> None:
        """Send that number of bytes."""
        until_s = time.monotonic() + TRANSFER_S
        while size_bytes:
            self._limit(min(MESSAGE_S, until_s - time.monotonic()))
            self._connection.sendall(_BYTES[: min(size_bytes, PIECE_BYTES)])
            size_bytes -= min(size_bytes, PIECE_BYTES)

    def receive_bytes(self, size_bytes: int) -> None:
        """Receive that number of bytes, and forget them. Raise EOFError if they end before."""
        room, until_s = memoryview(bytearray(min(PIECE_BYTES, size_bytes))), time.monotonic() + TRANSFER_S
        while size_bytes:
            self._limit(min(MESSAGE_S, until_s - time.monotonic()))
            came = self._connection.recv_into(room[: min(size_bytes, PIECE_BYTES)])
            if not came:
                raise EOFError(f"the other side ended with {size_bytes} bytes to come")
            size_bytes -= came

    def _exactly(self, size_bytes: int, until_s: float) -> bytes:
        got = bytearray()
        while len(got) < size_bytes:
            self._limit(until_s - time.monotonic())
            piece = self._connection.recv(size_bytes - len(got))
            if not piece:
                raise EOFError("the other side has closed the connection")
            got += piece
        return bytes(got)

    def _limit(self, limit_s: float) -> None:
        left_s = min(limit_s, self._until_s - time.monotonic())
        if left_s <= 0:
            raise TimeoutError("the other side took too long")
        self._connection.settimeout(left_s)
