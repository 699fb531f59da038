"""Plans which loads `headrace bench` sends: the points of a sweep, their requests and times. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Literal, get_args

from msgspec import Struct

from deploy.local.size.flags import numbers
from shared.errors import ConfigError

LEAST_REQUESTS = 32
"""Fewest requests of a point whose number is not given."""
A_SLOT = 4
"""Requests for each slot of a closed loop whose number of requests is not given."""
OPEN_S = 20.0
"""Seconds that an open loop sends if its number of requests is not given."""
POINTS_LIMIT, CONCURRENCY_LIMIT, REQUESTS_LIMIT = 64, 65_536, 10_000_000

Loop = Literal["closed", "open", "trace"]
Scenario = Literal["mixed", "prefill", "decode"]
"""Which part of the work is measured. Prefill: answers have one token. Decode: all prompts are sent before, so that
they are cached where the prefix cache has room for them."""


class Point(Struct, frozen=True):
    """One load of a sweep."""

    loop: Loop
    value: float
    """Closed: number of sessions in flight; each slot begins its next session when its last has ended. Open: sessions
    per second, begun at random times (Poisson), however many are still in flight. Trace: the speed of its clock."""
    requests: int
    """The number of sessions; each is one request, unless they are agents'."""
    scenario: Scenario = "mixed"
    prefix_ratio: float | None = None
    """The share of each prompt that is shared. None if it is not given as a share."""

    @property
    def load(self) -> str:
        """What `value` is."""
        return {"closed": "concurrency", "open": "rate", "trace": "trace at speed"}[self.loop]

    @property
    def name(self) -> str:
        """The load in words."""
        return load_name(self.load, self.value, self.scenario, self.prefix_ratio)


def load_name(load: str, value: float, scenario: str, prefix_ratio: float | None) -> str:
    """Return the words for a load."""
    shared = "" if prefix_ratio is None else f", {prefix_ratio:.0%} shared"
    return f"{load} {value:g}{shared}{'' if scenario == 'mixed' else f', {scenario}'}"


def points(
    concurrency: str,
    rate: str,
    requests: int,
    *,
    prefix_ratios: Sequence[float | None] = (None,),
    scenarios: Sequence[Scenario] = ("mixed",),
) -> list[Point]:
    """Return the points that the flags ask for. If `requests` is 0, each load gets a suitable number. Raise
    ConfigError."""
    if bool(concurrency) == bool(rate):
        raise ConfigError("give either --concurrency or --rate")
    if not 0 <= requests <= REQUESTS_LIMIT:
        raise ConfigError(f"--requests is 0 to {REQUESTS_LIMIT}")
    if concurrency:
        slots = numbers(concurrency, "--concurrency", least=1, most=CONCURRENCY_LIMIT, whole=True)
        found = [Point("closed", slot, requests or max(LEAST_REQUESTS, int(A_SLOT * slot))) for slot in slots]
    else:
        rates = numbers(rate, "--rate", least=0.001, most=CONCURRENCY_LIMIT)
        found = [Point("open", one, requests or max(LEAST_REQUESTS, int(OPEN_S * one))) for one in rates]
    found = [
        Point(point.loop, point.value, point.requests, scenario, ratio)
        for scenario in scenarios
        for ratio in prefix_ratios
        for point in found
    ]
    if len(found) > POINTS_LIMIT:
        raise ConfigError(f"a sweep has at most {POINTS_LIMIT} points")
    return found


def open_point(rate: float, requests: int, like: Point) -> Point:
    """Return a point of another rate, with as many requests as suit it if `requests` is 0."""
    return Point("open", rate, requests or max(LEAST_REQUESTS, int(OPEN_S * rate)), like.scenario, like.prefix_ratio)


def trace_points(speeds: str, requests: int) -> list[Point]:
    """Return a point for each speed of a trace. Raise ConfigError."""
    return [Point("trace", speed, requests) for speed in numbers(speeds, "--speed", least=0.001)]


def scenarios_of(text: str) -> list[Scenario]:
    """Return the scenarios that a flag lists. Raise ConfigError."""
    found: list[Scenario] = [one for word in text.split(",") for one in get_args(Scenario) if one == word]
    if len(found) != len(text.split(",")):
        raise ConfigError(f"--scenarios {text}: must be of {', '.join(get_args(Scenario))}, separated by commas")
    return found


def prefix_ratios_of(text: str) -> list[float | None]:
    """Return the shares that `--prefix-ratio` lists; one None if it is empty. Raise ConfigError."""
    return [*numbers(text, "--prefix-ratio", most=1)] if text else [None]


def arrivals(rate: float, requests: int, seed: int) -> list[float]:
    """Return when an open loop sends each request, in seconds from the start: a Poisson process."""
    draw, at_s = Random(f"arrivals {seed}"), 0.0  # noqa: S311 - a load, no secret
    times: list[float] = []
    for _ in range(requests):
        times.append(at_s)
        at_s += draw.expovariate(rate)
    return times


def lines(text: str, name: str) -> list[str]:
    """Return the prompts of a file, one per line. Raise ConfigError if there is none."""
    found = [line for line in text.splitlines() if line.strip()]
    if not found:
        raise ConfigError(f"{name}: contains no prompt")
    return found
