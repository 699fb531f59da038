"""Messages between an engine, or an operator, and the memory service, on a Unix socket. Pure.

engine    ── AskWeights ────▶  service   one message a packet (SOCK_SEQPACKET), JSON
          ◀── WriteWeights ──            nothing has these weights: make them, and commit; or
          ◀── WaitForWriter ─            another engine makes them: one of the other answers follows; or
          ◀── MapWeights ────            with the memory's descriptors, which the engine maps for reading; or
          ◀── NotMapped ─────            no, and why
          ── CommitWeights ─▶            after WriteWeights, with the memory's descriptors
          ◀── MapWeights ────            committed; without descriptors

operator  ── ShowWeights ───▶  ◀── WeightsShown ──
          ── FreeWeights ───▶  ◀── WeightsFreed ──

An engine's connection is its lock: while it is open, the engine makes the weights, or maps them. The kernel closes it
when the engine dies.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from shared.messages.codec import JSON_HEADER, Codec

PROTOCOL = 1
"""The version of the packets; another one is refused."""
MOST_NAME = 128
"""The most characters of a model's name. All that the service keeps is shown in one packet, even if JSON writes each
character as six bytes."""
DIGEST = "^[0-9a-f]{16}$"
_Digest = Annotated[str, Meta(pattern=DIGEST)]
_Size = Annotated[int, Meta(ge=1, le=1 << 46)]

RefusedWeights = Literal["protocol", "size", "full", "memory", "slow", "stopping"]


class WeightsIdentity(Struct, frozen=True):
    """Which weights: two engines that ask for the same map one copy."""

    model: _Digest
    """The digest of the files that they are made from."""
    layout: _Digest
    """The digest of what lies where in the memory."""
    device: Annotated[str, Meta(pattern="^[0-9a-z]{0,32}$")] = ""
    """The UUID of the GPU, in hex. Empty for host memory."""


class AskWeights(Struct, frozen=True, tag="ask"):
    """The first packet of an engine, and its only request."""

    protocol: int
    identity: WeightsIdentity
    size_bytes: _Size
    name: Annotated[str, Meta(max_length=MOST_NAME)] = ""
    """The model's name, for people."""


class CommitWeights(Struct, frozen=True, tag="commit"):
    """The weights are complete. The memory's descriptors come with it; nothing can write to it any more."""

    identity: WeightsIdentity


class ShowWeights(Struct, frozen=True, tag="show"):
    """Which weights are there?"""


class FreeWeights(Struct, frozen=True, tag="free"):
    """Release weights that no engine maps."""

    model: Annotated[str, Meta(max_length=MOST_NAME)] = ""
    """The model's name, or how its digest begins. Empty means all."""


class WriteWeights(Struct, frozen=True, tag="write"):
    """Make these weights, in memory of the engine's own, and commit them."""


class WaitForWriter(Struct, frozen=True, tag="wait"):
    """Another engine makes them."""


class MapWeights(Struct, frozen=True, tag="map"):
    """The weights are committed."""

    identity: WeightsIdentity
    size_bytes: _Size


class NotMapped(Struct, frozen=True, tag="refused"):
    """The engine gets no weights here. The connection ends."""

    code: RefusedWeights
    reason: str


class WeightsFreed(Struct, frozen=True, tag="freed"):
    """The answer to FreeWeights."""

    size_bytes: int
    """The bytes that were released."""
    held: tuple[str, ...] = ()
    """The models that engines still map or make, and that stay."""


class WeightsRow(Struct, frozen=True):
    """The weights of one model, as the service shows them."""

    name: str
    identity: WeightsIdentity
    state: Literal["written", "committed"]
    """written means that an engine makes them now."""
    size_bytes: int
    writer: int = 0
    """The process that makes them. 0 if they are committed."""
    readers: tuple[int, ...] = ()
    """The processes that map them."""
    waiting: tuple[int, ...] = ()
    """The processes that wait for them."""


class WeightsShown(Struct, frozen=True, tag="shown"):
    """The answer to ShowWeights."""

    size_bytes: int
    """The most bytes that all weights may have together."""
    rows: tuple[WeightsRow, ...] = ()


ToService = AskWeights | CommitWeights | ShowWeights | FreeWeights
FromService = WriteWeights | WaitForWriter | MapWeights | NotMapped | WeightsFreed | WeightsShown
_TO_SERVICE: Codec[ToService] = Codec(ToService, "packet to the memory service")
_FROM_SERVICE: Codec[FromService] = Codec(FromService, "packet from the memory service")


def encode_to_service(message: ToService) -> bytes:
    return _TO_SERVICE.encode(message, JSON_HEADER)


def encode_from_service(message: FromService) -> bytes:
    return _FROM_SERVICE.encode(message, JSON_HEADER)


def decode_to_service(packet: bytes) -> ToService:
    """Decode a packet. Raise ProtocolError."""
    return _TO_SERVICE.decode(packet, JSON_HEADER)


def decode_from_service(packet: bytes) -> FromService:
    """Decode a packet. Raise ProtocolError."""
    return _FROM_SERVICE.decode(packet, JSON_HEADER)
