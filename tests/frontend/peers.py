"""The frontend's world in one process: a router and workers that speak the real messages and do what a test says.

`async with world(directory) as w:` gives a running frontend with its HTTP port, on the in-process bus and discovery.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from math import hypot
from pathlib import Path
from random import Random
from struct import pack
from typing import Any, Generic, Literal, TypeVar
from zlib import crc32

import aiohttp
import msgspec
from openai import AsyncOpenAI
from prometheus_client import CollectorRegistry
from tokenizers import Tokenizer

from services.frontend.app import frontend
from services.frontend.config import AccessConfig, FrontendConfig, HttpConfig, LimitsConfig
from services.frontend.tool_parsers.parser import FormatName
from shared import subjects
from shared.bus.contract import Bus, Message, Subscription
from shared.bus.memory_bus import MemoryBroker, MemoryBus
from shared.bus.memory_events import MemoryEventBus
from shared.config import NatsConfig, TraceConfig
from shared.discovery.contract import Registration
from shared.discovery.directory import Directory
from shared.discovery.memory import MemoryDiscovery, MemoryStore
from shared.hashing import pack_tokens, self_test, unpack_tokens
from shared.messages.cards import (
    INSTANCE,
    MODEL_CARD,
    ImageInput,
    Instance,
    KvLayout,
    ModelCard,
    PictureOutput,
    Pooling,
    Role,
    SamplingDefaults,
    ServiceName,
)
from shared.messages.codec import JSON_HEADER
from shared.messages.control import PING, PONG, Pong
from shared.messages.frames import (
    RESEND_REQUEST,
    RESENT,
    STEP_FRAME,
    FinishReason,
    Part,
    PicturePiece,
    PromptLogprobs,
    ResendRequest,
    Resent,
    StepFrame,
    StreamState,
    TokenLogprob,
)
from shared.messages.generate import (
    CANCEL,
    GENERATE,
    GENERATE_REPLY,
    Accepted,
    Cancel,
    Generate,
    GenerateReply,
    Picture,
)
from shared.messages.load import LOAD_REPORT, LoadReport
from shared.messages.select import (
    LOAD_EVENTS,
    SELECT,
    SELECT_REPLY,
    LoadEvent,
    Overlap,
    Select,
    Selected,
    SelectRefused,
    SelectReply,
)
from shared.notes import ProcessNotes
from shared.runtime.observe import ProcessHealth
from shared.runtime.runtime import Runtime
from shared.tracing.spans import SpanRecord
from shared.tracing.tracer import Tracer
from tests.metric_values import summed

NAMESPACE = "test"
MODEL = "tiny/model-1.0"
CONTEXT = 2048
VOCABULARY = 320
BLOCK_SIZE = 16
DEADLINE_S = 60.0
"""Seconds of every wait in these tests; nothing comes near it unless it is broken."""


def instance_entry(service: ServiceName, instance: str, started: float = 0.0) -> dict[str, bytes]:
    entry = Instance(NAMESPACE, service, instance, 1, "here", 1, started, "0")
    return {subjects.instance_key(NAMESPACE, service, instance): INSTANCE.encode(entry, JSON_HEADER)}


def card_entry(
    instance: str,
    directory: Path,
    model: str = MODEL,
    *,
    grammars: bool = False,
    biases: bool = False,
    min_tokens: bool = False,
    allowed_tokens: bool = False,
    prompt_logprobs: bool = False,
    forgets_output: bool = False,
    embedding_size: int = 0,
    pooling: Pooling = "mean",
    role: Role = "aggregated",
    sampling: SamplingDefaults | None = None,
    template: Path | None = None,
    template_text: str = "",
    lora: tuple[str, ...] = (),
    address: str = "",
    alias: str = "",
    images: ImageInput | None = None,
    pictures: PictureOutput | None = None,
) -> dict[str, bytes]:
    card = ModelCard(
        pictures=pictures,
        generates=pictures is None,
        images=images,
        address=address,
        alias=alias,
        lora=lora,
        template_text=template_text,
        sampling=sampling or SamplingDefaults(),
        chat_template="" if template is None else str(template),
        template_digest="" if template is None else hashlib.sha256(template.read_bytes()).hexdigest(),
        role=role,
        model=model,
        instance=instance,
        path=str(directory),
        tokenizer_digest=hashlib.sha256((directory / "tokenizer.json").read_bytes()).hexdigest(),
        hash_self_test=self_test(BLOCK_SIZE),
        context_length=CONTEXT,
        vocab_size=VOCABULARY,
        block_size=BLOCK_SIZE,
        capacity_blocks=1024,
        kv_layout=KvLayout("float32", 2, 2, 16, BLOCK_SIZE),
        grammars=grammars,
        biases=biases,
        min_tokens=min_tokens,
        allowed_tokens=allowed_tokens,
        prompt_logprobs=prompt_logprobs,
        forgets_output=forgets_output,
        embedding_size=embedding_size,
        pooling=pooling if embedding_size else "",
    )
    return {subjects.model_key(NAMESPACE, model, instance): MODEL_CARD.encode(card, JSON_HEADER)}


T = TypeVar("T")


class Seen(Generic[T]):
    """The messages that a peer got, in order; tests wait for more."""

    def __init__(self) -> None:
        self.all: list[T] = []
        self._more = asyncio.Event()

    def add(self, item: T) -> None:
        self.all.append(item)
        self._more.set()

    async def at_least(self, count: int) -> list[T]:
        """Wait for at least this many messages, and return all."""
        return await self._wait(lambda: len(self.all) >= count)

    async def until(self, item: T) -> list[T]:
        """All of them, once `item` is among them."""
        return await self._wait(lambda: item in self.all)

    async def _wait(self, enough: Callable[[], bool]) -> list[T]:
        async with asyncio.timeout(DEADLINE_S):
            while not enough():
                self._more.clear()
                await self._more.wait()
        return self.all


class ScriptedRouter:
    """Chooses the first worker that is not excluded, unless `answer` says otherwise."""

    def __init__(self, bus: Bus, instance: str, workers: Sequence[str]) -> None:
        self.bus = bus
        self.instance = instance
        self.answer: Callable[[Select], SelectReply | None] = self._choose
        """None means no answer, as of a frozen router."""
        self.workers = list(workers)
        self.asked: Seen[Select] = Seen()
        self.told: Seen[LoadEvent] = Seen()

    async def start(self) -> None:
        await self.bus.subscribe(subjects.select(NAMESPACE, MODEL), self._on_select, queue="router")
        await self.bus.subscribe(subjects.select(NAMESPACE, self.instance), self._on_select)
        await self.bus.subscribe(subjects.router_load(NAMESPACE, MODEL), self._on_load)
        await self.bus.subscribe(subjects.control(NAMESPACE, "router", self.instance), self._on_ping)

    def _choose(self, select: Select) -> SelectReply:
        for worker in self.workers:
            if worker not in select.excluded:
                return Selected(select.request, select.attempt, worker, 0, self.instance, Overlap(), "first")
        return SelectRefused(
            select.request, select.attempt, "all_excluded" if select.excluded else "no_instances", "none left"
        )

    async def _on_select(self, message: Message) -> None:
        select = SELECT.decode(message.payload)
        reply = self.answer(select)
        self.asked.add(select)
        if reply is not None:
            await self.bus.publish(message.reply, SELECT_REPLY.encode(reply))

    async def _on_load(self, message: Message) -> None:
        for event in LOAD_EVENTS.decode(message.payload).events:
            self.told.add(event)

    async def _on_ping(self, message: Message) -> None:
        PING.decode(message.payload)
        await self.bus.publish(message.reply, PONG.encode(Pong(self.instance, 1)))


def vector_of(tokens: bytes, size: int) -> bytes:
    """An embedding that follows from all tokens, as ScriptedWorker makes it."""
    numbers = [crc32(tokens, number) - (1 << 31) for number in range(size)]
    length = hypot(*numbers)
    return pack(f"<{size}f", *(number / length for number in numbers))


def file_of(picture: Picture) -> bytes:
    """A picture's file that follows from all of it but its previews, as ScriptedWorker makes it."""
    return repr(msgspec.structs.replace(picture, previews=0)).encode()


