"""The frames on the Unix socket of a kvbm, which lies in its pool's directory. Pure.

    kvbm ──Hello──▶ engine          first, and once
    engine ──Asked──▶ kvbm          as many as it likes at once
    kvbm ──Answered──▶ engine       one for each Asked, or several for a fetch; in any order among requests

    | length, u32 little-endian | that many bytes of msgpack |

The payloads are the messages of `shared.kvbm_messages`, as msgpack.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct as Packing

import msgspec
from msgspec import Struct

from shared.errors import ProtocolError

PROTOCOL = 1
MOST_FRAME_BYTES = 1 << 20
"""Most bytes of a frame, without its length."""
_LENGTH = Packing("<I")


class Hello(Struct, frozen=True, tag="hello"):
    """The kvbm's first words."""

    protocol: int
    """The version of these frames; both ends must have the same."""
    kvbm: str
    """The kvbm's instance id."""


class Asked(Struct, frozen=True, tag="asked"):
    """A request."""

    number: int
    """Names the request on this connection."""
    operation: str
    """attach, store, commit, abort, fetch, release or discard."""
    payload: bytes


class Answered(Struct, frozen=True, tag="answered"):
    """An answer to the request of this number."""

    number: int
    payload: bytes
    last: bool = True
    """No other answer to it follows."""


Frame = Hello | Asked | Answered
_DECODER = msgspec.msgpack.Decoder(Frame)
_ENCODER = msgspec.msgpack.Encoder()


def encode_frame(frame: Frame) -> bytes:
    """Return the bytes of a frame. Raise ProtocolError where there are too many."""
    body = _ENCODER.encode(frame)
    if len(body) > MOST_FRAME_BYTES:
        raise ProtocolError(f"a frame of {len(body)} bytes; at most {MOST_FRAME_BYTES} are allowed")
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Takes a connection's bytes apart. It keeps at most one frame that is not complete."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that are complete now. Raise ProtocolError at bytes that are no frame; no more can be read
        then."""
        self._bytes += data
        at = 0
        try:
            while len(self._bytes) - at >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._bytes, at)
                if length > MOST_FRAME_BYTES:
                    raise ProtocolError(f"a frame of {length} bytes; at most {MOST_FRAME_BYTES} are allowed")
                start = at + _LENGTH.size
                if len(self._bytes) - start < length:
                    return
                at = start + length
                try:
                    yield _DECODER.decode(bytes(self._bytes[start:at]))
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as wrong:
                    raise ProtocolError(f"not a frame: {wrong}") from None
        finally:
            del self._bytes[:at]
