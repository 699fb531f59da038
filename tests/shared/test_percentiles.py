from __future__ import annotations

from shared.percentiles import nearest_ranks


def test_a_percentile_is_one_of_the_values_and_no_values_have_none() -> None:
    assert nearest_ranks(range(1, 101)) == {"p50": 50, "p90": 90, "p99": 99}
    assert nearest_ranks([7.0]) == {"p50": 7.0, "p90": 7.0, "p99": 7.0}
    assert nearest_ranks([1.0, 2.0])["p50"] == 1.0
    assert nearest_ranks([]) == {}
