"""NATS's client protocol: bytes from a server to what they say, and what is said to bytes. Pure.

    bytes ──▶ Wire.feed ──▶ [Info | Delivery | Ping | Pong | Refusal …]
    CONNECT, PUB and HPUB, SUB, UNSUB, PING, PONG ◀── functions of their arguments

https://docs.nats.io/reference/reference-protocols/nats-protocol. Why not nats-py: there a message goes through a stream
reader, its task, a queue and a second task, and out again through a flusher's task, each a turn of the event loop; and
one message that it cannot read ends its reading for good. See docs/decisions/0021-own-nats-client.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec
from msgspec import Struct

from shared.errors import ProtocolError
from shared.messaging import Message

LINE_LIMIT_BYTES = 1 << 20
"""INFO names all servers of a cluster; other lines have at most 4096."""
PAYLOAD_LIMIT_BYTES = 64 << 20
"""nats-server's own."""
STATUS, DESCRIPTION = "Status", "Description"
"""Headers that stand in a message's first header line; the server's answer for nobody is 503."""

_CRLF = b"\r\n"
_VERSION = b"NATS/1.0"
_NAME = re.compile(r"[!-9;-~]+")
_BREAK = re.compile(r"[\r\n]")


class Info(Struct, frozen=True):
    """The server's account of itself: first of all, and when it changes."""

    max_payload: int = 1 << 20
    tls_required: bool = False
    headers: bool = False


class Delivery(Struct, frozen=True, gc=False):
    """A message of a subscription, as it came."""

    sid: int
    subject: bytes
    reply: bytes
    headers: bytes
    payload: bytes

    def message(self) -> Message:
        """Raises ProtocolError: the server looks into neither headers nor UTF-8, so any client may send anything."""
        try:
            headers = _read_headers(self.headers) if self.headers else {}
            return Message(self.subject.decode(), self.payload, self.reply.decode(), headers)
        except (ValueError, ProtocolError) as wrong:
            raise ProtocolError(f"dropped a message on {self.subject!r}: {wrong}") from None


class Ping(Struct, frozen=True):
    """To be answered with PONG."""


class Pong(Struct, frozen=True):
    """The answer to the oldest PING: all that was sent before it is done."""


class Refusal(Struct, frozen=True):
    """-ERR: what the server did not do. It closes the connection after most, but not after a forbidden subject."""

    text: str


Said = Info | Delivery | Ping | Pong | Refusal

_INFO = msgspec.json.Decoder(Info)


class Wire:
    """The receiving end of one connection."""

    def __init__(self) -> None:
        self._held: list[bytes] = []
        """Of something unfinished; joined when it is all there."""
        self._held_bytes = 0
        self._needed_bytes = 1
        """Held before there is something to find in it."""

    def feed(self, came: bytes) -> list[Said]:
        """What is complete. Raises ProtocolError where this is not the protocol; then there is no going on."""
        if self._held:
            self._held.append(came)
            self._held_bytes += len(came)
            if self._held_bytes < self._needed_bytes:
                return []
            came = b"".join(self._held)
            self._held.clear()
        said: list[Said] = []
        at, size = 0, len(came)
        while at < size:
            line_end = came.find(_CRLF, at)
            if line_end < 0:
                if size - at > LINE_LIMIT_BYTES:
                    raise ProtocolError(f"a line of more than {LINE_LIMIT_BYTES} bytes")
                self._hold(came[at:], size - at + 1)
                break
            line, after = came[at:line_end], line_end + 2
            if line.startswith((b"MSG ", b"HMSG ")):
                sid, subject, reply, header_bytes, total_bytes = _sizes(line)
                end = after + total_bytes
                if end + 2 > size:
                    self._hold(came[at:], end + 2 - at)
                    break
                split = after + header_bytes
                said.append(Delivery(sid, subject, reply, came[after:split], came[split:end]))
                at = end + 2
            else:
                operation = _other(line)
                if operation is not None:
                    said.append(operation)
                at = after
        return said

    def _hold(self, rest: bytes, needed_bytes: int) -> None:
        self._held.append(rest)
        self._held_bytes = len(rest)
        self._needed_bytes = needed_bytes

    def validate(self) -> None:
        """Assert every invariant."""
        assert not self._held or sum(map(len, self._held)) == self._held_bytes < self._needed_bytes
        assert self._needed_bytes <= LINE_LIMIT_BYTES + PAYLOAD_LIMIT_BYTES + 4


