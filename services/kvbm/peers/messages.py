"""What two kvbms say to each other on a TCP connection, and what of it is believed. Pure.

    lender ──▶ reader   PeerHello, the first frame of each connection: who listens here, and which layouts it has
    reader ──▶ lender   Count → Counted          how many leading blocks of these keys it has
                        Borrow → Lent            pin the leading blocks of these keys until Return
                        Take → blocks            copy these blocks of a loan: for each a header, then its bytes
                        Received                 all of the last Take has come; no answer
                        Locate → Located         with NIXL in place of Take: where these blocks of a loan lie, and
                                                 their checksums; Received follows when the reader has read them
                        Return → Counted         the reader will take no more of the loan
    lender ──▶ reader   PeerRefused              in place of any answer; of a Take, after a header with size 0

A frame is a length (u32, little-endian) and that many bytes of msgpack. A block is a header of BLOCK_HEADER_BYTES and
the block's bytes. What was asked decides which of them comes.

A connection has one question at a time, so the next one proves that all of the last answer has come. A loan may be
taken on several connections. Whatever breaks these rules ends the connection: the reader forgets what it was reading,
and the lender ends the loans that were opened on it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import Meta, Struct

from services.kvbm.config import PeerBackend
from shared.errors import HeadraceError, ProtocolError
from shared.messages.codec import Codec
from shared.messages.kvbm import StoreBlock, StoreLayout

PEER_PROTOCOL = 1
FRAME_BYTES_MOST = 1 << 22
"""The most bytes of an answer: 4,096 blocks with their tokens."""
QUESTION_BYTES_MOST = 1 << 18
"""The most bytes of a question: 4,096 keys take a quarter of it."""
LAYOUTS_MOST = 256
_LENGTH = struct.Struct("<I")
LENGTH_BYTES = _LENGTH.size
_HEADER = struct.Struct("<IIQQ")
BLOCK_HEADER_BYTES = _HEADER.size

FaultCode = Literal[
    "unreachable",
    "closed",
    "late",
    "garbage",
    "protocol",
    "backend",
    "elsewhere",
    "epoch",
    "layout",
    "size",
    "checksum",
    "refused",
]
"""What went wrong with a peer.

    unreachable  no connection, or TLS that does not fit
    closed       the connection ended in the middle, or sent less than it said
    late         a deadline came first
    garbage      bytes that are no frame, no header, or an answer to another question
    protocol     another version of this protocol
    backend      the peer has the other back end
    elsewhere    another kvbm listens at the address than the address book names
    epoch        the kvbm has started again, or its pool is another one
    layout       another model, weights, dtype, shape, block size or rank
    size         blocks of another size than the layout's
    checksum     the bytes that came are not those that the lender read
    refused      the peer said no
"""


class PeerFault(HeadraceError):
    """A peer cannot be read, or is not believed. Its blocks are computed instead."""

    def __init__(self, code: FaultCode, reason: str) -> None:
        super().__init__(reason)
        self.code: FaultCode = code


# --- who a peer is


class PeerLayout(Struct, frozen=True, array_like=True):
    """One layout that a peer lends blocks of."""

    digest: str
    layout: StoreLayout
    """What the digest is made of, so that a refusal can say what differs."""
    block_bytes: int


class PeerHello(Struct, frozen=True, tag="hello"):
    """The first frame of each connection."""

    protocol: int
    instance: str
    epoch: int
    """A random number of the lender's life and pool. Loans of another epoch do not exist."""
    layouts: list[PeerLayout]
    backend: PeerBackend = "sockets"


class PeerAddress(Struct, frozen=True):
    """Where a peer listens, and who must answer there."""

    instance: str
    host: str
    port: int


# --- questions

QuestionNumber = Annotated[int, Meta(ge=0, le=0xFFFFFFFF)]


class Count(Struct, frozen=True, tag="count"):
    """Ask how many leading blocks of these keys are in the lender's memory."""

    number: QuestionNumber
    layout: str
    keys: bytes


class Borrow(Struct, frozen=True, tag="borrow"):
    """Ask for the leading blocks of these keys, pinned."""

    number: QuestionNumber
    epoch: int
    layout: StoreLayout
    keys: bytes


class Take(Struct, frozen=True, tag="take"):
    """Ask for the bytes of these blocks of a loan, on any connection."""

    number: QuestionNumber
    epoch: int
    loan: int
    indices: list[int]