class ScriptedWorker:
    """Accepts and then streams `output`, one token a step frame, or sends an embedding where one is asked for; with
    `output` None the test sends the parts."""

    def __init__(self, bus: Bus, instance: str) -> None:
        self.bus = bus
        self.instance = instance
        self.output: list[int] | None = []
        self.embedding_size = 0
        self.logprobs: list[TokenLogprob] | None = None
        self.finish: FinishReason = "stop"
        self.cached_tokens = self.cached_host_tokens = self.cached_disk_tokens = 0
        self.answer: Callable[[Generate], GenerateReply | None] = lambda one: Accepted(one.request, one.attempt)
        self.generates: Seen[Generate] = Seen()
        self.cancels: Seen[Cancel] = Seen()
        self.resends: Seen[ResendRequest] = Seen()
        self.loses = 0
        """The number of the next frames that do not arrive."""
        self.epoch = 1
        """Epoch of the frames' numbers."""
        self.keeps_from = 0
        """Frames before this one are not kept for a resend."""
        self.sends_again = True
        """False if it says so and does not."""
        self.streams: list[StreamState] = []
        """What it says that it runs."""
        self.at_hand: list[list[Part]] = []
        """Frames that it makes and sends just before its next answer to a resend."""
        self._frames: list[bytes] = []
        """All that it made; tests have one frontend that gets frames."""
        self._subscriptions: list[Subscription] = []

    async def start(self) -> None:
        receivers = {"generate": self._on_generate, "cancel": self._on_cancel, "control": self._on_ping}
        receivers["resend"] = self._on_resend
        for operation, receive in receivers.items():
            subject = subjects.worker(NAMESPACE, self.instance, operation)
            self._subscriptions.append(await self.bus.subscribe(subject, receive))

    async def die(self) -> None:
        """Stop answering while the lease is not over yet."""
        for subscription in self._subscriptions:
            await subscription.unsubscribe()

    def forget(self) -> None:
        """Record that the frontend has left the directory: frames for it start their numbers again."""
        self.epoch += 1
        self._frames.clear()

    async def report(self, progress: int, attempts: list[tuple[str, int]]) -> None:
        """A load report that names `attempts`, and the frames made so far."""
        frames = {"f1": len(self._frames) - 1} if self._frames else {}
        report = LoadReport(
            *(self.instance, 1, progress, 0, len(attempts), 0, 1024, 0, 0), attempts=attempts, frames=frames
        )
        await self.bus.publish(subjects.worker(NAMESPACE, self.instance, "load"), LOAD_REPORT.encode(report))

    async def _on_generate(self, message: Message) -> None:
        generate = GENERATE.decode(message.payload)
        self.generates.add(generate)
        reply = self.answer(generate)
        if reply is None:
            return
        await self.bus.publish(message.reply, GENERATE_REPLY.encode(reply))
        if not isinstance(reply, Accepted) or self.output is None:
            return
        if generate.sampling.pooling:
            await self.send(generate, 0, [], "stop", embedding=vector_of(generate.tokens, self.embedding_size))
            return
        if generate.picture is not None:
            await self._make(generate, generate.picture)
            return
        done = len(generate.tokens) // 4 - generate.prompt_tokens
        limit = generate.sampling.max_tokens
        for at in range(done, min(len(self.output), limit)):
            last = at + 1 == min(len(self.output), limit)
            reason: FinishReason = "length" if last and len(self.output) > limit else self.finish
            await self.send(generate, at, [self.output[at]], reason if last else None)

    async def _make(self, to: Generate, picture: Picture) -> None:
        """Send a step frame for each step of a picture, and its file in two pieces."""
        file, half = file_of(picture), len(file_of(picture)) // 2
        for at in range(1, picture.steps + 1):
            preview = b"preview" if at <= picture.previews else b""
            await self.send(to, 0, [], picture=PicturePiece(at, preview=preview))
        await self.send(to, 0, [], picture=PicturePiece(picture.steps, 0, file[:half]))
        await self.send(to, 0, [], "stop", picture=PicturePiece(picture.steps, half, file[half:]))

    async def send(
        self,
        to: Generate,
        first: int,
        tokens: Iterable[int],
        finish: FinishReason | None = None,
        error: str = "",
        embedding: bytes = b"",
        prompt_logprobs: PromptLogprobs | None = None,
        picture: PicturePiece | None = None,
    ) -> None:
        """One part in a frame of its own."""
        tokens = list(tokens)
        logprobs = None if self.logprobs is None else tuple(self.logprobs[first : first + len(tokens)])
        cached = (self.cached_host_tokens, self.cached_disk_tokens)
        part = Part(
            *(to.request, to.attempt, first, pack_tokens(tokens), finish, self.cached_tokens, logprobs, error),
            *(*cached, embedding, prompt_logprobs, picture),
        )
        self._frames.append(STEP_FRAME.encode(StepFrame(self.instance, self.epoch, len(self._frames), [part])))
        if self.loses:
            self.loses -= 1
        else:
            await self.bus.publish(subjects.stream(NAMESPACE, to.frontend), self._frames[-1])

    async def _on_resend(self, message: Message) -> None:
        asked = RESEND_REQUEST.decode(message.payload)
        for parts in self.at_hand:
            self._frames.append(STEP_FRAME.encode(StepFrame(self.instance, self.epoch, len(self._frames), parts)))
            await self.bus.publish(subjects.stream(NAMESPACE, asked.frontend), self._frames[-1])
        self.at_hand.clear()
        first, after = max(asked.first, self.keeps_from), len(self._frames)
        await self.bus.publish(message.reply, RESENT.encode(Resent(self.epoch, min(first, after), after, self.streams)))
        for frame in self._frames[first:] if self.sends_again else ():
            await self.bus.publish(subjects.stream(NAMESPACE, asked.frontend), frame)
        self.resends.add(asked)

    async def _on_cancel(self, message: Message) -> None:
        self.cancels.add(CANCEL.decode(message.payload))

    async def _on_ping(self, message: Message) -> None:
        PING.decode(message.payload)
        await self.bus.publish(message.reply, PONG.encode(Pong(self.instance, 1)))


