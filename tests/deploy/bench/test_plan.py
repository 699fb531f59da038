from __future__ import annotations

import pytest

from deploy.local.bench.plan import (
    LEAST_REQUESTS,
    Point,
    arrivals,
    lines,
    points,
    prefix_ratios_of,
    scenarios_of,
)
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


def test_a_load_is_measured_in_each_scenario_with_each_share_of_the_prompt_that_is_shared() -> None:
    found = points("", "2", 8, prefix_ratios=prefix_ratios_of("0.1,0.9"), scenarios=scenarios_of("mixed,decode"))
    assert [point.name for point in found] == [
        "rate 2, 10% shared",
        "rate 2, 90% shared",
        "rate 2, 10% shared, decode",
        "rate 2, 90% shared, decode",
    ]
    assert prefix_ratios_of("") == [None]


@pytest.mark.parametrize("text", ["1.1", "-0.1", "x", "0.5,"])
def test_a_share_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--prefix-ratio: .* must be numbers from 0 to 1, separated by commas"):
        prefix_ratios_of(text)


def test_an_unknown_scenario_is_refused() -> None:
    with pytest.raises(ConfigError, match="--scenarios mixed,both: must be of mixed, prefill, decode"):
        scenarios_of("mixed,both")


def test_a_file_without_prompts_is_refused() -> None:
    assert lines("one\n\n two\n", "file") == ["one", " two"]
    with pytest.raises(ConfigError, match="file: contains no prompt"):
        lines("\n \n", "file")
