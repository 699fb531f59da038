"""The format of one block on disk: a page that describes it, then its bytes. Pure.

    segment-000000                          segment-000001
    | record 0 | record 1 | … | record n-1 | record n | …            all records of a layout have one size
    | header page | payload, padded to 4096 |                        written in one request, read in one request

    header page   0  checksum of the rest of the page (XXH3-64)
                  8  magic, version, flags, sequence
                 32  layout digest (8 bytes), key (16), parent (16)
                 72  payload: size in bytes, XXH3-64
                 88  lengths of tokens, LoRA, salt; then the three; then what names the images; then zeros

The header has a checksum of its own, so that the index is rebuilt without reading payloads; the payload is checked when
it is read. So a torn write, whichever of its pages arrived, is the new record, no record, or a header whose payload
does not fit: never wrong bytes. XXH3 finds accidents, not forgery: the directory belongs to this process's user alone.
"""

from __future__ import annotations

import struct

from msgspec import Struct
from xxhash import xxh3_64_intdigest

from services.kvbm.tiers.disk_records import HeaderProblem
from shared.blocks import Content
from shared.errors import HeadraceError
from shared.hashing import KEY_BYTES

PAGE_BYTES = 4096
VERSION = 1
IMAGES_VERSION = 2
"""The version of records with images, which an earlier kvbm must not take for text. The upper half of their flags is
the length of what names the images."""
MAGIC = b"HRKVDISK"
DIGEST_BYTES = 8
"""The size of a layout digest, which is 16 hex digits in text."""

_CHECKSUM = struct.Struct("<Q")
_FIXED = struct.Struct(f"<8s I I Q {DIGEST_BYTES}s {KEY_BYTES}s {KEY_BYTES}s Q Q I H H")
_HAS_PARENT = 1
_BLANK = bytes(PAGE_BYTES)
VARIABLE_BYTES = PAGE_BYTES - _CHECKSUM.size - _FIXED.size
"""Room for tokens, LoRA, salt and images together: 1,000 tokens a block."""


class HeaderTooLarge(HeadraceError):
    """The tokens, LoRA, salt and images of a block do not fit its header page."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__(f"tokens, LoRA, salt and images of {size_bytes} bytes do not fit a header's {VARIABLE_BYTES}")
        self.size_bytes = size_bytes


class Header(Struct, frozen=True, gc=False):
    """What the header page of one record says."""

    content: Content
    sequence: int
    """A number that grows with each write of a layout: of two records with one key the higher is newer."""
    checksum: int
    """XXH3-64 of the payload."""


class DiskGeometry(Struct, frozen=True):
    """Where the records of one layout are. Made by `disk_geometry`."""

    layout: str
    """The layout's digest, 16 hex digits."""
    payload_bytes: int
    records_per_segment: int
    capacity: int
    """The number of records."""

    @property
    def memory_bytes(self) -> int:
        """The size of the memory that a payload is written from and read into: whole pages, as the pool's slots are."""
        return padded(self.payload_bytes)

    @property
    def record_bytes(self) -> int:
        """The distance from one record to the next."""
        return PAGE_BYTES + self.memory_bytes

    @property
    def segments(self) -> int:
        """The highest number of segments."""
        return -(-self.capacity // self.records_per_segment)

    def records_in(self, segment: int) -> int:
        """Return how many records this segment has: the last one may be shorter."""
        return min(self.records_per_segment, self.capacity - segment * self.records_per_segment)

    def position(self, record: int) -> tuple[int, int]:
        """Return the record's segment, and its offset there in bytes."""
        segment, index = divmod(record, self.records_per_segment)
        return segment, index * self.record_bytes


def padded(size_bytes: int) -> int:
    """Return the size rounded up to whole pages."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def disk_geometry(layout: str, payload_bytes: int, limit_bytes: int, segment_bytes: int) -> DiskGeometry:
    """Return a geometry of as many records as fit `limit_bytes`, in segments of about `segment_bytes`. Raises
    ValueError if not one record fits, or if the digest is not one."""
    if len(layout) != 2 * DIGEST_BYTES or layout.strip("0123456789abcdef"):
        raise ValueError(f"a layout digest is {2 * DIGEST_BYTES} hex digits, not {layout!r}")
    if payload_bytes < 1:
        raise ValueError(f"blocks of {payload_bytes} bytes")
    record_bytes = PAGE_BYTES + padded(payload_bytes)
    capacity = limit_bytes // record_bytes
    if capacity < 1:
        raise ValueError(f"the disk tier has {limit_bytes} bytes, a block takes {record_bytes}: raise disk.limit_bytes")
    return DiskGeometry(layout, payload_bytes, min(capacity, max(1, segment_bytes // record_bytes)), capacity)


def encode_header(page: memoryview | bytearray, geometry: DiskGeometry, header: Header) -> None:
    """Write `header` over the page. Raise HeaderTooLarge, and leave the page as it was."""
    content = header.content
    lora, salt = content.lora.encode(), content.salt.encode()
    variable = content.tokens + lora + salt + content.extra
    if len(variable) > VARIABLE_BYTES or max(len(lora), len(salt)) > 0xFFFF:
        raise HeaderTooLarge(len(variable))
    fixed = _FIXED.pack(
        MAGIC,
        IMAGES_VERSION if content.extra else VERSION,
        (0 if content.parent is None else _HAS_PARENT) | len(content.extra) << 16,
        header.sequence,
        bytes.fromhex(geometry.layout),
        content.key,
        content.parent or bytes(KEY_BYTES),
        geometry.payload_bytes,
        header.checksum,
        len(content.tokens),
        len(lora),
        len(salt),
    )
    body = (fixed + variable).ljust(PAGE_BYTES - _CHECKSUM.size, b"\0")
    page[:] = _CHECKSUM.pack(xxh3_64_intdigest(body)) + body


def decode_header(page: bytes | bytearray | memoryview, geometry: DiskGeometry) -> Header | HeaderProblem:
    """Return the page's header, or why it is not a record of this geometry."""
    page = bytes(page)
    if page == _BLANK:
        return "blank"
    body = page[_CHECKSUM.size :]
    if len(page) != PAGE_BYTES or _CHECKSUM.unpack_from(page)[0] != xxh3_64_intdigest(body):
        return "torn"
    magic, version, flags, sequence, layout, key, parent, payload_bytes, checksum, tokens, lora, salt = (
        _FIXED.unpack_from(body)
    )
    if magic != MAGIC or version not in (VERSION, IMAGES_VERSION):
        return "version"
    if layout.hex() != geometry.layout or payload_bytes != geometry.payload_bytes:
        return "layout"
    extra = flags >> 16
    if tokens + lora + salt + extra > VARIABLE_BYTES:
        return "torn"
    start, end = _FIXED.size, _FIXED.size + tokens + lora + salt
    try:
        content = Content(
            key,
            parent if flags & _HAS_PARENT else None,
            body[start : start + tokens],
            body[start + tokens : start + tokens + lora].decode(),
            body[start + tokens + lora : end].decode(),
            body[end : end + extra],
        )
    except UnicodeDecodeError:
        return "torn"
    return Header(content, sequence, checksum)
