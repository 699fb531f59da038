from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.local.bench.plan import Point
from deploy.local.bench.rows import BenchRow, Result, RowKey, row_of
from deploy.local.bench.saturation import (
    CLOSE,
    MOST_RATE,
    TRIES,
    RateSearch,
    render_saturations,
    saturation_of,
    why_not,
)
from deploy.local.bench.terms import Terms


def searched(start: float, capacity: float) -> tuple[RateSearch, list[float]]:
    search = RateSearch(start)
    tried: list[float] = []
    while (rate := search.next()) is not None:
        tried.append(rate)
        search.add(rate, sustained=rate <= capacity)
    return search, tried


@given(start=st.floats(0.1, 50), capacity=st.floats(0.1, 50))
def test_the_highest_sustained_rate_is_found_closely_in_few_tries(start: float, capacity: float) -> None:
    search, tried = searched(start, capacity)
    assert len(tried) <= TRIES
    assert len(set(tried)) == len(tried)
    assert search.best is not None
    assert search.too_high is not None
    assert search.best <= capacity < search.too_high
    assert search.too_high / search.best <= CLOSE or len(tried) == TRIES


def test_a_search_without_an_end_is_bounded() -> None:
    assert searched(8.0, 1e9)[1][-1] <= MOST_RATE
    assert searched(8.0, 1e9)[0].too_high is None
    assert len(searched(0.01, 0.0)[1]) <= TRIES
    assert searched(0.01, 0.0)[0].best is None


def test_a_rate_above_one_that_was_not_sustained_does_not_count() -> None:
    search = RateSearch(1.0)
    for rate, sustained in ((1.0, True), (2.0, False), (4.0, True)):
        search.add(rate, sustained=sustained)
    assert (search.best, search.too_high) == (1.0, 2.0)


def row(rate: float, first_s: float, *, variant: str = "", failed: int = 0, late_s: float = 0.0) -> BenchRow:
    results = [Result("done", first_s=first_s, events=3, late_s=late_s)] * 4 + [Result("failed", "500: no")] * failed
    key = RowKey(variant, 1, terms=Terms({"ttft_p90": 0.5}))
    return row_of(Point("open", rate, 4), results, 2.0, 0.1, key=key)


@pytest.mark.parametrize(
    ("measured", "why"),
    [
        (row(1.0, 0.4), ""),
        (row(1.0, 0.6), "ttft_p90 at 120% of its target"),
        (row(1.0, 0.4, failed=2), "2 failed"),
        (row(1.0, 0.4, late_s=0.5), "this driver is too slow"),
    ],
)
def test_a_rate_is_not_sustained_if_requests_fail_or_targets_are_missed(measured: BenchRow, why: str) -> None:
    assert why_not(measured) == why


def test_the_answer_names_the_rate_and_what_the_next_one_missed() -> None:
    search = RateSearch(1.0)
    rows = [row(1.0, 0.4, variant="policy=kv"), row(2.0, 0.6, variant="policy=kv")]
    for each in rows:
        search.add(each.value, sustained=not why_not(each))
    found = saturation_of(search, rows)
    assert (found.load, found.rate, found.at_least, found.tokens_per_s) == ("policy=kv, round 1", 1.0, False, 6.0)
    assert "ttft_p90 at 120% of its target" in render_saturations([found])
    assert saturation_of(RateSearch(1.0), [row(1.0, 0.1)]).load == "the endpoint"
