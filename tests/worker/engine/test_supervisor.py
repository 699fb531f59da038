"""services/worker/engine/supervisor.py: which engine is started again; the rest is in test_service.py."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from services.worker.config import WorkerConfig
from services.worker.contracts.messages import EngineReport, Failed, KvbmAsked, KvbmAsks, KvbmLink, Operate, Operated
from services.worker.engine.supervisor import EngineSupervisor
from shared.errors import ModelError
from tests.worker.scripted_engine import FACTS, ScriptedEngine
from tests.worker.shell import LIMIT_S

STALL_S = 0.1
HOPELESS = Failed(reason="no GPU is found", model=True)


class Engines:
    """Each reports one of these and then nothing; after the last of them, no more are started."""

    def __init__(self, *reports: EngineReport, busy: bool = False) -> None:
        self.lost: list[str] = []
        self.kvbm: list[KvbmAsks | KvbmLink] = []
        self.all: list[ScriptedEngine] = []
        self.done = asyncio.Event()
        self.hold = False
        """Whether engines live on though others are left."""
        self._reports = list(reports)
        self.host = EngineSupervisor(
            WorkerConfig(model="m", stall_s=STALL_S),
            "m",
            "0a",
            self.start,
            loading=lambda _report: None,
            ready=lambda _facts: self.ready(),
            stepped=lambda _step: None,
            lost=self.lost.append,
            busy=lambda: busy,
            kvbm=self.kvbm.append,
            observed=lambda _report: None,
        )

    async def start(self, _config: WorkerConfig, _model_name: str, instance: str) -> ScriptedEngine:
        self.all.append(ScriptedEngine(instance, self._reports.pop(0)))
        return self.all[-1]

    def ready(self) -> None:
        if self._reports and not self.hold:
            self.all[-1].kill()
        else:
            self.done.set()


async def test_a_model_that_no_engine_could_serve_is_given_up() -> None:
    engines = Engines(HOPELESS)
    with pytest.raises(ModelError, match="no GPU is found"):
        await asyncio.wait_for(engines.host.run(), LIMIT_S)
    assert engines.lost == []


async def test_what_one_could_serve_is_tried_again_until_another_can() -> None:
    engines = Engines(FACTS, HOPELESS, FACTS)
    run = asyncio.ensure_future(engines.host.run())
    await asyncio.wait_for(engines.done.wait(), LIMIT_S)
    assert engines.lost == ["engine: killed", "no GPU is found"]
    assert engines.host.epoch == 3
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run


async def test_an_engine_that_does_an_operation_is_not_taken_for_one_that_stands_still() -> None:
    engines = Engines(msgspec.structs.replace(FACTS, operations=("clear",)), HOPELESS, busy=True)
    engines.hold = True
    run = asyncio.ensure_future(engines.host.run())
    await asyncio.wait_for(engines.done.wait(), LIMIT_S)
    [engine] = engines.all
    operating = asyncio.ensure_future(engines.host.operate("clear", LIMIT_S))
    await asyncio.sleep(10 * STALL_S)
    assert not engines.lost
    [asked] = engine.told
    assert isinstance(asked, Operate)
    engine.report(Operated(asked.ticket))
    assert await operating == ""
    async with asyncio.timeout(LIMIT_S):  # now it stands still
        while not engines.lost:  # noqa: ASYNC110 - the supervisor reports nothing else
            await asyncio.sleep(0.01)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run


async def test_what_an_engine_asked_of_the_kvbm_is_taken_while_it_is_shut_down() -> None:
    engines = Engines(FACTS)
    run = asyncio.ensure_future(engines.host.run())
    await asyncio.wait_for(engines.done.wait(), LIMIT_S)
    [engine] = engines.all
    asks = KvbmAsks([KvbmAsked("fetch", "answered", 0.1)])
    engine.says_last = [KvbmLink(kvbm="", reason="it ends"), asks, Failed(reason="too late")]
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert engines.kvbm == [asks]
    assert engines.lost == []
