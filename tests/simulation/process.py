"""One simulated process: a service's own shell on the in-process twins, which can be frozen, killed and stopped.

    running ◀──▶ frozen       SIGSTOP, SIGCONT: its callbacks are told apart by OWNER, see clock.py
       │  └────────┴──▶ dead  SIGKILL: frozen for ever; its connections break, its lease ends by its TTL
       └──▶ ended             SIGTERM: it drains

A process that starts again is another one, with an instance id of its own.
"""

from __future__ import annotations

import asyncio
import atexit
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import copy_context
from functools import cache, partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Literal, assert_never

import msgspec
from prometheus_client import CollectorRegistry

from services.frontend.config import LimitsConfig
from services.frontend.metrics import Metrics
from services.frontend.requests.service import RequestService
from services.kvbm.config import KvbmConfig, PoolConfig, StatisticsConfig
from services.kvbm.pool.host_pool import HostPool
from services.kvbm.service import KvbmService, kvbm
from services.kvbm.tickets.results import TicketLimits
from services.router.config import IndexConfig, LoadConfig, RouterConfig, SourceConfig
from services.router.service import Router, router
from services.worker.config import EngineConfig, SimulatedConfig, WorkerConfig
from services.worker.config import KVConnectorConfig as ExchangeConfig
from services.worker.contracts.messages import Ready
from services.worker.contracts.runner import Drawn, Work
from services.worker.engine.core import EngineCore
from services.worker.kv_connector.pool_attachment import PoolAttachment
from services.worker.kv_connector.socket_client import SocketClient
from services.worker.scheduler.scheduler import Scheduler
from services.worker.service import Worker
from services.worker.simulated.runner import SimulatedModel
from services.worker.simulated.timing import Timing
from shared import subjects
from shared.bus.memory_bus import MemoryBroker
from shared.discovery.contract import Registration
from shared.discovery.directory import Directory
from shared.discovery.memory import MemoryDiscovery, MemoryStore
from shared.errors import ConfigError
from shared.messages.cards import KvLayout, Role, ServiceName
from shared.pool.format import ALIGN_BYTES, PAGE_BYTES
from shared.pool.lock import SOCKET
from shared.runtime.control import answer_control
from shared.runtime.runtime import Runtime
from tests.fakes.memory_sockets import MemorySockets
from tests.simulation.clock import OWNER, SimulatedLoop
from tests.simulation.events import KeptEvents, MutableBus, ShortMemory, ShortMemoryOverNats
from tests.simulation.plan import BLOCK_SIZE, CONTEXT_LENGTH, EMBEDDING_SIZE, EOS, VOCABULARY, Sizes
from tests.simulation.simulated_engine import SimulatedEngine

NAMESPACE = "simulated"
MODEL = "sim"
EPOCH_S = 1_000_000_000.0
"""The wall clock at the beginning."""

LIMITS = LimitsConfig(select_timeout_s=0.2, offer_timeout_s=0.5, quiet_s=0.5, frozen_s=1.5, stall_s=2.5, drain_s=2.0)
SIMULATED = SimulatedConfig(fixed_s=0.01, weights_s=0.01, row_s=0.0005, token_s=0.0005, output_tokens=10)


class _ProcessEnd(Exception):
    """The service has drained; ends the tasks that are left."""


