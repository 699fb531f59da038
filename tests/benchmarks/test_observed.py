"""Tests of the figures of `benchmarks/observed.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.observed import Turn, goals, in_turn, line, ratios, settings


def turns() -> list[Turn]:
    costs = {"off": (10.0, 20.0, 30.0), "on": (10.1, 20.2, 60.0), "traced": (10.4, 20.8, 31.2)}
    return [
        Turn("path", case, number, us, 0.99, "1 lost" if (case, number) == ("on", 2) else "")
        for case, every in costs.items()
        for number, us in enumerate(every)
    ]


def test_a_case_is_compared_with_the_base_of_the_same_round_and_without_rounds_that_do_not_count() -> None:
    assert ratios(turns(), "path", "on") == pytest.approx([1.01, 1.01])
    assert ratios(turns(), "path", "traced") == pytest.approx([1.04, 1.04, 1.04])
    assert not ratios(turns(), "serving", "on")


def test_a_goal_is_met_by_the_median_and_not_without_any_round() -> None:
    found = goals(turns(), ["path", "serving"], ["off", "on", "traced"])
    assert [goal.met for goal in found] == [True, False, False, False]
    assert found[0].name == "path: CPU a token, on, of off"
    assert found[2].value is None
    assert "1.010 (1.010 to 1.010)" in line(turns(), "path", "on")


def test_with_another_checkout_each_goal_is_also_relative_to_that() -> None:
    before = [Turn("path", "before", number, us, 0.99) for number, us in enumerate((9.0, 18.0, 27.0))]
    found = goals([*turns(), *before], ["path"], ["off", "on", "traced", "before"])
    assert [goal.name.rpartition(" ")[2] for goal in found] == ["off", "before", "off", "before"]
    assert found[1].value == pytest.approx(10.1 / 9)


def test_each_case_comes_first_in_its_turn() -> None:
    assert [in_turn(["a", "b", "c"], number) for number in range(3)] == [list("abc"), list("bca"), list("cab")]


def test_only_frontends_write_a_line_for_a_request_and_only_traced_ones_have_a_collector() -> None:
    on, traced = (settings(case, None, "http://c") for case in ("on", "traced"))
    assert [service for service, each in on.items() if "HEADRACE_ACCESS_LOG" in each] == ["frontend"]
    assert all("HEADRACE_TRACE_ENDPOINT" in each for each in traced.values())
    assert settings("off", None, "http://c") == {"frontend": {}, "router": {}, "worker": {}}
    assert settings("before", Path("/old"), "")["router"] == {"PYTHONPATH": "/old"}
