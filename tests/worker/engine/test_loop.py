from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import pytest

from services.worker.contracts.messages import (
    CancelAttempt,
    EngineCommand,
    EngineReport,
    KvbmAsked,
    KvbmAsks,
    KvbmLink,
    Shutdown,
    Snapshot,
    Stepped,
    Submit,
    TakeEngineSnapshot,
)
from services.worker.contracts.runner import Drawn, Work
from services.worker.engine.channel import EngineEnd
from services.worker.engine.core import EngineCore
from services.worker.engine.loop import EXCHANGE_S, SLICE_S, EngineLoop
from services.worker.kv_connector.connector import BACK_OFF_FIRST_S, ExchangeTerms, KVConnector
from services.worker.kv_connector.contract import KvbmAsk, KvbmDown, KvbmNews, KvbmReply, KvbmUp
from services.worker.kv_connector.pool_attachment import PoolAttachment
from services.worker.kv_connector.socket_client import SocketClient
from services.worker.limits import SchedulerLimits
from services.worker.scheduler.scheduler import Scheduler
from shared.hashing import pack_tokens, unpack_tokens
from shared.messages.generate import Sampling
from shared.messages.kv_events import AllBlocksCleared, BlockStored
from shared.messages.kvbm import StoreLayout
from shared.pool.lock import OWNERS
from tests.worker.fake_runner import FakeRunner, continuation
from tests.worker.pool_runner import BLOCK_SIZE, LAYOUT, HandMover, PoolRunner

PROMPT = [1, 2, 3, 4, 1]


def submit(request: str) -> Submit:
    return Submit(
        request=request,
        attempt=1,
        frontend="f",
        tokens=pack_tokens(PROMPT),
        prompt_tokens=len(PROMPT),
        sampling=Sampling(max_tokens=4, ignore_eos=True),
        time_left_s=60.0,
    )


class Script:
    """A channel that says what the script says: one line each time the loop asks, then Shutdown once it is idle."""

    def __init__(self, *lines: Sequence[EngineCommand]) -> None:
        self._lines = list(lines)
        self.reports: list[EngineReport] = []

    def send(self, report: EngineReport) -> None:
        self.reports.append(report)

    def receive(self, limit_s: float | None) -> Sequence[EngineCommand]:
        if self._lines:
            return self._lines.pop(0)
        return [Shutdown()] if limit_s is None else []

    @property
    def steps(self) -> list[Stepped]:
        return [report for report in self.reports if isinstance(report, Stepped)]


def run(*lines: Sequence[EngineCommand], runner: FakeRunner | None = None) -> Script:
    runner = runner or FakeRunner(block_size=2, capacity_blocks=16, context_length=32)
    scheduler = Scheduler(
        SchedulerLimits(
            model="model",
            context_length=32,
            eos_token_ids=frozenset((0,)),
            block_size=2,
            capacity_blocks=16,
            max_waiting=512,
        )
    )
    script = Script(*lines)
    ticks = iter(range(1_000_000))
    EngineLoop(cast(EngineEnd, script), EngineCore(scheduler, 2), runner, lambda: next(ticks) / 1000).run()
    return script


def test_an_attempt_is_drawn_to_its_end_and_reported_step_by_step() -> None:
    script = run([submit("r")])
    tokens = [
        token for step in script.steps for part in step.parts.get("f", []) for token in unpack_tokens(part.tokens)
    ]
    assert tokens[:1] == continuation(PROMPT, 1, 32)
    assert len(tokens) == 4
    assert [step.progress for step in script.steps] == list(range(len(script.steps)))
    assert script.steps[-1].load.running == 0


def test_the_first_batch_says_that_the_cache_is_empty_and_batches_are_numbered_without_gaps() -> None:
    script = run([submit("r")])
    assert script.steps[0].events == [AllBlocksCleared()]
    sequences = [step.event_sequence for step in script.steps if step.events]
    assert sequences == list(range(len(sequences)))
    assert all(step.event_sequence >= 0 for step in script.steps)


