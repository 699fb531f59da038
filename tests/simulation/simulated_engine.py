"""SimulatedEngine: an engine in the shell's own process, on the event loop's clock, without a process, thread or
channel.

It has the same core, pool and scheduler as the engine process; a step takes its time on the loop's clock, which a test
may control. It runs inside `receive`: the task that receives the reports drives it.

           a command                          freeze
    idle ──────────────▶ stepping      idle, stepping ──────▶ frozen: it handles and reports nothing
      ▲   time is over      │                 ▲     thaw        │
      └─────────────────────┘                 └─────────────────┘
    all ──kill──▶ gone: `receive` raises ChannelClosed
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from services.worker.config import EngineConfig, WorkerConfig
from services.worker.contracts.messages import EngineOrder, EngineReport, KvbmAsks, KvbmLink, Prefetch, Submit, TakeOver
from services.worker.contracts.runner import Work
from services.worker.engine.channel import ChannelClosed
from services.worker.engine.core import EngineCore, comes_meanwhile
from services.worker.kv_connector.contract import KvbmAsk, KvbmDown, KvbmReply
from services.worker.kv_connector.pool_attachment import PoolAttachment
from services.worker.kv_connector.socket_client import SocketClient
from services.worker.model.facts import facts_of
from services.worker.simulated.runner import SimulatedModel, simulated_model

Connect = Callable[[Callable[[], None]], SocketClient]
"""Returns a connection to the kvbm, which calls the given function when there is something to `poll`."""


class SimulatedEngine:
    """An Engine in this process."""

    def __init__(self, core: EngineCore, model: SimulatedModel, connect: Connect | None = None) -> None:
        self._core = core
        self._model = model
        self._loop = asyncio.get_running_loop()
        self._reports: deque[EngineReport] = deque((model.facts, core.opening()))
        self._commands: deque[EngineOrder] = deque()
        """Commands that are not handled yet; bounded as the attempts and requests of the shell are."""
        self._works: list[Work] | None = None
        """Works of the step under way. None if no step is under way."""
        self._begun_s = 0.0
        self._ends_s = 0.0
        self._frozen = False
        self._killed = False
        self._called = asyncio.Event()
        self._kvbm = None if connect is None else connect(self._called.set)

    @staticmethod
    async def start(
        config: WorkerConfig, model_name: str, instance: str, connect: Connect | None = None
    ) -> SimulatedEngine:
        """Start an engine, as EngineProcess does. Raises ModelError, ConfigError."""
        facts = facts_of(Path(config.model), block_size=config.block_size, capacity_blocks=config.capacity_blocks)
        model = simulated_model(facts, config.simulated)
        engine_config = EngineConfig.of(config, model_name, instance, parent_pid=os.getpid())
        if not config.kvbm.pool:
            return SimulatedEngine(EngineCore.of(engine_config, model.facts), model)
        mover = model.timing.mover(config.block_size, asyncio.get_running_loop().time)
        attachment = PoolAttachment(Path(config.kvbm.pool), instance)
        return SimulatedEngine(EngineCore.of(engine_config, model.facts, mover, attachment), model, connect)

    @property
    def pid(self) -> int:
        return os.getpid()

    def submit(self, command: Submit | Prefetch) -> bool:
        """Take an attempt; always returns True."""
        self.send(command)
        return True

    def send(self, command: EngineOrder | TakeOver) -> None:
        assert not isinstance(command, TakeOver), "it serves from the start"
        self._commands.append(command)
        self._called.set()

    def freeze(self) -> None:
        """Stop the engine, like SIGSTOP; the clock goes on."""
        self._frozen = True

    def thaw(self) -> None:
        """Let the engine go on, like SIGCONT: a step whose time is over ends now."""
        self._frozen = False
        self._called.set()

    def kill(self) -> None:
        """Lose the engine at once, frozen or not, with all commands and reports that were not handled."""
        if not self._killed:
            self._core.close()
            if self._kvbm is not None:
                self._kvbm.close()
        self._killed = True
        self._called.set()

    async def receive(self) -> EngineReport:
        """Return the next report; computes steps meanwhile. Raises ChannelClosed."""
        while not self._killed:
            if self._frozen:
                await self._rest(None)
            elif self._reports:
                return self._reports.popleft()
            elif self._works is None:
                await self._begin()
            elif self._loop.time() < self._ends_s:
                due_s = self._core.exchange_due_s
                await self._rest(self._ends_s if due_s is None else min(self._ends_s, due_s))
                if not (self._frozen or self._killed):
                    self._exchange()
            else:
                self._finish(self._works)
        raise ChannelClosed("engine: killed")

    async def end(self, _limit_s: float, _last: Callable[[EngineReport], None], /) -> int:
        """Kill the engine: there is nothing to wait for."""
        self.kill()
        return 0

    async def _begin(self) -> None:
        """Handle the commands; then begin a step, or wait for a command."""
        now_s = self._loop.time()
        while self._commands:
            self._reports.extend(self._core.handle(self._commands.popleft(), now_s))
        self._hear_kvbm(now_s)
        reports, self._works = self._core.begin(now_s)
        self._reports.extend(reports)
        answered = self._tell(self._core.step_connector(now_s), now_s)
        if self._works is not None:
            self._begun_s, self._ends_s = now_s, now_s + self._model.timing.step_s(self._works)
        if not self._reports and not (self._works is None and (self._core.busy or answered)):
            await self._rest(self._wait_until_s if self._works is None else self._ends_s)

    @property
    def _wait_until_s(self) -> float | None:
        due_s = [self._core.wait_until_s, None if self._kvbm is None else self._kvbm.wait_until_s]
        return min([one_s for one_s in due_s if one_s is not None], default=None)

    def _hear_kvbm(self, now_s: float) -> None:
        for news in () if self._kvbm is None else self._kvbm.poll(now_s):
            self._core.handle(news, now_s)

    def _tell(self, messages: Sequence[KvbmAsk | KvbmLink], now_s: float) -> bool:
        """Ask the kvbm, and report the link. Return whether there was an answer at once."""
        answers: list[KvbmDown | KvbmReply] = []
        for message in messages:
            if isinstance(message, KvbmLink):
                self._reports.append(message)
            elif self._kvbm is not None:
                answers += self._kvbm.send(message, now_s)
        for news in answers:
            self._core.handle(news, now_s)
        if self._kvbm is not None and (asks := self._kvbm.take_asked()):
            self._reports.append(KvbmAsks(asks))
        return bool(answers)

    def _exchange(self) -> None:
        """Exchange blocks while a step is computed, as an engine with a GPU does; other commands wait."""
        now_s, others = self._loop.time(), deque[EngineOrder]()
        while self._commands:
            command = self._commands.popleft()
            if comes_meanwhile(command, after_others=bool(others)):
                self._core.handle(command, now_s)
            else:
                others.append(command)
        self._commands = others
        self._hear_kvbm(now_s)
        self._tell(self._core.exchange(now_s), now_s)

    def _finish(self, works: list[Work]) -> None:
        self._works = None
        self._reports.extend(self._core.finish(self._model.draw(works), self._loop.time() - self._begun_s))

    async def _rest(self, until_s: float | None) -> None:
        """Wait until that time, or until the engine is called."""
        try:
            async with asyncio.timeout_at(until_s):
                await self._called.wait()
        except TimeoutError:
            return
        self._called.clear()
