"""What the services did between two looks at their metrics. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families

from deploy.local.table import table

FIRST_TOKEN = "headrace_time_to_first_token_seconds_bucket"  # noqa: S105 the name of a metric
CACHED = "headrace_cached_tokens_total"
INFLIGHT = "headrace_inflight_requests"
TIERS: tuple[str, ...] = ("device", "host", "disk")
TOTALS = {
    ("frontend", "headrace_requests_total"): "requests",
    ("frontend", "headrace_prompt_tokens_total"): "asked_tokens",
    ("frontend", "headrace_hand_overs_total"): "hand_overs",
    ("frontend", "headrace_input_sequence_tokens_count"): "prompts",
    ("frontend", "headrace_output_sequence_tokens_count"): "answers",
    ("frontend", "headrace_output_sequence_tokens_sum"): "answer_tokens",
    ("worker", "headrace_output_tokens_total"): "tokens",
    ("worker", "headrace_prompt_tokens_total"): "prompt_tokens",
}
"""(Service, series) → what it counts. Others have series of the same names: workers count attempts as requests."""
REFUSED = ("429", "503")
"""The statuses of requests for which no worker had room; they count as `refused` too."""
COLUMNS = ("requests", "tokens", "prompt_tokens")
"""The numbers that `status --watch` shows."""
GONE_SHOWN_S = 60.0
"""How long a process that is gone stays in the view."""
GONE_SHOWN = 20
"""The maximum number of them; the latest are shown."""


class Sample(Struct, frozen=True):
    """What one process has counted since its start."""

    at_s: float
    """When it was asked, on a clock that never goes back."""
    totals: Mapping[str, float] = {}
    """A value of TOTALS → its number."""
    first_tokens: Mapping[float, float] = {}
    """Seconds → how many requests had their first token within them."""
    cached: Mapping[str, float] = {}
    """Tier → how many prompt tokens a frontend's requests found cached there."""
    inflight: float = 0.0
    """Requests at a frontend now."""


class Rates(Struct, frozen=True):
    """What all services did, per second of an interval."""

    over_s: float = 0.0
    """The length of the interval. 0 if there was none yet."""
    per_s: Mapping[str, float] = {}
    first_token_p50_s: float | None = None
    """The time to the first token of half of the requests at most. None if no request had one."""
    first_token_p90_s: float | None = None
    hits: Mapping[str, float] = {}
    """Tier → the share of prompt tokens that were found cached there. Empty if no request ended in the interval."""


def sample(service: str, metrics: str, at_s: float) -> Sample:
    """Return what counts of a text of metrics. Raise ValueError if it is none."""
    totals: dict[str, float] = {}
    first_tokens: dict[float, float] = {}
    cached: dict[str, float] = {}
    inflight = 0.0
    for family in text_string_to_metric_families(metrics):
        for series in family.samples:
            if (counted := TOTALS.get((service, series.name))) is not None:
                totals[counted] = totals.get(counted, 0.0) + series.value
                if counted == "requests" and series.labels.get("status") in REFUSED:
                    totals["refused"] = totals.get("refused", 0.0) + series.value
            elif service == "frontend" and series.name == FIRST_TOKEN:
                bound = float(series.labels["le"])
                first_tokens[bound] = first_tokens.get(bound, 0.0) + series.value
            elif service == "frontend" and series.name == CACHED and (tier := series.labels["tier"]) in TIERS:
                cached[tier] = cached.get(tier, 0.0) + series.value
            elif service == "frontend" and series.name == INFLIGHT:
                inflight += series.value
    return Sample(at_s, totals, first_tokens, cached, inflight)


def rates(before: Mapping[str, Sample], after: Mapping[str, Sample]) -> Rates:
    """Return what the processes that were asked twice did in between, together. Keys are names of instances."""
    both = [(before[name], each) for name, each in after.items() if name in before]
    pairs = [(early, late) for early, late in both if late.at_s > early.at_s]
    lengths_s = [late.at_s - early.at_s for early, late in pairs]
    per_s = dict.fromkeys(TOTALS.values(), 0.0)
    first_tokens: dict[float, float] = {}
    cached = dict.fromkeys(TIERS, 0.0)
    for (early, late), length_s in zip(pairs, lengths_s, strict=True):
        for name, total in late.totals.items():
            per_s[name] = per_s.get(name, 0.0) + max(0.0, total - early.totals.get(name, 0.0)) / length_s
        for bound, count in late.first_tokens.items():
            grown = max(0.0, count - early.first_tokens.get(bound, 0.0))
            first_tokens[bound] = first_tokens.get(bound, 0.0) + grown
        for tier in cached:
            grown = late.cached.get(tier, 0.0) - early.cached.get(tier, 0.0)
            cached[tier] += max(0.0, grown) / length_s
    if not pairs:
        return Rates()
    halfway, most = (quantile(share, first_tokens) for share in (0.5, 0.9))
    asked = per_s["asked_tokens"]
    hits = {tier: min(1.0, each / asked) for tier, each in cached.items()} if asked else {}
    return Rates(max(lengths_s), per_s, halfway, most, hits)


def departures(
    before: Mapping[str, str], now: Mapping[str, str], gone: Mapping[str, tuple[str, float]], now_s: float
) -> dict[str, tuple[str, float]]:
    """Return which instances are gone: instance → (service, since when). A few of the latest stay, for a while."""
    left = {**gone, **{name: (service, now_s) for name, service in before.items() if name not in now}}
    recent = [
        (name, (service, since_s))
        for name, (service, since_s) in left.items()
        if name not in now and now_s - since_s < GONE_SHOWN_S
    ]
    return dict(recent[-GONE_SHOWN:])


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
    first_tokens = map(duration, (seen.first_token_p50_s, seen.first_token_p90_s))
    per_s: Iterable[str] = (f"{seen.per_s[name]:.3g}" if seen.over_s else "-" for name in COLUMNS)
    over = f"{seen.over_s:.1f}s" if seen.over_s else "-"
    return table("REQUESTS/S  TOKENS/S  PROMPT TOKENS/S  TTFT P50  TTFT P90  OVER", [(*per_s, *first_tokens, over)])


def duration(seconds: float | None) -> str:
    """Return a duration in seconds or milliseconds; `-`: it is not known."""
    if seconds is None:
        return "-"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
