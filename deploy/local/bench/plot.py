"""Draws the curves of a sweep as a PNG. This is the only module of the command that needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

from deploy.local.bench.rows import BenchRow

mpl.use("Agg")

from matplotlib import pyplot

_LATENCIES = {
    "time to first token, s": "first_token_s",
    "between tokens, s": "inter_token_s",
    "whole answer, s": "whole_s",
}
"""The title of each plot of latencies, and the field of BenchRow that it shows."""


def draw(rows: Sequence[BenchRow], path: Path) -> None:
    """Draw latencies and throughput over the load into a PNG file."""
    figure, axes = pyplot.subplots(1, len(_LATENCIES) + 1, figsize=(4.4 * (len(_LATENCIES) + 1), 3.6))
    for axis, (title, field) in zip(axes, _LATENCIES.items(), strict=False):
        for percentile in ("p50", "p99"):
            _curve(axis, title, rows, [getattr(getattr(row, field), percentile) for row in rows], percentile)
        axis.legend()
    _curve(axes[-1], "tokens/s", rows, [row.tokens_per_s for row in rows])
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _curve(axis: Any, title: str, rows: Sequence[BenchRow], values: Sequence[float | None], name: str = "") -> None:
    seen = [(row.value, value) for row, value in zip(rows, values, strict=True) if value is not None]
    axis.plot([x for x, _ in seen], [y for _, y in seen], marker="o", markersize=4, label=name)
    axis.set(title=title, xlabel=rows[0].load)
    axis.set_xscale("log", base=2)
    axis.set_ylim(bottom=0)
    axis.grid(visible=True, alpha=0.3)
