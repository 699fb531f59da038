"""A worker whose engine and standby are real processes, which are killed and frozen."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from services.worker.config import KVConnectorConfig, WorkerConfig
from services.worker.contracts.messages import EngineReport, Loading, StandingBy, TakeOver
from services.worker.engine import standby, supervisor
from services.worker.engine.process import EngineProcess
from shared.messages.generate import Accepted
from shared.messages.kv_events import AllBlocksCleared
from tests.tiny_model import write_tiny_model
from tests.worker.drawer_socket import listening
from tests.worker.shell import LIMIT_S, NAMESPACE, WORKER, Shell, endless, request, running_worker
from tests.worker.test_engine_main import Store, answer, ready

PROMPT = list(range(10, 50))


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WorkerConfig:
    monkeypatch.setattr(supervisor, "AFTER_S", 0.0)
    monkeypatch.setattr(standby, "AFTER_S", 0.0)
    return WorkerConfig(
        namespace=NAMESPACE,
        model=str(write_tiny_model(tmp_path / "model")),
        cache=str(tmp_path / "cache"),
        capacity_blocks=64,
        threads=1,
        drain_s=0.2,
        standby=True,
    )


async def standing_by(shell: Shell, *, after: int = 0) -> int:
    """Wait until an engine stands by that is not the one of process `after`; return its process."""
    kept = shell.worker.engine.standby
    assert kept is not None
    await shell.peer.until(lambda: kept.pid not in (None, after) and bool(kept.ready))
    await shell.peer.until(lambda: shell.peer.reports[-1].standby == "ready")
    assert kept.pid is not None
    return kept.pid


async def computed(shell: Shell, name: str) -> list[int]:
    """Return the tokens of an answer, as soon as the worker serves."""
    await shell.peer.until(lambda: ("model", WORKER) in shell.directory.cards)
    async with asyncio.timeout(LIMIT_S):  # the card of an engine that was lost is there a moment longer
        while not isinstance(await shell.peer.generate(request(name, PROMPT, max_tokens=12)), Accepted):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert await shell.peer.ended(name) in ("length", "stop")
    return shell.peer.tokens(name)


def engine_pid(shell: Shell) -> int:
    pid = shell.worker.engine.pid
    assert pid is not None
    return pid


def value(shell: Shell, metric: str) -> float | None:
    return shell.runtime.registry.get_sample_value(metric)


async def test_an_engine_that_is_killed_under_streams_is_followed_by_its_standby(config: WorkerConfig) -> None:
    async with running_worker(config) as shell:
        first = await computed(shell, "before")
        waiting = await standing_by(shell)
        await shell.peer.until(lambda: value(shell, "headrace_standby_ready") == 1)
        assert shell.peer.reports[-1].standby_bytes > 1 << 20
        for name in ("r", "s"):
            await shell.peer.generate(endless(name))
        await shell.peer.until(lambda: len(shell.peer.tokens("r")) > 1)
        os.kill(engine_pid(shell), signal.SIGKILL)
        assert [await shell.peer.ended(name) for name in ("r", "s")] == ["error", "error"]  # frontends continue them
        assert await computed(shell, "after") == first
        assert engine_pid(shell) == waiting
        assert shell.peer.parts("after")[-1].cached_tokens == 0
        cleared = [event for _, batch in shell.peer.batches for event in batch.events if event == AllBlocksCleared()]
        assert len(cleared) == 2  # what the engine before had cached is gone from every index
        assert await standing_by(shell, after=waiting) != waiting
        assert value(shell, "headrace_standby_take_overs_total") == 1
        assert value(shell, "headrace_engine_restarts_total") == 1


async def test_an_engine_that_is_frozen_beyond_its_limit_is_followed_by_its_standby(config: WorkerConfig) -> None:
    async with running_worker(msgspec.structs.replace(config, stall_s=10.0)) as shell:
        await computed(shell, "before")
        waiting = await standing_by(shell)
        os.kill(engine_pid(shell), signal.SIGSTOP)
        await shell.peer.generate(endless("r"))
        assert await shell.peer.ended("r") == "error"
        await computed(shell, "after")
        assert engine_pid(shell) == waiting


async def test_a_standby_that_is_killed_is_replaced_and_the_engine_answers_on(config: WorkerConfig) -> None:
    async with running_worker(config) as shell:
        first = await computed(shell, "before")
        serves, waiting = engine_pid(shell), await standing_by(shell)
        await shell.peer.generate(endless("r"))
        os.kill(waiting, signal.SIGKILL)
        assert await standing_by(shell, after=waiting) != waiting
        assert await shell.peer.ended("r") == "length"
        assert await computed(shell, "after") == first
        assert engine_pid(shell) == serves
        assert value(shell, "headrace_engine_restarts_total") == 0


async def test_an_engine_and_a_standby_that_are_killed_together_are_both_replaced(config: WorkerConfig) -> None:
    async with running_worker(config) as shell:
        first = await computed(shell, "before")
        serves, waiting = engine_pid(shell), await standing_by(shell)
        for pid in (waiting, serves):
            os.kill(pid, signal.SIGKILL)
        await shell.peer.until(lambda: shell.worker.engine.pid not in (None, serves, waiting))
        assert await computed(shell, "after") == first
        await standing_by(shell, after=waiting)


async def test_a_frozen_standby_does_not_take_over_and_an_engine_is_started(
    config: WorkerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "TAKE_OVER_LIMIT_S", 0.5)
    async with running_worker(config) as shell:
        first = await computed(shell, "before")
        serves, waiting = engine_pid(shell), await standing_by(shell)
        os.kill(waiting, signal.SIGSTOP)
        os.kill(serves, signal.SIGKILL)
        await shell.peer.until(lambda: shell.worker.engine.pid not in (None, serves, waiting))
        assert await computed(shell, "after") == first


async def test_no_process_is_left_of_a_worker_with_a_standby(config: WorkerConfig) -> None:
    async with running_worker(config) as shell:
        pids = [await standing_by(shell), engine_pid(shell)]
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, 0)
            pytest.fail(f"process {pid} lives")


async def test_a_standby_computes_nothing_until_it_takes_over_and_then_loads_blocks_of_the_engine_before(
    tmp_path: Path,
) -> None:
    config = WorkerConfig(
        model=str(write_tiny_model(tmp_path / "tiny")),
        cache=str(tmp_path / "cache"),
        capacity_blocks=64,
        threads=1,
        kvbm=KVConnectorConfig(pool=str(tmp_path / "pool"), wait_s=LIMIT_S),
    )
    prompt = [position * 7 % 320 for position in range(100)]
    first = await EngineProcess.start(config, "tiny", "w1")
    waiting = await EngineProcess.start(config, "tiny", "", stands_by=True)
    store = Store(tmp_path / "pool", await ready(first))
    async with asyncio.timeout(LIMIT_S):
        report: EngineReport = Loading("", 0.0)
        while isinstance(report, Loading):
            report = await waiting.receive()
    assert isinstance(report, StandingBy)
    async with listening(store.directory, store.drawer):
        await store.linked(first)
        computed = await answer(first, prompt, 8, store=store)
        await store.saved(first, 6)
        first.kill()
        await first.end(LIMIT_S)
        ticks = _ticks(waiting.pid)
        await asyncio.sleep(0.3)
        assert _ticks(waiting.pid) == ticks, "it computes"
        waiting.send(TakeOver("w1"))
        await ready(waiting)
        await store.linked(waiting)
        loaded = await answer(waiting, prompt, 8, store=store)
        assert [part.tokens for part in loaded] == [part.tokens for part in computed]
        assert (loaded[-1].cached_tokens, loaded[-1].cached_host_tokens) == (96, 96)
    assert await waiting.end(LIMIT_S) == 0
    store.drawer.close()


def _ticks(pid: int) -> int:
    """Return the processor time of a process, in ticks."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])
