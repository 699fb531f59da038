"""`headrace autoscale` over a simulated fleet: misses and worker hours against fixed fleets and a threshold rule.

The engines are the real scheduler's with the times of a profile, in virtual time. A day is squeezed into 13 minutes and
a worker starts in 5 s, which is 9 minutes of a day.
"""

from __future__ import annotations

from math import ceil
from pathlib import Path
from random import Random

import pytest

from deploy.local.autoscale.capacity import ScaleGoals, WorkerRole, Workers
from deploy.local.autoscale.decider import ScalePolicy, WorkerBounds
from deploy.local.autoscale.flags import worker_times
from deploy.local.size.profile_file import decode_profile
from services.virtual.loads import LoadTrace
from services.virtual.run import step_time
from tests.deploy.autoscale.scaled_fleet import KV_TOKENS, Rule, ScaledFleet, day_curve, fixed, planned, threshold
from tests.deploy.size.test_plan import write_profile

DAY_S = 800.0
START_S, COOL_DOWN_S = 5.0, 60.0
TTFT_S, ITL_S = 3.0, 0.2
MOST = 14


class Trial:
    """One load, and the workers that serve it."""

    def __init__(self, folder: Path, load: LoadTrace, *roles: WorkerRole) -> None:
        roles = roles or ("aggregated",)
        self.one: dict[WorkerRole, int] = dict.fromkeys(roles, 1)
        file = write_profile(folder, 0.15)
        profile = decode_profile(file.read_bytes(), str(file))
        self.load, self._step_s = load, step_time(str(file))
        times = worker_times(profile, KV_TOKENS)
        bounds = {role: WorkerBounds(1, MOST) for role in roles}
        self.policy = ScalePolicy(
            times, ScaleGoals(TTFT_S, ITL_S), bounds, start_s=START_S, cool_down_s=COOL_DOWN_S, window_s=30.0
        )

    def run(self, rule: Rule, workers: Workers | None = None) -> tuple[float, float, ScaledFleet]:
        """The share of requests that miss, the mean number of workers, and the run. It begins with one of each role, or
        with `workers`."""
        done = ScaledFleet(self.load, self._step_s, rule, workers=workers or self.one, start_s=START_S).run()
        misses, mean = done.misses(TTFT_S, ITL_S), done.worker_s / done.fleet.clock.now_s
        print(f"{100 * misses:.2f} % miss with {mean:.2f} workers in the mean, {done.changes} changes")
        return misses, mean, done

    def run_fixed(self, workers: Workers) -> tuple[float, float, ScaledFleet]:
        return self.run(fixed(workers), workers)


@pytest.mark.parametrize("seed", [11, pytest.param(12, marks=pytest.mark.tier("long"))])
def test_on_a_day_curve_fewer_requests_miss_than_with_a_fixed_fleet_of_no_fewer_worker_hours(
    seed: int, tmp_path: Path
) -> None:
    trial = Trial(tmp_path, day_curve(Random(seed), day_s=DAY_S, low=1, high=12))
    misses, mean, run = trial.run(planned(trial.policy))
    of_fixed, hours, _ = trial.run_fixed({"aggregated": ceil(mean)})
    assert hours >= 0.99 * mean  # the last moments of a run are not counted
    assert misses <= 0.7 * of_fixed
    assert run.changes <= 24
    assert not any(journey.failed for journey in run.fleet.journeys)


@pytest.mark.tier("long")
def test_on_a_day_curve_no_threshold_misses_less_with_as_few_worker_hours(tmp_path: Path) -> None:
    trial = Trial(tmp_path, day_curve(Random(13), day_s=DAY_S, low=1, high=12))
    misses, mean, _ = trial.run(planned(trial.policy))
    for requests in (8, 12):
        of_rule, hours, _ = trial.run(threshold(requests, COOL_DOWN_S, MOST))
        assert of_rule > misses or hours > mean


@pytest.mark.tier("long")
def test_bursts_that_double_the_rate_cost_few_requests_and_the_fleet_does_not_flap(tmp_path: Path) -> None:
    trial = Trial(tmp_path, day_curve(Random(14), day_s=DAY_S, low=1, high=8, bursts=3))
    misses, mean, run = trial.run(planned(trial.policy))
    of_fixed, _, _ = trial.run_fixed({"aggregated": ceil(mean)})
    assert misses <= 0.7 * of_fixed
    assert run.changes <= 36


@pytest.mark.tier("long")
@pytest.mark.parametrize(("seed", "high"), [(15, 8), (16, 6)])
def test_both_roles_of_a_split_follow_the_load_and_fewer_requests_miss_than_with_any_fixed_split_of_no_fewer_hours(
    seed: int, high: float, tmp_path: Path
) -> None:
    trial = Trial(tmp_path, day_curve(Random(seed), day_s=DAY_S, low=1, high=high), "prefill", "decode")
    misses, mean, run = trial.run(planned(trial.policy))
    assert len({wanted["prefill"] for wanted in run.wanted}) > 4
    assert run.fleet.journeys[-1].hand_overs
    assert not any(journey.failed for journey in run.fleet.journeys)
    assert run.changes <= 24
    for decode in (1, 2):
        of_fixed, hours, _ = trial.run_fixed({"prefill": ceil(mean) - decode, "decode": decode})
        assert hours >= 0.99 * mean  # the last moments of a run are not counted
        assert misses <= 0.7 * of_fixed
