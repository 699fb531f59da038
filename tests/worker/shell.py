"""A worker's shell on the in-process twins, with a real engine, and a frontend's end of the wire."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from services.worker.config import WorkerConfig
from services.worker.engine.supervisor import StartEngine
from services.worker.engine_start import start_engine
from services.worker.rounds import make_standby
from services.worker.service import Worker
from shared import subjects
from shared.bus.contract import Bus, Message
from shared.bus.memory_bus import MemoryBroker, MemoryBus
from shared.bus.memory_events import MemoryEventBus
from shared.discovery.memory import MemoryStore
from shared.hashing import pack_tokens, unpack_tokens
from shared.messages.frames import STEP_FRAME, Part, StepFrame
from shared.messages.generate import CANCEL, GENERATE, GENERATE_REPLY, Cancel, Generate, GenerateReply, Sampling
from shared.messages.kv_events import EVENT_BATCH, BlockStored, EventBatch
from shared.messages.load import LOAD_REPORT, LoadReport
from shared.runtime.runtime import Runtime
from tests.fake_runtime import fake_runtime

NAMESPACE = "test"
WORKER = "a1"
FRONTEND = "f1"
EOS = 2
VOCABULARY = 320
LIMIT_S = 180.0


def write_model(directory: Path, *, eos: int = EOS, vocabulary: int = VOCABULARY, context_length: int = 512) -> Path:
    """The files that the echo engine and the shell look at."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {"eos_token_id": eos, "vocab_size": vocabulary, "max_position_embeddings": context_length}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (directory / "tokenizer.json").write_text("{}", encoding="utf-8")
    return directory


class Peer:
    """What a frontend and a router hear from one worker."""

    def __init__(self, bus: Bus, worker: str = WORKER) -> None:
        self.bus = bus
        self.worker = worker
        self.frames: list[StepFrame] = []
        self.reports: list[LoadReport] = []
        self.batches: list[tuple[int, EventBatch]] = []
        self._heard = asyncio.Event()

    async def open(self) -> None:
        await self.bus.subscribe(subjects.stream(NAMESPACE, FRONTEND), self._frame)
        await self.bus.subscribe(subjects.worker(NAMESPACE, self.worker, "load"), self._report)

    async def until(self, met: Callable[[], bool], *, limit_s: float = LIMIT_S) -> None:
        """Returns when `met()` holds; looks whenever something was heard, and load reports come all the time."""
        async with asyncio.timeout(limit_s):
            while not met():
                self._heard.clear()
                await self._heard.wait()

    async def ask(self, operation: str, payload: bytes) -> Message:
        subject = subjects.worker(NAMESPACE, self.worker, operation)
        return await self.bus.request(subject, payload, timeout_s=LIMIT_S)

    async def generate(self, generate: Generate) -> GenerateReply:
        return GENERATE_REPLY.decode((await self.ask("generate", GENERATE.encode(generate))).payload)

    async def cancel(self, request: str, attempt: int = 1) -> None:
        payload = CANCEL.encode(Cancel(request, attempt))
        await self.bus.publish(subjects.worker(NAMESPACE, self.worker, "cancel"), payload)

    def parts(self, request: str) -> list[Part]:
        return [part for frame in self.frames for part in frame.parts if part.request == request]

    def tokens(self, request: str) -> list[int]:
        tokens: list[int] = []
        for part in self.parts(request):
            assert part.first == len(tokens)
            tokens += unpack_tokens(part.tokens)
        return tokens

    def finish(self, request: str) -> str | None:
        finishes = [part.finish for part in self.parts(request) if part.finish is not None]
        assert len(finishes) <= 1, "two ends of one attempt"
        return finishes[0] if finishes else None

    async def ended(self, request: str) -> str | None:
        await self.until(lambda: self.finish(request) is not None)
        return self.finish(request)

    @property
    def stored(self) -> int:
        """Blocks that became findable so far."""
        events = [event for _, batch in self.batches for event in batch.events]
        return sum(len(event.block_hashes) for event in events if isinstance(event, BlockStored))

    def take_batch(self, sequence: int, payload: bytes) -> None:
        self.batches.append((sequence, EVENT_BATCH.decode(payload)))
        self._heard.set()

    def wake(self, _: object = None) -> None:
        self._heard.set()

    async def _frame(self, message: Message) -> None:
        self.frames.append(STEP_FRAME.decode(message.payload))
        self._heard.set()

    async def _report(self, message: Message) -> None:
        self.reports.append(LOAD_REPORT.decode(message.payload))
        self._heard.set()


class Shell:
    """A running worker with its twins."""

    def __init__(self, worker: Worker, runtime: Runtime, broker: MemoryBroker, store: MemoryStore, peer: Peer) -> None:
        self.worker = worker
        self.runtime = runtime
        self.broker = broker
        self.store = store
        self.peer = peer
        self.directory = runtime.directory


def request(name: str, prompt: list[int], *, max_tokens: int = 400, **fields: object) -> Generate:
    generate = Generate(
        request=name,
        attempt=1,
        model="model",
        frontend=FRONTEND,
        tokens=pack_tokens(prompt),
        prompt_tokens=len(prompt),
        sampling=Sampling(max_tokens=max_tokens),
        time_left_s=60.0,
    )
    return msgspec.structs.replace(generate, **fields)


def endless(name: str) -> Generate:
    """Runs until it is cancelled, or for 500 tokens."""
    return request(name, [5, 6, 7], sampling=Sampling(max_tokens=500, ignore_eos=True))


@asynccontextmanager
async def running_worker(
    config: WorkerConfig, *, bus: Bus | None = None, start_engine: StartEngine = start_engine
) -> AsyncIterator[Shell]:
    """A worker that is served on leaving: stopped, drained, its engine ended."""
    broker, store = MemoryBroker(), MemoryStore()
    worker_bus = bus or MemoryBus(broker)
    async with fake_runtime(NAMESPACE, "worker", WORKER, worker_bus, broker, store) as runtime:
        peer = Peer(bus or MemoryBus(broker))
        await peer.open()
        runtime.directory.subscribe(peer.wake)
        standby = make_standby(config, WORKER)
        worker = Worker(runtime, config, start_engine, standby)
        if worker.event_source is not None:
            MemoryEventBus(broker.events).subscribe(worker.event_source, peer.take_batch)
        serving = runtime.tasks.create_task(worker.run())
        try:
            yield Shell(worker, runtime, broker, store, peer)
        finally:
            runtime.stopping.set()
            await asyncio.wait((serving,))
            if standby is not None:
                await standby.end()
