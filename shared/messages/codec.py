"""The typed encoder and decoder of a channel: msgpack, or JSON if the message's header says so. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

import msgspec

from shared.errors import ProtocolError

JSON_HEADER = {"Content-Type": "application/json"}
T = TypeVar("T")


class Codec(Generic[T]):
    """The typed encoder and decoder of one channel, built once."""

    def __init__(self, kind: type[T] | object, name: str) -> None:
        self._name = name
        self._msgpack: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)
        self._json: msgspec.json.Decoder[T] = msgspec.json.Decoder(kind)

    def decode(self, payload: bytes, headers: Mapping[str, str] | None = None) -> T:
        """Decode a message of this channel. Raise ProtocolError if it is not one."""
        try:
            if not is_json(headers):
                return self._msgpack.decode(payload)
            message = self._json.decode(payload)
            _ENCODER.encode(message)  # JSON has larger integers than msgpack can carry to the next process
            return message
        except (msgspec.MsgspecError, UnicodeDecodeError, OverflowError, RecursionError) as wrong:
            raise ProtocolError(f"{self._name}: {wrong}") from wrong

    def encode(self, message: T, headers: Mapping[str, str] | None = None) -> bytes:
        """Encode a message: as JSON if `headers`, those of the request that it answers, say so; else as msgpack."""
        return msgspec.json.encode(message) if is_json(headers) else _ENCODER.encode(message)


def is_json(headers: Mapping[str, str] | None) -> bool:
    """Return whether a message's headers ask for JSON."""
    return headers is not None and "application/json" in headers.get("Content-Type", "")


_ENCODER = msgspec.msgpack.Encoder()
