"""The frames on the Unix socket in a pool's directory, through which an engine reaches its kvbm. Pure.

    engine  ── Asked ──▶  kvbm          frame: length (4 bytes, little-endian) │ that many bytes of msgpack
            ◀── Hello ──                       Hello comes first on each connection
            ◀── Answered ──                    one answer or more to each Asked, until one is the last

The payloads are the messages of `shared/messages/kvbm.py`, always in msgpack.

docs/decisions/0066 gives the reasons.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from shared.errors import PayloadTooLarge, ProtocolError
from shared.messages.codec import Codec

PROTOCOL = 1
"""The version of the frames. A client that does not know it closes the connection."""
MOST_FRAME_BYTES = 1 << 20
"""The most bytes of a frame, without its length."""
MOST_REQUEST_BLOCKS = 1 << 15
"""The most blocks that a request may name by their keys, so that it and its answers fit frames: 16 bytes a block are
asked, and at most 20 answered."""
_LENGTH_BYTES = 4


class Hello(Struct, frozen=True, tag="hello"):
    """The first frame on each connection."""

    protocol: int
    kvbm: str
    """The instance id of the kvbm."""
    ready: bool = True
    """Whether the pool's memory is made; before that, attaching is refused as `not_ready`."""
    namespace: str = ""
    """The kvbm's namespace. Empty if it is unknown, as with a kvbm of before this field."""


class Asked(Struct, frozen=True, tag="asked"):
    """A request to kvbm. Requests of one connection are handled in order."""

    number: int
    """Names the request in its answers. The client chooses it."""
    operation: str
    """The operation, as the last part of the subject on NATS: attach, store, commit, abort, fetch, release, discard."""
    payload: bytes
    trace: str = ""
    """The `traceparent` of a traced request. Empty if it is not traced."""


class Answered(Struct, frozen=True, tag="answered"):
    """An answer to a request. An answer to a later request may come before the last one to a fetch."""

    number: int
    payload: bytes
    last: bool = True
    """Whether no more answers to this request come."""


TO_KVBM: Codec[Asked] = Codec(Asked, "frame to kvbm")
FROM_KVBM: Codec[Hello | Answered] = Codec(Hello | Answered, "frame from kvbm")


def encode_frame(message: Hello | Asked | Answered) -> bytes:
    """Return the whole frame of a message. Raise PayloadTooLarge if it is too long for one."""
    body = msgspec.msgpack.encode(message)
    if len(body) > MOST_FRAME_BYTES:
        raise PayloadTooLarge(len(body), MOST_FRAME_BYTES)
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


class FrameReader:
    """Cuts the bytes of one connection into frames. It keeps at most one unfinished frame."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the bodies of the frames that end in `data`, in order.

        Raise ProtocolError for a length that no frame has. The connection is worthless then."""
        buffer = self._buffer
        buffer += data
        bodies: list[bytes] = []
        start = 0
        while len(buffer) - start >= _LENGTH_BYTES:
            size_bytes = int.from_bytes(buffer[start : start + _LENGTH_BYTES], "little")
            if not 0 < size_bytes <= MOST_FRAME_BYTES:
                raise ProtocolError(f"a frame of {size_bytes} bytes; allowed are 1 to {MOST_FRAME_BYTES}")
            end = start + _LENGTH_BYTES + size_bytes
            if len(buffer) < end:
                break
            bodies.append(bytes(buffer[start + _LENGTH_BYTES : end]))
            start = end
        del buffer[:start]
        return bodies
