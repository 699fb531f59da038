"""Answers what people and routers ask of a kvbm: its state, and snapshots of the blocks that can be found."""

from __future__ import annotations

import asyncio
import logging

from services.kvbm.config import KvbmConfig
from services.kvbm.layout import describe
from services.kvbm.layout.layouts import Layouts
from services.kvbm.pool.host_pool import HostPool
from services.kvbm.pool.prefault import Prefault
from services.kvbm.replies import ReplySender
from shared.blocks import Content
from shared.bus.contract import Message
from shared.errors import ProtocolError
from shared.kv_events import in_chunks, to_snapshot
from shared.kvbm_messages import KVBM_STATE, KvbmState
from shared.messages import JSON_HEADER, SNAPSHOT_CHUNK, SNAPSHOT_REQUEST, SnapshotChunk, Tier
from shared.runtime.lifecycle import Runtime

EPOCH = 1
"""The epoch of the KV events. It is fixed, since a kvbm that starts again is another instance."""
CHUNK_BYTES = 1 << 18
"""The size of a snapshot's chunk, in bytes of msgpack: far below any payload limit, and quickly encoded."""
SLICE_BLOCKS = 4096
"""How many blocks of a snapshot are made into chunks at once: a disk has millions."""

_log = logging.getLogger(__name__)


class StoreQueries:
    """The answers of one kvbm, and its log line."""

    def __init__(
        self,
        runtime: Runtime,
        config: KvbmConfig,
        pool: HostPool,
        layouts: Layouts,
        prefault: Prefault,
        answers: ReplySender,
    ) -> None:
        self._instance = runtime.instance
        self._window_s = config.statistics.window_s
        self._pool = pool
        self._layouts = layouts
        self._prefault = prefault
        self._replies = answers

    def log_layouts(self) -> None:
        """Write a line to the log for each layout."""
        for layout in self._layouts.open.values():
            _log.info("%s", describe.line(layout.facts(), self._window_s))

    async def answer_stat(self, message: Message) -> None:
        """Reply with KvbmState in JSON; the payload is ignored."""
        if message.reply:
            question = Message(message.subject, b"", message.reply, JSON_HEADER)
            await self._replies.send(question, KVBM_STATE.encode(self.state(), JSON_HEADER))

    def state(self) -> KvbmState:
        """Return the state of the pool and of all layouts."""
        return KvbmState(
            instance=self._instance,
            pool=str(self._pool.path.parent),
            pool_bytes=self._pool.geometry.file_bytes,
            reserved=self._prefault.share,
            window_s=self._window_s,
            layouts=[describe.state(layout.facts()) for layout in self._layouts.open.values()],
        )

    async def answer_snapshot(self, message: Message) -> None:
        """Reply with a snapshot of one layout, both tiers. A layout that is not here gets no reply: the address book
        does not name it."""
        asked = SNAPSHOT_REQUEST.decode(message.payload, message.headers)
        layout = self._layouts.open.get(asked.layout)
        if layout is None or not message.reply:
            raise ProtocolError(f"a snapshot of layout {asked.layout[:64]!r}, which is not here, or no reply subject")
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
                if not await self._replies.send(message, SNAPSHOT_CHUNK.encode(chunk, message.headers), last=last):
                    return  # a snapshot with a gap must not get an end
                await asyncio.sleep(0)
