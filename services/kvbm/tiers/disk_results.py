"""What the disk tier returns: the outcomes of requests, the blocks that it found, and its state. Pure."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from shared.blocks import Content

HeaderProblem = Literal["blank", "torn", "version", "layout"]
"""Why a page is not a record of this layout. blank: it was never written. torn: its checksum or its lengths are wrong.
version: it has another format version. layout: it has another layout or payload size."""
LossReason = Literal["off", "busy", "no space", "error", "too large", "missing", "other key", "damaged"] | HeaderProblem
"""Why a block was not written or not read.

    off, busy               not tried: the tier is off; the limit of requests is under way
    no space, error         the disk refused
    too large               the block's tokens do not fit the header
    missing                 the file ends before the record does
    blank … layout          the header is not a record of this layout (`HeaderProblem`)
    other key, damaged      the record holds another block; the payload, or the memory to write, is not what was written
"""


class WrittenToDisk(Struct, frozen=True):
    """The record holds the block."""

    took_s: float
    """Seconds in the thread, for checksum and disk, without the queue."""


class LoadedFromDisk(Struct, frozen=True):
    """The memory holds the block, and its checksum was right."""

    content: Content
    took_s: float
    checksum: int = 0
    """The payload's checksum, as its header has it."""


class DiskFailure(Struct, frozen=True):
    """The request was not done; `detail` is for people."""

    reason: LossReason
    detail: str

    @property
    def tried(self) -> bool:
        """Whether the disk was tried. If not, the record is as it was; if so, the record's former block is to be
        forgotten."""
        return self.reason not in ("off", "busy")


class FoundBlock(Struct, frozen=True, gc=False):
    """A block that was on the disk when the tier came up. Its payload is checked when it is read."""

    record: int
    content: Content


class DiskStatistics(Struct, frozen=True):
    """The state of the disk tier."""

    state: Literal["off", "scanning", "on"]
    reason: str
    """Why the tier is off, or why it does not grow; empty if all is well."""