class World:
    """Everything a test reaches for."""

    def __init__(
        self,
        broker: MemoryBroker,
        store: MemoryStore,
        directory: Path,
        connected: Callable[[str], Bus] | None = None,
    ) -> None:
        self.broker = broker
        self.store = store
        self.directory = directory
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        new = connected or (lambda name: MemoryBus(broker))
        self.router = ScriptedRouter(new("r1"), "r1", ["w1", "w2"])
        self.workers = [ScriptedWorker(new(name), name) for name in ("w1", "w2")]
        self.registrations: dict[str, Registration] = {}
        self.registry = CollectorRegistry()
        self.vitals = ProcessHealth()
        self.notes = ProcessNotes()
        self.spans: list[SpanRecord] = []
        """Those of the frontend that have ended."""
        self.bus = MemoryBus(broker)
        """The frontend's, where it is not connected to NATS itself."""
        self.serving: Bus = self.bus if connected is None else connected("f1")
        self.doors: Bus | None = None if connected is None else connected("f1-clients")
        self.url = ""
        self.page_url = ""
        """URL of the page at /ui."""
        self.picker = ""
        """HOST:PORT of the endpoint picker, if a test has one."""

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def say(self, text: str) -> list[int]:
        """Every worker answers `text` and ends its turn."""
        for worker in self.workers:
            worker.output = [*self.ids(text), 2]
        return self.ids(text)

    def latest_prompt(self) -> str:
        """The latest prompt that a worker got."""
        latest = next(worker.generates.all[-1] for worker in self.workers if worker.generates.all)
        return self.tokenizer.decode(unpack_tokens(latest.tokens), skip_special_tokens=False)

    async def announce_router(self) -> None:
        await self.announce(self.router.instance, instance_entry("router", self.router.instance))

    async def announce_worker(
        self,
        instance: str,
        *,
        grammars: bool = False,
        biases: bool = False,
        min_tokens: bool = False,
        allowed_tokens: bool = False,
        prompt_logprobs: bool = False,
        embedding_size: int = 0,
        pooling: Pooling = "mean",
        images: ImageInput | None = None,
        pictures: PictureOutput | None = None,
    ) -> None:
        card = card_entry(
            *(instance, self.directory),
            grammars=grammars,
            biases=biases,
            min_tokens=min_tokens,
            allowed_tokens=allowed_tokens,
            prompt_logprobs=prompt_logprobs,
            embedding_size=embedding_size,
            pooling=pooling,
            images=images,
            pictures=pictures,
        )
        entries = instance_entry("worker", instance) | card
        await self.announce(instance, entries)

    async def leave(self, instance: str) -> None:
        await self.registrations.pop(instance).close()

    async def announce(self, instance: str, entries: dict[str, bytes]) -> None:
        self.registrations[instance] = await MemoryDiscovery(self.store).register(lambda _epoch: entries)

    async def until(self, path: str, holds: Callable[[Any], bool]) -> None:
        """Asks for `path` until what it answers `holds`; each question is a turn of the frontend's loop."""
        async with asyncio.timeout(DEADLINE_S), aiohttp.ClientSession(self.url) as http:
            while True:
                async with http.get(path) as response:
                    if holds(await response.json()):
                        return

    async def ready(self, model: str = MODEL) -> None:
        """Until the frontend would serve `model`."""
        await self.until("/health", lambda health: health["ready"] and model in health.get("models", (model,)))

    async def counted(self, name: str, value: float) -> None:
        """Until a metric without labels has that value; each look is a turn of the frontend's loop."""
        await self.until("/health", lambda _: self.metric(name) == value)

    def metric(self, name: str, **labels: str) -> float:
        return summed(self.registry, name, **labels)