class Process:
    """Owns everything that its service owns. Its endpoints and its callbacks go by its instance id."""

    def __init__(
        self,
        loop: SimulatedLoop,
        broker: MemoryBroker,
        store: MemoryStore,
        service: ServiceName,
        instance: str,
        draw: Random,
        *,
        sizes: Sizes,
        sockets: MemorySockets,
        kept_events: KeptEvents,
        pool: str = "",
        role: Role = "aggregated",
    ) -> None:
        """`pool`: the directory of the kvbm's. Empty if there is none. `sockets`: where engines reach it. `role`: a
        worker's."""
        self.service: ServiceName = service
        self.role: Role = role
        self.instance = instance
        self.state: Literal["running", "frozen", "dead", "ended"] = "running"
        self.froze = False
        """Was it ever frozen."""
        self.wrong: list[str] = []
        """What its engine computed that it must not."""
        self.wall_offset_s = 0.0
        self.context = copy_context()
        self.context.run(OWNER.set, instance)
        self.frontend: RequestService | None = None
        self.router: Router | None = None
        self.worker: Worker | None = None
        self.engine: SimulatedEngine | None = None
        """The one that lives, of a worker."""
        self.scheduler: Scheduler | None = None
        """Its scheduler, with the block pool."""
        self.kvbm: KvbmService | None = None
        self._loop = loop
        self._store = store
        self._sizes = sizes
        self._pool = pool
        self._sockets = sockets
        self._socket = Path(pool) / SOCKET
        self.bus = MutableBus(broker, instance)
        self._discovery = MemoryDiscovery(store, instance)
        self.directory = Directory(self._discovery, self.bus, NAMESPACE)
        self._events = self._open_events(broker, kept_events)
        self._draw = draw
        self._stopping = asyncio.Event()
        self.main = loop.create_task(self._live(), name=instance, context=self.context)

    @property
    def takes_requests(self) -> bool:
        """Whether a balancer would send a client here."""
        return self.frontend is not None and not self.frontend.admission.closed

    # --- what befalls it

    def freeze(self) -> None:
        """SIGSTOP. Its lease ends if this lasts."""
        if self.state == "running":
            self.state = "frozen"
            self.froze = True
            self._loop.freeze(self.instance)
            self._loop.call_later(self._store.ttl_s, self._lapse)

    def thaw(self) -> None:
        """SIGCONT."""
        if self.state == "frozen":
            self.state = "running"
            self._loop.thaw(self.instance)

    def kill(self) -> None:
        """SIGKILL."""
        if self.state in ("running", "frozen"):
            self.state = "dead"
            self._loop.freeze(self.instance)
            self.bus.disconnect()
            if isinstance(self._events, ShortMemory):
                self._events.close()
            self._let_go()
            for registration in self._discovery.registrations:
                registration.end()
                self._loop.call_later(self._store.ttl_s, self._store.kill, registration)

    def stop(self) -> None:
        """SIGTERM; `main` is done when it has drained."""
        self._stopping.set()

    def expire(self) -> None:
        """Its lease ends although it lives."""
        for registration in self._discovery.registrations:
            self._store.expire(registration)

    def kill_engine(self) -> None:
        """The engine's process dies, the worker's own lives on."""
        if self.engine is not None:
            self.context.copy().run(self.engine.kill)

    def freeze_engine(self) -> Callable[[], None] | None:
        """The engine's process is stopped; what lets it go on."""
        if self.engine is None:
            return None
        self.engine.freeze()
        return partial(self.context.copy().run, self.engine.thaw)

    def mute(self, *, muted: bool) -> None:
        """What it publishes of its cache is lost."""
        if self._sizes.plane != "zmq":
            self.bus.muted = muted
        elif self.worker is not None:
            mute = self.bus.broker.events.mute if muted else self.bus.broker.events.unmute
            source = self.worker.event_source
            if source is not None and self.bus.broker.events.publisher(source.publish) is not None:
                mute(source)

    def bury(self) -> None:
        """The simulation is over: what is left of the dead is taken apart."""
        self._loop.thaw(self.instance)
        self.main.cancel()

    def _let_go(self) -> None:
        """What the kernel takes from a process that is dead: locks, and memory that it shares."""
        self.kill_engine()
        if self.kvbm is not None:
            self.kvbm._pool.close()
            self._sockets.break_all(self._socket)

    def _lapse(self) -> None:
        if self.state == "frozen":
            self.expire()

    def _open_events(self, broker: MemoryBroker, kept: KeptEvents) -> ShortMemory | ShortMemoryOverNats:
        sizes = self._sizes
        if sizes.plane == "zmq":
            return ShortMemory(broker, self.instance, sizes.ring_batches)
        stream = "kept" if sizes.plane == "jetstream" else ""
        read_stream = partial(kept.read, self.bus)
        return ShortMemoryOverNats(
            self.bus, NAMESPACE, self.instance, sizes.ring_batches, stream=stream, read_stream=read_stream
        )

    # --- its life

    async def _live(self) -> None:
        with suppress(asyncio.CancelledError):
            try:
                await self._serve()
            except* _ProcessEnd:
                pass
            finally:
                await self._discovery.close()
                if isinstance(self._events, ShortMemoryOverNats):
                    await self._events.close()
                await self.bus.drain()
                if self.state != "dead":
                    self.state = "ended"

    async def _serve(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.directory.run())
            runtime = Runtime(
                namespace=NAMESPACE,
                service=self.service,
                instance=self.instance,
                machine="simulated",
                bus=self.bus,
                events=self._events,
                discovery=self._discovery,
                directory=self.directory,
                registry=CollectorRegistry(),
                tasks=tasks,
                stopping=self._stopping,
                started=self._loop.time(),
                wall=lambda: EPOCH_S + self._loop.time() + self.wall_offset_s,
                draw=self._draw,
            )
            await answer_control(runtime)
            match self.service:
                case "frontend":
                    await self._serve_frontend(runtime)
                case "router":
                    async with router(runtime, _router_config(self._sizes)) as self.router:
                        await self._stopping.wait()
                case "worker":
                    await self._serve_worker(runtime)
                case "kvbm":
                    await self._serve_kvbm(runtime)
                case "turns":
                    raise AssertionError("no model takes turns in the simulation")
                case _:
                    assert_never(self.service)
            raise _ProcessEnd

    async def _serve_frontend(self, runtime: Runtime) -> None:
        """As services/frontend/app.py does, without its doors."""
        limits = msgspec.structs.replace(LIMITS, wait_s=self._sizes.wait_s)
        frontend = RequestService(runtime, limits, Metrics(runtime.registry))
        await frontend.start()
        self.frontend = frontend
        registering = runtime.tasks.create_task(self._register(runtime))
        try:
            await self._stopping.wait()
        finally:
            frontend.admission.closed = True
            with suppress(TimeoutError):
                async with asyncio.timeout(LIMITS.drain_s):
                    await frontend.wait_idle()
            if registering.done():
                await registering.result().close()
            else:
                registering.cancel()

    async def _register(self, runtime: Runtime) -> Registration:
        operations = {"stream": subjects.stream(NAMESPACE, self.instance)}
        return await runtime.discovery.register(lambda epoch: runtime.address(epoch, operations))

    async def _serve_worker(self, runtime: Runtime) -> None:
        config = WorkerConfig(
            namespace=NAMESPACE,
            model=_model().name,
            model_name=MODEL,
            engine="simulated",
            block_size=BLOCK_SIZE,
            capacity_blocks=self._sizes.capacity_blocks,
            max_running=4,
            max_waiting=self._sizes.max_waiting,
            stall_s=2.0,
            drain_s=1.0,
            role=self.role,
            kvbm=ExchangeConfig(
                pool=self._pool, offload="filled" if self.role == "prefill" else self._sizes.offload, timeout_s=0.5
            ),
        )
        self.worker = Worker(runtime, config, self._start_engine)
        await self.worker.run()

    async def _start_engine(self, config: WorkerConfig, model_name: str, instance: str) -> SimulatedEngine:
        """As SimulatedEngine.start does, with a model that has no directory."""
        model = model_of(facts_of(config.capacity_blocks), speed=self._sizes.speed, copy_s=self._sizes.copy_s)
        engine_config = EngineConfig.of(config, model_name, instance, parent_pid=0)
        mover = model.timing.mover(BLOCK_SIZE, self._loop.time) if self._pool else None
        attachment = PoolAttachment(Path(self._pool), instance) if self._pool else None
        core = EngineCore.of(engine_config, model.facts, mover, attachment)
        self.scheduler = core._scheduler
        if self.role == "prefill":
            model = PromptModel(model, lambda what: self.wrong.append(f"{self.instance} {what}"))
        self.engine = SimulatedEngine(core, model, self._connect if self._pool else None)
        return self.engine

    def _connect(self, arrived: Callable[[], None]) -> SocketClient:
        return SocketClient(Path(self._pool), partial(self._sockets.connect, arrived=arrived))

    async def _serve_kvbm(self, runtime: Runtime) -> None:
        """Where the one before has not ended, it is tried again, as a supervisor of kvbm would."""
        config = KvbmConfig(
            namespace=NAMESPACE,
            pool=PoolConfig(directory=self._pool, size_bytes=pool_bytes(self._sizes.pool_slots)),
            tickets=TicketLimits(store_time_s=1.0, fetch_time_s=1.0),
            statistics=StatisticsConfig(log_s=0.0),
        )
        while not self._stopping.is_set():
            try:
                async with kvbm(runtime, config) as self.kvbm:
                    self._sockets.listen(self._socket, self.kvbm.door.serve)
                    await self._stopping.wait()
                    self._sockets.unlisten(self._socket)
            except ConfigError:
                await asyncio.sleep(0.25)


