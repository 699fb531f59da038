"""Finds the highest rate that a fleet sustains: doubles it until it does not, then bisects. Pure.

    start ─▶ sustained? twice as much, else half ─▶ … ─▶ the middle (by ratio) of the highest that was sustained below
    the lowest that was not ─▶ … until the two are close

A rate is sustained if all requests are sent in time and done, the targets hold and the queue does not grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from msgspec import Struct

from deploy.local.bench.rows import LATE_S, BenchRow
from deploy.local.table import table

CLOSE = 1.05
"""The ratio of two rates between which no further one is tried."""
TRIES = 14
"""The most rates that are tried."""
LEAST_RATE, MOST_RATE = 0.001, 65_536.0


class Saturation(Struct, frozen=True):
    """The highest sustained rate of one fleet in one round."""

    load: str
    rate: float | None
    """None if no rate that was tried was sustained."""
    at_least: bool
    """True if no rate that was tried was too high."""
    tokens_per_s: float
    why: str
    """What the lowest rate above it missed."""


class RateSearch:
    """The rates that were tried, and the next one."""

    def __init__(self, start: float) -> None:
        self._start = start
        self._tried: dict[float, bool] = {}

    @property
    def too_high(self) -> float | None:
        """The lowest rate that was not sustained. None if there is none yet."""
        return min((rate for rate, sustained in self._tried.items() if not sustained), default=None)

    @property
    def best(self) -> float | None:
        """The highest sustained rate below that. None if there is none."""
        limit = self.too_high
        held = (rate for rate, sustained in self._tried.items() if sustained and (limit is None or rate < limit))
        return max(held, default=None)

    def next(self) -> float | None:
        """Return the rate to try next. None if the answer is known, or as good as it gets."""
        best, too_high = self.best, self.too_high
        if len(self._tried) >= TRIES:
            return None
        if best is None and too_high is None:
            return self._start
        if too_high is None:
            assert best is not None
            return 2 * best if 2 * best <= MOST_RATE else None
        if best is None:
            return too_high / 2 if too_high / 2 >= LEAST_RATE else None
        return sqrt(best * too_high) if too_high / best > CLOSE else None

    def add(self, rate: float, *, sustained: bool) -> None:
        """Note whether a rate was sustained."""
        self._tried[rate] = sustained


def why_not(row: BenchRow) -> str:
    """Return why a load was not sustained. Empty if it was."""
    failed = {outcome: number for outcome, number in row.outcomes.items() if outcome != "done"}
    if failed:
        return ", ".join(f"{number} {outcome}" for outcome, number in failed.items())
    if row.missed:
        return ", ".join(f"{name} at {ratio:.0%} of its target" for name, ratio in row.missed.items())
    if row.late_s > LATE_S:
        return "this driver is too slow"
    return "the queue grows" if row.queue_grows else ""


def saturation_of(search: RateSearch, rows: Sequence[BenchRow]) -> Saturation:
    """Return what a search has found, given the rows of all rates that it tried."""
    by_rate = {row.value: row for row in rows}
    best, too_high = search.best, search.too_high
    return Saturation(
        load=rows[0].full_name.partition(f"{rows[0].value:g}")[2].strip(", ") or "the endpoint",
        rate=best,
        at_least=too_high is None,
        tokens_per_s=0.0 if best is None else by_rate[best].tokens_per_s,
        why="" if too_high is None else why_not(by_rate[too_high]),
    )


def render_saturations(found: Sequence[Saturation]) -> str:
    """Return the highest sustained rates as a table."""
    cells = [
        (
            each.load,
            "-" if each.rate is None else f"{'≥ ' if each.at_least else ''}{each.rate:.4g}",
            f"{each.tokens_per_s:,.0f}",
            each.why or "-",
        )
        for each in found
    ]
    return table("OF  SUSTAINED REQ/S  TOKENS/S  ABOVE IT", cells)
