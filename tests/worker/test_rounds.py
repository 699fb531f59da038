"""services/worker/rounds.py: a worker between two rounds, with an engine that reports what the test says; real
processes are in tests/worker/test_checkpoint.py."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from services.worker import rounds
from services.worker.config import WorkerConfig
from services.worker.contracts.messages import EngineReport, Loading, StandingBy
from services.worker.engine.standby import Standby
from services.worker.operations.checkpoint import READY, RESTORED
from services.worker.rounds import PausedWorker
from tests.worker.scripted_engine import ScriptedEngine
from tests.worker.shell import LIMIT_S


def paused(directory: Path, report: EngineReport) -> tuple[PausedWorker, Standby]:
    """A worker that sleeps, and what keeps its engine, which reports this first."""

    async def start() -> ScriptedEngine:
        return ScriptedEngine("", report)

    config = msgspec.convert({"model": "m", "checkpoint": {"directory": str(directory)}}, WorkerConfig)
    standby = Standby(start)
    return PausedWorker(config, "0a", standby), standby


async def test_it_serves_again_when_it_is_restored_and_its_engine_stands_by(tmp_path: Path) -> None:
    worker, standby = paused(tmp_path, StandingBy())
    waiting = asyncio.ensure_future(worker.wait(asyncio.Event()))
    async with asyncio.timeout(LIMIT_S):
        while not (tmp_path / "0a" / READY).exists():  # noqa: ASYNC110 - the worker says it by a file
            await asyncio.sleep(0.01)
        (tmp_path / "0a" / RESTORED).touch()
        assert await waiting
    assert standby.ready
    await standby.end()


async def test_a_signal_ends_it_and_its_engine(tmp_path: Path) -> None:
    worker, standby = paused(tmp_path, StandingBy())
    stopping = asyncio.Event()
    stopping.set()
    assert not await asyncio.wait_for(worker.wait(stopping), LIMIT_S)
    assert standby.pid is None


async def test_it_serves_again_where_no_engine_stands_by_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rounds, "STANDBY_LIMIT_S", 0.05)
    worker, standby = paused(tmp_path, Loading("mapping weights", 0.0))
    assert await asyncio.wait_for(worker.wait(asyncio.Event()), LIMIT_S)
    assert "no engine stands by after 0.05 s: the worker cannot be frozen, and serves" in caplog.text
    assert not (tmp_path / "0a").exists()
    await standby.end()


async def test_it_serves_again_where_it_cannot_say_that_it_sleeps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    worker, standby = paused(tmp_path / "file", StandingBy())
    assert await asyncio.wait_for(worker.wait(asyncio.Event()), LIMIT_S)
    assert "the worker cannot be frozen, and serves" in caplog.text
    await standby.end()
