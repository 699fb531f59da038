from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from random import Random

import pytest
from msgspec.structs import replace

from benchmarks.saturation_loads import tenants
from services.virtual.fleet import Late, SimulatedFleet
from services.virtual.journeys import Journey, TokenGaps
from services.virtual.loads import LoadTrace, TraceRequest, agents, chats
from services.virtual.machine import SimulatedMachine, StepTime
from services.virtual.steady import FIRST_AHEAD, MOST_AHEAD, steady_steps
from services.worker.config import SimulatedConfig
from services.worker.contracts.messages import Submit
from services.worker.contracts.runner import Work
from services.worker.engine.core import REPORT_INTERVAL_S
from services.worker.simulated.timing import Timing
from shared.messages.frames import NOT_BEGUN
from shared.messages.generate import Sampling

REQUESTS = 30
MODEL_S = Timing(SimulatedConfig()).step_s


def slow(works: Sequence[Work]) -> float:
    """Return a step time by which some requests wait."""
    return 0.02 + 0.001 * sum(len(work.tokens) for work in works)


def often_short(works: Sequence[Work]) -> float:
    """Return a step time that is too short for a report of its own with few sequences."""
    return 0.0009 * len(works) + 1e-5 * sum(len(work.tokens) for work in works)


class ImpatientFleet(SimulatedFleet):
    """A fleet whose requests have deadlines, and wait only a short time until they begin."""

    def _submit(self, journey: Journey, attempt: int, *, prefill_only: bool = False) -> Submit:
        submit = super()._submit(journey, attempt, prefill_only=prefill_only)
        return replace(submit, time_left_s=1.0 + journey.request.number % 5, wait_left_s=0.3)


class Run:
    """A fleet, everything that its router hears, and whether a worker had steady steps under way at a report."""

    def __init__(
        self, load: LoadTrace, step_s: StepTime, *, stepwise: bool, blocks: int, late: Late | None, impatient: bool
    ) -> None:
        self.gaps = TokenGaps()
        fleet = ImpatientFleet if impatient else SimulatedFleet
        self.fleet = fleet(load, "kv", capacity_blocks=blocks, gaps=self.gaps, late=late)
        self._step_s = step_s
        self._stepwise = stepwise
        self.steady = 0
        for _ in range(2):
            self.join()
        for second in range(int(load.requests[-1].arrival_s)):
            self.fleet.clock.at(second, self._look)

    def join(self) -> None:
        """Add a worker. One whose machine may slow it computes every step by itself."""
        busy_s = self._step_s if self._stepwise else None
        self.fleet.join(self._step_s, machine=SimulatedMachine(self.fleet.clock, busy_s=busy_s))

    def _look(self) -> None:
        self.steady += any(worker.steady is not None for worker in self.fleet.workers.values())

    def facts(self) -> object:
        """Return all that is known of the run."""
        workers = self.fleet.workers.values()
        for worker in workers:
            worker.core.validate()
        return (
            [repr(journey) for journey in self.fleet.journeys],
            sorted(self.gaps.all_s),
            self.fleet.prefilled,
            [worker.last for worker in workers],
            self.fleet.router.index.statistics(),
            self.fleet.router.load.statistics(),
            self.fleet.clock.now_s,
        )