class PromptModel(SimulatedModel):
    """The model of a worker that computes prompts alone: it complains of a second token of one sequence."""

    def __init__(self, model: SimulatedModel, complain: Callable[[str], None]) -> None:
        super().__init__(model.facts, model.timing, output_tokens=SIMULATED.output_tokens)
        self._complain = complain
        self._drawn: set[int] = set()

    def draw(self, works: Sequence[Work]) -> list[Drawn | None]:
        drawn = super().draw(works)
        for work, one in zip(works, drawn, strict=True):
            if one is None:
                continue
            if work.sequence in self._drawn:
                self._complain("decodes, but its role is prefill")
            if work.sampling.pooling:
                self._complain("embeds, but its role is prefill")
            self._drawn.add(work.sequence)
        return drawn


def _router_config(sizes: Sizes) -> RouterConfig:
    return RouterConfig(
        namespace=NAMESPACE,
        policy=sizes.policy,
        index=IndexConfig(limit_bytes=sizes.index_bytes, speculation_s=1.0),
        load=LoadConfig(grace_s=0.5, unknown_s=1.0),
        source=SourceConfig(
            held_limit_batches=sizes.held_batches,
            replay_timeout_s=0.5,
            snapshot_idle_timeout_s=0.5,
            digest_s=1.0,
            silence_s=0.0,
        ),
    )