def test_a_snapshot_stands_at_the_sequence_it_names() -> None:
    script = run([submit("r")], [], [TakeEngineSnapshot(7)])
    at = next(index for index, report in enumerate(script.reports) if isinstance(report, Snapshot))
    taken = script.reports[at]
    assert isinstance(taken, Snapshot)
    assert taken.ticket == 7
    told = [step for step in script.reports[:at] if isinstance(step, Stepped)]
    stored = [
        block
        for step in told
        for event in step.events
        if isinstance(event, BlockStored)
        for block in event.block_hashes
    ]
    assert [block.hash for block in taken.blocks] == stored
    assert taken.event_sequence == told[-1].event_sequence


def test_a_cancelled_attempt_is_reported_even_where_nothing_is_computed() -> None:
    script = run([submit("r"), CancelAttempt("r", 1)])
    (part,) = [part for step in script.steps for part in step.parts.get("f", [])]
    assert part.finish == "cancelled"


class Sleeper:
    """A channel on which one command comes, then time passes as the loop sleeps, then Shutdown."""

    def __init__(self, command: EngineCommand, sleeps: int) -> None:
        self._commands: list[EngineCommand] = [command]
        self._sleeps = sleeps
        self.now_s = 0.0
        self.slept_s: list[float | None] = []

    def send(self, report: EngineReport) -> None:
        pass

    def receive(self, limit_s: float | None) -> Sequence[EngineCommand]:
        if limit_s != 0.0:
            self.slept_s.append(limit_s)
            self.now_s += limit_s or 0.0
        if len(self.slept_s) > self._sleeps:
            return [Shutdown()]
        commands, self._commands = self._commands, []
        return commands


class Scripted:
    """A SocketClient that says a line each time it is polled, once `after_s` have passed."""

    wait_until_s: float | None = None

    def __init__(self, *lines: KvbmNews, after_s: float = 0.0) -> None:
        self._lines = list(lines)
        self._after_s = after_s
        self.asked: list[KvbmAsk] = []

    def poll(self, now_s: float) -> list[KvbmNews]:
        return [self._lines.pop(0)] if self._lines and now_s > self._after_s else []

    def send(self, ask: KvbmAsk, _now_s: float, /) -> list[KvbmDown | KvbmReply]:
        self.asked.append(ask)
        return [KvbmReply(ask.number, b"", failed="it is gone")]

    def take_asked(self) -> list[KvbmAsked]:
        asked, self.asked = self.asked, []
        return [KvbmAsked(ask.operation, "away", 0.0) for ask in asked]


def loop_with_pool(sleeper: Sleeper, runner: PoolRunner, pool: Path, kvbm: Scripted | None = None) -> EngineLoop:
    """The loop of an engine with a kvbm's pool."""
    core = core_with_pool(sleeper, runner, pool)
    return EngineLoop(cast(EngineEnd, sleeper), core, runner, lambda: sleeper.now_s, cast(SocketClient | None, kvbm))


def core_with_pool(sleeper: Sleeper, runner: PoolRunner, pool: Path) -> EngineCore:
    limits = SchedulerLimits(
        model="model",
        context_length=32,
        eos_token_ids=frozenset((0,)),
        block_size=BLOCK_SIZE,
        capacity_blocks=16,
        max_waiting=512,
    )
    scheduler = Scheduler(limits)
    connector = KVConnector(
        scheduler.kv_cache,
        HandMover(runner.memory, lambda: sleeper.now_s),
        PoolAttachment(pool, "w1"),
        ExchangeTerms("w1", StoreLayout(model="model", weights="", kv=LAYOUT), 1.0, most_blocks=64),
    )
    return EngineCore(scheduler, BLOCK_SIZE, connector)


