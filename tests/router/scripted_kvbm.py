"""A kvbm without a pool: the test decides what it sends."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import xor
from typing import Literal

import msgspec

from shared import subjects
from shared.bus.contract import LAST_HEADER, Bus, EventBus, Message
from shared.bus.memory_events import MemoryEventBus
from shared.discovery.contract import Discovery, Registration
from shared.discovery.memory import MemoryDiscovery
from shared.hashing import content_keys, event_hash, pack_tokens, root_key
from shared.messages.cards import INSTANCE, Instance
from shared.messages.codec import JSON_HEADER
from shared.messages.kv_events import (
    EVENT_BATCH,
    SNAPSHOT_CHUNK,
    SNAPSHOT_REQUEST,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KvEvent,
    SnapshotBlock,
    SnapshotChunk,
)
from shared.messages.kvbm import KVBM_REPORT, KvbmReport, LayoutReport
from tests.router.fleet import BLOCK_SIZE, MODEL, NAMESPACE, RouterFleet, until

LowerTier = Literal["host", "disk"]
MEDIA: dict[LowerTier, str] = {"host": "host_pinned", "disk": "disk"}


class ScriptedLayout:
    """The blocks of one layout, and its event stream."""

    def __init__(self, events: EventBus) -> None:
        self.publisher = events.open_publisher()
        self.sequence = -1
        self.blocks: dict[LowerTier, dict[int, SnapshotBlock]] = {"host": {}, "disk": {}}
        self.snapshots = 0

    def stores(self, tokens: list[int], blocks: Sequence[int], tier: LowerTier, *, silently: bool = False) -> None:
        """Make these blocks of the prompt available in the tier; the prefix before them need not be."""
        packed, names = _named(tokens)
        for number in blocks:
            parent = names[number - 1] if number else None
            span = slice(BLOCK_SIZE * number, BLOCK_SIZE * (number + 1))
            block = SnapshotBlock(names[number], parent, packed[4 * span.start : 4 * span.stop])
            self.blocks[tier][names[number]] = block
            if not silently:
                self.tells(BlockStored([names[number]], parent, tokens[span], BLOCK_SIZE, medium=MEDIA[tier]))

    def drops(self, tokens: list[int], blocks: Sequence[int], tier: LowerTier) -> None:
        names = [_named(tokens)[1][number] for number in blocks]
        for name in names:
            del self.blocks[tier][name]
        self.tells(BlockRemoved(block_hashes=[*names], medium=MEDIA[tier]))

    def tells(self, *events: KvEvent) -> None:
        self.sequence += 1
        batch = EventBatch(ts=float(self.sequence), events=list(events))
        self.publisher.publish(self.sequence, EVENT_BATCH.encode(batch))

    def report(self, layout: str) -> LayoutReport:
        host, disk = (reduce(xor, self.blocks[tier], 0) for tier in MEDIA)
        return LayoutReport(layout, self.sequence, host, disk)


class ScriptedKvbm:
    """One kvbm process, started with these layouts."""

    def __init__(self, name: str, bus: Bus, events: EventBus, discovery: Discovery, layouts: Sequence[str]) -> None:
        self.name = name
        self.layouts = {layout: ScriptedLayout(events) for layout in layouts}
        self._bus = bus
        self._events = events
        self._discovery = discovery
        self._registration: Registration | None = None

    async def start(self) -> None:
        await self._bus.subscribe(subjects.kvbm(NAMESPACE, self.name, "snapshot"), self._snapshot)
        self._registration = await self._discovery.register(self._entries)

    async def adds(self, layout: str) -> None:
        """Add a layout, as if an engine had attached with it."""
        self.layouts[layout] = ScriptedLayout(self._events)
        assert self._registration is not None
        await self._registration.publish()

    async def stop(self) -> None:
        assert self._registration is not None
        await self._registration.close()

    async def reports(self) -> None:
        report = KvbmReport(self.name, [each.report(layout) for layout, each in self.layouts.items()])
        await self._bus.publish(subjects.kvbm(NAMESPACE, self.name, "load"), KVBM_REPORT.encode(report))

    async def _snapshot(self, message: Message) -> None:
        layout = self.layouts[SNAPSHOT_REQUEST.decode(message.payload).layout]
        layout.snapshots += 1
        tiers = list(layout.blocks.items())
        for tier, blocks in tiers:
            last = tier == tiers[-1][0]
            chunk = SnapshotChunk(1, layout.sequence, list(blocks.values()), last, tier=tier)
            headers = {LAST_HEADER: "true"} if last else None
            await self._bus.publish(message.reply, SNAPSHOT_CHUNK.encode(chunk), headers=headers)

    def _entries(self, epoch: int) -> dict[str, bytes]:
        sources = {
            layout: msgspec.structs.replace(each.publisher.source, epoch=True, snapshot=True, digest=True)
            for layout, each in self.layouts.items()
        }
        instance = Instance(
            namespace=NAMESPACE,
            service="kvbm",
            instance=self.name,
            epoch=epoch,
            machine="m",
            pid=1,
            started=0.0,
            version="0",
            layouts=sources,
        )
        return {subjects.instance_key(NAMESPACE, "kvbm", self.name): INSTANCE.encode(instance, JSON_HEADER)}


async def kvbm(world: RouterFleet, name: str = "k", *, layouts: Sequence[str] = ("l",)) -> ScriptedKvbm:
    """Start a kvbm and wait until discovery has it."""
    started = ScriptedKvbm(name, world.bus, MemoryEventBus(world.broker.events), MemoryDiscovery(world.store), layouts)
    await started.start()
    await until(lambda: name in world.runtime.directory.instances)
    return started


def _named(tokens: list[int]) -> tuple[bytes, list[int]]:
    """Return (packed tokens, the engine hashes of the full blocks)."""
    packed = pack_tokens(tokens)
    return packed, [event_hash(key) for key in content_keys(root_key(MODEL), packed, BLOCK_SIZE)]
