"""SocketClient: an engine's way to the kvbm of a pool's directory, without waiting.

    none ──connect──▶ connected ──Hello──▶ up: KvbmUp; requests are sent, answers come ──▶ lost: KvbmDown, none
      ▲                                                                                     │
      └──── RETRY_S later, at the next `poll` ──────────────────────────────────────────────┘

What the socket does not take at once waits here, up to MOST_UNSENT_BYTES. A traced fetch carries its place in the trace
to the kvbm, whose own span is below it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Protocol

from msgspec import Struct

from services.worker.contracts.messages import AskOutcome, AskSpan, KvbmAsked
from services.worker.kv_connector.contract import KvbmAsk, KvbmDown, KvbmNews, KvbmReply, KvbmUp
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
from shared.socket_path import reachable
from shared.tracing.spans import SpanIds
from shared.tracing.traceparent import parse

RETRY_S = 0.5
"""Seconds between two tries to connect."""
HELLO_S = 2.0
"""Seconds that the kvbm may take for its first words."""
MOST_UNSENT_BYTES = 4 << 20
"""Most bytes that wait for the socket; over it the kvbm does not read, and the connection is given up."""
MOST_READ_BYTES = 4 << 20
"""Most bytes that one `poll` reads, so that a step of the scheduler ends; the rest is read at the next."""
MOST_ASKED = 4096
"""Most ended requests that wait for `take_asked`. Further ones are not counted."""
_READ_BYTES = 1 << 16
_WRITE_BYTES = 1 << 18
_libc = ctypes.PyDLL(None, use_errno=True)
"""The C library, whose functions keep the interpreter's lock here. Python's own `recv` and `send` give it to vLLM's
other threads, also if nothing has come: on two busy cores each step then waited 0.4 ms to get it back."""
_libc.recv.argtypes = _libc.send.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
_libc.recv.restype = _libc.send.restype = ctypes.c_ssize_t


class KvbmStream(Protocol):
    """The bytes of one connection. No method waits."""

    def receive(self) -> bytes | None:
        """Return bytes that have come. None if there are none yet, empty at the end. Raise OSError."""
        ...

    def send(self, data: bytes) -> int:
        """Return how many of the bytes were taken. Raise OSError."""
        ...

    def fileno(self) -> int:
        """Return the descriptor, or -1 without one."""
        ...

    def close(self) -> None: ...


class UnixStream:
    """A KvbmStream of a Unix socket."""

    def __init__(self, path: Path) -> None:
        """Connect. Raise OSError if no one listens, or if the queue of connections is full (EAGAIN)."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self._buffer = ctypes.create_string_buffer(_READ_BYTES)
        try:
            with ExitStack() as opened:
                self._socket.connect(reachable(str(path), opened))
        except OSError:
            self._socket.close()
            raise

    def receive(self) -> bytes | None:
        count = _called(_libc.recv(self._socket.fileno(), self._buffer, _READ_BYTES, socket.MSG_DONTWAIT))
        return None if count is None else ctypes.string_at(self._buffer, count)

    def send(self, data: bytes) -> int:
        flags = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
        return _called(_libc.send(self._socket.fileno(), data, len(data), flags)) or 0

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()


class _Awaited(Struct):
    ask: KvbmAsk
    asked_s: float
    until_s: float
    span: AskSpan | None