def sleep_through(command: EngineCommand, sleeps: int, pool: Path, kvbm: Scripted) -> list[float | None]:
    """How long the loop of an engine with a kvbm's pool wanted to sleep each time."""
    sleeper = Sleeper(command, sleeps)
    sleeper.now_s = 1.0
    loop_with_pool(sleeper, PoolRunner(16, 32), pool, kvbm).run()
    return sleeper.slept_s


def test_the_loop_sleeps_without_a_limit_where_nothing_is_due(tmp_path: Path) -> None:
    assert sleep_through(submit("r"), 0, tmp_path, Scripted()) == [None]


def test_the_loop_sleeps_until_something_is_due(tmp_path: Path) -> None:
    slept_s = sleep_through(CancelAttempt("r", 1), 3, tmp_path / "nowhere", Scripted(KvbmUp("k1")))
    assert slept_s == [BACK_OFF_FIRST_S, 2 * BACK_OFF_FIRST_S, 4 * BACK_OFF_FIRST_S, 8 * BACK_OFF_FIRST_S]
    due = Scripted()
    due.wait_until_s = 1.25
    assert sleep_through(CancelAttempt("r", 1), 0, tmp_path, due) == [0.25], "the connection has something to do"


def test_what_cannot_be_asked_is_handled_before_the_loop_sleeps_and_reported_to_the_shell(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / OWNERS).mkdir(mode=0o700)
    sleeper = Talker()
    sleeper.now_s = 1.0
    loop_with_pool(sleeper, PoolRunner(16, 32), tmp_path, Scripted(KvbmUp("k1"))).run()
    links = [report.reason for report in sleeper.heard if isinstance(report, KvbmLink)]
    assert links == ["attach: it is gone"]
    [asks, *_] = [report.asks for report in sleeper.heard if isinstance(report, KvbmAsks)]
    assert asks == [KvbmAsked("attach", "away", 0.0)]
    assert sleeper.slept_s[0] == BACK_OFF_FIRST_S, "the connector has heard that it is gone"


class Answering(Scripted):
    """A SocketClient that has an answer whenever it is polled."""

    def poll(self, now_s: float) -> list[KvbmNews]:
        self.asked.append(KvbmAsk(1, "fetch", b""))
        return super().poll(now_s)


def test_requests_that_have_ended_are_reported_before_the_loop_ends(tmp_path: Path) -> None:
    script, sleeper, runner = Script([Shutdown()]), Sleeper(submit("r"), 0), PoolRunner(16, 32)
    core, kvbm = core_with_pool(sleeper, runner, tmp_path), cast(SocketClient, Answering())
    EngineLoop(cast(EngineEnd, script), core, runner, lambda: 1.0, kvbm).run()
    assert script.reports[-1] == KvbmAsks([KvbmAsked("fetch", "away", 0.0)])


class BrokenRunner(FakeRunner):
    def step(self, works: Sequence[Work]) -> list[Drawn | None]:
        raise ZeroDivisionError("the device is gone")


def test_what_the_runner_raises_comes_out() -> None:
    with pytest.raises(ZeroDivisionError):
        run([submit("r")], runner=BrokenRunner(block_size=2, capacity_blocks=16, context_length=32))


STEP_S = 0.05


class Device(PoolRunner):
    """It computes for STEP_S while the loop does something else, its first steps for other times."""

    def __init__(self, sleeper: Sleeper, *steps_s: float) -> None:
        super().__init__(16, 32)
        self.meanwhile: Callable[[Callable[[], bool]], None] | None = None
        self.returned_s: list[float] = []
        """How long after its begin each step was returned to."""
        self._sleeper = sleeper
        self._steps_s = list(steps_s)

    def step(self, works: Sequence[Work]) -> list[Drawn | None]:
        step_s = self._steps_s.pop(0) if self._steps_s else STEP_S
        begun_s = self._sleeper.now_s
        if self.meanwhile is not None:
            self.meanwhile(lambda: self._sleeper.now_s < begun_s + step_s)
        self.returned_s.append(self._sleeper.now_s - begun_s)
        self._sleeper.now_s = max(self._sleeper.now_s, begun_s + step_s)
        return super().step(works)


