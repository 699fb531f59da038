"""An Engine that reports what a test says, and keeps the commands that it gets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.worker.config import WorkerConfig
from services.worker.contracts.messages import EngineOrder, EngineReport, Prefetch, Ready, Submit, TakeOver
from services.worker.engine.channel import ChannelClosed
from shared.messages.cards import KvLayout

FACTS = Ready(
    context_length=512,
    vocab_size=320,
    eos_token_ids=(2,),
    block_size=16,
    capacity_blocks=64,
    kv_layout=KvLayout("float32", 1, 1, 1, 16),
)


class ScriptedEngine:
    """Ready at once, or what else it reports first."""

    pid = 1

    def __init__(self, instance: str, first: EngineReport = FACTS) -> None:
        self.instance = instance
        """The worker that started it."""
        self.told: list[EngineOrder | TakeOver] = []
        self.says_last: list[EngineReport] = []
        """What it reports while it is ended."""
        self._reports: asyncio.Queue[EngineReport | None] = asyncio.Queue()
        self.report(first)

    def report(self, report: EngineReport) -> None:
        self._reports.put_nowait(report)

    def submit(self, command: Submit | Prefetch) -> bool:
        self.told.append(command)
        return True

    def send(self, command: EngineOrder | TakeOver) -> None:
        self.told.append(command)

    async def receive(self) -> EngineReport:
        report = await self._reports.get()
        if report is None:
            raise ChannelClosed("engine: killed")
        return report

    def kill(self) -> None:
        self._reports.put_nowait(None)

    async def end(self, _limit_s: float, last: Callable[[EngineReport], None], /) -> int:
        for report in self.says_last:
            last(report)
        return 0


class ScriptedEngines:
    """Starts them."""

    def __init__(self, first: EngineReport = FACTS) -> None:
        self.all: list[ScriptedEngine] = []
        self._first = first

    async def start(self, _config: WorkerConfig, _model_name: str, instance: str) -> ScriptedEngine:
        self.all.append(ScriptedEngine(instance, self._first))
        return self.all[-1]