class SocketClient:
    """One engine's connection, whose methods never wait. Belongs to one thread."""

    def __init__(self, directory: Path, connect: Callable[[Path], KvbmStream] = UnixStream) -> None:
        """`connect` returns a connection to the socket at a path, or raises OSError."""
        self._directory = directory
        self._connect_to = connect
        self._stream: KvbmStream | None = None
        self._ready = select.epoll()
        """Readable while the stream is, or while it takes bytes that wait here."""
        self._reader = FrameReader()
        self._unsent = bytearray()
        self._awaited: dict[int, _Awaited] = {}
        self._asked: list[KvbmAsked] = []
        self._ids = SpanIds(Random())  # noqa: S311 - ids only have to differ
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
        return not self._tried or (self._stream is not None and not self._kvbm)

    @property
    def wait_until_s(self) -> float | None:
        """When `poll` has something to do though nothing has come. None if never."""
        if self._stream is None:
            return self._try_s
        if not self._kvbm:
            return self._hello_until_s
        return min([awaited.until_s for awaited in self._awaited.values()], default=None)

    def fileno(self) -> int:
        """Return a descriptor that is readable while `poll` has something to do because of the kvbm."""
        return self._ready.fileno()

    def poll(self, now_s: float) -> list[KvbmNews]:
        """Connect if that is due; return what has come, in order."""
        news: list[KvbmNews] = []
        if self._stream is None:
            if now_s < self._try_s:
                return news
            news.extend(self._connect(now_s))
        if self._stream is not None:
            try:
                self._flush(self._stream)
                news.extend(self._receive(self._stream, now_s))
                if not self._kvbm and now_s >= self._hello_until_s:
                    raise ProtocolError("no Hello came in time: is the socket that of a kvbm of this version?")
            except (OSError, ProtocolError) as wrong:
                news.extend(self._lose(str(wrong) or type(wrong).__name__, now_s))
        if self._awaited:
            for number in [number for number, awaited in self._awaited.items() if now_s >= awaited.until_s]:
                awaited = self._awaited.pop(number)
                failed = f"no answer in {awaited.ask.timeout_s:g} s"
                self._end(awaited, "late", now_s, failed)
                news.append(KvbmReply(number, b"", failed=failed))
        return news

    def send(self, ask: KvbmAsk, now_s: float) -> list[KvbmDown | KvbmReply]:
        """Send a request. Return what there is to say at once: that it could not be sent."""
        awaited = _Awaited(ask, now_s, now_s + ask.timeout_s, self._span(ask))
        if self._stream is None or not self._kvbm:
            failed = "there is no kvbm"
            self._end(awaited, "away", now_s, failed)
            return [KvbmReply(ask.number, b"", failed=failed)]
        self._awaited[ask.number] = awaited
        trace = "" if awaited.span is None else awaited.span.place.header
        try:
            self._unsent += encode_frame(Asked(ask.number, ask.operation, ask.payload, trace))
            self._flush(self._stream)
            if len(self._unsent) > MOST_UNSENT_BYTES:
                raise ProtocolError(f"the kvbm has not read {len(self._unsent)} bytes")
        except (OSError, ProtocolError) as wrong:
            return list(self._lose(str(wrong), now_s))
        return []

    def take_asked(self) -> list[KvbmAsked]:
        """Return the requests that have ended since the last call, for the worker's metrics and traces."""
        asked, self._asked = self._asked, []
        return asked

    def close(self) -> None:
        """Close the connection. Nothing is said of what was asked."""
        self._disconnect()
        self._kvbm = ""
        self._ready.close()

    # --- inside

    def _connect(self, now_s: float) -> list[KvbmDown]:
        self._try_s = now_s + RETRY_S
        self._tried = True
        path = self._directory / SOCKET
        try:
            check_directory(self._directory)  # else another user could answer
        except PoolUnfit as wrong:
            return self._not_up(str(wrong))
        except FileNotFoundError:
            return self._not_up(
                f"there is no {self._directory}: start a kvbm with that pool.directory, or correct kvbm.pool"
            )
        except OSError as wrong:
            return self._not_up(f"{self._directory}: {wrong.strerror}")
        try:
            self._stream = self._connect_to(path)
        except OSError as wrong:  # EAGAIN: its queue of connections is full
            words = "no kvbm listens" if wrong.errno in (errno.ENOENT, errno.ECONNREFUSED) else wrong.strerror or wrong
            return self._not_up(f"{path}: {words}")
        if self._stream.fileno() >= 0:
            self._ready.register(self._stream.fileno(), select.EPOLLIN)
        self._reader = FrameReader()
        self._hello_until_s = now_s + HELLO_S
        return []

    def _receive(self, stream: KvbmStream, now_s: float) -> Iterator[KvbmUp | KvbmReply]:
        read_bytes = 0
        while read_bytes < MOST_READ_BYTES:
            data = stream.receive()
            if data is None:
                return
            if not data:
                raise ProtocolError("the kvbm has closed the connection")
            read_bytes += len(data)
            for body in self._reader.feed(data):
                yield from self._take(FROM_KVBM.decode(body), now_s)

    def _take(self, message: Hello | Answered, now_s: float) -> Iterator[KvbmUp | KvbmReply]:
        match message:
            case Hello(protocol, kvbm, namespace=namespace) if not self._kvbm:
                if protocol != PROTOCOL:
                    raise ProtocolError(f"kvbm {kvbm} speaks protocol {protocol}, this engine {PROTOCOL}")
                self._kvbm, self.trouble = kvbm, ""
                yield KvbmUp(kvbm, namespace)
            case Answered(number, payload, last) if self._kvbm:
                awaited = self._awaited.get(number)
                if awaited is None:
                    return  # it came after its time
                if last:
                    self._end(self._awaited.pop(number), "answered", now_s)
                else:
                    awaited.until_s = now_s + awaited.ask.timeout_s
                yield KvbmReply(number, payload, last=last)
            case _:
                raise ProtocolError(f"the kvbm sent {type(message).__name__}")

    def _flush(self, stream: KvbmStream) -> None:
        waited = bool(self._unsent)
        while self._unsent:
            count = stream.send(bytes(self._unsent[:_WRITE_BYTES]))
            if not count:
                break
            del self._unsent[:count]
        if (waits := bool(self._unsent)) or waited:
            self._watch(stream, select.EPOLLIN | (select.EPOLLOUT if waits else 0))

    def _watch(self, stream: KvbmStream, events: int) -> None:
        if stream.fileno() >= 0:
            self._ready.modify(stream.fileno(), events)

    def _lose(self, reason: str, now_s: float) -> list[KvbmDown]:
        """Close the connection; return what the connector must know."""
        self._disconnect()
        for awaited in self._awaited.values():
            self._end(awaited, "away", now_s, reason)
        self._awaited.clear()
        self._try_s = now_s + RETRY_S
        return self._not_up(f"{self._directory / SOCKET}: {reason}")

    def _not_up(self, trouble: str) -> list[KvbmDown]:
        """Take note of why no kvbm is up; return it where it is news."""
        was, self.trouble, self._kvbm = self.trouble, trouble, ""
        return [] if trouble == was else [KvbmDown(trouble)]

    def _disconnect(self) -> None:
        if self._stream is not None:
            if self._stream.fileno() >= 0:
                self._ready.unregister(self._stream.fileno())
            self._stream.close()
            self._stream = None
        self._unsent.clear()

    # --- metrics and traces

    def _span(self, ask: KvbmAsk) -> AskSpan | None:
        parent = parse((ask.trace,)) if ask.trace else None
        return None if parent is None else AskSpan(self._ids.child(parent), parent.span, time.time_ns())

    def _end(self, awaited: _Awaited, outcome: AskOutcome, now_s: float, failed: str = "") -> None:
        if len(self._asked) < MOST_ASKED:
            took_s = now_s - awaited.asked_s
            self._asked.append(KvbmAsked(awaited.ask.operation, outcome, took_s, failed, awaited.span))


def _called(count: int) -> int | None:
    """Return what a call of `_libc` returned. None if the socket was not ready. Raise OSError."""
    if count >= 0:
        return count
    code = ctypes.get_errno()
    if code in (errno.EAGAIN, errno.EINTR):
        return None
    raise OSError(code, os.strerror(code))
