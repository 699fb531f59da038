from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.frontend.auth.token_bucket import TokenBucket


def test_a_bucket_is_full_at_first_and_a_minute_after_it_was_emptied() -> None:
    bucket = TokenBucket(60, 100.0)
    assert (bucket.level(100.0), bucket.until_full_s(100.0)) == (60, 0)
    bucket.spend(60, 100.0)
    assert (bucket.level(100.0), bucket.until_full_s(100.0)) == (0, 60)
    assert bucket.level(110.0) == pytest.approx(10)
    assert bucket.level(160.0) == bucket.level(1e6) == 60


def test_waiting_for_wait_s_is_enough() -> None:
    bucket = TokenBucket(7, 0.0)
    bucket.spend(7, 0.0)
    wait_s = bucket.wait_s(1, 0.0)
    assert wait_s == pytest.approx(60 / 7)
    assert bucket.wait_s(1, wait_s / 2) > 0
    assert bucket.wait_s(1, wait_s) == 0


def test_more_than_a_minute_brings_is_granted_when_the_bucket_is_full_and_owed_then() -> None:
    bucket = TokenBucket(100, 0.0)
    assert bucket.wait_s(250, 0.0) == 0
    bucket.spend(250, 0.0)
    assert bucket.level(0.0) == -150
    assert bucket.wait_s(1, 0.0) == pytest.approx(90.6)
    assert bucket.wait_s(250, 0.0) == pytest.approx(150)


def test_what_is_given_back_fills_it_and_no_more_than_that() -> None:
    bucket = TokenBucket(60, 0.0)
    bucket.spend(30, 0.0)
    bucket.spend(-20, 0.0)
    assert bucket.level(0.0) == pytest.approx(50)
    bucket.spend(-1000, 0.0)
    assert bucket.level(0.0) == 60
    bucket.spend(1, 0.0)
    assert bucket.level(0.0) == pytest.approx(59), "what was given back beyond the brim is not kept"


def test_under_another_limit_what_was_spent_stays_spent() -> None:
    bucket = TokenBucket(60, 0.0)
    bucket.spend(50, 0.0)
    bucket.set_rate(600, 0.0)
    assert bucket.level(0.0) == pytest.approx(550)
    bucket.set_rate(20, 0.0)
    assert bucket.level(0.0) == pytest.approx(-30)


@given(
    st.integers(1, 1000),
    st.lists(st.tuples(st.floats(0, 90), st.integers(1, 1500)), max_size=60),
)
def test_no_period_grants_more_than_the_level_and_the_refill_except_for_one_large_amount(
    per_minute: int, asked: list[tuple[float, int]]
) -> None:
    bucket, now, had, largest = TokenBucket(per_minute, 0.0), 0.0, 0, 0
    for pause_s, amount in asked:
        now += pause_s
        if bucket.wait_s(amount, now) == 0:
            bucket.spend(amount, now)
            had += amount
            largest = max(largest, amount - per_minute)
        assert had <= per_minute * (1 + now / 60) + max(0, largest) + 1e-3
        assert bucket.level(now) <= per_minute
