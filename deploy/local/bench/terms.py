"""What the figures of a load are held to: targets and prices. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from msgspec import Struct

from deploy.local.size.flags import TARGETS
from shared.percentiles import nearest_ranks

FEW = 12
"""Requests with fewer than these say nothing about a queue."""
GROWTH, GROWTH_SHARE = 1.5, 0.05
"""A queue grows if first tokens of the last third of requests come later than those of the first third by this factor,
and by this share of the time in which requests are sent."""


class Spread(Struct, frozen=True):
    """Percentiles in seconds. None means no values."""

    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    max: float | None = None


def spread(seconds: Sequence[float]) -> Spread:
    """Return nearest-rank percentiles."""
    ordered = sorted(seconds)
    return Spread(**nearest_ranks(ordered), max=ordered[-1] if ordered else None)


class Terms(Struct, frozen=True):
    """Targets and prices."""

    targets: Mapping[str, float] = {}
    """Upper limits in seconds, by names such as `ttft_p90`."""
    gpus: int = 1
    price: float = 0.0
    """The price of a GPU hour. 0 if it is not known."""
    gpu_watts: float = 0.0
    """The power of a GPU. 0 if it is not known."""

    def limit_s(self, figure: str) -> float | None:
        """Return the limit of a single request for `ttft` or `itl`: that of the highest percentile that has one."""
        return next((self.targets[name] for name in reversed(TARGETS) if name in self.targets and figure in name), None)


def missed(targets: Mapping[str, float], ttft: Spread, itl: Spread) -> dict[str, float]:
    """Return each figure that is above its target, divided by it."""
    figures = {name: getattr(ttft if name.startswith("ttft") else itl, name[-3:]) for name in TARGETS}
    found = {name: figures[name] / limit for name, limit in targets.items() if figures[name] is not None}
    return {name: ratio for name, ratio in found.items() if ratio > 1}


def queue_grows(firsts: Sequence[tuple[float, float]]) -> bool | None:
    """Return whether first tokens come later and later, given when each request was sent and how long its first token
    took. None if these are too few to say."""
    if len(firsts) < FEW:
        return None
    ordered = sorted(firsts)
    third = len(ordered) // 3
    early, late = (median(first_s for _, first_s in part) for part in (ordered[:third], ordered[-third:]))
    return late > GROWTH * early and late - early > GROWTH_SHARE * (ordered[-1][0] - ordered[0][0])
