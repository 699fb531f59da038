"""The protocol between `headrace check --peer` and `headrace check --serve`. Pure.

    frame = length (u32, big-endian), then a message in msgpack: at most FRAME_LIMIT_BYTES

    client                                server
    ProbeHello ─────────────────────────▶         the first connection begins a measurement; there is one at a time
               ◀──────── ProbeWelcome, ProbeBusy
    ProbeJoin ──────────────────────────▶         a further connection of the same measurement
               ◀──────── ProbeWelcome, ProbeBusy
    ProbeEcho ──────────────────────────▶
               ◀───────────── ProbeEchoed         with the server's time
    ProbeUpload, then size_bytes of bytes ▶
               ◀─────────── ProbeUploaded         when all of them have come
    ProbeDownload ──────────────────────▶
               ◀──────── size_bytes of bytes

Anything else ends the connection. A measurement ends with its first connection, or after SESSION_S.
"""

from __future__ import annotations

from math import isfinite
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from shared.errors import MALFORMED, ProtocolError

VERSION = 1
LENGTH_BYTES = 4
FRAME_LIMIT_BYTES = 4096
TRANSFER_LIMIT_BYTES = 1 << 30
"""Limit of one transfer."""
SESSION_LIMIT_BYTES = 64 << 30
"""Limit of all transfers of one measurement."""
SESSION_S = 40.0
"""Limit of one measurement, in seconds."""
MESSAGE_S = 5.0
"""Limit of the time for a whole message, in seconds, and for the next piece of a transfer."""
TRANSFER_S = 10.0
"""Limit of the time for a transfer, in seconds."""
MOST_STREAMS = 8
CLOCK_LIMIT_S = 1e11
"""Times after this are no times: the year is above 5000."""

Size = Annotated[int, Meta(ge=1, le=TRANSFER_LIMIT_BYTES)]
Name = Annotated[str, Meta(max_length=256)]


class ProbeHello(Struct, frozen=True, tag="hello"):
    """Begin a measurement."""

    version: int
    software: Name


class ProbeJoin(Struct, frozen=True, tag="join"):
    """Add this connection to the measurement of that name."""

    version: int
    session: Name


class ProbeWelcome(Struct, frozen=True, tag="welcome"):
    """The answer to a connection that may measure."""

    version: int
    software: Name
    session: Name
    nixl: bool
    """Whether the package nixl is installed there."""


class ProbeBusy(Struct, frozen=True, tag="busy"):
    """The answer to a connection that may not measure; the server closes it."""

    reason: Name


class ProbeEcho(Struct, frozen=True, tag="echo"):
    """A question for the time."""

    number: int


class ProbeEchoed(Struct, frozen=True, tag="echoed"):
    """The server's time, in seconds since 1970."""

    number: int
    clock_s: float

    def __post_init__(self) -> None:
        """Raise ValueError, which decoding reports, for a number that is no time."""
        if not (isfinite(self.clock_s) and 0 <= self.clock_s <= CLOCK_LIMIT_S):
            raise ValueError("clock_s is not a time")


class ProbeUpload(Struct, frozen=True, tag="upload"):
    """The client sends this number of bytes now."""

    size_bytes: Size


class ProbeUploaded(Struct, frozen=True, tag="uploaded"):
    """All bytes of an upload have come."""

    size_bytes: Size


class ProbeDownload(Struct, frozen=True, tag="download"):
    """The server sends this number of bytes now."""

    size_bytes: Size


Question = ProbeHello | ProbeJoin | ProbeEcho | ProbeUpload | ProbeDownload
Answer = ProbeWelcome | ProbeBusy | ProbeEchoed | ProbeUploaded
_QUESTION: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)
_ANSWER: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def encode(message: Question | Answer) -> bytes:
    """Return the whole frame of a message."""
    body = msgspec.msgpack.encode(message)
    assert len(body) <= FRAME_LIMIT_BYTES
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def body_bytes(length: bytes) -> int:
    """Return the size of a frame's body. Raise ProtocolError."""
    size = int.from_bytes(length, "big")
    if not 0 < size <= FRAME_LIMIT_BYTES:
        raise ProtocolError(f"a message of {size} bytes: the other side does not speak this protocol")
    return size


def question(body: bytes) -> Question:
    """Decode a client's message. Raise ProtocolError."""
    try:
        return _QUESTION.decode(body)
    except MALFORMED as wrong:
        raise ProtocolError(f"an unreadable question: {wrong}") from None


def answer(body: bytes) -> Answer:
    """Decode a server's message. Raise ProtocolError."""
    try:
        return _ANSWER.decode(body)
    except MALFORMED as wrong:
        raise ProtocolError(f"an unreadable answer: {wrong}") from None