class Locate(Struct, frozen=True, tag="locate"):
    """Ask where these blocks of a loan lie, to read them through NIXL."""

    number: QuestionNumber
    epoch: int
    loan: int
    indices: list[int]


class Received(Struct, frozen=True, tag="received"):
    """Report that all of the last Take on this connection has come, or that what Locate named was read."""


class Return(Struct, frozen=True, tag="return"):
    """End a loan. Idempotent."""

    number: QuestionNumber
    loan: int


# --- answers


class Counted(Struct, frozen=True, tag="counted"):
    """The number of leading blocks; of a Return, 0."""

    number: int
    blocks: int


class Lent(Struct, frozen=True, tag="lent"):
    """The leading blocks, pinned until Return, the end of the connection, or `time_left_s`."""

    number: int
    loan: int
    time_left_s: float
    blocks: list[StoreBlock]


class Located(Struct, frozen=True, tag="located"):
    """Where the blocks of a Locate lie, in its order."""

    number: int
    metadata: bytes
    """What the lender's NIXL agent says of itself and its memory."""
    addresses: list[int]
    """Addresses in the process of that agent."""
    checksums: list[int]
    """XXH3-64 of each block."""


PeerRefusalCode = Literal["bad_request", "epoch", "layout", "unknown_loan", "full", "no_agent"]


class PeerRefused(Struct, frozen=True, tag="peer_refused"):
    """The request was refused, and nothing was done; of a Take, no further block comes."""

    number: int
    code: PeerRefusalCode
    reason: str
    of_take: bool = False


PeerQuestion = Count | Borrow | Take | Locate | Received | Return
PeerAnswer = PeerHello | Counted | Lent | Located | PeerRefused
PEER_QUESTION: Codec[PeerQuestion] = Codec(PeerQuestion, "peer's question")
PEER_ANSWER: Codec[PeerAnswer] = Codec(PeerAnswer, "peer's answer")


class BlockHeader(Struct, frozen=True):
    """What stands before the bytes of a block."""

    number: int
    """The number of the Take."""
    index: int
    """The index of the block in the loan."""
    size_bytes: int
    """The size of the block. 0 if a refusal follows in place of it."""
    checksum: int
    """XXH3-64 of the bytes."""


def pack_header(header: BlockHeader) -> bytes:
    """Pack a block's header."""
    return _HEADER.pack(header.number, header.index, header.size_bytes, header.checksum)


def check_header(packed: bytes | bytearray | memoryview, number: int, index: int, block_bytes: int) -> BlockHeader:
    """Return the header of the block that must come now. Raise PeerFault for any other; a size of 0 is returned."""
    header = BlockHeader(*_HEADER.unpack(packed))
    if header.number != number or (header.size_bytes and header.index != index):
        raise PeerFault("garbage", f"block {header.index} of take {header.number}, not block {index} of {number}")
    if header.size_bytes not in (0, block_bytes):
        raise PeerFault("size", f"a block of {header.size_bytes} bytes, and the layout's have {block_bytes}")
    return header


def pack_frame(body: bytes) -> bytes:
    """Return the frame of an encoded message. Its size is the caller's care: see `FRAME_BYTES_MOST`."""
    assert len(body) <= FRAME_BYTES_MOST, f"a frame of {len(body)} bytes"
    return _LENGTH.pack(len(body)) + body


def frame_length(packed: bytes | bytearray | memoryview) -> int:
    """Return the length of the frame that follows. Raise PeerFault for one that no frame has."""
    (length,) = _LENGTH.unpack(packed)
    if not 0 < length <= FRAME_BYTES_MOST:
        raise PeerFault("garbage", f"a frame of {length} bytes, where 1 to {FRAME_BYTES_MOST} are allowed")
    return int(length)


def decode_answer(body: bytes) -> PeerAnswer:
    """Decode an answer. Raise PeerFault."""
    try:
        return PEER_ANSWER.decode(body)
    except ProtocolError as wrong:
        raise PeerFault("garbage", str(wrong)) from None


# --- what is believed


