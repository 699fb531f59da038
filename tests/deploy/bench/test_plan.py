from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.local.bench.plan import LEAST_REQUESTS, Point, arrivals, lines, points, prompts
from shared.errors import ConfigError


def test_a_sweep_of_concurrency_has_a_point_for_each_and_enough_requests() -> None:
    assert points("1,64", "", 0) == [Point("closed", 1, LEAST_REQUESTS), Point("closed", 64, 256)]
    assert points("8", "", 5) == [Point("closed", 8, 5)]


def test_a_sweep_of_rates_sends_for_a_while() -> None:
    assert points("", "0.5,10", 0) == [Point("open", 0.5, LEAST_REQUESTS), Point("open", 10, 200)]
    assert points("", "0.5", 0)[0].name == "rate 0.5"


@pytest.mark.parametrize(
    ("concurrency", "rate", "requests"),
    [
        ("", "", 0),
        ("1", "1", 0),
        ("0", "", 0),
        ("1.5", "", 0),
        ("one", "", 0),
        ("1,,2", "", 0),
        ("", "nan", 0),
        ("", "inf", 0),
        ("", "-1", 0),
        ("1", "", -1),
        ("1" + ",1" * 64, "", 0),
    ],
)
def test_loads_that_make_no_sense_are_refused(concurrency: str, rate: str, requests: int) -> None:
    with pytest.raises(ConfigError):
        points(concurrency, rate, requests)


def test_arrivals_are_random_at_their_rate_and_the_same_for_the_same_seed() -> None:
    times = arrivals(50.0, 10_000, 1)
    assert times == sorted(times)
    assert times[0] == 0.0
    assert 180 < times[-1] < 220
    assert times == arrivals(50.0, 10_000, 1)
    assert times != arrivals(50.0, 10_000, 2)


@given(words=st.integers(1, 60), shared=st.integers(0, 60), seed=st.integers(0, 100))
def test_made_up_prompts_have_their_length_and_share_their_opening_alone(words: int, shared: int, seed: int) -> None:
    shared = min(shared, words)
    found = [prompt.split() for prompt in islice(prompts(words, shared, (), seed), 3)]
    assert [len(prompt) for prompt in found] == [words] * 3
    assert len({tuple(prompt[:shared]) for prompt in found}) == 1
    if words - shared > 40:
        assert len({tuple(prompt) for prompt in found}) == 3


def test_given_prompts_come_in_turn_without_end() -> None:
    given = lines("one\n\n two\n", "file")
    assert list(islice(prompts(512, 0, given, 0), 3)) == ["one", " two", "one"]
    with pytest.raises(ConfigError, match="file: contains no prompt"):
        lines("\n \n", "file")
