"""Requests all blocks of one rank from a worker, or of one layout from a kvbm, in slices that give the loop a turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import msgspec

from shared.bus.contract import Bus
from shared.errors import ProtocolError, RequestTimeout
from shared.messages.kv_events import SNAPSHOT_CHUNK, SNAPSHOT_REQUEST, SnapshotChunk, SnapshotRequest

SNAPSHOT_LIMIT_S = 60.0
"""Seconds after which a snapshot without an end is given up."""
_SLICE_BLOCKS = 256


async def snapshot_slices(
    bus: Bus, subject: str, asked: SnapshotRequest, *, idle_timeout_s: float
) -> AsyncGenerator[SnapshotChunk, None]:
    """Yield the whole snapshot in smaller chunks, at least one. Raise Unavailable, or ProtocolError if the answer is
    invalid."""
    mark: tuple[int, int] | None = None
    deadline_s = asyncio.get_running_loop().time() + SNAPSHOT_LIMIT_S
    async with bus.stream(subject, SNAPSHOT_REQUEST.encode(asked), idle_timeout_s=idle_timeout_s) as chunks:
        async for message in chunks:
            chunk = SNAPSHOT_CHUNK.decode(message.payload)
            if mark is not None and mark != (chunk.epoch, chunk.sequence):
                raise ProtocolError("the chunks are of different snapshots")
            mark = chunk.epoch, chunk.sequence
            for start in range(0, max(len(chunk.blocks), 1), _SLICE_BLOCKS):
                yield msgspec.structs.replace(chunk, blocks=chunk.blocks[start : start + _SLICE_BLOCKS])
                await asyncio.sleep(0)
            if chunk.last:
                return
            if asyncio.get_running_loop().time() > deadline_s:
                raise RequestTimeout(f"{subject}: the snapshot took more than {SNAPSHOT_LIMIT_S:g} s")
    raise ProtocolError("the snapshot has no end")
