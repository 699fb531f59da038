"""services/worker/engine/standby.py, with engines that report what the test says, and under a supervisor; real
processes are in tests/worker/test_standby_processes.py."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest

from services.worker.config import WorkerConfig
from services.worker.contracts.messages import (
    FIRST_TOKENS,
    EngineOperation,
    EngineOrder,
    EngineReport,
    Failed,
    Loading,
    Operate,
    Operated,
    Ready,
    StandingBy,
    TakeOver,
)
from services.worker.engine import supervisor
from services.worker.engine.back_off import BackOff
from services.worker.engine.standby import Standby
from services.worker.engine.supervisor import EngineSupervisor
from shared.errors import ModelError
from tests.worker.scripted_engine import FACTS, ScriptedEngine
from tests.worker.shell import LIMIT_S

SLEEPS = msgspec.structs.replace(FACTS, operations=("sleep", "wake"))


class Obeying(ScriptedEngine):
    """It serves when it is to take over."""

    def send(self, command: EngineOrder | TakeOver) -> None:
        super().send(command)
        if isinstance(command, TakeOver):
            self.report(FACTS)


class Pair:
    """A supervisor and a standby. Each engine reports `first`, each standby the next of `reports` first."""

    def __init__(
        self,
        *reports: EngineReport,
        first: EngineReport = FACTS,
        refusals: int = 0,
        kind: type[ScriptedEngine] = Obeying,
    ) -> None:
        self.engines: list[ScriptedEngine] = []
        self.standbys: list[ScriptedEngine] = []
        self.lost: list[str] = []
        self.ready = 0
        self._first, self._kind = first, kind
        self._reports = list(reports)
        self._refusals = refusals
        self.standby = Standby(self._start_standby)
        self.host = EngineSupervisor(
            msgspec.convert({"model": "m", "standby": True}, WorkerConfig),
            "m",
            "0a",
            self._start,
            loading=lambda _report: None,
            ready=self._count,
            stepped=lambda _step: None,
            lost=self.lost.append,
            busy=lambda: False,
            kvbm=lambda _report: None,
            observed=lambda _report: None,
            standby=self.standby,
        )

    def _count(self, _facts: Ready) -> None:
        self.ready += 1

    async def _start(self, _config: WorkerConfig, _model_name: str, instance: str) -> ScriptedEngine:
        self.engines.append(ScriptedEngine(instance, self._first))
        return self.engines[-1]

    async def _start_standby(self) -> ScriptedEngine:
        if self._refusals:
            self._refusals -= 1
            raise OSError("Cannot allocate memory")
        self.standbys.append(self._kind("", self._reports.pop(0) if self._reports else StandingBy(7)))
        return self.standbys[-1]


async def until(met: Callable[[], object]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not met():  # noqa: ASYNC110 - neither reports anything else
            await asyncio.sleep(0.002)


@asynccontextmanager
async def running(pair: Pair) -> AsyncIterator[Pair]:
    run = asyncio.ensure_future(pair.host.run())
    try:
        await until(lambda: pair.ready)
        yield pair
    finally:
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
        await pair.standby.end()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "AFTER_S", 0.0)
    monkeypatch.setattr(BackOff, "after", lambda _self, _lived_s: 0.0)


async def test_a_standby_takes_over_from_an_engine_that_ends_and_another_one_stands_by() -> None:
    async with running(Pair()) as pair:
        await until(lambda: pair.standby.ready)
        assert pair.standby.ready == StandingBy(7)
        pair.engines[0].kill()
        await until(lambda: len(pair.standbys) == 2)
        [taken, waiting] = pair.standbys
        assert (taken.told, waiting.told) == ([TakeOver("0a")], [])
        assert (pair.host.take_overs, pair.host.epoch, pair.lost) == (1, 2, ["engine: killed"])
        assert (lost := pair.host.losses) is not None
        assert (lost.count, lost.reason, lost.take_overs) == (1, "engine: killed", 1)
        assert lost.age_s >= 0
        assert len(pair.engines) == 1


async def test_an_engine_that_is_stopped_is_not_counted_as_lost() -> None:
    async with running(Pair()) as pair:
        await until(lambda: bool(pair.engines))
        await pair.host.stop()
        assert pair.host.epoch == 2
        assert pair.host.losses is None


async def test_a_standby_that_is_still_loading_goes_on_as_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FIRST_TOKENS_LIMIT_S", 0.02)
    monkeypatch.setattr(supervisor, "GRACE_S", 0.0)
    async with running(Pair(Loading(FIRST_TOKENS, 0.9), kind=ScriptedEngine)) as pair:
        await until(lambda: len(pair.standbys) == 1)
        await asyncio.sleep(0)
        assert pair.standby.ready is None
        pair.engines[0].kill()
        await until(lambda: len(pair.engines) == 2)  # it never came further, and has the limit of its stage
        assert pair.standbys[0].told == [TakeOver("0a")]
        assert pair.lost[1] == "the engine did not compute its first tokens in 0.02 s"


async def test_a_ready_standby_that_does_not_take_over_in_time_is_killed_and_an_engine_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "TAKE_OVER_LIMIT_S", 0.02)
    async with running(Pair(kind=ScriptedEngine)) as pair:
        await until(lambda: pair.standby.ready)
        pair.engines[0].kill()
        await until(lambda: len(pair.engines) == 2)
        assert pair.lost == ["engine: killed", "the standby did not take over in 0.02 s"]


async def test_a_standby_that_waits_for_memory_is_killed_only_when_it_says_nothing_for_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running(Pair(kind=ScriptedEngine)) as pair:
        await until(lambda: pair.standby.ready)
        pair.engines[0].kill()
        await until(lambda: pair.standbys[0].told)
        monkeypatch.setattr(supervisor, "TAKE_OVER_LIMIT_S", 0.02)  # from its next word on
        pair.standbys[0].report(StandingBy(7))
        await until(lambda: len(pair.engines) == 2)
        assert pair.lost == ["engine: killed", "the standby did not take over in 0.02 s"]


@pytest.mark.parametrize("last", [Failed(reason="the model's files are gone", model=True), FACTS])
async def test_a_standby_that_fails_or_serves_unasked_is_started_again_and_the_engine_lives_on(
    last: EngineReport, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        async with running(Pair(last)) as pair:
            await until(lambda: pair.standby.ready)
            assert len(pair.standbys) == 2
            assert (pair.lost, len(pair.engines)) == ([], 1)
    reason = last.reason if isinstance(last, Failed) else "it reported Ready without being asked to take over"
    assert f"the standby is lost ({reason}); starting another in 0 s" in caplog.text


async def test_a_standby_that_cannot_be_started_is_tried_again_and_the_engine_lives_on() -> None:
    async with running(Pair(refusals=3)) as pair:
        await until(lambda: pair.standby.ready)
        assert (pair.lost, len(pair.engines), len(pair.standbys)) == ([], 1, 1)


async def test_a_standby_that_is_killed_with_its_engine_is_followed_by_an_engine_that_is_started() -> None:
    async with running(Pair()) as pair:
        await until(lambda: pair.standby.ready)
        pair.standbys[0].kill()
        pair.engines[0].kill()
        await until(lambda: pair.ready == 2 and pair.standby.ready)


async def operate(pair: Pair, operation: EngineOperation) -> None:
    told = pair.engines[0].told
    before = len(told)
    asked = asyncio.ensure_future(pair.host.operate(operation, LIMIT_S))
    await until(lambda: len(told) > before)
    order = told[-1]
    assert isinstance(order, Operate)
    pair.engines[0].report(Operated(order.ticket))
    assert await asked == ""


async def test_none_stands_by_while_the_worker_sleeps() -> None:
    async with running(Pair(first=SLEEPS)) as pair:
        await until(lambda: pair.standby.ready)
        await operate(pair, "sleep")
        assert (pair.standby.pid, pair.standby.ready) == (None, None)
        await asyncio.sleep(0.02)
        assert len(pair.standbys) == 1
        await operate(pair, "wake")
        await until(lambda: pair.standby.ready)
        assert len(pair.standbys) == 2


async def test_what_starts_when_none_is_kept_any_longer_is_ended() -> None:
    begun, go = asyncio.Event(), asyncio.Event()
    ended: list[ScriptedEngine] = []

    class Slow(ScriptedEngine):
        async def end(self, _limit_s: float, _last: Callable[[EngineReport], None], /) -> int:
            ended.append(self)
            return 0

    async def start() -> ScriptedEngine:
        begun.set()
        await go.wait()
        return Slow("", StandingBy())

    standby = Standby(start)
    standby.keep(0.0)
    await asyncio.wait_for(begun.wait(), LIMIT_S)
    assert standby.take("0a") is None
    go.set()
    await until(lambda: ended)
    await standby.end()


async def test_what_cannot_start_when_none_is_kept_any_longer_is_not_tried_again() -> None:
    begun, go = asyncio.Event(), asyncio.Event()
    starts = 0

    async def start() -> ScriptedEngine:
        nonlocal starts
        starts += 1
        begun.set()
        await go.wait()
        raise OSError("Cannot allocate memory")

    standby = Standby(start)
    standby.keep(0.0)
    await asyncio.wait_for(begun.wait(), LIMIT_S)
    ending = asyncio.ensure_future(standby.end())
    await asyncio.sleep(0)
    go.set()
    await asyncio.wait_for(ending, LIMIT_S)
    assert starts == 1


async def test_a_model_that_no_engine_could_serve_is_given_up_with_a_standby_too() -> None:
    pair = Pair(first=Failed(reason="no GPU is found", model=True))
    with pytest.raises(ModelError, match="no GPU is found"):
        await asyncio.wait_for(pair.host.run(), LIMIT_S)
    assert pair.standbys == []
