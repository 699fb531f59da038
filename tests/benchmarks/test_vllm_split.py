"""Which gaps `benchmarks/vllm_split.py` counts, and what it makes of them."""

from __future__ import annotations

import pytest

from benchmarks.vllm_split import gaps_within, goals_of, row_of


def test_gaps_count_that_a_long_prompt_may_have_made() -> None:
    streams = [[0.0, 1.0, 3.0, 4.0, 9.0], [2.5], []]
    assert gaps_within(streams, 0.5, 20.0) == [1.0, 1.0, 2.0, 5.0]
    assert gaps_within(streams, 1.0, 4.0) == [1.0, 2.0]
    assert gaps_within(streams, 3.5, 3.8) == [1.0], "the one that lasted meanwhile"


@pytest.mark.parametrize(("split", "met"), [(100.0, True), (101.0, False)])
def test_half_the_gap_is_the_goal(split: float, met: bool) -> None:
    rows = [row_of("aggregated", [{"gap_p99_ms": each} for each in (100.0, 200.0, 400.0)])]
    rows += [row_of("split", [{"gap_p99_ms": split}])]
    assert rows[0] == {"side": "aggregated", "gap_p99_ms": 200.0, "spread": [100.0, 400.0]}
    (goal,) = goals_of(rows)
    assert goal.met is met
