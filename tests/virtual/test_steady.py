from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from random import Random

import pytest

from benchmarks.saturation_loads import tenants
from services.virtual.fleet import Late, SimulatedFleet
from services.virtual.journeys import TokenGaps
from services.virtual.loads import LoadTrace, agents, chats
from services.virtual.machine import SimulatedMachine, StepTime
from services.virtual.steady import MOST_AHEAD, steady_steps
from services.worker.config import SimulatedConfig
from services.worker.contracts.runner import Work
from services.worker.engine.core import REPORT_INTERVAL_S
from services.worker.simulated.timing import Timing
from shared.messages.generate import Sampling

REQUESTS = 30
MODEL_S = Timing(SimulatedConfig()).step_s


def slow(works: Sequence[Work]) -> float:
    """Return a step time by which some requests wait."""
    return 0.02 + 0.001 * sum(len(work.tokens) for work in works)


def often_short(works: Sequence[Work]) -> float:
    """Return a step time that is too short for a report of its own with few sequences."""
    return 0.0009 * len(works) + 1e-5 * sum(len(work.tokens) for work in works)


class Run:
    """A fleet, everything that its router hears, and whether a worker had steady steps under way at a report."""

    def __init__(
        self, load: LoadTrace, step_s: StepTime, *, stepwise: bool, blocks: int, late: Late | None = None
    ) -> None:
        self.gaps = TokenGaps()
        self.fleet = SimulatedFleet(load, "kv", capacity_blocks=blocks, gaps=self.gaps, late=late)
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
    load: LoadTrace, step_s: StepTime, *, blocks: int = 4000, late: Late | None = None, leaves: bool = False
) -> list[Run]:
    runs = [Run(load, step_s, stepwise=stepwise, blocks=blocks, late=late) for stepwise in (False, True)]
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


def works(*lengths: int) -> list[Work]:
    return [Work(0, range(length), length - 1, length, [], Sampling(9), 1) for length in lengths]


def test_each_step_takes_the_time_of_its_lengths() -> None:
    steady = steady_steps(works(100, 7), 10, lambda each: sum(work.end for work in each), 5.0)
    assert steady is not None
    assert list(steady.ends_s[:4]) == [5.0, 112.0, 221.0, 332.0]
    assert steady.elapsed_s(2) == [107.0, 109.0]
    assert [steady.due(now_s) for now_s in (5.0, 111.0, 112.0, 300.0, 1e9)] == [0, 0, 1, 2, 9]


def test_steps_end_before_one_that_would_share_a_report_and_none_are_computed_ahead_beyond_a_bound() -> None:
    shorter = steady_steps(works(100), 50, lambda each: 0.1 if each[0].end < 110 else REPORT_INTERVAL_S, 0.0)
    assert shorter is not None
    assert len(shorter.ends_s) == 11
    most = steady_steps(works(100), 5 * MOST_AHEAD, lambda _: 0.1, 0.0)
    assert most is not None
    assert len(most.ends_s) == MOST_AHEAD + 1
    assert steady_steps(works(100), 2, lambda _: 0.1, 0.0) is None
    assert steady_steps(works(100), 50, lambda _: REPORT_INTERVAL_S, 0.0) is None