def both(
    load: LoadTrace,
    step_s: StepTime,
    *,
    blocks: int = 4000,
    late: Late | None = None,
    leaves: bool = False,
    impatient: bool = False,
) -> list[Run]:
    runs = [
        Run(load, step_s, stepwise=stepwise, blocks=blocks, late=late, impatient=impatient)
        for stepwise in (False, True)
    ]
    for run in runs:
        if leaves:
            middle_s = load.requests[REQUESTS // 2].arrival_s
            run.fleet.clock.at(middle_s, run.join)
            run.fleet.clock.at(middle_s + 0.5, partial(run.fleet.leave, "worker000"))
        run.fleet.run()
    return runs


@pytest.mark.parametrize(
    ("make", "pace", "step_s"),
    [
        (partial(tenants, "tenants"), 1.0, MODEL_S),
        (chats, 0.2, MODEL_S),
        (agents, 0.5, slow),
        (chats, 4.0, often_short),
    ],
)
def test_a_fleet_does_the_same_as_step_by_step(
    make: Callable[[int, Random], LoadTrace], pace: float, step_s: StepTime
) -> None:
    load = make(REQUESTS, Random(5))
    ahead, stepwise = both(load.at(pace * load.rate), step_s)
    assert ahead.facts() == stepwise.facts()
    assert stepwise.steady == 0
    assert ahead.steady or step_s is often_short


def test_it_does_the_same_where_blocks_run_out() -> None:
    load = chats(REQUESTS, Random(6))
    ahead, stepwise = both(load.at(3 * load.rate), slow, blocks=150)
    assert ahead.facts() == stepwise.facts()
    assert sum(worker.last.load.preemptions for worker in ahead.fleet.workers.values()) > 0


def test_it_does_the_same_where_a_worker_dies_in_such_steps() -> None:
    ahead, stepwise = both(chats(REQUESTS, Random(7)), slow, leaves=True)
    assert ahead.facts() == stepwise.facts()
    assert any(journey.attempt > 0 for journey in ahead.fleet.journeys)


def test_it_does_the_same_where_a_run_is_given_up() -> None:
    load = chats(REQUESTS, Random(8))
    ahead, stepwise = both(load.at(3 * load.rate), slow, late=Late(0.5, 3))
    assert ahead.facts() == stepwise.facts()
    assert any(0 < journey.produced < journey.request.output_tokens for journey in ahead.fleet.journeys)


def test_it_does_the_same_where_requests_have_deadlines() -> None:
    load = chats(REQUESTS, Random(9))
    ahead, stepwise = both(load.at(3 * load.rate), slow, impatient=True)
    assert ahead.facts() == stepwise.facts()
    assert ahead.steady
    journeys = ahead.fleet.journeys
    assert any(NOT_BEGUN in journey.failed for journey in journeys)
    assert any(not journey.failed and 0 < journey.produced < journey.request.output_tokens for journey in journeys)


def test_few_steps_are_computed_ahead_where_commands_come_often_and_more_where_none_comes_up_to_a_bound() -> None:
    computed = 0

    def counted(works: Sequence[Work]) -> float:
        nonlocal computed
        computed += 1
        return MODEL_S(works)

    for gap_s in (0.04, 10.0):
        load = LoadTrace("", 512, [TraceRequest(number, gap_s * number, [number], 100, 500) for number in range(40)])
        fleet, computed = SimulatedFleet(load, "kv", capacity_blocks=4000), 0
        worker = fleet.workers[fleet.join(counted)]
        assert worker.ahead == FIRST_AHEAD
        fleet.run()
        assert computed < 1.5 * worker.last.progress, "few of them were useless"
        assert worker.ahead == MOST_AHEAD, "the last answer went on for longer"


def works(*lengths: int) -> list[Work]:
    return [Work(0, range(length), length - 1, length, [], Sampling(9), 1) for length in lengths]


def test_each_step_takes_the_time_of_its_lengths() -> None:
    steady = steady_steps(works(100, 7), 10, lambda each: sum(work.end for work in each), 5.0, None)
    assert steady is not None
    assert list(steady.ends_s[:4]) == [5.0, 112.0, 221.0, 332.0]
    assert steady.elapsed_s(2) == [107.0, 109.0]
    assert [steady.due(now_s) for now_s in (5.0, 111.0, 112.0, 300.0, 1e9)] == [0, 0, 1, 2, 9]


def test_steps_end_before_one_that_would_share_a_report() -> None:
    shorter = steady_steps(works(100), 50, lambda each: 0.1 if each[0].end < 110 else REPORT_INTERVAL_S, 0.0, None)
    assert shorter is not None
    assert len(shorter.ends_s) == 11
    assert steady_steps(works(100), 50, lambda _: REPORT_INTERVAL_S, 0.0, None) is None


def test_all_steps_begin_before_an_attempt_may_end_by_its_deadline() -> None:
    for until_s, count in ((None, 50), (4.5, 5), (5.0, 5), (5.5, 6), (2.5, 3)):
        steady = steady_steps(works(100), 50, lambda _: 1.0, 0.0, until_s)
        assert steady is not None
        assert len(steady.ends_s) == count + 1
    assert steady_steps(works(100), 50, lambda _: 1.0, 0.0, 2.0) is None
    assert steady_steps(works(100), 2, lambda _: 1.0, 0.0, None) is None
