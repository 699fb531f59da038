"""The disk tier of one layout: blocks written to and read from numbered records, and what happens when the disk fails.

             opened and scanned: back(found)
    off ────────────────────────────────────▶ on ──┐ every `retry_s`: is everything still there? is there space again?
     ▲ └─ it failed: again after `retry_s`    │ ◀──┘
     └────────────────────────────────────────┘
       gone(reason): the directory vanished, is read-only or not ours, or 4 requests in a row failed

What costs one record only: a torn, foreign or damaged header, a payload whose checksum differs, a file that was cut
off, one sector that cannot be read. Where the disk is full no segment is made for a while, and everything else goes on.

Which record holds which block is not decided here, and a block that is not wanted any more needs nothing done: its
record is written over some day. Until then a restart finds it again, which is right, since equal keys mean equal bytes.
A block that may be wrong is erased instead: no restart finds it.
Nothing is synced: the tier outlives the process at any point, and of a machine's crash what the checksums confirm. A
request ends in one named outcome (`disk_outcomes`), told to its callback in the loop; nothing raises. Its memory is in
use until then, whatever became of the tier meanwhile.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Literal, TypeVar

import numpy as np
from xxhash import xxh3_64_intdigest

from services.kvbm.disk.format import PAGE_BYTES, DiskGeometry, Header, HeaderTooLarge, decode_header, encode_header
from services.kvbm.disk.io_threads import DiskThreads
from services.kvbm.disk.scan import scan
from services.kvbm.disk.segments import Segments
from services.kvbm.tiers.disk_results import (
    DiskFailure,
    DiskStatistics,
    FoundBlock,
    LoadedFromDisk,
    LossReason,
    WrittenToDisk,
)
from shared.blocks import Content
from shared.hashing import ContentKey

ERRORS_IN_A_ROW = 4
"""Failed requests, without one that went well between, that switch the tier off."""

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_GONE = frozenset({errno.EROFS, errno.EACCES, errno.EPERM, errno.ENODEV, errno.ENXIO, errno.ESTALE, errno.ENOENT})

_log = logging.getLogger(__name__)


Result = TypeVar("Result", WrittenToDisk, LoadedFromDisk)
T = TypeVar("T")


class Disk:
    """See the module. `threads` may be shared with other layouts. `back` is told what was found, the oldest first, and
    from then on requests are taken; `gone` is told why no more are. Both are called in the loop, in turn, `back`
    first."""

    def __init__(
        self,
        directory: Path,
        geometry: DiskGeometry,
        threads: DiskThreads,
        back: Callable[[list[FoundBlock]], None],
        gone: Callable[[str], None],
        *,
        min_free_bytes: int = 0,
        retry_s: float = 5.0,
    ) -> None:
        self.geometry = geometry
        self._directory = directory
        self._threads = threads
        self._back = back
        self._gone = gone
        self._min_free_bytes = min_free_bytes
        self._retry_s = retry_s
        self._segments: Segments | None = None
        """What requests go to; None: the tier is off."""
        self._scanning: Segments | None = None
        self._scanned_segments = 0
        self._reason = "not opened yet"
        self._full = ""
        """Why no block is written for now, or only to segments that are there; until the next look."""
        self._full_told = ""
        """What the log has last."""
        self._writes_stopped = False
        self._errors_in_a_row = 0
        self._failed = asyncio.Event()
        self._sequence = 0
        self._counts: Counter[Literal["loaded", "written"]] = Counter()
        self._lost: Counter[LossReason] = Counter()
        self._under_way: Counter[Literal["read", "write"]] = Counter()

    @property
    def on(self) -> bool:
        """Whether requests are taken."""
        return self._segments is not None

    def statistics(self) -> DiskStatistics:
        """What is there and what was done."""
        segments = self._segments or self._scanning
        return DiskStatistics(
            state="on" if self._segments else "scanning" if self._scanning else "off",
            reason=self._full if self._segments else self._reason,
            direct=segments is not None and segments.direct,
            segments=0 if segments is None else len(segments.existing()),
            scanned_segments=self._scanned_segments,
            reading=self._under_way["read"],
            writing=self._under_way["write"],
            loaded=self._counts["loaded"],
            written=self._counts["written"],
            loaded_bytes=self._counts["loaded"] * self.geometry.payload_bytes,
            written_bytes=self._counts["written"] * self.geometry.payload_bytes,
            lost=dict(self._lost),
        )

    # --- requests

    def write(
        self,
        record: int,
        content: Content,
        memory: memoryview,
        done: Callable[[WrittenToDisk | DiskFailure], None],
        *,
        checksum: int = 0,
    ) -> None:
        """Writes `memory` (`geometry.memory_bytes` long, aligned to 4096) over the record. `done` follows, never before
        this returns; until then nobody may write to the memory, nor use the record otherwise. `checksum`: what the
        payload must have, or nothing is written; 0: nobody knows."""
        self._check(record, memory)
        if self._segments is not None and self._writes_stopped:
            self._refuse(DiskFailure("no space", self._full), done)
            return
        self._sequence += 1
        sequence, geometry = self._sequence, self.geometry

        def job(segments: Segments, page: memoryview) -> WrittenToDisk | DiskFailure:
            start_s = perf_counter()
            found = xxh3_64_intdigest(memory[: geometry.payload_bytes])
            if checksum not in (0, found):
                return DiskFailure("damaged", f"the memory to write does not hold the bytes of {content.key.hex()}")
            try:
                encode_header(page, geometry, Header(content, sequence, found))
            except HeaderTooLarge as error:
                return DiskFailure("too large", str(error))
            segments.write(record, page, memory)
            return WrittenToDisk(perf_counter() - start_s)

        self._submit("write", job, done)

    def read(
        self, record: int, key: ContentKey, memory: memoryview, done: Callable[[LoadedFromDisk | DiskFailure], None]
    ) -> None:
        """Reads the record into `memory`, as long and as aligned as for `write`, if it is the block `key` names. `done`
        follows, never before this returns; until then the memory is being written to, and what it holds after `Lost` is
        rubbish."""
        self._check(record, memory)
        geometry = self.geometry

        def job(segments: Segments, page: memoryview) -> LoadedFromDisk | DiskFailure:
            start_s = perf_counter()
            if not segments.read(record, page, memory):
                return DiskFailure("missing", f"record {record} lies behind the end of its file")
            header = decode_header(page, geometry)
            if not isinstance(header, Header):
                return DiskFailure(header, f"the header of record {record} is no record of this layout: {header}")
            if header.content.key != key:
                return DiskFailure("other key", f"record {record} holds {header.content.key.hex()}, not {key.hex()}")
            if xxh3_64_intdigest(memory[: geometry.payload_bytes]) != header.checksum:
                return DiskFailure("damaged", f"record {record} does not hold the bytes that were written")
            return LoadedFromDisk(header.content, perf_counter() - start_s, header.checksum)

        self._submit("read", job, done)

    def erase(self, record: int, done: Callable[[WrittenToDisk | DiskFailure], None]) -> None:
        """No block is found in the record any more. `done` follows, never before this returns. A read that is under way
        ends as it would, or finds nothing."""
        assert 0 <= record < self.geometry.capacity, f"record {record} of {self.geometry.capacity}"

        def job(segments: Segments, page: memoryview) -> WrittenToDisk | DiskFailure:
            start_s = perf_counter()
            segments.erase(record, page)
            return WrittenToDisk(perf_counter() - start_s)

        self._submit("write", job, done, payload=False)

    def _check(self, record: int, memory: memoryview) -> None:
        assert 0 <= record < self.geometry.capacity, f"record {record} of {self.geometry.capacity}"
        assert memory.nbytes == len(memory) == self.geometry.memory_bytes, f"memory of {memory.nbytes} bytes"
        address: int = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
        assert address % PAGE_BYTES == 0, "memory that is not aligned to pages"

    def _submit(
        self,
        kind: Literal["read", "write"],
        job: Callable[[Segments, memoryview], Result | DiskFailure],
        done: Callable[[Result | DiskFailure], None],
        *,
        payload: bool = True,
    ) -> None:
        """`payload`: a block's bytes are what it moves, and are counted."""
        segments = self._segments
        if segments is None:
            self._refuse(DiskFailure("off", self._reason), done)
            return

        def ended(outcome: Result | DiskFailure | Exception) -> None:
            self._under_way[kind] -= 1
            segments.release()
            if isinstance(outcome, Exception):
                outcome = self._judge(segments, outcome)
            elif not isinstance(outcome, DiskFailure):
                if payload:
                    self._counts["written" if kind == "write" else "loaded"] += 1
                self._errors_in_a_row = 0
            if isinstance(outcome, DiskFailure):
                self._lost[outcome.reason] += 1
            done(outcome)

        segments.acquire()
        self._under_way[kind] += 1
        if not self._threads.submit(kind, lambda page: job(segments, page), ended):
            self._under_way[kind] -= 1
            segments.release()
            self._refuse(DiskFailure("busy", f"{self._threads.limit} {kind}s are under way"), done)

    def _refuse(self, lost: DiskFailure, done: Callable[[DiskFailure], None]) -> None:
        self._lost[lost.reason] += 1
        asyncio.get_running_loop().call_soon(done, lost)

    # --- trouble

    def _judge(self, segments: Segments, error: Exception) -> DiskFailure:
        """What an error costs: this record, growth, or the tier."""
        number = error.errno if isinstance(error, OSError) else None
        if number == errno.ECANCELED:
            return DiskFailure("off", str(error))
        if number in _FULL:
            self._stop_growing(segments, str(error))
            return DiskFailure("no space", str(error))
        if segments is self._segments:
            self._errors_in_a_row += 1
            if number in _GONE or self._errors_in_a_row >= ERRORS_IN_A_ROW:
                self._fail(error)
        return DiskFailure("error", str(error))

    def _stop_growing(self, segments: Segments, reason: str) -> None:
        """A full disk that has no room for a segment still takes what goes to those that are there; one that refuses
        even that is not written to for a while."""
        if segments is not self._segments:
            return
        self._writes_stopped |= not segments.no_space
        if reason != self._full_told:
            _log.warning("disk tier %s: full for now: %s", self.geometry.layout, reason)
        self._full = self._full_told = reason

    def _fail(self, error: Exception) -> None:
        """No more requests from here on; `run` does the rest."""
        self._segments = None
        self._reason = str(error)
        self._failed.set()

    # --- life

    async def run(self) -> None:
        """Brings the tier up, keeps looking at it, and brings it up again, until it is cancelled."""
        while True:
            segments = Segments(self._directory, self.geometry, self._min_free_bytes)
            segments.acquire()
            try:
                await self._come_up(segments)
                await self._stay(segments)
            except OSError as error:
                if str(error) != self._reason:
                    _log.warning(
                        "disk tier %s: off, tried again every %g s: %s", self.geometry.layout, self._retry_s, error
                    )
                self._fail(error)
            finally:
                self._segments = self._scanning = None
                self._reason = self._reason or "closed"
                segments.release()
            await asyncio.sleep(self._retry_s)

    async def _come_up(self, segments: Segments) -> None:
        self._scanning = segments
        self._scanned_segments = 0
        await self._upkeep(segments, lambda _: segments.open())
        found, sequence = await scan(segments, self.geometry, self._upkeep, self._scanned)
        self._sequence = max(self._sequence, sequence)
        self._scanning, self._segments, self._reason = None, segments, ""
        self._writes_stopped, self._full, self._full_told, self._errors_in_a_row = False, "", "", 0
        self._failed.clear()
        how = "past the page cache" if segments.direct else "through the page cache: O_DIRECT does not work there"
        _log.info("disk tier %s: on, %d blocks found, %s", self.geometry.layout, len(found), how)
        self._back(found)

    async def _stay(self, segments: Segments) -> None:
        """Returns, with `gone` told, when the tier has failed."""
        while not self._failed.is_set():
            try:
                async with asyncio.timeout(self._retry_s):
                    await self._failed.wait()
            except TimeoutError:
                await self._look(segments)
        _log.warning("disk tier %s: off: %s", self.geometry.layout, self._reason)
        self._gone(self._reason)

    async def _look(self, segments: Segments) -> None:
        try:
            await self._upkeep(segments, lambda _: segments.check())
        except OSError as error:
            self._fail(error)
        self._writes_stopped, self._full = False, ""

    def _scanned(self, segments: int) -> None:
        self._scanned_segments = segments

    async def _upkeep(self, segments: Segments, job: Callable[[memoryview], T]) -> T:
        segments.acquire()
        return await self._threads.upkeep(job, segments.release)
