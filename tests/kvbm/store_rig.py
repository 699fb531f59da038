"""A kvbm on the in-process twins, with a real pool, real locks and real files; engines that copy real bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import reduce
from hashlib import shake_256
from operator import xor
from pathlib import Path
from struct import unpack
from typing import Any

import msgspec

from services.kvbm.config import DiskConfig, KvbmConfig, PoolConfig, TiersConfig
from services.kvbm.service import KvbmService, kvbm
from services.kvbm.tickets.packing import unpack_slots
from services.kvbm.tiers.policies import LruPolicy
from shared import subjects
from shared.blocks import Content
from shared.bus.contract import LAST_HEADER, Bus, Message
from shared.bus.memory_bus import MemoryBroker, MemoryBus
from shared.bus.memory_events import MemoryEventBus
from shared.discovery.contract import Registration
from shared.discovery.memory import MemoryDiscovery, MemoryStore
from shared.hashing import ContentKey, event_hash
from shared.messages import kvbm as wire
from shared.messages.cards import INSTANCE, Instance, KvLayout
from shared.messages.codec import JSON_HEADER
from shared.messages.kv_events import (
    EVENT_BATCH,
    SNAPSHOT_CHUNK,
    SNAPSHOT_REQUEST,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    SnapshotRequest,
)
from shared.messages.kvbm import StoreLayout
from shared.pool.format import Arena
from shared.pool.lock import LOCK, POOL, HeldLock, hold_owner
from shared.pool.map import ArenaMap, PoolMap
from shared.runtime.runtime import Runtime
from tests.fake_runtime import fake_runtime
from tests.fakes.memory_sockets import MemorySockets

NAMESPACE = "test"
LIMIT_S = 180.0
LAYOUT = StoreLayout("m", "weights-1", KvLayout("float32", layers=1, kv_heads=2, head_dim=500, block_size=1))
"""Blocks of one token and 8000 bytes: two pages, the last one padded."""
OTHER_LAYOUT = StoreLayout("m", "weights-2", KvLayout("float32", layers=1, kv_heads=2, head_dim=250, block_size=1))
"""A layout of blocks of 4000 bytes."""
SMALL_BYTES = 1 << 17
"""A pool of 8 slots for such blocks."""


def settings(directory: Path, *, size_bytes: int = 1 << 20, disk: bool = False, **tables: Any) -> KvbmConfig:
    """Return the settings of a kvbm in `directory`."""
    disk_config = DiskConfig(str(directory / "disk"), 1 << 20, 1 << 18, min_free_bytes=0, threads=2, retry_s=0.05)
    return msgspec.structs.replace(
        KvbmConfig(
            namespace=NAMESPACE,
            pool=PoolConfig(directory=str(directory / "pool"), size_bytes=size_bytes, prefault_threads=1),
            disk=disk_config if disk else DiskConfig(),
            tiers=TiersConfig(disk_sightings=1),
        ),
        **tables,
    )


def payload(content: Content, layout: StoreLayout = LAYOUT) -> bytes:
    """Return the bytes that belong to a block of a layout: any others are wrong bytes."""
    return shake_256(content.key + layout.digest.encode()).digest(layout.kv.block_bytes)


async def until(met: Callable[[], bool]) -> None:
    """Return when `met()` holds; fails after LIMIT_S."""
    async with asyncio.timeout(LIMIT_S):
        while not met():  # noqa: ASYNC110 - what is looked at is in other threads and files
            await asyncio.sleep(0.002)


def kvbm_of(directory: Path) -> str:
    """Return the instance id of the kvbm that locked a pool's directory last. Empty if none did."""
    lock = directory / LOCK
    return lock.read_text().partition(" ")[2].strip() if lock.exists() else ""


class SmallOnly(LruPolicy):
    """A plug-in policy, which cannot be made for more than one block."""

    def __init__(self, capacity_blocks: int) -> None:
        if capacity_blocks > 1:
            raise ValueError(f"{capacity_blocks} blocks are too many for me")
        super().__init__(capacity_blocks)


