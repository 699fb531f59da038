"""A worker next to a kvbm: the shell's own client, and the engine's own core, scheduler, connector and mover, over real
memory; and the link between worker and kvbm, which loses messages and delays them.

The engine's bytes are `tests.worker.pool_runner`'s: any that are not those of exactly this prefix fail the test.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from random import Random

from services.kvbm.service import KvbmService
from services.worker.contracts.messages import KvbmDown, KvbmReply, KvbmUp
from services.worker.kv_connector.client import KvbmClient
from services.worker.kv_connector.metrics import KvbmMetrics
from shared.runtime.runtime import Runtime
from tests.fake_runtime import fake_runtime
from tests.fakes.memory_bus import MemoryBus
from tests.kvbm.store_rig import LIMIT_S, NAMESPACE
from tests.kvbm.store_rig import World as Machine
from tests.worker import kvbm_world
from tests.worker.kvbm_world import Engine

SHELL = "shell "
"""The prefix of the name of a worker's end of its link."""
PAUSES_S = (0.0, 0.0, 0.001, 0.003)
ANSWER_S = 0.15
"""Seconds that a request waits for its reply."""


class Link:
    """Faults on the messages of and to workers' shells; no message overtakes another, as with NATS. `lost`, `late` and
    `twice` are shares. `twice` is of stores, which is worse than NATS: the second one comes later, and its reply
    reaches no engine."""

    def __init__(self, draw: Random) -> None:
        self.lost = draw.choice((0.0, 0.01, 0.05))
        self.late = draw.choice((0.0, 0.03))
        self.twice = draw.choice((0.0, 0.1))
        self._draw = draw
        self._last_s: dict[tuple[str, str], float] = {}
        """When the last message of a link arrives."""

    def __call__(self, sender: str, receiver: str, subject: str, deliver: Callable[[], None]) -> None:
        if not sender.startswith(SHELL) and not receiver.startswith(SHELL):
            deliver()
        elif self._draw.random() >= self.lost:
            loop = asyncio.get_running_loop()
            late_s = self._draw.uniform(0.0, 1.5 * ANSWER_S) if self._draw.random() < self.late else 0.0
            arrives_s = max(self._last_s.get((sender, receiver), 0.0) + 1e-6, loop.time() + late_s)
            self._last_s[sender, receiver] = arrives_s
            loop.call_at(arrives_s, deliver)
            if subject.endswith(".store") and self._draw.random() < self.twice:
                loop.call_at(arrives_s + self._draw.uniform(0.0, 2 * ANSWER_S), deliver)

    def mend(self) -> None:
        """Deliver everything from now on."""
        self.lost = self.late = self.twice = 0.0


class Worker:
    """One worker, whose engines live one after the other."""

    def __init__(self, directory: Path, name: str, draw: Random, runtime: Runtime) -> None:
        self.name = name
        self.acts = 0
        """Turns that its engines have had while they were attached."""
        self._draw = draw
        self._loop = asyncio.get_running_loop()
        self._inbox: deque[KvbmUp | KvbmDown | KvbmReply] = deque()
        self.client = KvbmClient(
            *(runtime, str(directory), KvbmMetrics(runtime.registry)),
            send=self._inbox.append,
            link_changed=lambda: None,
        )
        self._directory = directory
        self._engines = count(1)

    async def life(self, steps: int, over: Callable[[], bool], pause_s: float) -> Engine:
        """Run an engine for `steps` steps, and now and then for `pause_s` none. The caller ends it."""
        draw = self._draw
        engine = self._start()
        for _ in range(steps):
            if over():
                break
            if len(engine.living) < 4 and draw.random() < 0.4:
                engine.world.submit(engine)
            if draw.random() < 0.02:
                engine.cancel(draw.randrange(4))
            self.acts += bool(engine.link.kvbm)
            for _ in range(draw.randint(1, 6)):
                self._step(engine)
                engine.copy(draw.randint(0, 6))
            await asyncio.sleep(pause_s if draw.random() < 0.03 else draw.choice(PAUSES_S))
        return engine

    def _start(self) -> Engine:
        world = kvbm_world.World(self._directory, self._draw, threads=self._draw.random() < 0.3)
        world.now_s, world.step_s = self._loop.time(), 3.0
        world.answer_s, world.waits_s = ANSWER_S, (0.02, 0.3)
        self._inbox.clear()
        self.client.engine_ready()
        return Engine(world, f"{self.name}-{next(self._engines)}")

    def _step(self, engine: Engine) -> bool:
        """Run one step. Return False if there was nothing to do."""
        engine.world.now_s = self._loop.time()
        while self._inbox:
            engine.handle(self._inbox.popleft())
        link = engine.link
        works = engine.step()
        if engine.link is not link:
            self.client.handle_engine_message(engine.link)
        while engine.asks:
            self.client.handle_engine_message(engine.asks.popleft())
        return works

    async def rest(self, engine: Engine, kvbm: KvbmService) -> None:
        """Wait until every request is answered, and the kvbm keeps nothing for the engine, although it lives."""
        owner = engine.attachment.hold()

        def rests() -> bool:
            works = self._step(engine)
            engine.copy(8)
            if works or engine.living or not engine.link.kvbm or not engine.connector.idle:
                return False
            layout = kvbm.layouts.open.get(engine.link.layout)
            known = None if layout is None else layout.tickets._owners.get(owner)
            if known is None or known.tickets:
                engine.world.submit(engine)  # a ticket that it knows nothing of ends when it asks for more
                return False
            return True

        async with asyncio.timeout(LIMIT_S):
            while not rests():  # noqa: ASYNC110 - it is driven from here
                await asyncio.sleep(0.001)
        load = engine.scheduler.load()
        assert (load.held_blocks, load.waiting, load.running) == (0, 0, 0)

    def die(self, engine: Engine) -> None:
        """End as the kernel ends a process, in the middle of its copies: the lock is released, its file stays."""
        engine.connector.mover.close()
        engine.attachment._pool.close()
        engine.attachment._name.release()
        self.client.engine_lost()


@asynccontextmanager
async def worker(machine: Machine, name: str, draw: Random) -> AsyncIterator[Worker]:
    """Run a worker's shell as long as the context is open."""
    bus = MemoryBus(machine.broker, SHELL + name)
    async with fake_runtime(NAMESPACE, "worker", name, bus, machine.broker, machine.store) as runtime:
        one = Worker(Path(machine.config.pool.directory), name, draw, runtime)
        running = runtime.tasks.create_task(one.client.run())
        try:
            yield one
        finally:
            running.cancel()
