"""benchmarks/media.py: the ratio is that of neighbours, and is held against its goal."""

from __future__ import annotations

from benchmarks.media import goals_of


def test_the_ratio_is_the_median_of_neighbours() -> None:
    slow, fast = {"alone": 1.0, "headrace": 0.98}, {"alone": 10.0, "headrace": 9.0}
    [goal] = goals_of([slow, slow, fast])
    assert (goal.value, goal.met) == (0.98, True)
    assert not goals_of([slow, fast, fast])[0].met
