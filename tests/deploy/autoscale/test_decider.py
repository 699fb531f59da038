"""deploy/local/autoscale/decider.py: what users of other autoscalers complain of, one by one, over a fluid fleet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import pi, sin

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from deploy.local.autoscale.capacity import ScaleGoals, WorkerRole, WorkerTimes
from deploy.local.autoscale.decider import (
    KEPT,
    MOST_CORRECTION,
    DaySchedule,
    FleetSeen,
    ScaleDecision,
    ScalePolicy,
    ScaleState,
    TrafficCounts,
    WorkerBounds,
    decide,
)
from shared.measured_times import MeasuredTimes

EVERY_S = 5.0
TIMES = WorkerTimes(
    prefill=MeasuredTimes([(16, 0, 0.01), (4096, 0, 0.2), (16, 4096, 0.01), (4096, 4096, 0.3)], "prefill"),
    decode=MeasuredTimes([(1, 0, 0.005), (64, 0, 0.008), (1, 4096, 0.006), (64, 4096, 0.02)], "decode"),
    overhead_s=0.01,
    kv_tokens=200_000,
    max_running=64,
)
"""A worker that computes about ten prompts of 2,000 tokens a second."""


def policy(least: int = 1, most: int = 8, *roles: WorkerRole, **more: object) -> ScalePolicy:
    bounds = {role: WorkerBounds(least, most) for role in roles or ("aggregated",)}
    made = ScalePolicy(TIMES, ScaleGoals(0.5, 0.05), bounds, start_s=30.0)
    return replace(made, **more)


@dataclass
class FluidFleet:
    """A fleet whose requests flow: workers serve what they can, and the rest waits."""

    policy: ScalePolicy
    workers: dict[WorkerRole, int]
    rate: Callable[[float], float] = lambda _: 0.0
    served_by_one: float = 8.0
    starts: bool = True
    """False if workers that are asked for never come."""
    state: ScaleState = field(default_factory=ScaleState)
    now_s: float = 1000.0
    queue: float = 0.0
    complete: bool = True
    history: list[ScaleDecision] = field(default_factory=list)
    _coming: list[tuple[float, WorkerRole]] = field(default_factory=list)

    def look(self) -> FleetSeen:
        arrived = self.rate(self.now_s) * EVERY_S
        room = min(self.workers.values()) * self.served_by_one * EVERY_S
        done = min(self.queue + arrived, room)
        self.queue += arrived - done
        counts = TrafficCounts(EVERY_S, arrived, 0.0, arrived * 2000, 0.0, done, done * 100)
        if not any(self.workers.values()):
            counts = TrafficCounts(EVERY_S, refused=arrived)
            self.queue = 0.0
        alive = dict(self.workers)
        for _, role in self._coming:
            alive[role] += 1
        return FleetSeen(
            complete=self.complete,
            counts=counts,
            in_flight=int(self.queue + done),
            waiting_tokens=int(2000 * self.queue),
            held=int(self.queue + done),
            serving=dict(self.workers),
            alive=alive,
        )

    def turn(self) -> ScaleDecision:
        self.now_s += EVERY_S
        for due_s, role in [each for each in self._coming if each[0] <= self.now_s and self.starts]:
            self._coming.remove((due_s, role))
            self.workers[role] += 1
        decision, self.state = decide(self.policy, self.state, self.look(), self.now_s, int(self.now_s // 60) % 1440)
        self.history.append(decision)
        for role, number in decision.wanted.items():
            coming = sum(each[1] == role for each in self._coming)
            self._coming += [(self.now_s + self.policy.start_s, role)] * (number - self.workers[role] - coming)
            self.workers[role] = min(self.workers[role], number)
        return decision

    def run(self, seconds: float) -> ScaleDecision:
        for _ in range(int(seconds / EVERY_S)):
            decision = self.turn()
        return decision

    def changes(self, role: WorkerRole = "aggregated") -> int:
        numbers = [decision.wanted[role] for decision in self.history]
        return sum(before != after for before, after in pairwise(numbers))

    def turns(self, role: WorkerRole = "aggregated") -> int:
        """How often growing turned into shrinking, or the other way round."""
        numbers = [decision.wanted[role] for decision in self.history]
        steps = [after - before for before, after in pairwise(numbers) if before != after]
        return sum(before * after < 0 for before, after in pairwise(steps))


def test_zero_traffic_scales_down_to_the_least_and_no_division_by_zero_stops_it() -> None:
    fleet = FluidFleet(policy(1), {"aggregated": 5})
    assert fleet.run(400).wanted == {"aggregated": 1}
    fleet.policy = policy(0)
    assert fleet.run(400).wanted == {"aggregated": 0}


def test_nothing_is_taken_away_before_a_whole_cool_down_has_been_seen() -> None:
    fleet = FluidFleet(policy(0), {"aggregated": 5})
    fleet.run(295)
    assert fleet.history[-1].wanted == {"aggregated": 5}


@pytest.mark.parametrize("roles", [("aggregated",), ("prefill", "decode")])
def test_all_roles_go_to_zero_and_come_back_with_the_first_refused_request(roles: tuple[WorkerRole, ...]) -> None:
    fleet = FluidFleet(policy(0, 8, *roles), dict.fromkeys(roles, 2))
    assert fleet.run(600).wanted == dict.fromkeys(roles, 0)
    fleet.rate = lambda _: 0.2
    assert fleet.turn().wanted == dict.fromkeys(roles, 1)
    fleet.run(60)
    assert fleet.workers == dict.fromkeys(roles, 1)


def test_a_queue_counts_though_no_more_requests_come_than_before() -> None:
    fleet = FluidFleet(policy(), {"aggregated": 1}, lambda _: 3.0)
    assert fleet.run(300).wanted == {"aggregated": 1}
    fleet.queue += 400
    assert fleet.turn().wanted["aggregated"] > 1


def test_load_that_no_number_of_workers_serves_stops_at_the_bound() -> None:
    fleet = FluidFleet(policy(1, 6), {"aggregated": 1}, lambda _: 1e6)
    assert fleet.run(1200).wanted == {"aggregated": 6}
    assert fleet.state.correction <= MOST_CORRECTION


def test_a_target_that_no_worker_meets_does_not_scale_without_end() -> None:
    impossible = policy(1, 64, goals=ScaleGoals(0.001, 0.0001))
    fleet = FluidFleet(impossible, {"aggregated": 1}, lambda _: 2.0)
    fleet.run(1200)
    assert fleet.history[-1].wanted["aggregated"] <= 3


def test_metrics_that_vanish_take_nothing_away_however_long() -> None:
    fleet = FluidFleet(policy(0), {"aggregated": 3}, lambda _: 15.0)
    fleet.run(600)
    there = fleet.history[-1].wanted["aggregated"]
    fleet.complete, fleet.rate, fleet.queue = False, lambda _: 0.0, 0.0
    assert fleet.run(3600).wanted == {"aggregated": there}
    assert "not everything was seen" in fleet.history[-1].notes[0]
    fleet.complete = True
    assert fleet.run(290).wanted == {"aggregated": there}, "a whole cool-down is seen again first"
    assert fleet.run(60).wanted == {"aggregated": 0}


def test_a_fleet_that_was_not_seen_for_long_keeps_its_workers_for_a_whole_cool_down_afterwards() -> None:
    fleet = FluidFleet(policy(), {"aggregated": 1}, lambda now_s: 40.0 if now_s < 2000 else 1.0)
    full = fleet.run(900).wanted
    fleet.now_s += 2 * fleet.policy.cool_down_s
    assert fleet.run(fleet.policy.cool_down_s - EVERY_S).wanted == full
    assert fleet.run(60).wanted == {"aggregated": 1}


def test_a_first_look_that_is_not_complete_decides_nothing() -> None:
    fleet = FluidFleet(policy(2), {"aggregated": 0}, complete=False)
    assert fleet.turn().wanted == {"aggregated": 0}
    fleet.complete = True
    assert fleet.turn().wanted == {"aggregated": 2}


def test_a_fleet_that_does_not_settle_is_named_and_grows_by_one_at_a_time() -> None:
    fleet = FluidFleet(policy(1, 8), {"aggregated": 1}, lambda _: 18.0, starts=False)
    fleet.run(80)
    asked = fleet.history[-1].wanted["aggregated"]
    fleet.rate = lambda _: 200.0
    fleet.run(5)
    fleet.policy = policy(1, 64)
    fleet.run(120)
    assert any("does not settle" in note for note in fleet.history[-1].notes)
    assert fleet.changes() <= asked + 8
    growth = [
        after.wanted["aggregated"] - before.wanted["aggregated"] for before, after in pairwise(fleet.history[-12:])
    ]
    assert max(growth) <= 1


@pytest.mark.parametrize("there", [1, 6])
def test_a_number_of_workers_that_was_changed_by_hand_is_asked_for_again_once_in_a_while(there: int) -> None:
    fleet = FluidFleet(policy(3, 8), {"aggregated": 3}, rate=lambda _: 1.0)
    fleet.run(1200)
    assert not any(decision.again for decision in fleet.history)
    # `up` was started again, or `docker compose up --scale` was run by hand
    seen, state, now_s = replace(fleet.look(), alive={"aggregated": there}), fleet.state, fleet.now_s
    decisions = []
    for _ in range(72):
        now_s += EVERY_S
        decision, state = decide(fleet.policy, state, seen, now_s, 0)
        decisions.append(decision)
    assert {decision.wanted["aggregated"] for decision in decisions} == {3}
    assert sum(decision.again for decision in decisions) == 3, "after each 90 s of 360 s, and not before"
    note = f"{there} aggregated are there, and 3 aggregated are wanted: the launcher is asked again"
    assert sum(note in decision.notes for decision in decisions) == 3


def test_workers_that_never_came_are_given_up_when_the_load_ends() -> None:
    fleet = FluidFleet(policy(1, 8), {"aggregated": 1}, rate=lambda now_s: 30.0 if now_s < 1600 else 0.0, starts=False)
    fleet.run(600)
    assert fleet.history[-1].wanted["aggregated"] > 2
    fleet.queue = 0.0
    assert fleet.run(900).wanted == {"aggregated": 1}


def test_metrics_that_vanish_do_not_keep_the_fleet_below_its_least_number() -> None:
    fleet = FluidFleet(policy(1, 8), {"aggregated": 1})
    fleet.run(600)
    fleet.complete, fleet.policy = False, policy(3, 8)
    assert fleet.turn().wanted == {"aggregated": 3}


def test_workers_that_only_a_bound_asks_for_do_not_make_the_others_slower() -> None:
    fleet = FluidFleet(policy(4, 8), {"aggregated": 1}, lambda _: 0.1)
    fleet.run(600)
    assert fleet.state.correction == 1.0


@pytest.mark.parametrize("slower", [1.0, 0.6, 0.35])
def test_a_profile_of_a_faster_machine_is_made_up_for_without_flapping(slower: float) -> None:
    fleet = FluidFleet(policy(1, 16), {"aggregated": 1}, lambda _: 20.0, served_by_one=8.0 * slower)
    fleet.run(5400)
    assert fleet.turns() <= 6
    fleet.history.clear()
    fleet.run(5400)
    assert fleet.queue < 50
    assert fleet.changes() <= 1


@pytest.mark.parametrize("period_s", [60, 240, 600])
def test_load_that_swings_never_flaps(period_s: float) -> None:
    fleet = FluidFleet(policy(1, 16), {"aggregated": 2}, lambda now_s: 15 + 10 * sin(2 * pi * now_s / period_s))
    fleet.run(7200)
    assert fleet.turns() <= 2 * 7200 / max(300, period_s)
    if period_s < 300:
        assert fleet.turns() <= 2, "swings within the cool-down change nothing"


def test_a_burst_grows_the_fleet_at_once_and_leaves_after_the_cool_down() -> None:
    fleet = FluidFleet(policy(1, 16), {"aggregated": 1}, lambda now_s: 60.0 if 2000 <= now_s < 2120 else 2.0)
    fleet.run(1020)
    assert fleet.history[-1].wanted["aggregated"] > 3
    assert fleet.run(1500).wanted["aggregated"] == 1
    assert fleet.turns() <= 1


def test_a_schedule_holds_a_least_number_also_over_midnight() -> None:
    night = DaySchedule(23 * 60, 60, "aggregated", 4)
    assert [night.holds(minute) for minute in (22 * 60 + 59, 23 * 60, 0, 59, 60)] == [False, True, True, True, False]
    scheduled = policy(1, 8, schedules=(DaySchedule(0, 24 * 60, "aggregated", 4),))
    assert FluidFleet(scheduled, {"aggregated": 1}).turn().wanted == {"aggregated": 4}


def test_a_role_grows_within_the_total_only_when_the_other_has_shrunk() -> None:
    split = policy(1, 8, "prefill", "decode", total=6)
    fleet = FluidFleet(split, {"prefill": 1, "decode": 5}, lambda _: 15.0)
    for _ in range(200):
        decision = fleet.turn()
        assert sum(decision.wanted.values()) <= 6
    assert decision.wanted["prefill"] > 1
    assert decision.wanted["decode"] < 5


@given(
    st.lists(
        st.tuples(st.floats(0, 1e9), st.integers(0, 10**9), st.integers(0, 10**6), st.booleans(), st.integers(0, 20)),
        max_size=60,
    ),
    st.integers(0, 3),
)
def test_whatever_is_seen_the_bounds_hold_and_what_is_remembered_is_bounded(
    looks: list[tuple[float, int, int, bool, int]], least: int
) -> None:
    wanted: Mapping[WorkerRole, int] = {}
    state, now_s = ScaleState(), 0.0
    for requests, tokens, held, complete, serving in looks:
        now_s += EVERY_S
        counts = TrafficCounts(EVERY_S, requests, 0.0, tokens, tokens / 2, requests, tokens)
        there: Mapping[WorkerRole, int] = {"aggregated": serving}
        decision, state = decide(
            policy(least, 8), state, FleetSeen(complete, counts, held, tokens, held, there, there), now_s, 0
        )
        if state.moments:
            assert least <= decision.wanted["aggregated"] <= 8
            assert complete or decision.wanted["aggregated"] >= wanted.get("aggregated", 0)
            wanted = {"aggregated": min(8, decision.wanted["aggregated"])}
        assert len(state.moments) <= KEPT
        assert 1 <= state.correction <= MOST_CORRECTION
