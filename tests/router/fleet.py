"""A router's surroundings for tests: workers that send real messages, a frontend's side of the bus, and no engine."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import reduce
from operator import xor

import msgspec

from services.router.config import RouterConfig
from services.router.service import Router, router
from shared import subjects
from shared.bus.contract import LAST_HEADER, Bus, EventBus, Message
from shared.bus.memory_bus import MemoryBroker, MemoryBus
from shared.bus.memory_events import MemoryEventBus
from shared.discovery.contract import Discovery, Registration
from shared.discovery.memory import MemoryDiscovery, MemoryStore
from shared.hashing import (
    content_keys,
    event_hash,
    pack_hashes,
    pack_tokens,
    root_key,
    self_test,
    sequence_hashes,
)
from shared.messages.cards import INSTANCE, MODEL_CARD, Instance, KvLayout, ModelCard, Role
from shared.messages.codec import JSON_HEADER
from shared.messages.kv_events import (
    EVENT_BATCH,
    SNAPSHOT_CHUNK,
    SNAPSHOT_REQUEST,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KvEvent,
    SnapshotBlock,
    SnapshotChunk,
)
from shared.messages.load import LOAD_REPORT, KvState, LoadReport
from shared.messages.select import (
    LOAD_EVENTS,
    SELECT,
    SELECT_REPLY,
    LoadEvent,
    LoadEvents,
    Overlap,
    Select,
    Selected,
    SelectReply,
)
from shared.runtime.runtime import Runtime
from tests.fake_runtime import fake_runtime
from tests.metric_values import summed

NAMESPACE = "test"
MODEL = "tiny/model.v1"
BLOCK_SIZE = 4
LIMIT_S = 180.0


async def until(met: Callable[[], bool]) -> None:
    """Return when `met()` holds; fail after LIMIT_S."""
    async with asyncio.timeout(LIMIT_S):
        while not met():  # noqa: ASYNC110 - pure modules have no events to wait for
            await asyncio.sleep(0.002)


def tokens_of(name: str, blocks: int) -> list[int]:
    """Return a prompt of `blocks` full blocks; prompts of different names share no block."""
    return [ord(letter) for letter in name.ljust(BLOCK_SIZE, ".")[:BLOCK_SIZE]] + list(range(BLOCK_SIZE * (blocks - 1)))


class ScriptedWorker:
    """A worker without an engine: the test decides what it sends."""

    def __init__(self, name: str, bus: Bus, events: EventBus, discovery: Discovery, *, epoch: int = 1) -> None:
        self.name = name
        self.bus = bus
        self.discovery = discovery
        self.publisher = events.open_publisher()
        self.epoch = epoch
        self.sequence = -1
        self.blocks: defaultdict[int, dict[int, SnapshotBlock]] = defaultdict(dict)
        """Blocks by rank."""
        self.ranks = 1
        self.sends_events = True
        self.plain = False
        """Whether it behaves like plain vLLM: events and their replay, but no epoch, snapshots or digest, and no KV
        state in the load reports."""
        self.lie = 0
        """XORed into the digests that it reports."""
        self.capacity_blocks = 1000
        self.snapshots = 0
        self.model = MODEL
        self.block_size = BLOCK_SIZE
        self.lora: tuple[str, ...] = ()
        self.registration: Registration | None = None
        self.answers_snapshots = True
        self.kvbm = self.kvbm_layout = ""
        self.role: Role = "aggregated"

    async def start(self) -> None:
        await self.bus.subscribe(subjects.worker(NAMESPACE, self.name, "snapshot"), self._snapshot)
        self.registration = await self.discovery.register(self._entries)

    async def attaches(self, kvbm: str, layout: str) -> None:
        """Name this store in the card from now on."""
        self.kvbm, self.kvbm_layout = kvbm, layout
        assert self.registration is not None
        await self.registration.publish()

    async def loads(self, *loras: str) -> None:
        """Show these LoRAs in the card from now on."""
        self.lora = loras
        assert self.registration is not None
        await self.registration.publish()

    async def stop(self) -> None:
        assert self.registration is not None
        await self.registration.close()
        self.publisher.close()

    async def stores(self, tokens: list[int], *, rank: int = 0, silently: bool = False) -> None:
        """Cache the prompt's full blocks; send events of the new ones, unless `silently`."""
        packed = pack_tokens(tokens)
        names = [event_hash(key) for key in content_keys(root_key(MODEL), packed, BLOCK_SIZE)]
        new: list[KvEvent] = []
        for number, name in enumerate(names):
            if name in self.blocks[rank]:
                continue
            parent = names[number - 1] if number else None
            first = BLOCK_SIZE * number
            block = tokens[first : first + BLOCK_SIZE]
            self.blocks[rank][name] = SnapshotBlock(name, parent, packed[4 * first : 4 * (first + BLOCK_SIZE)])
            new.append(BlockStored([name], parent, block, self.block_size, medium="GPU"))
        if new and not silently:
            self.tells(*new, rank=rank)

    def drops(self, tokens: list[int], block: int, *, rank: int = 0) -> None:
        """Evict one block of the prompt."""
        name = event_hash(content_keys(root_key(MODEL), pack_tokens(tokens), BLOCK_SIZE)[block])
        del self.blocks[rank][name]
        self.tells(BlockRemoved(block_hashes=[name], medium="GPU"), rank=rank)

    def clears(self) -> None:
        self.blocks.clear()
        self.tells(AllBlocksCleared())

    def restarts_engine(self) -> None:
        """Start a new epoch with an empty cache and sequences from 0; send nothing."""
        self.blocks.clear()
        self.epoch += 1
        self.sequence = -1

    def tells(self, *events: KvEvent, rank: int = 0) -> None:
        self.sequence += 1
        batch = EventBatch(ts=float(self.epoch * 1000 + self.sequence), events=list(events), data_parallel_rank=rank)
        self.publisher.publish(self.sequence, EVENT_BATCH.encode(batch))

    async def reports(
        self, *attempts: str, waiting_tokens: int = 0, held_blocks: int = 0, prefill_tokens_per_s: float = 0.0
    ) -> None:
        report = LoadReport(
            instance=self.name,
            epoch=1,
            progress=1,
            waiting=0,
            running=len(attempts),
            waiting_tokens=waiting_tokens,
            total_blocks=1000,
            held_blocks=held_blocks,
            cached_blocks=sum(map(len, self.blocks.values())),
            kv=[
                KvState(rank, self.epoch, self.sequence, reduce(xor, self.blocks[rank], self.lie))
                for rank in range(0 if self.plain else self.ranks)
            ],
            attempts=[(attempt, 1) for attempt in attempts],
            prefill_tokens_per_s=prefill_tokens_per_s,
        )
        await self.bus.publish(subjects.worker(NAMESPACE, self.name, "load"), LOAD_REPORT.encode(report))

    async def _snapshot(self, message: Message) -> None:
        asked = SNAPSHOT_REQUEST.decode(message.payload)
        self.snapshots += 1
        if not self.answers_snapshots:
            return
        blocks = list(self.blocks[asked.rank].values())
        halves = [blocks[: len(blocks) // 2], blocks[len(blocks) // 2 :]]
        for half in halves:
            last = half is halves[-1]
            chunk = SnapshotChunk(self.epoch, self.sequence, half, last)
            headers = {LAST_HEADER: "true"} if last else None
            await self.bus.publish(message.reply, SNAPSHOT_CHUNK.encode(chunk), headers=headers)

    def _entries(self, epoch: int) -> dict[str, bytes]:
        more = not self.plain
        source = msgspec.structs.replace(self.publisher.source, epoch=more, snapshot=more, digest=more)
        instance = Instance(
            namespace=NAMESPACE,
            service="worker",
            instance=self.name,
            epoch=epoch,
            machine="m",
            pid=1,
            started=0.0,
            version="0",
            events=source if self.sends_events else None,
        )
        card = ModelCard(
            model=self.model,
            instance=self.name,
            path="/models/tiny",
            tokenizer_digest="0" * 64,
            hash_self_test=self_test(BLOCK_SIZE),
            context_length=4096,
            vocab_size=1000,
            block_size=BLOCK_SIZE,
            capacity_blocks=self.capacity_blocks,
            kv_layout=KvLayout("float32", 1, 1, 4, BLOCK_SIZE),
            lora=self.lora,
            ranks=self.ranks,
            role=self.role,
            kvbm=self.kvbm,
            kvbm_layout=self.kvbm_layout,
        )
        return {
            subjects.instance_key(NAMESPACE, "worker", self.name): INSTANCE.encode(instance, JSON_HEADER),
            subjects.model_key(NAMESPACE, self.model, self.name): MODEL_CARD.encode(card, JSON_HEADER),
        }


class RouterFleet:
    """One router and the other ends of its connections."""

    def __init__(self, runtime: Runtime, service: Router, broker: MemoryBroker, store: MemoryStore) -> None:
        self.runtime = runtime
        self.router = service
        self.broker = broker
        self.store = store
        self.bus: Bus = MemoryBus(broker)
        self.workers: list[ScriptedWorker] = []

    async def worker(self, name: str, *, awaited: bool = True, **changes: object) -> ScriptedWorker:
        """Start a worker. If `awaited`, wait until it is routed to and its events are followed."""
        worker = ScriptedWorker(name, self.bus, MemoryEventBus(self.broker.events), MemoryDiscovery(self.store))
        for field, value in changes.items():
            setattr(worker, field, value)
        await worker.start()
        self.workers.append(worker)
        if awaited:
            await self.knows(worker)
        return worker

    async def knows(self, worker: ScriptedWorker) -> None:
        """Wait until the router routes to the worker and follows its events."""
        models = self.router.models
        await until(lambda: worker.model in models and worker.name in models[worker.model].cards)
        if worker.sends_events and worker.answers_snapshots:
            await until(lambda: self.router.feeds[worker.name].source.state == "live")

    async def ask(self, tokens: list[int], request: str = "r", **fields: object) -> SelectReply:
        return await self.ask_raw(SELECT.encode(select(tokens, request, **fields)))

    async def ask_raw(self, payload: bytes, *, router: bool = False) -> SelectReply:
        subject = subjects.select(NAMESPACE, self.runtime.instance if router else MODEL)
        answer = await self.bus.request(subject, payload, timeout_s=LIMIT_S)
        return SELECT_REPLY.decode(answer.payload)

    async def chosen(self, tokens: list[int], request: str = "r", **fields: object) -> Selected:
        reply = await self.ask(tokens, request, **fields)
        assert isinstance(reply, Selected), reply
        return reply

    async def tell(self, *events: LoadEvent) -> None:
        """Publish load events, like a frontend."""
        payload = LOAD_EVENTS.encode(LoadEvents(MODEL, list(events)))
        await self.bus.publish(subjects.router_load(NAMESPACE, MODEL), payload)

    async def finds(self, worker: str, tokens: list[int], blocks: int, *, rank: int = 0) -> None:
        """Wait until the router's index has exactly `blocks` leading blocks of the prompt for the worker."""
        hashes = sequence_hashes(pack_tokens(tokens), BLOCK_SIZE)
        index = self.router.models[MODEL].index
        await until(lambda: index.find(hashes).get((worker, rank), Overlap()).blocks == blocks)

    def metric(self, name: str, **labels: str) -> float:
        return summed(self.runtime.registry, name, **labels)


def select(tokens: list[int], request: str = "r", **fields: object) -> Select:
    ask = Select(
        request=request,
        attempt=1,
        frontend="f",
        model=MODEL,
        hashes=pack_hashes(sequence_hashes(pack_tokens(tokens), BLOCK_SIZE)),
        prompt_tokens=len(tokens),
        max_tokens=10,
    )
    return msgspec.structs.replace(ask, **fields)


NO_SPECULATION = msgspec.structs.replace(
    RouterConfig(), index=msgspec.structs.replace(RouterConfig().index, speculation_s=0.0)
)


@asynccontextmanager
async def fleet(
    config: RouterConfig = NO_SPECULATION, *, instance: str = "0a", beside: RouterFleet | None = None
) -> AsyncIterator[RouterFleet]:
    """Run a router on the in-process twins without other processes, or a replica of `beside`."""
    broker, store = (MemoryBroker(), MemoryStore()) if beside is None else (beside.broker, beside.store)
    twins = fake_runtime(NAMESPACE, "router", instance, MemoryBus(broker), broker, store)
    async with twins as runtime, router(runtime, config) as service:
        yield RouterFleet(runtime, service, broker, store)
        for model in service.models.values():
            model.validate()
