"""A disk tier in a real directory, with requests to await and the callbacks that it made."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from hashlib import shake_256
from pathlib import Path

from services.kvbm.disk.disk import Disk
from services.kvbm.disk.format import DiskGeometry, disk_geometry
from services.kvbm.disk.io_threads import DiskThreads
from services.kvbm.tiers.disk_records import DiskFailure, FoundBlock, LoadedFromDisk, WrittenToDisk
from shared.blocks import Content
from shared.hashing import ContentKey, pack_tokens

LAYOUT = "00112233445566ff"
PAYLOAD_BYTES = 9000
"""The size of a payload: three pages, the last one padded."""
RECORD_BYTES = 4096 + 12288
DEADLINE_S = 60.0


def small(records: int = 8, per_segment: int = 4, payload_bytes: int = PAYLOAD_BYTES) -> DiskGeometry:
    """Return a geometry of `records` records."""
    record_bytes = 4096 + -(-payload_bytes // 4096) * 4096
    return disk_geometry(LAYOUT, payload_bytes, records * record_bytes, per_segment * record_bytes)


def content(number: int) -> Content:
    """Return content number `number`; some have a parent, a LoRA or a salt."""
    key = shake_256(b"key %d" % number).digest(16)
    parent = shake_256(b"parent %d" % number).digest(16) if number % 2 else None
    return Content(key, parent, pack_tokens(range(number, number + 16)), "lora" * (number % 3), "salt" * (number % 5))


def payload(key: ContentKey, size_bytes: int = PAYLOAD_BYTES) -> bytes:
    """Return the bytes that belong to a key: any others are wrong bytes."""
    return shake_256(key).digest(size_bytes)


def memory(shape: DiskGeometry, holds: bytes = b"") -> memoryview:
    """Aligned memory for one payload."""
    view = memoryview(mmap.mmap(-1, shape.memory_bytes))
    view[: len(holds)] = holds
    return view


class Rig:
    """One disk tier, and the callbacks that it made."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.found: asyncio.Queue[list[FoundBlock]] = asyncio.Queue()
        self.gone: asyncio.Queue[str] = asyncio.Queue()

    async def back(self) -> dict[ContentKey, int]:
        """Wait until the tier is on. Return key → record of the blocks that were found."""
        async with asyncio.timeout(DEADLINE_S):
            return {found.content.key: found.record for found in await self.found.get()}

    async def went(self) -> str:
        """Wait until the tier is off. Return why."""
        async with asyncio.timeout(DEADLINE_S):
            return await self.gone.get()

    async def off_because(self, words: str) -> None:
        """Wait until the tier is off for a reason with these words."""
        async with asyncio.timeout(DEADLINE_S):
            while words not in self.disk.statistics().reason:  # noqa: ASYNC110 — no event tells why it stays off
                await asyncio.sleep(0.001)

    async def write(self, record: int, what: Content, holds: bytes | None = None) -> WrittenToDisk | DiskFailure:
        """Write a block; its bytes are those of its key unless `holds` gives others."""
        shape = self.disk.geometry
        ended: asyncio.Future[WrittenToDisk | DiskFailure] = asyncio.get_running_loop().create_future()
        holds = payload(what.key, shape.payload_bytes) if holds is None else holds
        self.disk.write(record, what, memory(shape, holds), ended.set_result)
        async with asyncio.timeout(DEADLINE_S):
            return await ended

    async def erase(self, record: int) -> WrittenToDisk | DiskFailure:
        ended: asyncio.Future[WrittenToDisk | DiskFailure] = asyncio.get_running_loop().create_future()
        self.disk.erase(record, ended.set_result)
        async with asyncio.timeout(DEADLINE_S):
            return await ended

    async def read(self, record: int, key: ContentKey) -> tuple[LoadedFromDisk | DiskFailure, bytes]:
        """Read a block. Return the outcome and the memory's bytes."""
        shape = self.disk.geometry
        into = memory(shape)
        ended: asyncio.Future[LoadedFromDisk | DiskFailure] = asyncio.get_running_loop().create_future()
        self.disk.read(record, key, into, ended.set_result)
        async with asyncio.timeout(DEADLINE_S):
            return await ended, bytes(into[: shape.payload_bytes])

    async def holds(self, record: int, what: Content) -> bool:
        """Return whether the record gives exactly this content and the bytes of its key."""
        outcome, read = await self.read(record, what.key)
        if isinstance(outcome, LoadedFromDisk):
            assert (outcome.content, read) == (what, payload(what.key, len(read))), "wrong bytes"
        return isinstance(outcome, LoadedFromDisk)


@asynccontextmanager
async def running(
    directory: Path,
    shape: DiskGeometry | None = None,
    *,
    min_free_bytes: int = 0,
    limit: int = 64,
    retry_s: float = 0.02,
) -> AsyncIterator[Rig]:
    """Run a disk tier that its own task brings up."""
    threads = DiskThreads(4, limit)
    rigs: list[Rig] = []
    back: Callable[[list[FoundBlock]], None] = lambda found: rigs[0].found.put_nowait(found)  # noqa: E731
    gone: Callable[[str], None] = lambda reason: rigs[0].gone.put_nowait(reason)  # noqa: E731
    shape = small() if shape is None else shape
    disk = Disk(directory, shape, threads, back, gone, min_free_bytes=min_free_bytes, retry_s=retry_s)
    rigs.append(Rig(disk))
    life = asyncio.create_task(disk.run())
    try:
        yield rigs[0]
    finally:
        life.cancel()
        with suppress(asyncio.CancelledError):
            await life
        assert await threads.close(DEADLINE_S)
        assert disk.statistics().state == "off"