def facts_of(capacity_blocks: int) -> Ready:
    """What every simulated engine serves."""
    return Ready(
        context_length=CONTEXT_LENGTH,
        vocab_size=VOCABULARY,
        eos_token_ids=(EOS,),
        block_size=BLOCK_SIZE,
        capacity_blocks=capacity_blocks,
        kv_layout=KvLayout(dtype="float32", layers=1, kv_heads=1, head_dim=1, block_size=BLOCK_SIZE),
        path=_model().name,
        embedding_size=EMBEDDING_SIZE,
    )


def model_of(facts: Ready, *, speed: float = 1.0, copy_s: float = 1.0) -> SimulatedModel:
    """The model that speaks on all workers."""
    token_bytes = 1000
    copy_bytes_per_s = BLOCK_SIZE * token_bytes / copy_s
    config = msgspec.structs.replace(
        SIMULATED, speed=speed, kv_token_bytes=token_bytes, copy_bytes_per_s=copy_bytes_per_s
    )
    return SimulatedModel(facts, Timing(config), output_tokens=SIMULATED.output_tokens)


def pool_bytes(slots: int) -> int:
    """Return the size of a pool with `slots` slots of one page, a multiple of 16."""
    return ALIGN_BYTES + slots * PAGE_BYTES


def make_pool(directory: Path, slots: int) -> None:
    """A pool whose memory is there: it is made in threads else, which have no place in a simulation."""
    pool = HostPool.open(directory, pool_bytes(slots))
    os.posix_fallocate(pool._pool.descriptor, 0, pool.geometry.file_bytes)
    assert pool.reserved
    pool.close()


@cache
def _model() -> TemporaryDirectory[str]:
    """Workers name a tokenizer, which no part of the simulation reads."""
    directory = TemporaryDirectory(prefix="headrace-simulation-")
    atexit.register(directory.cleanup)
    Path(directory.name, "tokenizer.json").write_text("{}", encoding="utf-8")
    return directory
