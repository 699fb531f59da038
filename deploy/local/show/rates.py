"""What the services did between two looks at their metrics. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families

from deploy.local.table import table

FIRST_TOKEN = "headrace_time_to_first_token_seconds_bucket"  # noqa: S105 the name of a metric
TOTALS = {
    ("frontend", "headrace_requests_total"): "requests",
    ("worker", "headrace_output_tokens_total"): "tokens",
    ("worker", "headrace_prompt_tokens_total"): "prompt_tokens",
}
"""(Service, series) → what it counts. Others have series of the same names: workers count attempts as requests."""


class Sample(Struct, frozen=True):
    """What one process has counted since its start."""

    at_s: float
    """When it was asked, on a clock that never goes back."""
    totals: Mapping[str, float] = {}
    """A value of TOTALS → its number."""
    first_tokens: Mapping[float, float] = {}
    """Seconds → how many requests had their first token within them."""


class Rates(Struct, frozen=True):
    """What all services did, per second of an interval."""

    over_s: float = 0.0
    """The length of the interval; 0: there was none yet."""
    per_s: Mapping[str, float] = {}
    first_token_p50_s: float | None = None
    """The time to the first token of half of the requests at most; None: no request had one."""
    first_token_p90_s: float | None = None


def sample(service: str, metrics: str, at_s: float) -> Sample:
    """Return what counts of a text of metrics. Raise ValueError if it is none."""
    totals: dict[str, float] = {}
    first_tokens: dict[float, float] = {}
    for family in text_string_to_metric_families(metrics):
        for series in family.samples:
            if (counted := TOTALS.get((service, series.name))) is not None:
                totals[counted] = totals.get(counted, 0.0) + series.value
            elif service == "frontend" and series.name == FIRST_TOKEN:
                bound = float(series.labels["le"])
                first_tokens[bound] = first_tokens.get(bound, 0.0) + series.value
    return Sample(at_s, totals, first_tokens)


def rates(before: Mapping[str, Sample], after: Mapping[str, Sample]) -> Rates:
    """Return what the processes that were asked twice did in between, together. Keys are names of instances."""
    pairs = [(before[name], each) for name, each in after.items() if name in before]
    lengths_s = [late.at_s - early.at_s for early, late in pairs]
    per_s = dict.fromkeys(TOTALS.values(), 0.0)
    first_tokens: dict[float, float] = {}
    for (early, late), length_s in zip(pairs, lengths_s, strict=True):
        for name, total in late.totals.items():
            per_s[name] += max(0.0, total - early.totals.get(name, 0.0)) / length_s
        for bound, count in late.first_tokens.items():
            grown = max(0.0, count - early.first_tokens.get(bound, 0.0))
            first_tokens[bound] = first_tokens.get(bound, 0.0) + grown
    if not pairs:
        return Rates()
    halfway, most = (quantile(share, first_tokens) for share in (0.5, 0.9))
    return Rates(max(lengths_s), per_s, halfway, most)


def quantile(share: float, counts: Mapping[float, float]) -> float | None:
    """Return the value below which that share of a histogram lies; `counts` are cumulative, by upper bound.

    Inside a bucket, values are taken to be spread evenly. Above the last finite bound, it is that bound.
    """
    bounds = sorted(counts)
    if not bounds or counts[bounds[-1]] <= 0:
        return None
    wanted = share * counts[bounds[-1]]
    lower, below = 0.0, 0.0
    for bound in bounds:
        if counts[bound] >= wanted:
            if math.isinf(bound):
                return lower
            return lower + (bound - lower) * (wanted - below) / (counts[bound] - below)
        lower, below = bound, counts[bound]
    return lower


def render_rates(seen: Rates) -> str:
    """Return the rates as a table; `-` stands for what is not known yet."""
    first_tokens = map(_duration, (seen.first_token_p50_s, seen.first_token_p90_s))
    per_s: Iterable[str] = (f"{seen.per_s[name]:.3g}" if seen.over_s else "-" for name in TOTALS.values())
    over = f"{seen.over_s:.1f}s" if seen.over_s else "-"
    return table("REQUESTS/S  TOKENS/S  PROMPT TOKENS/S  TTFT P50  TTFT P90  OVER", [(*per_s, *first_tokens, over)])


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