def _sizes(line: bytes) -> tuple[int, bytes, bytes, int, int]:
    """(sid, subject, reply, bytes of headers, bytes in all) of `[H]MSG subject sid [reply] [headers] total`."""
    words = line.split(b" ")
    with_headers = words[0] == b"HMSG"
    try:
        if len(words) == 4 + with_headers:
            reply = b""
        elif len(words) == 5 + with_headers:
            reply = words[3]
        else:
            raise ValueError
        total = int(words[-1])
        headers = int(words[-2]) if with_headers else 0
        if not 0 <= headers <= total <= PAYLOAD_LIMIT_BYTES:
            raise ValueError
        return int(words[2]), words[1], reply, headers, total
    except ValueError:
        raise ProtocolError(f"not a message of NATS: {line[:100]!r}") from None


def _other(line: bytes) -> Said | None:
    """What a line says that has no payload; None: nothing."""
    word, _, rest = line.partition(b" ")
    match word:
        case b"PING":
            return Ping()
        case b"PONG":
            return Pong()
        case b"+OK":
            return None
        case b"-ERR":
            return Refusal(rest.decode(errors="replace").strip("' "))
        case b"INFO":
            try:
                return _INFO.decode(rest)
            except msgspec.MsgspecError as wrong:
                raise ProtocolError(f"not NATS's INFO: {wrong}") from None
        case _:
            raise ProtocolError(f"not NATS: {line[:100]!r}")


def _read_headers(block: bytes) -> dict[str, str]:
    """Of `NATS/1.0[ status[ description]]`, lines of `name: value`, and an empty line."""
    first, *lines, empty, last = block.split(_CRLF) if block.count(_CRLF) > 1 else (b"", b"-", b"-")
    if not first.startswith(_VERSION) or empty or last:
        raise ProtocolError(f"not headers: {block[:100]!r}")
    headers: dict[str, str] = {}
    status, _, description = first[len(_VERSION) :].decode().strip().partition(" ")
    if status:
        headers[STATUS] = status
    if description:
        headers[DESCRIPTION] = description
    for line in lines:
        name, colon, value = line.decode().partition(":")
        if not colon:
            raise ProtocolError(f"not a header: {line[:100]!r}")
        headers[name] = value.strip()
    return headers


# --- what a client says

PING = b"PING\r\n"
PONG = b"PONG\r\n"


def connect(*, name: str, version: str, user: str, password: str) -> bytes:
    """The first thing said. A user without a password is a token."""
    options: dict[str, object] = {
        "verbose": False,
        "pedantic": False,
        "lang": "python",
        "version": version,
        "protocol": 1,
        "headers": True,
        "no_responders": True,
        "name": name,
    }
    if user and not password:
        options["auth_token"] = user
    elif user:
        options |= {"user": user, "pass": password}
    return b"CONNECT " + msgspec.json.encode(options) + _CRLF


def publish(subject: str, reply: str, payload: bytes, headers: Mapping[str, str] | None) -> bytes:
    """`subject` and `reply` are checked already. Raises ProtocolError for what cannot be a header."""
    to = f"{subject} {reply}" if reply else subject
    if not headers:
        return b"".join((f"PUB {to} {len(payload)}\r\n".encode(), payload, _CRLF))
    block = _write_headers(headers)
    sizes = f"{len(block)} {len(block) + len(payload)}"
    return b"".join((f"HPUB {to} {sizes}\r\n".encode(), block, payload, _CRLF))


def _write_headers(headers: Mapping[str, str]) -> bytes:
    lines = [_VERSION.decode()]
    for name, value in headers.items():
        if not _NAME.fullmatch(name) or _BREAK.search(value):
            raise ProtocolError(f"not a header: {name[:100]!r}: {value[:100]!r}")
        lines.append(f"{name}: {value}")
    return "\r\n".join([*lines, "", ""]).encode()


def subscribe(subject: str, queue: str, sid: int) -> bytes:
    """`subject` is checked already, `queue` empty or one token."""
    return f"SUB {subject} {queue} {sid}\r\n".encode() if queue else f"SUB {subject} {sid}\r\n".encode()


def unsubscribe(sid: int) -> bytes:
    """No more of that subscription."""
    return f"UNSUB {sid}\r\n".encode()
