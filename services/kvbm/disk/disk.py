"""The disk tier of one layout: writes blocks to numbered records, reads them back, and recovers when the disk fails.

             opened and scanned: ready(found)
    off ────────────────────────────────────▶ on ──┐ every `retry_s`: is everything still there? is there space again?
     ▲ └─ it failed: again after `retry_s`    │ ◀──┘
     └────────────────────────────────────────┘
       failed(reason): the directory vanished, is read-only or not ours, or 4 requests in a row failed

What costs one record only: a torn, foreign or damaged header, a payload whose checksum differs, a file that was cut
off, one sector that cannot be read. When the disk is full no segment is made for a while, and everything else goes on.

The tiers decide which record holds which block. A block that is evicted needs no work here: its record is overwritten
some day. Until then a restart finds the block again, which is right, since equal keys mean equal bytes. A block that
may be wrong is erased instead, so that no restart finds it.

Nothing is synced: the tier survives the end of the process at any point, and after a crash of the machine the checksums
say what is left. A request ends in one named outcome (`disk_records`), passed to its callback in the loop; nothing
raises. Its memory is in use until then, even if the tier fails meanwhile.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from operator import itemgetter
from pathlib import Path
from time import perf_counter
from typing import Literal, TypeVar

import numpy as np
from xxhash import xxh3_64_intdigest

from services.kvbm.disk.format import PAGE_BYTES, DiskGeometry, Header, HeaderTooLarge, decode_header, encode_header
from services.kvbm.disk.io_threads import DiskThreads
from services.kvbm.disk.segments import Segments
from services.kvbm.tiers.disk_records import (
    DiskFailure,
    DiskStatistics,
    FoundBlock,
    HeaderProblem,
    LoadedFromDisk,
    WrittenToDisk,
)
from shared.blocks import Content
from shared.hashing import ContentKey

ERRORS_IN_A_ROW = 4
"""Failed requests in a row, without a successful one between, that switch the tier off."""

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_DISK_GONE = frozenset({errno.EROFS, errno.EACCES, errno.EPERM, errno.ENODEV, errno.ENXIO, errno.ESTALE, errno.ENOENT})

_log = logging.getLogger(__name__)


Result = TypeVar("Result", WrittenToDisk, LoadedFromDisk)
T = TypeVar("T")
RECORDS = 1024
"""The number of headers that one request to a thread reads."""
AT_ONCE = 4
"""The number of such requests under way."""

Headers = list[tuple[int, Header | HeaderProblem]]


Upkeep = Callable[[Segments, Callable[[memoryview], Headers]], Awaitable[Headers]]
"""Runs a job with the segments in a thread. Raises OSError."""


class Disk:
    """The disk tier of one layout. `threads` may be shared with other layouts. `ready` gets the blocks that were found,
    oldest first, and from then on requests are taken; `failed` gets the reason why no more are. Both are called in the
    loop, in turn, `ready` first."""

    def __init__(
        self,
        directory: Path,
        geometry: DiskGeometry,
        threads: DiskThreads,
        ready: Callable[[list[FoundBlock]], None],
        failed: Callable[[str], None],
        *,
        min_free_bytes: int = 0,
        retry_s: float = 5.0,
    ) -> None:
        self.geometry = geometry
        self._directory = directory
        self._threads = threads
        self._on_ready = ready
        self._on_failed = failed
        self._min_free_bytes = min_free_bytes
        self._retry_s = retry_s
        self._segments: Segments | None = None
        """The files that requests go to; None if the tier is off."""
        self._scanning = False
        self._reason = "not opened yet"
        self._full = ""
        """Why no block is written for now, or only to existing segments; until the next check."""
        self._full_logged = ""
        """The reason that the log has last."""
        self._writes_stopped = False
        self._errors_in_a_row = 0
        self._failed = asyncio.Event()
        self._sequence = 0

    def statistics(self) -> DiskStatistics:
        """Return the state."""
        if self._segments is not None:
            return DiskStatistics("on", self._full)
        return DiskStatistics("scanning" if self._scanning else "off", self._reason)

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
        """Write `memory` (`geometry.memory_bytes` long, aligned to 4096) over the record. `done` follows, never before
        this returns; until then the memory must not change, and the record must not be used otherwise. `checksum` is
        what the payload must have, or nothing is written; 0 if it is unknown."""
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
        """Read the record into `memory`, as long and as aligned as for `write`, if it holds the block that `key` names.
        `done` follows, never before this returns; until then the memory is being written to. After a failure its bytes
        are rubbish."""
        self._check(record, memory)
        geometry = self.geometry

        def job(segments: Segments, page: memoryview) -> LoadedFromDisk | DiskFailure:
            start_s = perf_counter()
            if not segments.read(record, page, memory):
                return DiskFailure("missing", f"record {record} is after the end of its file")
            header = decode_header(page, geometry)
            if not isinstance(header, Header):
                return DiskFailure(header, f"the header of record {record} is not a record of this layout: {header}")
            if header.content.key != key:
                return DiskFailure("other key", f"record {record} holds {header.content.key.hex()}, not {key.hex()}")
            if xxh3_64_intdigest(memory[: geometry.payload_bytes]) != header.checksum:
                return DiskFailure("damaged", f"record {record} does not hold the bytes that were written")
            return LoadedFromDisk(header.content, perf_counter() - start_s, header.checksum)

        self._submit("read", job, done)

    def erase(self, record: int, done: Callable[[WrittenToDisk | DiskFailure], None]) -> None:
        """Erase the record: no block is found in it any more. `done` follows, never before this returns. A read that is
        under way ends as it would, or finds nothing."""
        assert 0 <= record < self.geometry.capacity, f"record {record} of {self.geometry.capacity}"

        def job(segments: Segments, page: memoryview) -> WrittenToDisk | DiskFailure:
            start_s = perf_counter()
            segments.erase(record, page)
            return WrittenToDisk(perf_counter() - start_s)

        self._submit("write", job, done)

    def _check(self, record: int, memory: memoryview) -> None:
        assert 0 <= record < self.geometry.capacity, f"record {record} of {self.geometry.capacity}"
        assert memory.nbytes == len(memory) == self.geometry.memory_bytes, f"memory of {memory.nbytes} bytes"
        address: int = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
        assert address % PAGE_BYTES == 0, "the memory is not aligned to pages"

    def _submit(
        self,
        kind: Literal["read", "write"],
        job: Callable[[Segments, memoryview], Result | DiskFailure],
        done: Callable[[Result | DiskFailure], None],
    ) -> None:
        """Run the job in a thread, then `done` in the loop."""
        segments = self._segments
        if segments is None:
            self._refuse(DiskFailure("off", self._reason), done)
            return

        def ended(outcome: Result | DiskFailure | Exception) -> None:
            segments.release()
            if isinstance(outcome, Exception):
                outcome = self._judge(segments, outcome)
            elif not isinstance(outcome, DiskFailure):
                self._errors_in_a_row = 0
            done(outcome)

        segments.acquire()
        if not self._threads.submit(kind, lambda page: job(segments, page), ended):
            segments.release()
            self._refuse(DiskFailure("busy", f"{self._threads.limit} {kind}s are under way"), done)

    def _refuse(self, lost: DiskFailure, done: Callable[[DiskFailure], None]) -> None:
        asyncio.get_running_loop().call_soon(done, lost)

    # --- trouble

    def _judge(self, segments: Segments, error: Exception) -> DiskFailure:
        """Decide what an error costs: this record, growth, or the tier."""
        number = error.errno if isinstance(error, OSError) else None
        if number == errno.ECANCELED:
            return DiskFailure("off", str(error))
        if number in _FULL:
            self._stop_growing(segments, str(error))
            return DiskFailure("no space", str(error))
        if segments is self._segments:
            self._errors_in_a_row += 1
            if number in _DISK_GONE or self._errors_in_a_row >= ERRORS_IN_A_ROW:
                self._fail(error)
        return DiskFailure("error", str(error))

    def _stop_growing(self, segments: Segments, reason: str) -> None:
        """Stop making segments for a while; a full disk still takes what goes to existing ones. A disk that refuses
        even that is not written to for a while."""
        if segments is not self._segments:
            return
        self._writes_stopped |= not segments.no_space
        if reason != self._full_logged:
            _log.warning("disk tier %s: full for now: %s", self.geometry.layout, reason)
        self._full = self._full_logged = reason

    def _fail(self, error: Exception) -> None:
        """Take no more requests; `run` does the rest."""
        self._segments = None
        self._reason = str(error)
        self._failed.set()

    # --- life

    async def run(self) -> None:
        """Bring the tier up, keep checking it, and bring it up again after a failure, until cancelled."""
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
                self._segments, self._scanning = None, False
                self._reason = self._reason or "closed"
                segments.release()
            await asyncio.sleep(self._retry_s)

    async def _come_up(self, segments: Segments) -> None:
        self._scanning = True
        await self._upkeep(segments, lambda _: segments.open())
        found, sequence = await scan(segments, self.geometry, self._upkeep)
        self._sequence = max(self._sequence, sequence)
        self._scanning, self._segments, self._reason = False, segments, ""
        self._writes_stopped, self._full, self._full_logged, self._errors_in_a_row = False, "", "", 0
        self._failed.clear()
        how = "with O_DIRECT" if segments.direct else "through the page cache, as O_DIRECT does not work there"
        _log.info("disk tier %s: on, %d blocks found, %s", self.geometry.layout, len(found), how)
        self._on_ready(found)

    async def _stay(self, segments: Segments) -> None:
        """Return when the tier has failed and `failed` was called."""
        while not self._failed.is_set():
            try:
                async with asyncio.timeout(self._retry_s):
                    await self._failed.wait()
            except TimeoutError:
                await self._check_files(segments)
        _log.warning("disk tier %s: off: %s", self.geometry.layout, self._reason)
        self._on_failed(self._reason)

    async def _check_files(self, segments: Segments) -> None:
        try:
            await self._upkeep(segments, lambda _: segments.check())
        except OSError as error:
            self._fail(error)
        self._writes_stopped, self._full = False, ""

    async def _upkeep(self, segments: Segments, job: Callable[[memoryview], T]) -> T:
        segments.acquire()
        return await self._threads.upkeep(job, segments.release)


async def scan(segments: Segments, geometry: DiskGeometry, upkeep: Upkeep) -> tuple[list[FoundBlock], int]:
    """Read all headers. Return the blocks that were found, oldest first, and the highest sequence. The newer of two
    records with one key counts. Raise OSError."""
    newest: dict[ContentKey, tuple[int, int, Content]] = {}
    highest = 0
    chunks = _chunks(geometry, segments.existing())

    async def work() -> None:
        nonlocal highest
        for segment, first, count in chunks:
            for record, header in await upkeep(segments, partial(segments.scan, segment, first, count)):
                if isinstance(header, Header):
                    highest = max(highest, header.sequence)
                    known = newest.get(header.content.key)
                    if known is None or header.sequence > known[0]:
                        newest[header.content.key] = (header.sequence, record, header.content)

    failures: list[OSError] = []
    try:
        async with asyncio.TaskGroup() as scans:
            for _ in range(AT_ONCE):
                scans.create_task(work())
    except* OSError as group:
        failures.extend(error for error in group.exceptions if isinstance(error, OSError))
    if failures:
        raise failures[0]
    return [FoundBlock(record, content) for _, record, content in sorted(newest.values(), key=itemgetter(0))], highest


def _chunks(geometry: DiskGeometry, made: list[int]) -> Iterator[tuple[int, int, int]]:
    for segment in made:
        records = geometry.records_in(segment)
        for first in range(0, records, RECORDS):
            yield segment, first, min(RECORDS, records - first)