@asynccontextmanager
async def world(
    directory: Path,
    *,
    announced: bool = True,
    ready: bool = True,
    more: dict[str, bytes] | None = None,
    tool_parser: dict[str, FormatName | Literal["auto", "none"]] | None = None,
    limits: LimitsConfig | None = None,
    http: HttpConfig | None = None,
    access: AccessConfig | None = None,
    grammars: bool = False,
    biases: bool = False,
    min_tokens: bool = False,
    allowed_tokens: bool = False,
    prompt_logprobs: bool = False,
    embedding_size: int = 0,
    pooling: Pooling = "mean",
    images: ImageInput | None = None,
    pictures: PictureOutput | None = None,
    nats: NatsConfig | None = None,
    connected: Callable[[str], Bus] | None = None,
    settings: FrontendConfig | None = None,
    trace: TraceConfig | None = None,
) -> AsyncIterator[World]:
    """A frontend; with `announced`, a router and the workers w1 and w2 are known to it; with `ready`, it says so.
    `grammars`, `biases`, `min_tokens`, `allowed_tokens`, `prompt_logprobs`: their cards say that they can be held to
    one, add them, keep it, keep to them, compute them;
    `embedding_size`, `pooling`: how they embed; `images`: how they take images; `pictures`:
    what pictures they make. `more` is in the address book from the start. `connected` makes connections, which the
    caller closes. `trace`: requests are traced, and their spans are in the world."""
    w = World(MemoryBroker(), MemoryStore(), directory, connected)
    await w.router.start()
    for worker in w.workers:
        await worker.start()
    if announced:
        await w.announce_router()
        for worker in w.workers:
            worker.embedding_size = embedding_size
            await w.announce_worker(
                worker.instance,
                grammars=grammars,
                biases=biases,
                min_tokens=min_tokens,
                allowed_tokens=allowed_tokens,
                prompt_logprobs=prompt_logprobs,
                embedding_size=embedding_size,
                pooling=pooling,
                images=images,
                pictures=pictures,
            )
    if more:
        await w.announce("more", more)
    config = msgspec.structs.replace(
        settings or FrontendConfig(),
        namespace=NAMESPACE,
        tool_parser=tool_parser or {},
        nats=nats or NatsConfig(),
        # A busy machine would put comments into streams that a test compares.
        http=msgspec.structs.replace(http or HttpConfig(silent_s=0.0), port=0),
        access=access or AccessConfig(),
        limits=limits or LimitsConfig(drain_s=0.0, deadline_s=60.0),
    )
    async with _tasks() as tasks:
        runtime = _runtime(w, tasks, trace)
        tasks.create_task(runtime.directory.run())
        async with asyncio.timeout(DEADLINE_S):
            await runtime.directory.synced()
        async with frontend(runtime, config) as door:
            w.url, w.page_url = door.url, door.page_url
            if announced and ready:
                await w.ready()
            yield w


