"""Rebuilds the disk tier's index by reading the headers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from operator import itemgetter

from services.kvbm.disk.format import DiskGeometry, Header
from services.kvbm.disk.segments import Segments
from services.kvbm.tiers.disk_results import FoundBlock, HeaderProblem
from shared.blocks import Content
from shared.hashing import ContentKey

RECORDS = 1024
"""The number of headers that one request to a thread reads."""
AT_ONCE = 4
"""The number of such requests under way."""

Headers = list[tuple[int, Header | HeaderProblem]]


Upkeep = Callable[[Segments, Callable[[memoryview], Headers]], Awaitable[Headers]]
"""Runs a job with the segments in a thread. Raises OSError."""


async def scan(segments: Segments, geometry: DiskGeometry, upkeep: Upkeep) -> tuple[list[FoundBlock], int]:
    """Return the blocks that were found, oldest first, and the highest sequence. The newer of two records with one key
    counts. Raise OSError."""
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
