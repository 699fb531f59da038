"""Plans what `headrace bench` sends and when: points of a sweep, prompts, arrival times. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from random import Random
from typing import Literal

from msgspec import Struct

from shared.errors import ConfigError

LEAST_REQUESTS = 32
"""Fewest requests of a point whose number is not given."""
A_SLOT = 4
"""Requests for each slot of a closed loop whose number of requests is not given."""
OPEN_S = 20.0
"""Seconds that an open loop sends if its number of requests is not given."""
POINTS_LIMIT, CONCURRENCY_LIMIT, REQUESTS_LIMIT = 64, 65_536, 10_000_000

_TEXT = """
water river wheel mill stone gate flow dam weir sluice basin valley bridge boat rope oak iron grain bread slow quick
deep shallow old new bright quiet heavy round turns carries lifts grinds opens closes falls rises
"""
_WORDS = _TEXT.split()


class Point(Struct, frozen=True):
    """One load of a sweep."""

    loop: Literal["closed", "open"]
    value: float
    """Closed: number of requests in flight; each slot sends its next request when its last has ended. Open: requests
    per second, sent at random times (Poisson), however many are still in flight."""
    requests: int

    @property
    def name(self) -> str:
        return f"{'concurrency' if self.loop == 'closed' else 'rate'} {self.value:g}"


def points(concurrency: str, rate: str, requests: int) -> list[Point]:
    """Return the points that the flags ask for. If `requests` is 0, each load gets a suitable number. Raise
    ConfigError."""
    if bool(concurrency) == bool(rate):
        raise ConfigError("give either --concurrency or --rate")
    if not 0 <= requests <= REQUESTS_LIMIT:
        raise ConfigError(f"--requests is 0 to {REQUESTS_LIMIT}")
    if concurrency:
        slots = [_number("--concurrency", text, least=1, whole=True) for text in concurrency.split(",")]
        found = [Point("closed", slot, requests or max(LEAST_REQUESTS, int(A_SLOT * slot))) for slot in slots]
    else:
        rates = [_number("--rate", text, least=0.001, whole=False) for text in rate.split(",")]
        found = [Point("open", one, requests or max(LEAST_REQUESTS, int(OPEN_S * one))) for one in rates]
    if len(found) > POINTS_LIMIT:
        raise ConfigError(f"a sweep has at most {POINTS_LIMIT} points")
    return found


def _number(flag: str, text: str, *, least: float, whole: bool) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not least <= number <= CONCURRENCY_LIMIT or (whole and number != int(number)):
        kind = "whole numbers" if whole else "numbers"
        raise ConfigError(
            f"{flag}: {text!r}: must be {kind} from {least:g} to {CONCURRENCY_LIMIT}, separated by commas"
        )
    return number


def arrivals(rate: float, requests: int, seed: int) -> list[float]:
    """Return when an open loop sends each request, in seconds from the start: a Poisson process."""
    draw, at_s = Random(f"arrivals {seed}"), 0.0  # noqa: S311 - a load, no secret
    times: list[float] = []
    for _ in range(requests):
        times.append(at_s)
        at_s += draw.expovariate(rate)
    return times


def prompts(words: int, shared_words: int, given: Sequence[str], seed: int) -> Iterator[str]:
    """Yield prompts without end: those `given` in turn, or generated ones of `words` words that share the first
    `shared_words`."""
    if given:
        for number in count():
            yield given[number % len(given)]
    opening = Random(f"opening {seed}").choices(_WORDS, k=shared_words)  # noqa: S311
    for number in count():
        rest = Random(f"prompt {seed} {number}").choices(_WORDS, k=words - shared_words)  # noqa: S311
        yield " ".join((*opening, *rest))


def lines(text: str, name: str) -> list[str]:
    """Return the prompts of a file, one per line. Raise ConfigError if there is none."""
    found = [line for line in text.splitlines() if line.strip()]
    if not found:
        raise ConfigError(f"{name}: contains no prompt")
    return found
