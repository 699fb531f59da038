"""Requests that are drawn as ServeGen describes the clients of a production model. Pure.

    chunk-N-trace.csv       second,rate,cv,Gamma|Weibull,shape,scale    requests of client N, up to the next line
    chunk-N-dataset.json    {"second": {"input_tokens": "{tokens: share, …}", "output_tokens": "{…}"}}

The gaps between a client's requests have the distribution of their window, and its rate in the mean. Both lengths of a
request are drawn apart, from the histograms of that time. The data has no texts: no two prompts have a beginning in
common.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from heapq import merge
from itertools import accumulate, islice, pairwise
from math import gamma, inf
from operator import itemgetter
from random import Random

import msgspec
from msgspec import Struct

from deploy.local.size.traffic import MADE_BLOCK, TOKENS_LIMIT, Traffic, TrafficRow, checked, unshared
from shared.errors import MALFORMED, ConfigError

FIELDS = ("input_tokens", "output_tokens")
SHAPE_LEAST = {"Gamma": 0.001, "Weibull": 0.05}
"""The least shape of a distribution of gaps, which has most of its gaps at 0."""
SHAPE_MOST = 1e6
LAST_S = 600.0
"""The length of the last window in seconds: that of all windows in the published data."""
_LENGTH = re.compile(r"(-?\d+)(?=:)")


class GapWindow(Struct, frozen=True):
    """The requests of one client from a time on."""

    begin_s: float
    rate: float
    kind: str = ""
    shape: float = 1.0

    def gap(self, draw: Random) -> float:
        """Draw a gap between two requests, of 1 in the mean."""
        if self.kind == "Gamma":
            return draw.gammavariate(self.shape, 1 / self.shape)
        return draw.weibullvariate(1 / gamma(1 + 1 / self.shape), self.shape)


class ServeGenClient:
    """One client: its requests and their lengths, always the same ones. Raise ConfigError for what is not as ServeGen
    has it; for a histogram when it is needed."""

    def __init__(self, trace: bytes, dataset: bytes, name: str) -> None:
        """`name` is that of the files, up to `-trace.csv` and `-dataset.json`."""
        self._name, self._draw = name, Random(f"servegen {name.rpartition('/')[2]}")  # noqa: S311 - a load, no secret
        self._windows = _windows(trace.decode(errors="replace"), f"{name}-trace.csv")
        try:
            found = msgspec.json.decode(dataset, type=dict[int, dict[str, str]])
        except MALFORMED as wrong:
            raise ConfigError(f"{name}-dataset.json: {wrong}") from None
        for second, histograms in found.items():
            if not histograms.keys() >= {*FIELDS}:
                raise ConfigError(f"{name}-dataset.json: {second}: no {' and '.join(FIELDS)}; images are not read")
        self._histograms = {second: found[second] for second in sorted(found) if found[second][FIELDS[0]] != "{}"}

    def arrivals(self) -> Iterator[tuple[float, ServeGenClient]]:
        """Yield the times of the requests, in seconds."""
        left = -1.0
        for window, after in pairwise(self._windows):
            if not window.rate:
                continue
            left = window.gap(self._draw) * self._draw.random() if left < 0 else left
            most, done = window.rate * (after.begin_s - window.begin_s), 0.0
            while done + left < most:
                done += left
                yield window.begin_s + done / window.rate, self
                left = window.gap(self._draw)
            left -= most - done

    def lengths(self, at_s: float) -> list[int]:
        """Draw the lengths of a prompt and an answer at a time: of the last histograms before it, or of the first."""
        if not self._histograms:
            raise ConfigError(f"{self._name}-dataset.json: no lengths, and {self._name}-trace.csv has requests")
        seconds = list(self._histograms)
        second = seconds[max(0, bisect_right(seconds, at_s) - 1)]
        where, found = f"{self._name}-dataset.json: {second}: ", self._histograms[second]
        tables = [_table(found[field], where + field) for field in FIELDS]
        return [self._draw.choices(lengths, cum_weights=shares)[0] for lengths, shares in tables]


def drawn_requests(clients: Sequence[ServeGenClient], name: str, requests: int) -> Traffic:
    """Return the first `requests` requests of all clients. Raise ConfigError."""
    names = iter(range(1, 1 << 60))
    rows = list[TrafficRow]()
    for at_s, client in islice(merge(*(each.arrivals() for each in clients), key=itemgetter(0)), requests):
        prompt, output = client.lengths(at_s)
        rows.append(unshared(1000 * at_s, max(1, prompt), output, names))
    return checked(MADE_BLOCK, rows, name)


def _windows(text: str, name: str) -> list[GapWindow]:
    """Return the windows of a client, and one without requests that ends the last one."""
    found = list[GapWindow]()
    for number, line in enumerate(text.splitlines(), 1):
        try:
            second, rate, _, kind, shape, _ = line.split(",")
            window = GapWindow(float(second), float(rate), kind, float(shape))
        except ValueError:
            raise ConfigError(f"{name}:{number}: expected second,rate,cv,pattern,shape,scale") from None
        if window.rate and not (
            SHAPE_LEAST.get(kind, SHAPE_MOST) <= window.shape < SHAPE_MOST and 0 < window.rate < inf
        ):
            raise ConfigError(f"{name}:{number}: {rate} requests a second of the pattern {kind} with the shape {shape}")
        if not (found[-1].begin_s if found else -inf) < window.begin_s < inf:
            raise ConfigError(f"{name}:{number}: time goes back, to {second} s")
        found.append(window)
    return [*found, GapWindow(found[-1].begin_s + LAST_S, 0.0)] if found else []


@lru_cache(1 << 14)
def _table(text: str, where: str) -> tuple[Sequence[int], Sequence[float]]:
    """Return the lengths of a histogram, and the sum of the shares up to each."""
    try:
        shares: Mapping[int, float] = msgspec.json.decode(_LENGTH.sub(r'"\1"', text), type=dict[int, float])
    except MALFORMED as wrong:
        raise ConfigError(f"{where}: expected {{tokens: share, …}}: {wrong}") from None
    if (wrong_length := next((each for each in shares if not 0 <= each <= TOKENS_LIMIT), None)) is not None:
        raise ConfigError(f"{where}: a length of {wrong_length} tokens is out of range")
    if min(shares.values(), default=-1.0) < 0 or not 0.99 < sum(shares.values()) < 1.01:
        raise ConfigError(f"{where}: shares are at least 0 and make 1, these {sum(shares.values()):g}")
    return list(shares), list(accumulate(shares.values()))
