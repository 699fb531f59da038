"""Percentiles by the nearest rank. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
"""The percentiles of latencies that are shown, by name."""


def nearest_ranks(ordered: Sequence[float]) -> dict[str, float]:
    """Return the percentiles of `SHARES`, by name, of values in ascending order; empty without values."""
    return {name: ordered[ceil(share * len(ordered)) - 1] for name, share in SHARES.items() if ordered}
