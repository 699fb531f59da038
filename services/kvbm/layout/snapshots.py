"""Sends snapshots of the blocks that can be found, for routers that have missed events."""

from __future__ import annotations

import asyncio

from services.kvbm.doors.replies import ReplySender
from services.kvbm.layout.layout import LayoutStore
from shared.blocks import Content
from shared.bus.contract import Message
from shared.kv_events import in_chunks, to_snapshot
from shared.messages.kv_events import SNAPSHOT_CHUNK, SnapshotChunk, Tier

EPOCH = 1
"""The epoch of the KV events. It is fixed, since a kvbm that starts again is another instance."""
CHUNK_BYTES = 1 << 18
"""The size of a snapshot's chunk, in bytes of msgpack: far below any payload limit, and quickly encoded."""
SLICE_BLOCKS = 4096
"""How many blocks of a snapshot are made into chunks at once: a disk has millions."""


async def send_snapshot(layout: LayoutStore, message: Message, replies: ReplySender) -> None:
    """Reply with a snapshot of the layout, both tiers, in chunks."""
    sequence, tiers = layout.snapshot()
    slices: list[tuple[Tier, list[Content]]] = [
        (tier, contents[start : start + SLICE_BLOCKS])
        for tier, contents in tiers
        for start in range(0, max(1, len(contents)), SLICE_BLOCKS)
    ]
    for number, (tier, contents) in enumerate(slices, 1):
        chunks = in_chunks(to_snapshot(contents), CHUNK_BYTES)
        for left, blocks in zip(reversed(range(len(chunks))), chunks, strict=True):
            last = number == len(slices) and not left
            chunk = SnapshotChunk(EPOCH, sequence, blocks, last, tier)
            if not await replies.send(message, SNAPSHOT_CHUNK.encode(chunk, message.headers), last=last):
                return  # a snapshot with a gap must not get an end
            await asyncio.sleep(0)
