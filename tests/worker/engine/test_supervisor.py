"""services/worker/engine/supervisor.py: which engine is started again; the rest is in test_service.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import msgspec
import pytest

from services.worker.config import WorkerConfig
from services.worker.contracts.messages import (
    FIRST_TOKENS,
    EngineOperation,
    EngineReport,
    Failed,
    KvbmAsked,
    KvbmAsks,
    KvbmLink,
    Loading,
    MemoryUse,
    Operate,
    Operated,
    OwnMetrics,
    Probed,
    ProbeDevice,
)
from services.worker.engine import supervisor
from services.worker.engine.supervisor import EngineSupervisor
from shared.errors import ModelError
from tests.worker.scripted_engine import FACTS, ScriptedEngine
from tests.worker.shell import LIMIT_S

STALL_S = 0.1
HOPELESS = Failed(reason="no GPU is found", model=True)


class Engines:
    """Each reports one of these and then nothing; after the last of them, no more are started."""

    def __init__(
        self, *reports: EngineReport, busy: bool = False, settings: Mapping[str, object] | None = None
    ) -> None:
        self.lost: list[str] = []
        self.observed: list[Probed | MemoryUse | OwnMetrics] = []
        self.kvbm: list[KvbmAsks | KvbmLink] = []
        self.all: list[ScriptedEngine] = []
        self.done = asyncio.Event()
        self.busy = busy
        self.hold = False
        """Whether engines live on though others are left."""
        self._reports = list(reports)
        self.host = EngineSupervisor(
            msgspec.convert({"model": "m", "stall_s": STALL_S, **(settings or {})}, WorkerConfig),
            "m",
            "0a",
            self.start,
            loading=lambda _report: None,
            ready=lambda _facts: self.ready(),
            stepped=lambda _step: None,
            lost=self.lost.append,
            busy=lambda: self.busy,
            kvbm=self.kvbm.append,
            observed=self.observed.append,
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


async def until(met: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not met():  # noqa: ASYNC110 - the supervisor reports nothing else
            await asyncio.sleep(0.005)


@asynccontextmanager
async def running(engines: Engines) -> AsyncIterator[ScriptedEngine]:
    """The supervisor, whose first engine is ready."""
    engines.hold = True
    run = asyncio.ensure_future(engines.host.run())
    await asyncio.wait_for(engines.done.wait(), LIMIT_S)
    try:
        yield engines.all[0]
    finally:
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)


def ends_slowly(engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> tuple[asyncio.Event, list[str]]:
    """Return what ends it when it is set, and what then has an entry."""
    gone, ended = asyncio.Event(), list[str]()

    async def end(*_: object) -> int:
        await asyncio.wait_for(gone.wait(), LIMIT_S)
        ended.append("ended")
        return 0

    monkeypatch.setattr(engine, "end", end)
    return gone, ended


async def test_a_loss_is_reported_before_the_process_has_ended_and_another_is_started_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engines = Engines(FACTS, FACTS)
    async with running(engines) as engine:
        gone, ended = ends_slowly(engine, monkeypatch)
        engine.kill()
        await until(lambda: bool(engines.lost))
        assert (engines.lost, engines.host.epoch, engines.host.facts) == (["engine: killed"], 2, None)
        assert (ended, len(engines.all)) == ([], 1)
        gone.set()
        await until(lambda: len(engines.all) == 2)
        assert (ended, engines.lost) == (["ended"], ["engine: killed"])


async def test_an_engine_that_is_lost_has_ended_when_the_supervisor_has(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = Engines(FACTS)
    engines.hold = True
    run = asyncio.ensure_future(engines.host.run())
    await asyncio.wait_for(engines.done.wait(), LIMIT_S)
    gone, ended = ends_slowly(engines.all[0], monkeypatch)
    engines.all[0].kill()
    await until(lambda: bool(engines.lost))
    run.cancel()
    await asyncio.wait([run], timeout=0.05)
    gone.set()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert ended == ["ended"]


def probes(engine: ScriptedEngine) -> list[ProbeDevice]:
    return [command for command in engine.told if isinstance(command, ProbeDevice)]


IDLE_S = 0.02
IDLE = {"health": {"idle_s": IDLE_S, "limit_s": LIMIT_S, "prompt": [7, 8]}}
IMPATIENT = {"health": {"idle_s": IDLE_S, "limit_s": 0.05}}


async def test_an_idle_native_engine_is_asked_for_a_token_again_and_again() -> None:
    engines = Engines(FACTS, settings=IDLE)
    async with running(engines) as engine:
        for _ in range(3):
            await until(lambda: len(probes(engine)) > len(engines.observed))
            engine.report(Probed(0.01))
            await until(lambda: len(engines.observed) == len(probes(engine)))
    assert probes(engine)[:3] == [ProbeDevice((7, 8))] * 3  # a busy machine may let a fourth come
    assert engines.observed == [Probed(0.01)] * 3
    assert not engines.lost


async def test_an_idle_engine_that_does_not_compute_a_token_in_time_is_killed_and_another_is_started() -> None:
    engines = Engines(FACTS, FACTS, settings=IMPATIENT)
    async with running(engines):
        await until(lambda: len(engines.all) == 2)
    reason = "the idle engine did not compute a token in 0.05 s"
    assert engines.lost == [reason]
    assert engines.observed == [Probed(0.05, reason)]


async def test_an_engine_that_fails_at_a_probe_is_a_failed_probe_and_lost_for_its_own_reason() -> None:
    engines = Engines(FACTS, FACTS, settings=IDLE)
    async with running(engines) as engine:
        await until(lambda: len(probes(engine)) == 1)
        engine.report(Failed(reason="the GPU failed: it has fallen off the bus"))
        await until(lambda: len(engines.all) == 2)
    assert engines.lost == ["the GPU failed: it has fallen off the bus"]
    [probed] = engines.observed
    assert isinstance(probed, Probed)
    assert probed.failed == "the GPU failed: it has fallen off the bus"


async def test_an_engine_that_computes_operates_or_sleeps_is_not_asked_for_a_token() -> None:
    engines = Engines(msgspec.structs.replace(FACTS, operations=("sleep", "wake")), settings={**IDLE, "stall_s": 3600})
    engines.busy = True

    async def operate(operation: EngineOperation, operated: asyncio.Event) -> None:
        asked = asyncio.ensure_future(engines.host.operate(operation, LIMIT_S))
        await until(lambda: any(isinstance(one, Operate) and one.operation == operation for one in engine.told))
        await operated.wait()
        tickets = [one.ticket for one in engine.told if isinstance(one, Operate)]
        engine.report(Operated(tickets[-1]))
        assert await asked == ""

    async with running(engines) as engine:
        await asyncio.sleep(10 * IDLE_S)
        assert not engine.told, "it computes"
        operated = asyncio.Event()
        operating = asyncio.ensure_future(operate("sleep", operated))
        await until(lambda: bool(engine.told))
        engines.busy = False
        await asyncio.sleep(10 * IDLE_S)
        assert not probes(engine), "it operates"
        operated.set()
        await operating
        await asyncio.sleep(10 * IDLE_S)
        assert not probes(engine), "it sleeps"
        await operate("wake", operated)
        await until(lambda: len(probes(engine)) == 1)


@pytest.mark.parametrize("settings", [{"engine": "echo"}, {"engine": "vllm"}, {"health": {"idle_s": 0}}])
async def test_engines_without_a_device_or_that_probe_by_themselves_are_not_asked_for_a_token(
    settings: dict[str, object],
) -> None:
    engines = Engines(FACTS, settings={**IDLE, **settings})
    async with running(engines) as engine:
        await asyncio.sleep(10 * IDLE_S)
        assert not engine.told


async def test_an_engine_that_does_not_compute_its_first_tokens_in_time_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "FIRST_TOKENS_LIMIT_S", 0.05)
    monkeypatch.setattr(supervisor, "GRACE_S", 0.0)
    engines = Engines(Loading(FIRST_TOKENS, 0.9), FACTS)
    async with running(engines):
        assert engines.lost == ["the engine did not compute its first tokens in 0.05 s"]


async def test_an_engine_that_begins_its_first_tokens_again_has_the_whole_limit_again() -> None:
    host = Engines(FACTS).host
    engine = ScriptedEngine("0a", FACTS)
    limits = list[asyncio.TimerHandle | None]()
    for _ in range(2):
        host._take_early(engine, Loading(FIRST_TOKENS, 0.9))
        limits.append(host._stage_limit)
    assert [limit is not None and limit.cancelled() for limit in limits] == [True, False]