def _runtime(w: World, tasks: asyncio.TaskGroup, trace: TraceConfig | None) -> Runtime:
    tracer = None if trace is None else Tracer(trace, w.registry, w.spans.append, draw=Random(1))
    discovery = MemoryDiscovery(w.store)
    return Runtime(
        namespace=NAMESPACE,
        service="frontend",
        instance="f1",
        machine="here",
        bus=w.serving,
        client_bus=w.doors,
        events=MemoryEventBus(w.broker.events),
        discovery=discovery,
        directory=Directory(discovery, w.serving, NAMESPACE, registry=w.registry),
        registry=w.registry,
        tasks=tasks,
        stopping=asyncio.Event(),
        health=w.vitals,
        notes=w.notes,
        tracer=tracer,
    )


@asynccontextmanager
async def _tasks() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group that is cancelled as a whole in the end; a task that failed fails the test."""
    opened: asyncio.Future[asyncio.TaskGroup] = asyncio.get_running_loop().create_future()

    async def hold() -> None:
        async with asyncio.TaskGroup() as tasks:
            opened.set_result(tasks)
            await asyncio.Event().wait()

    holder = asyncio.create_task(hold())
    try:
        yield await opened
    finally:
        holder.cancel()
        with suppress(asyncio.CancelledError):
            await holder


@asynccontextmanager
async def clients(w: World, key: str = "none") -> AsyncIterator[tuple[AsyncOpenAI, aiohttp.ClientSession]]:
    """The official client, with that API key, and a bare one."""
    async with AsyncExitStack() as stack:
        openai = AsyncOpenAI(base_url=f"{w.url}/v1", api_key=key, max_retries=0, timeout=DEADLINE_S)
        await stack.enter_async_context(openai)
        session = aiohttp.ClientSession(w.url, timeout=aiohttp.ClientTimeout(DEADLINE_S))
        yield openai, await stack.enter_async_context(session)
