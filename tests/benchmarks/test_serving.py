"""Tests of which runs of `benchmarks/serving.py` count, and of its goals."""

from __future__ import annotations

import pytest

from benchmarks.serving import ServingRow, StackPair, goals, line, refusal, summary
from benchmarks.serving_load import GeneratorReport


def report(*, events: float = 128.0, elapsed_s: float = 10.0, errors: dict[str, int] | None = None) -> GeneratorReport:
    return GeneratorReport(100, errors or {}, elapsed_s, events, 50.0, 90.0, 20.0, 20.0, 30.0, 1.0, 0)


def row(system: str, us: float, *, pace: str = "paced", elapsed_s: float = 10.0, events: float = 128.0) -> ServingRow:
    load = report(elapsed_s=elapsed_s, events=events)
    return ServingRow(system, pace, 512, us, {"frontend": us / 4, "nats": 3 * us / 4}, {}, load, refusal(load, pace))


def test_a_paced_run_whose_tokens_come_together_is_refused() -> None:
    assert refusal(report(events=0.97 * 128), "paced") == "0.97 events a token"
    assert refusal(report(events=0.99 * 128), "paced") == ""


def test_an_unpaced_run_may_join_tokens_but_has_no_errors() -> None:
    assert refusal(report(events=10), "unpaced") == ""
    assert refusal(report(errors={"503": 2}), "unpaced") == "errors: {'503': 2}"


def test_runs_of_different_speed_are_not_compared_when_paced() -> None:
    apart = StackPair(row("ours", 40), row("peer", 80, elapsed_s=10.4))
    assert apart.refused == "the yardstick took 1.04 times as long"
    assert not StackPair(row("ours", 40), row("peer", 80, elapsed_s=10.2)).refused
    unpaced = StackPair(row("ours", 40, pace="unpaced"), row("peer", 80, pace="unpaced", elapsed_s=30))
    assert not unpaced.refused


def test_a_goal_is_the_median_of_the_repeats_that_count() -> None:
    pairs = [StackPair(row("ours", us), row("peer", 100)) for us in (70, 76, 90)]
    pairs.append(StackPair(row("ours", 10, events=64), row("peer", 100)))
    ratio, alone = goals(pairs, ["paced"], [512])
    assert ratio.value == pytest.approx(0.76)
    assert (ratio.goal, ratio.met) == (0.8, True)
    assert (alone.value, alone.met) == (19.0, False)
    assert list(summary(pairs)) == ["paced     512  ratio 0.76  (0.10 to 0.90, 3 of 4 count)"]


def test_without_the_yardstick_no_ratio_is_met() -> None:
    found = goals([StackPair(row("ours", 10), None)], ["paced", "unpaced"], [128, 512])
    assert [goal.met for goal in found if goal.unit == "times"] == [False] * 4
    assert list(summary([StackPair(row("ours", 10), None)])) == []


def test_a_refused_run_says_so_in_its_line() -> None:
    assert "REFUSED: 0.50 events a token" in line(row("ours", 10, events=64))
    assert "nats 7.5  frontend 2.5" in line(row("ours", 10))
