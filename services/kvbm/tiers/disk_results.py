"""What the disk tier answers: the ends of a request, what was found, and its statistics. Pure."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from shared.blocks import Content

HeaderProblem = Literal["blank", "torn", "version", "layout"]
"""Why a page is no record of ours: never written; its checksum or its lengths are wrong; another format version;
another layout or payload size."""
LossReason = Literal["off", "busy", "no space", "error", "too large", "missing", "other key", "damaged"] | HeaderProblem
"""Why a block was not written or not read.

    off, busy               not tried: the tier is off; as many requests are under way as may be
    no space, error         the disk refused
    too large               its tokens do not fit the header
    missing                 the file ends before the record does
    blank … layout          the header is no record of this layout (`NotRead`)
    other key, damaged      the record holds another block; the payload, or the memory to write, is not what was written
"""


class WrittenToDisk(Struct, frozen=True):
    """The record holds the block."""

    took_s: float
    """In the thread: checksum and disk, without the queue."""


class LoadedFromDisk(Struct, frozen=True):
    """The memory holds the block, verified."""

    content: Content
    took_s: float
    checksum: int = 0
    """As in its header."""


class DiskFailure(Struct, frozen=True):
    """It did not happen; `detail` is for people."""

    reason: LossReason
    detail: str

    @property
    def tried(self) -> bool:
        """False: the record is as it was, and may be asked for again. True: whatever it held is to be forgotten."""
        return self.reason not in ("off", "busy")


class FoundBlock(Struct, frozen=True, gc=False):
    """A block that was there when the tier came up. Its payload is checked when it is read."""

    record: int
    content: Content


class DiskStatistics(Struct, frozen=True):
    """Since the start."""

    state: Literal["off", "scanning", "on"]
    reason: str
    """Why it is off, or why it does not grow; empty: all is well."""
    direct: bool
    segments: int
    """Files that are there."""
    scanned_segments: int
    reading: int
    writing: int
    loaded: int
    written: int
    loaded_bytes: int
    written_bytes: int
    lost: dict[LossReason, int]
