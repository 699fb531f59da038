"""Messages between an engine that shares its blocks and one that reads them, on a Unix socket. Pure.

reader  ── Import ───────▶  sharer     one message a packet (SOCK_SEQPACKET), msgpack
        ◀── Offer ───────              with the memory's descriptors; or NotShared, and the connection ends
        ── AskSlots ──▶
        ◀── SlotsShared ── …             each as soon as its blocks are there; the slots stay as they are until
                                       ReturnSlots, Leave, the end of the connection, or proof that the reader died
        ── ReturnSlots ──▶
        ◀── Closing ─────              the sharer wants its memory back: return everything, then Leave
        ── Leave ────────▶             nothing is mapped or read any more
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from shared.hashing import ContentKey
from shared.messages.codec import Codec

PROTOCOL = 1
"""The version of the packets; another one is refused."""
MOST_PACKET_BYTES = 64 << 10
"""The most bytes of a packet."""
MOST_BLOCKS = 2048
"""The most blocks of one share: 32,768 tokens in blocks of 16."""
MOST_DESCRIPTORS = 4
"""The most descriptors of one offer."""

MemoryKind = Literal["cuda", "host"]
RefusalCode = Literal[
    "protocol", "model", "layout", "dtype", "rank", "generation", "kind", "memory", "unproven", "limit", "closing"
]
_Number = Annotated[int, Meta(ge=0, le=1 << 62)]


class SharingIdentity(Struct, frozen=True):
    """What must be the same at both ends before any byte of the other is worth reading."""

    model: str
    """The name under which content keys are made, and so the weights."""
    layout: str
    """The digest of the shape of a block, `KvLayout.digest`."""
    dtype: str
    rank: Annotated[int, Meta(ge=0)] = 0
    ranks: Annotated[int, Meta(ge=1)] = 1
    kind: MemoryKind = "cuda"


class SlotShape(Struct, frozen=True):
    """Where blocks lie within the shared memory, as `BlockShape`, with offsets for addresses. In bytes."""

    regions: tuple[_Number, ...]
    fragment_bytes: _Number
    stride_bytes: _Number
    slots: _Number


class Import(Struct, frozen=True, tag="import"):
    """The first packet of a reader. Whatever the same owner had shared before has ended."""

    protocol: int
    owner: str
    """The name of the reader's kernel lock (`shared.pool.lock`), which proves its death."""
    wanted: SharingIdentity
    generation: int = 0
    """The generation that the reader expects. 0 means any."""


class AskSlots(Struct, frozen=True, tag="borrow"):
    """Share the leading ones of these blocks that are there, and each further one as soon as it is."""

    number: _Number
    """Names the share. The reader chooses it: 1 or more, and each only once."""
    keys: Annotated[list[ContentKey], Meta(min_length=1, max_length=MOST_BLOCKS)]


class ReturnSlots(Struct, frozen=True, tag="release"):
    """Nothing reads the slots of this share any more, and no further ones are wanted. An unknown one is ignored."""

    number: _Number


class Leave(Struct, frozen=True, tag="leave"):
    """All shares have ended and nothing is mapped. The last packet of a reader."""


class Offer(Struct, frozen=True, tag="offer"):
    """The memory that its descriptors stand for."""

    protocol: int
    owner: str
    """The name of the sharer's kernel lock."""
    identity: SharingIdentity
    generation: Annotated[int, Meta(ge=1)]
    """Drawn for each memory: blocks of another generation lie in memory that is gone."""
    device: str
    """The UUID of the GPU, in hex; empty for host memory."""
    size_bytes: _Number
    shape: SlotShape


class NotShared(Struct, frozen=True, tag="refused"):
    """The answer to Import, after which the sharer closes the connection, or to AskSlots."""

    code: RefusalCode
    reason: str
    number: int = -1
    """The share that was refused. -1 means the import."""


class SlotsShared(Struct, frozen=True, tag="lent"):
    """An answer to AskSlots: more blocks of the share."""

    number: int
    generation: int
    slots: list[int]
    """The slots of the blocks that follow those shared before."""
    last: bool = False
    """No further block of the share will be shared."""


class Closing(Struct, frozen=True, tag="closing"):
    """The sharer shares nothing more, and waits for the reader to leave."""


TO_SHARER: Codec[Import | AskSlots | ReturnSlots | Leave] = Codec(
    Import | AskSlots | ReturnSlots | Leave, "packet to a sharer"
)
FROM_SHARER: Codec[Offer | NotShared | SlotsShared | Closing] = Codec(
    Offer | NotShared | SlotsShared | Closing, "packet from a sharer"
)
