"""Sums up the results of `headrace bench`: one row for each load. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import ceil
from typing import Literal

from msgspec import Struct

from deploy.local.bench.plan import Point
from deploy.local.table import table

Outcome = Literal["done", "ended early", "refused", "failed", "timed out", "unreadable", "unreachable"]
"""The end of a request. Refused: status 429 or 503. Ended early: the stream ended before its finish reason."""


class Result(Struct, frozen=True):
    """The result of one request. Times are seconds since it was sent."""

    outcome: Outcome
    reason: str = ""
    first_s: float | None = None
    """Time of the first event with text."""
    last_s: float = 0.0
    """Time of the last event with text."""
    ended_s: float = 0.0
    gaps_s: tuple[float, ...] = ()
    """Times between events with text."""
    events: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    """The server's count. None if it sent no usage."""
    retry_after_s: float = 0.0


class Spread(Struct, frozen=True):
    """Percentiles in seconds. None means no values."""

    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    max: float | None = None


class BenchRow(Struct, frozen=True):
    """The measurement of one load."""

    load: str
    value: float
    requests: int
    """Number of requests that ended, with any outcome."""
    outcomes: Mapping[str, int]
    reasons: Mapping[str, int]
    """Reason → number of requests that were not done because of it; the most frequent ones."""
    seconds: float
    """Time from the first request to the last end."""
    first_token_s: Spread
    inter_token_s: Spread
    """Times between events with text. If events have several tokens, these are fewer and longer than between tokens."""
    time_per_token_s: Spread
    """Time from the first to the last token of each request, divided by the number of tokens after the first."""
    whole_s: Spread
    requests_per_s: float
    tokens_per_s: float
    tokens_by: Literal["usage", "events"]
    """Source of the token counts: the server's usage or, if a request had none, the events, one token each."""
    prompt_tokens: float | None
    """Mean number of prompt tokens."""
    driver_cpu: float
    """Share of one core that the driver used. Near 1, the numbers measure the driver and not the server."""
    complete: bool
    """True if all planned requests were sent and have ended."""

    @property
    def name(self) -> str:
        return f"{self.load} {self.value:g}"


def row_of(point: Point, results: Sequence[Result], seconds: float, driver_cpu: float) -> BenchRow:
    """Return the row of a point. Latencies count only requests that were done; tokens count all that arrived."""
    done = [result for result in results if result.outcome == "done"]
    counted = [result.completion_tokens for result in results]
    tokens = sum(result.events if count is None else count for result, count in zip(results, counted, strict=True))
    reported = all(result.completion_tokens is not None for result in done)
    prompts = [result.prompt_tokens for result in done if result.prompt_tokens is not None]
    lasting_s = max(seconds, 1e-9)
    return BenchRow(
        load="concurrency" if point.loop == "closed" else "rate",
        value=point.value,
        requests=len(results),
        outcomes=Counter(result.outcome for result in results),
        reasons=dict(Counter(result.reason for result in results if result.outcome != "done").most_common(8)),
        seconds=seconds,
        first_token_s=spread([result.first_s for result in done if result.first_s is not None]),
        inter_token_s=spread([gap for result in done for gap in result.gaps_s]),
        time_per_token_s=spread([each for result in done if (each := _time_per_token_s(result)) is not None]),
        whole_s=spread([result.ended_s for result in done]),
        requests_per_s=len(done) / lasting_s,
        tokens_per_s=tokens / lasting_s,
        tokens_by="usage" if reported else "events",
        prompt_tokens=sum(prompts) / len(prompts) if prompts else None,
        driver_cpu=driver_cpu,
        complete=len(results) == point.requests,
    )


def _time_per_token_s(result: Result) -> float | None:
    tokens = result.events if result.completion_tokens is None else result.completion_tokens
    return (result.last_s - result.first_s) / (tokens - 1) if result.first_s is not None and tokens > 1 else None


def spread(seconds: Sequence[float]) -> Spread:
    """Return nearest-rank percentiles."""
    ordered = sorted(seconds)
    if not ordered:
        return Spread()
    p50, p90, p99 = (ordered[ceil(share * len(ordered)) - 1] for share in (0.5, 0.9, 0.99))
    return Spread(p50, p90, p99, ordered[-1])


def render(rows: Sequence[BenchRow]) -> str:
    """Return the rows as a table with latencies in ms, and notes."""
    head = "LOAD  DONE  FAILED  TTFT MS P50  P99  INTER-TOKEN MS P50  P99  WHOLE MS P50  P99  TOKENS/S  REQ/S"
    cells: list[Sequence[object]] = []
    for row in rows:
        done = row.outcomes.get("done", 0)
        spreads = (row.first_token_s, row.inter_token_s, row.whole_s)
        latencies = [_ms(share) for each in spreads for share in (each.p50, each.p99)]
        rates = (f"{row.tokens_per_s:,.0f}", f"{row.requests_per_s:,.1f}")
        cells.append((row.name, done, row.requests - done, *latencies, *rates))
    return "\n".join([table(head, cells), *(note for row in rows for note in _notes(row))])


def _notes(row: BenchRow) -> list[str]:
    """Return warnings about a row."""
    failed = {name: number for name, number in row.outcomes.items() if name != "done"}
    notes: list[str] = []
    if failed:
        reason = next(iter(row.reasons), "")
        counts = ", ".join(f"{number} {name}" for name, number in failed.items())
        notes.append(f"{row.name}: {counts}" + (f" ({reason})" if reason else ""))
    if row.tokens_by == "events":
        notes.append(f"{row.name}: the server sent no usage; each event counts as one token")
    if row.driver_cpu > 0.8:
        notes.append(
            f"{row.name}: this driver used {row.driver_cpu:.0%} of a core: it may be the limit instead of the server"
        )
    if not row.complete:
        notes.append(f"{row.name}: not complete")
    return notes


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:,.1f}"
