"""ZMTP 3.0 between a publisher and one subscriber: encodes messages, and parses the subscriber's bytes. Pure.

    connection    greeting, 64 bytes each way, then frames
    frame         flags, length in 1 or 8 bytes (big-endian), body
    handshake     the command READY each way, with the type of the socket
    subscriber    the message 01 topic subscribes, 00 topic unsubscribes; ZMTP 3.1 has the commands SUBSCRIBE and CANCEL
    either        the command PING is answered with PONG

Source: https://rfc.zeromq.org/spec/23/ (NULL mechanism), and /spec/37/ for SUBSCRIBE, CANCEL and PING.

libzmq's own PUB socket keeps every topic that a subscriber names, without a limit, even if XPUB_MANUAL refuses it; each
byte of a topic takes some 30 bytes. Here a subscriber uses at most FRAME_LIMIT_BYTES and the prefixes of one topic.
"""

from __future__ import annotations

from collections.abc import Iterable

from shared.errors import ProtocolError

FRAME_LIMIT_BYTES = 1024
"""The maximum size of a subscriber's frame: a topic, or its properties."""
PING_CONTEXT_LIMIT_BYTES = 16

GREETING = b"\xff" + bytes(7) + b"\x01\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
"""Our greeting: version 3.0, no security."""
_VERSION_AT, _MECHANISM = 10, slice(12, 32)
_MORE, _LONG, _COMMAND = 1, 2, 4
_SUBSCRIBERS = (b"SUB", b"XSUB")


def message(frames: Iterable[bytes]) -> bytes:
    """Encode a message of one or more frames."""
    *first, last = frames
    return b"".join([*(_frame(_MORE, each) for each in first), _frame(0, last)])


def command(name: bytes, body: bytes) -> bytes:
    """Encode the frame of a command."""
    return _frame(_COMMAND, bytes([len(name)]) + name + body)


def _frame(flags: int, body: bytes) -> bytes:
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags | _LONG]) + len(body).to_bytes(8, "big") + body


READY = command(b"READY", b"\x0bSocket-Type" + len(b"PUB").to_bytes(4, "big") + b"PUB")


class Subscriber:
    """One subscriber of `topic`. `greeted` and `ready` are the progress of its handshake.

    Subscriptions to other topics are ignored, since nothing is published there.
    """

    def __init__(self, topic: bytes) -> None:
        self._topic = topic
        self._unread = bytearray()
        self._prefixes: set[bytes] = set()
        self._continues = False
        self.greeted = False
        self.ready = False

    @property
    def subscribed(self) -> bool:
        """Whether the subscriber wants messages of the topic."""
        return bool(self._prefixes)

    def receive(self, data: bytes) -> list[bytes]:
        """Take bytes from the subscriber, and return the answers. Raise ProtocolError if the connection must be
        closed."""
        self._unread += data
        answers: list[bytes] = []
        if not self.greeted and len(self._unread) >= len(GREETING):
            self._greet(bytes(self._unread[: len(GREETING)]))
            del self._unread[: len(GREETING)]
            answers.append(READY)
        at = 0
        while self.greeted and (frame := self._next(at)) is not None:
            flags, body, at = frame
            answers += self._take_frame(flags, body)
        del self._unread[:at]
        return answers

    def validate(self) -> None:
        assert len(self._prefixes) <= len(self._topic) + 1
        assert len(self._unread) < max(len(GREETING), FRAME_LIMIT_BYTES + 9)
        assert self.greeted or not self.ready
        assert self.ready or not self._prefixes

    def _greet(self, greeting: bytes) -> None:
        if greeting[0] != 0xFF or greeting[9] & 1 == 0 or greeting[_VERSION_AT] < 3:
            raise ProtocolError("the greeting is not that of ZMTP 3")
        if greeting[_MECHANISM] != GREETING[_MECHANISM]:
            raise ProtocolError(f"the security mechanism is {greeting[_MECHANISM].rstrip(bytes(1))!r}, not NULL")
        self.greeted = True

    def _next(self, at: int) -> tuple[int, bytes, int] | None:
        """Return the frame at `at` and the position after it. None if it is not complete yet."""
        if len(self._unread) < at + 2:
            return None
        flags = self._unread[at]
        begin = at + (9 if flags & _LONG else 2)
        if len(self._unread) < begin:
            return None
        size_bytes = int.from_bytes(self._unread[at + 1 : begin], "big")
        if size_bytes > FRAME_LIMIT_BYTES:
            raise ProtocolError(f"a subscriber's frame has {size_bytes} bytes; the limit is {FRAME_LIMIT_BYTES}")
        end = begin + size_bytes
        return None if len(self._unread) < end else (flags, bytes(self._unread[begin:end]), end)

    def _take_frame(self, flags: int, body: bytes) -> list[bytes]:
        if flags & _COMMAND:
            return self._take_command(body)
        if not self.ready:
            raise ProtocolError("a message came before READY")
        first, self._continues = not self._continues, flags & _MORE != 0
        if first and body[:1] in (b"\0", b"\1"):
            self._subscribe(body[1:], wanted=body[0] == 1)
        return []

    def _take_command(self, body: bytes) -> list[bytes]:
        name, rest = body[1 : 1 + body[0]] if body else b"", body[1 + body[0] :] if body else b""
        match name:
            case b"READY" if not self.ready:
                kind = _properties(rest).get(b"socket-type", b"")
                if kind not in _SUBSCRIBERS:
                    raise ProtocolError(f"a socket of the type {kind!r} connected; only SUB and XSUB may subscribe")
                self.ready = True
            case b"SUBSCRIBE" | b"CANCEL" if self.ready:
                self._subscribe(rest, wanted=name == b"SUBSCRIBE")
            case b"PING" if self.ready:
                return [command(b"PONG", rest[2:][:PING_CONTEXT_LIMIT_BYTES])]
            case _ if not self.ready:
                raise ProtocolError(f"the command {name!r} came before READY")
            case _:
                pass
        return []

    def _subscribe(self, prefix: bytes, *, wanted: bool) -> None:
        if not wanted:
            self._prefixes.discard(prefix)
        elif self._topic.startswith(prefix):
            self._prefixes.add(prefix)


def _properties(body: bytes) -> dict[bytes, bytes]:
    """Parse the properties of READY; their names become lower case."""
    found: dict[bytes, bytes] = {}
    at = 0
    while at < len(body):
        name_end = at + 1 + body[at]
        begin = name_end + 4
        end = begin + int.from_bytes(body[name_end:begin], "big")
        if end > len(body):
            raise ProtocolError("READY is cut short")
        found[body[at + 1 : name_end].lower()] = body[begin:end]
        at = end
    return found
