"""services/worker/engine/supervisor.py: which engine is started again; the rest is in test_service.py."""

from __future__ import annotations

import asyncio

import pytest

from services.worker.config import WorkerConfig
from services.worker.engine.supervisor import EngineSupervisor
from services.worker.messages import EngineReport, Failed
from shared.errors import ModelError
from tests.worker.scripted_engine import FACTS, ScriptedEngine
from tests.worker.shell import LIMIT_S

HOPELESS = Failed(reason="no GPU is found", model=True)


class Engines:
    """Each reports one of these and then nothing; after the last of them, no more are started."""

    def __init__(self, *reports: EngineReport) -> None:
        self.lost: list[str] = []
        self.all: list[ScriptedEngine] = []
        self.done = asyncio.Event()
        self._reports = list(reports)
        self.host = EngineSupervisor(
            WorkerConfig(model="m"),
            "m",
            "0a",
            self.start,
            loading=lambda _report: None,
            ready=lambda _facts: self.ready(),
            stepped=lambda _step: None,
            lost=self.lost.append,
            busy=lambda: False,
            kvbm_message=lambda _message: None,
            observed=lambda _report: None,
        )

    async def start(self, _config: WorkerConfig, _model_name: str, instance: str) -> ScriptedEngine:
        self.all.append(ScriptedEngine(instance, self._reports.pop(0)))
        return self.all[-1]

    def ready(self) -> None:
        if self._reports:
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
