from __future__ import annotations

from random import Random
from typing import Literal

import pytest

from benchmarks.disagg import BURST_PERIOD_S, Setup, SplitRow, capacity, cases, goals_of, in_bursts, run_split
from services.virtual.loads import chats

LOAD = chats(60, Random(1))


def row(
    kind: Literal["aggregated", "fixed", "mixed"],
    prefill: int,
    *,
    start: int = 0,
    ttft: float = 1.0,
    itl: float = 0.1,
    rate: float = 100.0,
    latency: float = 5.0,
) -> SplitRow:
    return SplitRow(
        load="trace",
        start=start,
        kind=kind,
        prefill=prefill,
        decode=8 - prefill,
        step_s=0.25,
        requests_per_s=1.0,
        ttft_p50_s=0.0,
        ttft_p90_s=ttft,
        ttft_p99_s=0.0,
        itl_p50_s=0.0,
        itl_p90_s=0.0,
        itl_p99_s=itl,
        itl_p999_s=0.0,
        second_p50_s=0.0,
        second_p90_s=0.0,
        handed_over=0.0,
        early=0.0,
        computed=0.0,
        hit_rate=0.0,
        output_tokens_per_s=rate,
        latency_mean_s=latency,
        failed=0,
    )


def test_a_fixed_split_hands_every_request_over_and_an_aggregated_fleet_none() -> None:
    fixed, whole = run_split("x", 0, LOAD, Setup("fixed", 4)), run_split("x", 0, LOAD, Setup("aggregated"))
    assert (fixed.handed_over, whole.handed_over) == (1.0, 0.0)
    assert 1.0 >= fixed.early > whole.early == 0.0
    assert (fixed.decode, whole.decode, fixed.failed, whole.failed) == (4, 8, 0, 0)
    assert whole.computed == 1.0 > fixed.computed > 0.0
    assert fixed.second_p50_s > fixed.itl_p50_s > 0.0 == whole.second_p50_s


def test_bursts_keep_every_request_in_its_period_and_leave_the_second_half_empty() -> None:
    moved = in_bursts(LOAD)
    for before, after in zip(LOAD.requests, moved.requests, strict=True):
        assert before.arrival_s // BURST_PERIOD_S == after.arrival_s // BURST_PERIOD_S
        assert after.arrival_s % BURST_PERIOD_S <= BURST_PERIOD_S / 2
    assert [each.number for each in moved.requests] == [each.number for each in LOAD.requests]


def test_longer_answers_change_only_the_answers() -> None:
    longer, half = cases(LOAD)["long answers"], LOAD.first(30)
    assert [each.prompt_tokens for each in longer.requests] == [each.prompt_tokens for each in half.requests]
    assert sum(each.output_tokens for each in longer.requests) == 3 * sum(each.output_tokens for each in half.requests)


def test_capacity_does_not_depend_on_the_pace_of_the_load() -> None:
    assert capacity(LOAD) == pytest.approx(capacity(LOAD.at(1000 * LOAD.rate)))


def test_goals_compare_the_best_split_and_the_best_mix_by_their_latency() -> None:
    rows = [
        row("aggregated", 0, ttft=1.0, itl=0.2),
        row("fixed", 3, itl=0.01, latency=50.0),
        row("fixed", 5, ttft=2.0, itl=0.05),
        row("mixed", 5, ttft=1.04, itl=0.06, rate=90.0, latency=4.0),
    ]
    goals = {goal.name.partition(": ")[2]: goal for goal in goals_of(rows)}
    assert goals["itl p99, fixed 5+3 of aggregated, steps of 0.25 s"].value == 0.25
    assert goals["itl p99, fixed 5+3 of aggregated, steps of 0.25 s"].met
    assert goals["ttft p90, mixed 5+3 of aggregated, steps of 0.25 s"].met
    assert not goals["itl p99, mixed 5+3 of fixed 5+3"].met
    assert not goals["time a token, mixed 5+3 of aggregated, steps of 0.25 s"].met
    assert len(goals) == 7


def test_a_goal_is_met_by_the_median_of_its_windows_and_has_their_range() -> None:
    rows = [
        each
        for start, ttft in ((0, 0.9), (1000, 1.0), (2000, 3.0))
        for each in (
            row("aggregated", 0, start=start),
            row("fixed", 4, start=start),
            row("mixed", 4, start=start, ttft=ttft),
        )
    ]
    (goal,) = [goal for goal in goals_of(rows) if "ttft p90, mixed 4+4 of aggregated" in goal.name]
    assert (goal.value, goal.least, goal.most, goal.met) == (1.0, 0.9, 3.0, True)


def test_the_best_mix_is_the_one_of_all_windows() -> None:
    rows = [
        each
        for start, fours, fives in ((0, 1.0, 2.0), (1000, 9.0, 2.0))
        for each in (
            row("aggregated", 0, start=start),
            row("fixed", 4, start=start),
            row("mixed", 4, start=start, latency=fours),
            row("mixed", 5, start=start, latency=fives),
        )
    ]
    assert all("mixed 5+3" in goal.name for goal in goals_of(rows) if "mixed" in goal.name)
