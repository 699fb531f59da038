"""SocketClient: the connector's way to the kvbm of a pool's directory, without NATS and without waiting.

    none ──connect──▶ connected ──Hello──▶ up: KvbmUp; requests are sent, answers come ──▶ lost: KvbmDown, none
      ▲                                                                                     │
      └──── RETRY_S later, at the next `poll` ──────────────────────────────────────────────┘

`poll` and `send` never block. What the socket does not take at once waits here, up to MOST_UNSENT_BYTES.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from services.worker.contracts.messages import KvbmAsk, KvbmDown, KvbmReply, KvbmUp
from shared.errors import ProtocolError
from shared.pool.format import PoolUnfit
from shared.pool.lock import SOCKET, check_directory
from shared.pool.socket_frames import (
    FROM_KVBM,
    PROTOCOL,
    Answered,
    Asked,
    FrameReader,
    Hello,
    encode_frame,
)

RETRY_S = 0.5
"""Seconds between two tries to connect."""
HELLO_S = 2.0
"""Seconds that the kvbm may take for its first words."""
MOST_UNSENT_BYTES = 4 << 20
"""Most bytes that wait for the socket; over it the kvbm does not read, and the connection is given up."""
MOST_READ_BYTES = 4 << 20
"""Most bytes that one `poll` reads, so that a step of the scheduler ends; the rest is read at the next."""
_READ_BYTES = 1 << 16
_WRITE_BYTES = 1 << 18
_libc = ctypes.PyDLL(None, use_errno=True)
"""The C library, whose functions keep the interpreter's lock here. Python's own `recv` and `send` give it to vLLM's
other threads, also if nothing has come: on two busy cores each step then waited 0.4 ms to get it back."""
_libc.recv.argtypes = _libc.send.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
_libc.recv.restype = _libc.send.restype = ctypes.c_ssize_t


class _Awaited(Struct):
    until_s: float
    timeout_s: float


class SocketClient:
    """One engine's connection. Belongs to one thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._socket: socket.socket | None = None
        self._reader = FrameReader()
        self._buffer = ctypes.create_string_buffer(_READ_BYTES)
        self._unsent = bytearray()
        self._awaited: dict[int, _Awaited] = {}
        self._kvbm = ""
        """Instance id of the kvbm that is up. Empty if none is."""
        self._try_s = 0.0
        self._hello_until_s = 0.0
        self._tried = False
        self.trouble = ""
        """Why there is no connection. Empty if there is one, or none was tried yet."""

    @property
    def settling(self) -> bool:
        """True until it is known whether there is a kvbm."""
        return not self._tried or (self._socket is not None and not self._kvbm)

    def poll(self, now_s: float) -> list[KvbmUp | KvbmDown | KvbmReply]:
        """Connect if that is due; return what has come, in order."""
        news: list[KvbmUp | KvbmDown | KvbmReply] = []
        if self._socket is None:
            if now_s < self._try_s:
                return news
            self._connect(now_s)
        if self._socket is not None:
            try:
                self._flush()
                news.extend(self._receive(now_s))
                if not self._kvbm and now_s >= self._hello_until_s:
                    raise ProtocolError("no Hello came in time: is the socket that of a kvbm of this version?")
            except (OSError, ProtocolError) as wrong:
                news.extend(self._lose(str(wrong) or type(wrong).__name__, now_s))
        if self._awaited:
            for number in [number for number, awaited in self._awaited.items() if now_s >= awaited.until_s]:
                timeout_s = self._awaited.pop(number).timeout_s
                news.append(KvbmReply(number, b"", failed=f"no answer in {timeout_s:g} s"))
        return news

    def send(self, ask: KvbmAsk, now_s: float) -> list[KvbmDown | KvbmReply]:
        """Send a request. Return what there is to say at once: that it could not be sent."""
        if self._socket is None or not self._kvbm:
            return [KvbmReply(ask.number, b"", failed="there is no kvbm")]
        self._awaited[ask.number] = _Awaited(now_s + ask.timeout_s, ask.timeout_s)
        try:
            self._unsent += encode_frame(Asked(ask.number, ask.operation, ask.payload))
            self._flush()
            if len(self._unsent) > MOST_UNSENT_BYTES:
                raise ProtocolError(f"the kvbm has not read {len(self._unsent)} bytes")
        except (OSError, ProtocolError) as wrong:
            return self._lose(str(wrong), now_s)
        return []

    def close(self) -> None:
        """Close the connection. Nothing is said of what was asked."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    # --- inside

    def _connect(self, now_s: float) -> None:
        self._try_s = now_s + RETRY_S
        self._tried = True
        path = self._directory / SOCKET
        try:
            check_directory(self._directory)  # else another user could answer
        except PoolUnfit as wrong:
            self.trouble = str(wrong)
            return
        except OSError as wrong:
            self.trouble = f"{self._directory}: {wrong.strerror}"
            return
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            made.connect(str(path))
        except OSError as wrong:  # EAGAIN: its queue of connections is full
            made.close()
            words = "no kvbm listens" if wrong.errno in (errno.ENOENT, errno.ECONNREFUSED) else wrong.strerror or wrong
            self.trouble = f"{path}: {words}"
            return
        self._socket, self._reader = made, FrameReader()
        self._unsent.clear()
        self._hello_until_s = now_s + HELLO_S

    def _receive(self, now_s: float) -> Iterator[KvbmUp | KvbmReply]:
        assert self._socket is not None
        read_bytes = 0
        while read_bytes < MOST_READ_BYTES:
            count = _called(_libc.recv(self._socket.fileno(), self._buffer, _READ_BYTES, socket.MSG_DONTWAIT))
            if count is None:
                return
            if not count:
                raise ProtocolError("the kvbm has closed the connection")
            read_bytes += count
            for body in self._reader.feed(ctypes.string_at(self._buffer, count)):
                yield from self._take(FROM_KVBM.decode(body), now_s)

    def _take(self, message: Hello | Answered, now_s: float) -> Iterator[KvbmUp | KvbmReply]:
        match message:
            case Hello(protocol, kvbm) if not self._kvbm:
                if protocol != PROTOCOL:
                    raise ProtocolError(f"kvbm {kvbm} speaks protocol {protocol}, this connector {PROTOCOL}")
                self._kvbm, self.trouble = kvbm, ""
                yield KvbmUp(kvbm)
            case Answered(number, payload, last) if self._kvbm:
                awaited = self._awaited.get(number)
                if awaited is None:
                    pass  # it came after its time: the connector attaches again anyway
                elif last:
                    del self._awaited[number]
                else:
                    awaited.until_s = now_s + awaited.timeout_s
                yield KvbmReply(number, payload, last=last)
            case _:
                raise ProtocolError(f"the kvbm sent {type(message).__name__}")

    def _flush(self) -> None:
        assert self._socket is not None
        while self._unsent:
            part = bytes(self._unsent[:_WRITE_BYTES])
            flags = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
            count = _called(_libc.send(self._socket.fileno(), part, len(part), flags))
            if count is None:
                return
            del self._unsent[:count]

    def _lose(self, reason: str, now_s: float) -> list[KvbmDown | KvbmReply]:
        """Close the connection; return what the connector must know."""
        self.close()
        was, self._kvbm = self._kvbm, ""
        self._awaited.clear()
        self._unsent.clear()
        self._try_s = now_s + RETRY_S
        self.trouble = f"{self._directory / SOCKET}: {reason}"
        return [KvbmDown(self.trouble)] if was else []


def _called(count: int) -> int | None:
    """Return what a call of `_libc` returned. None if the socket was not ready. Raise OSError."""
    if count >= 0:
        return count
    code = ctypes.get_errno()
    if code in (errno.EAGAIN, errno.EINTR):
        return None
    raise OSError(code, os.strerror(code))