def check_hello(hello: PeerAnswer, instance: str, epoch: int | None) -> PeerHello:
    """Return the first frame if it is of this instance, and of this epoch if one is known. Raise PeerFault."""
    if not isinstance(hello, PeerHello):
        raise PeerFault("garbage", "the first frame is no hello")
    if hello.protocol != PEER_PROTOCOL:
        raise PeerFault("protocol", f"protocol {hello.protocol}; this program has {PEER_PROTOCOL}")
    if hello.instance != instance:
        raise PeerFault("elsewhere", f"kvbm {hello.instance[:64]!r} listens there, not {instance}")
    if epoch is not None and hello.epoch != epoch:
        raise PeerFault("epoch", f"epoch {hello.epoch}, and it was {epoch}: it has started again")
    if len(hello.layouts) > LAYOUTS_MOST:
        raise PeerFault("garbage", f"{len(hello.layouts)} layouts, at most {LAYOUTS_MOST} are believed")
    return hello


def check_backend(hello: PeerHello, mine: PeerHello) -> None:
    """Raise PeerFault unless the peer has the same back end."""
    if hello.backend != mine.backend:
        raise PeerFault("backend", f"peers.backend is {hello.backend!r} there, {mine.backend!r} here")


def check_layout(hello: PeerHello, mine: StoreLayout) -> None:
    """Raise PeerFault unless the peer has the very same layout, in blocks of the same size."""
    digest = mine.digest
    for theirs in hello.layouts:
        if theirs.digest != digest:
            continue
        if theirs.layout != mine:
            raise PeerFault("layout", f"layout {digest} is another one there: {difference(mine, theirs.layout)}")
        if theirs.block_bytes != mine.kv.block_bytes:
            raise PeerFault("size", f"blocks of {theirs.block_bytes} bytes there, {mine.kv.block_bytes} here")
        return
    raise PeerFault("layout", f"the peer has no layout {digest}")


def difference(mine: StoreLayout, theirs: StoreLayout) -> str:
    """Return in which field two layouts differ first."""
    pairs = [(mine, theirs), (mine.kv, theirs.kv)]
    for ours, its in pairs:
        for field in ours.__struct_fields__:
            here, there = getattr(ours, field), getattr(its, field)
            if here != there and field != "kv":
                return f"{field} {str(here)[:64]!r} here, {str(there)[:64]!r} there"
    return "no difference"


def check_lent(lent: PeerAnswer, number: int, keys: Sequence[bytes]) -> Lent:
    """Return the loan if it is a prefix of what was asked, first block first. Raise PeerFault."""
    if isinstance(lent, PeerRefused) and lent.number == number:
        raise PeerFault(lent.code if lent.code in ("epoch", "layout") else "refused", lent.reason[:200])
    if not isinstance(lent, Lent) or lent.number != number:
        raise PeerFault("garbage", f"an answer that is no loan for question {number}")
    if len(lent.blocks) > len(keys) or any(block.key != key for block, key in zip(lent.blocks, keys, strict=False)):
        raise PeerFault("garbage", "other blocks were lent than were asked for")
    for before, block in zip(lent.blocks, lent.blocks[1:], strict=False):
        if block.parent != before.key:
            raise PeerFault("garbage", f"block {block.key.hex()} does not follow the one before it")
    if not 0 <= lent.time_left_s < float("inf"):
        raise PeerFault("garbage", f"a loan of {lent.time_left_s} s")
    return lent


def check_located(located: PeerAnswer, number: int, blocks: int) -> Located:
    """Return where the blocks lie. Raise PeerFault."""
    if isinstance(located, PeerRefused) and located.number == number:
        raise PeerFault("refused", located.reason[:200])
    if not isinstance(located, Located) or located.number != number:
        raise PeerFault("garbage", f"no places for question {number}")
    if len(located.addresses) != blocks or len(located.checksums) != blocks:
        raise PeerFault("garbage", f"places of {len(located.addresses)} blocks, and {blocks} were asked for")
    return located


def check_counted(counted: PeerAnswer, number: int, most: int) -> int:
    """Return the number of blocks. Raise PeerFault."""
    if isinstance(counted, PeerRefused) and counted.number == number:
        raise PeerFault("refused", counted.reason[:200])
    if not isinstance(counted, Counted) or counted.number != number or not 0 <= counted.blocks <= most:
        raise PeerFault("garbage", f"no count of 0 to {most} for question {number}")
    return counted.blocks


def plan_takes(indices: Sequence[int], block_bytes: int, streams: int, take_bytes: int) -> list[list[int]]:
    """Divide the blocks of a read into Takes of about `take_bytes`, in order, and of one stream's part at most."""
    if not indices:
        return []
    most = max(1, take_bytes // block_bytes)
    size = min(most, -(-len(indices) // streams))
    return [list(indices[at : at + size]) for at in range(0, len(indices), size)]