class Engine:
    """An engine process's end of the wire and of the pool. It lives in this process, but its lock is its own."""

    def __init__(self, bus: Bus, directory: Path, owner: str, worker: str, layout: StoreLayout) -> None:
        self.owner = owner
        self.worker = worker
        self.layout = layout
        self.slots: ArenaMap | None = None
        self.answer_s = LIMIT_S
        """Seconds that it waits for a reply."""
        self._bus = bus
        self._directory = directory
        self._lock: HeldLock | None = None
        self._pool: PoolMap | None = None

    async def ask(self, operation: str, payload: bytes, *, headers: dict[str, str] | None = None) -> Message:
        """Return one reply of the kvbm that holds the pool now."""
        return await self._bus.request(self.subject(operation), payload, timeout_s=self.answer_s, headers=headers)

    def subject(self, operation: str) -> str:
        return subjects.kvbm(NAMESPACE, kvbm_of(self._directory), operation)

    def hold(self) -> None:
        """Take the engine's lock."""
        self._lock = hold_owner(self._directory, self.owner)

    async def try_attach(self, **changes: Any) -> wire.Attached | wire.KvbmRefused:
        asked = msgspec.structs.replace(wire.Attach(self.worker, self.owner, self.layout), **changes)
        return wire.ATTACH_REPLY.decode((await self.ask("attach", wire.ATTACH.encode(asked))).payload)

    async def attach(self) -> wire.Attached:
        """Attach, and map the slots; tried again while the pool's memory is being made."""
        if self._lock is None:
            self.hold()
        async with asyncio.timeout(LIMIT_S):
            while isinstance(reply := await self.try_attach(), wire.KvbmRefused):
                assert reply.code == "not_ready", reply.reason
                await asyncio.sleep(0.005)
        self.map(reply)
        return reply

    def map(self, attached: wire.Attached) -> None:
        """Map the slots that the reply names."""
        self.unmap()
        self._pool = PoolMap(self._directory / POOL)
        place = Arena(attached.offset, attached.slot_bytes, attached.slots, attached.generations)
        self.slots = self._pool.arena(place)

    def unmap(self) -> None:
        if self.slots is not None and self._pool is not None:
            self.slots.close()
            self._pool.close()
        self.slots = self._pool = None

    def die(self) -> None:
        """End as the kernel ends a process: the lock is released, the file stays."""
        self.unmap()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    # --- storing

    async def try_store(self, contents: Sequence[Content]) -> wire.Granted | wire.KvbmRefused:
        blocks = [wire.StoreBlock(one.key, one.parent, one.tokens, one.lora, one.salt, one.extra) for one in contents]
        asked = wire.STORE.encode(wire.Store(self.owner, blocks))
        return wire.STORE_REPLY.decode((await self.ask("store", asked)).payload)

    async def grant(self, contents: Sequence[Content]) -> wire.Granted:
        granted = await self.try_store(contents)
        assert isinstance(granted, wire.Granted), granted
        assert len(granted.blocks) * 4 == len(granted.slots)
        return granted

    def write(self, granted: wire.Granted, contents: Sequence[Content]) -> None:
        """Write the blocks' bytes into the granted slots."""
        for index, slot in zip(granted.blocks, unpack_slots(granted.slots), strict=True):
            self.write_one(slot, contents[index])

    def write_one(self, slot: int, content: Content) -> None:
        assert self.slots is not None
        with self.slots.slot(slot) as memory:
            memory[: self.layout.kv.block_bytes] = payload(content, self.layout)

    async def commit(self, ticket: int, slots: bytes, checksums: bytes = b"") -> wire.Settled | wire.KvbmRefused:
        asked = wire.COMMIT.encode(wire.Commit(self.owner, ticket, slots, checksums))
        return wire.SETTLED.decode((await self.ask("commit", asked)).payload)

    async def store(self, contents: Sequence[Content]) -> int:
        """Store, write and commit the blocks. Return how many were granted."""
        granted = await self.grant(contents)
        if granted.ticket:
            self.write(granted, contents)
            assert await self.commit(granted.ticket, granted.slots) == wire.Settled()
        return len(granted.blocks)

    async def abort(self, ticket: int) -> wire.Settled | wire.KvbmRefused:
        asked = wire.ABORT.encode(wire.Abort(self.owner, ticket))
        return wire.SETTLED.decode((await self.ask("abort", asked)).payload)

    # --- fetching

    async def fetch(self, keys: Sequence[ContentKey]) -> list[wire.Fetched | wire.KvbmRefused]:
        """Return all replies to a fetch."""
        asked = wire.FETCH.encode(wire.Fetch(self.owner, b"".join(keys)))
        async with self._bus.stream(self.subject("fetch"), asked, idle_timeout_s=self.answer_s) as replies:
            return [wire.FETCH_REPLY.decode(message.payload) async for message in replies]

    async def release(self, ticket: int) -> wire.Settled | wire.KvbmRefused:
        asked = wire.RELEASE.encode(wire.Release(self.owner, ticket))
        return wire.SETTLED.decode((await self.ask("release", asked)).payload)

    async def discard(self, keys: Sequence[ContentKey]) -> wire.Settled | wire.KvbmRefused:
        asked = wire.DISCARD.encode(wire.Discard(self.owner, b"".join(keys)))
        return wire.SETTLED.decode((await self.ask("discard", asked)).payload)

    async def load(self, contents: Sequence[Content]) -> tuple[int, int]:
        """Fetch, read, compare and release. Return how many blocks were right, and how many of them came from disk."""
        replies = await self.fetch([content.key for content in contents])
        right = from_disk = 0
        for reply in replies:
            assert isinstance(reply, wire.Fetched), reply
            assert reply.first == right, "out of order"
            read = self.read(reply, contents[right : right + len(reply.slots) // 4])
            assert all(read), "a held block is gone"
            right += len(read)
            from_disk += len(read) if reply.disk else 0
        last = replies[-1]
        assert isinstance(last, wire.Fetched)
        assert right == last.found, "the last reply came before the last block"
        assert await self.release(last.ticket) == wire.Settled()
        return right, from_disk

    def read(self, fetched: wire.Fetched, contents: Sequence[Content]) -> list[bool]:
        """Return for each block whether it could be read."""
        assert self.slots is not None
        slots = unpack_slots(fetched.slots)
        right: list[bool] = []
        for slot, generation, content in zip(
            slots, unpack(f"<{len(slots)}Q", fetched.generations), contents, strict=True
        ):
            with self.slots.slot(slot) as memory:
                read = bytes(memory[: self.layout.kv.block_bytes])
            right.append(self.slots.generation(slot) == generation)
            assert read == payload(content, self.layout) or not right[-1], "wrong bytes"
        return right


class Router:
    """A router's view of one layout, from its events."""

    def __init__(self) -> None:
        self.sequence = -1
        self.held: dict[str, set[int]] = {"host_pinned": set(), "disk": set()}

    def take(self, sequence: int, payload: bytes) -> None:
        assert sequence == self.sequence + 1, "a gap"
        self.sequence = sequence
        for event in EVENT_BATCH.decode(payload).events:
            match event:
                case BlockStored(block_hashes=hashes, medium=str(medium)):
                    assert self.held[medium].isdisjoint(map(_whole, hashes)), "stored twice"
                    self.held[medium].update(map(_whole, hashes))
                case BlockRemoved(block_hashes=hashes, medium=str(medium)):
                    assert self.held[medium] >= set(map(_whole, hashes)), "removed without having been stored"
                    self.held[medium].difference_update(map(_whole, hashes))
                case BlockStored() | BlockRemoved() | AllBlocksCleared():
                    raise AssertionError(f"no event of a kvbm: {event}")

    def digest(self, medium: str) -> int:
        return reduce(xor, self.held[medium], 0)

    def holds(self, medium: str, contents: Sequence[Content]) -> bool:
        """Return whether the view has exactly these blocks."""
        return self.held[medium] == {event_hash(content.key) for content in contents}


def _whole(name: int | bytes) -> int:
    assert isinstance(name, int)
    return name


class World:
    """Everything that outlives a kvbm: NATS, connections in memory, discovery, the directory."""

    def __init__(self, config: KvbmConfig) -> None:
        self.config = config
        self.broker = MemoryBroker()
        self.sockets = MemorySockets()
        self.store = MemoryStore()
        self.bus = MemoryBus(self.broker)
        self.engines: list[Engine] = []

    def engine(self, name: str, *, worker: str = "", layout: StoreLayout = LAYOUT) -> Engine:
        """Return an engine that holds no lock yet."""
        engine = Engine(self.bus, Path(self.config.pool.directory), name, worker or f"{name}-worker", layout)
        self.engines.append(engine)
        return engine

    async def attached(self, name: str, *, worker: str = "", layout: StoreLayout = LAYOUT) -> Engine:
        engine = self.engine(name, worker=worker, layout=layout)
        await engine.attach()
        return engine


class Store:
    """One life of a kvbm."""

    def __init__(self, world: World, service: KvbmService, runtime: Runtime) -> None:
        self.world = world
        self.service = service
        self.runtime = runtime
        self.reports: list[wire.KvbmReport] = []

    def lose(self) -> None:
        """End as if killed: no reply that it was about to send arrives, and connections to it end."""
        assert isinstance(self.runtime.bus, MemoryBus)
        self.world.broker.disconnect(self.runtime.bus)
        self.world.sockets.break_all(self.service.door.path)

    async def report(self, message: Message) -> None:
        self.reports.append(wire.KVBM_REPORT.decode(message.payload))

    def metric(self, name: str, **labels: str) -> float:
        return self.runtime.registry.get_sample_value(name, labels) or 0.0

    async def state(self) -> wire.KvbmState:
        subject = subjects.kvbm(NAMESPACE, self.runtime.instance, "stat")
        answer = await self.world.bus.request(subject, b"", timeout_s=LIMIT_S)
        assert answer.headers == JSON_HEADER
        return wire.KVBM_STATE.decode(answer.payload, answer.headers)

    async def layout(self, layout: StoreLayout = LAYOUT) -> wire.LayoutState:
        return next(one for one in (await self.state()).layouts if one.layout == layout.digest)

    async def entry(self) -> Instance | None:
        key = subjects.instance_key(NAMESPACE, "kvbm", self.runtime.instance)
        value = (await self.runtime.discovery.list(key)).get(key)
        return None if value is None else INSTANCE.decode(value, JSON_HEADER)

    async def router(self, layout: StoreLayout = LAYOUT) -> Router:
        """Follow one layout from now on; it must be open and have published nothing yet."""
        router = Router()
        MemoryEventBus(self.world.broker.events).subscribe(
            self.service.layouts.open[layout.digest].log.source, router.take
        )
        return router

    async def snapshot(self, layout: StoreLayout = LAYOUT) -> tuple[int, dict[str, list[int]]]:
        """Return the sequence of a snapshot, and its event hashes by tier, in order."""
        subject = subjects.kvbm(NAMESPACE, self.runtime.instance, "snapshot")
        question = SNAPSHOT_REQUEST.encode(SnapshotRequest(layout=layout.digest))
        tiers: dict[str, list[int]] = {"host": [], "disk": []}
        async with self.world.bus.stream(subject, question, idle_timeout_s=LIMIT_S) as chunks:
            messages = [message async for message in chunks]
        sequence = -2
        for message in messages:
            chunk = SNAPSHOT_CHUNK.decode(message.payload)
            assert (chunk.epoch, chunk.last) == (1, message.headers.get(LAST_HEADER) == "true")
            assert sequence in (-2, chunk.sequence), "chunks of two snapshots"
            sequence = chunk.sequence
            tiers[chunk.tier] += [block.hash for block in chunk.blocks]
        return sequence, tiers

    async def spilled(self, layout: StoreLayout = LAYOUT) -> None:
        """Wait until the disk is on, and nothing is on its way there."""
        opened = self.service.layouts.open[layout.digest]

        def met() -> bool:
            tiers = opened.tiers.statistics()
            return tiers.disk.on and not tiers.disk.writing and not tiers.spills_waiting

        await until(met)

    async def reported(self, met: Callable[[wire.LayoutReport], bool], layout: StoreLayout = LAYOUT) -> None:
        """Wait until the kvbm's report on the layout meets the condition."""
        await until(
            lambda: bool(self.reports) and any(r.layout == layout.digest and met(r) for r in self.reports[-1].layouts)
        )


@asynccontextmanager
async def running(world: World, instance: str = "b1") -> AsyncIterator[Store]:
    """Run a kvbm that is stopped, in order, on leaving; it is validated all the time."""
    bus = MemoryBus(world.broker)
    async with (
        fake_runtime(NAMESPACE, "kvbm", instance, bus, world.broker, world.store) as runtime,
        kvbm(runtime, world.config) as service,
    ):
        store = Store(world, service, runtime)
        await world.bus.subscribe(subjects.kvbm(NAMESPACE, instance, "load"), store.report)
        checking = runtime.tasks.create_task(_check(service))
        world.sockets.listen(service.door.path, service.door.serve)
        yield store
        world.sockets.unlisten(service.door.path)
        checking.cancel()


async def _check(service: KvbmService) -> None:
    """Validate the kvbm in each turn of the loop."""
    while True:
        service.validate()
        await asyncio.sleep(0.001)


@asynccontextmanager
async def serving(directory: Path, *, instance: str = "b1", **settings_of: Any) -> AsyncIterator[Store]:
    """Run a world with one kvbm; at its end every engine's lock is released."""
    world = World(settings(directory, **settings_of))
    try:
        async with running(world, instance) as store:
            yield store
    finally:
        for engine in world.engines:
            engine.die()


async def worker_in(world: World, worker: str) -> Registration:
    """Register a worker's shell; closing the registration is the loss of its lease."""
    entry = Instance(
        *(NAMESPACE, "worker", worker, 1, "here", 1, 0.0, "1"),
        subjects={"control": subjects.control(NAMESPACE, "worker", worker)},
    )
    key = subjects.instance_key(NAMESPACE, "worker", worker)
    return await MemoryDiscovery(world.store).register(lambda _: {key: INSTANCE.encode(entry, JSON_HEADER)})