def test_while_the_device_computes_the_loop_exchanges_blocks_until_shortly_before_the_end(tmp_path: Path) -> None:
    sleeper = Sleeper(submit("r"), 1_000)
    device = Device(sleeper)
    loop_with_pool(sleeper, device, tmp_path).run()
    prefill_s, first_s, *others_s = device.returned_s
    assert prefill_s == pytest.approx(len(PROMPT) / 256 - EXCHANGE_S), "at the assumed speed"
    assert first_s == 0.0, "it is not known how long a step that decodes takes"
    assert others_s == pytest.approx([STEP_S - EXCHANGE_S] * 2)


def test_a_step_that_ends_sooner_than_expected_is_seen_soon(tmp_path: Path) -> None:
    sleeper = Sleeper(submit("r"), 1_000)
    device = Device(sleeper, STEP_S, 1.0)
    loop_with_pool(sleeper, device, tmp_path).run()
    assert all(STEP_S <= returned_s <= STEP_S + SLICE_S for returned_s in device.returned_s[2:])


@pytest.mark.parametrize("uptime_s", [1.0, 4_321.987, 1e6 / 3])
def test_the_loop_never_sleeps_longer_than_a_slice_while_a_step_is_computed(tmp_path: Path, uptime_s: float) -> None:
    sleeper = Sleeper(submit("r"), 1_000)
    sleeper.now_s = uptime_s
    loop_with_pool(sleeper, Device(sleeper), tmp_path).run()
    slept_s = [limit_s for limit_s in sleeper.slept_s if limit_s is not None]
    assert len(slept_s) > 2 * STEP_S / SLICE_S
    assert max(slept_s) <= SLICE_S, "the channel rounds up to whole milliseconds"


class Talker(Sleeper):
    """A channel that says a line each time the loop sleeps while a step is computed, after half of that time."""

    def __init__(self, *lines: EngineCommand) -> None:
        super().__init__(submit("r"), 1_000)
        self._lines = list(lines)
        self.heard: list[EngineReport] = []

    def send(self, report: EngineReport) -> None:
        self.heard.append(report)

    def receive(self, limit_s: float | None) -> Sequence[EngineCommand]:
        if limit_s == 0.0 or limit_s is None or not self._lines:
            return super().receive(limit_s)
        self.now_s += limit_s / 2
        return [self._lines.pop(0)]


def test_what_the_kvbm_says_is_handled_while_a_step_is_computed_and_all_else_after_it(tmp_path: Path) -> None:
    talker = Talker(CancelAttempt("r", 1))
    device = Device(talker)
    loop_with_pool(talker, device, tmp_path / "nowhere", Scripted(KvbmUp("k1"))).run()
    kinds = [type(report) for report in talker.heard]
    assert kinds[:3] == [Stepped, KvbmLink, Stepped], "the pool is not there, which the connector says at once"
    parts = [part for report in talker.heard if isinstance(report, Stepped) for part in report.parts.get("f", [])]
    assert [part.finish for part in parts] == [None, "cancelled"], "the step was computed before it was handled"


def test_an_attempt_that_comes_while_a_step_is_computed_waits_when_the_step_ends(tmp_path: Path) -> None:
    talker = Talker(submit("s"))
    loop_with_pool(talker, Device(talker), tmp_path).run()
    _opening, first, *_ = [report for report in talker.heard if isinstance(report, Stepped)]
    assert (first.load.running, first.load.waiting) == (1, 1)


def test_commands_of_attempts_keep_their_order(tmp_path: Path) -> None:
    talker = Talker(CancelAttempt("s", 1), submit("s"))
    loop_with_pool(talker, Device(talker), tmp_path).run()
    parts = [part for report in talker.heard if isinstance(report, Stepped) for part in report.parts.get("f", [])]
    assert [part.finish for part in parts if part.request == "s"][-1] == "length", "it was cancelled before it came"
