"""benchmarks/encode_role.py: the figure is held against its goal."""

from __future__ import annotations

import pytest

from benchmarks.encode_role import GOAL, goals_of


@pytest.mark.parametrize(("apart_s", "met"), [(0.2, True), (0.31, False)])
def test_the_gap_apart_is_held_against_that_in_place(apart_s: float, met: bool) -> None:
    [goal] = goals_of({"gap_p99_s": 0.5}, {"gap_p99_s": apart_s})
    assert goal.value == pytest.approx(apart_s / 0.5)
    assert (goal.goal, goal.met) == (GOAL, met)
