"""Draws the curves of a sweep as a PNG. This is the only module of the command that needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import matplotlib as mpl

from deploy.local.bench.rows import Row

mpl.use("Agg")

from matplotlib import pyplot

_Curves = Mapping[str, Callable[[Row], float | None]]
_LATENCIES: Mapping[str, _Curves] = {
    "time to first token, s": {
        "p50": lambda row: row.first_token_s.p50,
        "p99": lambda row: row.first_token_s.p99,
    },
    "between tokens, s": {
        "p50": lambda row: row.inter_token_s.p50,
        "p99": lambda row: row.inter_token_s.p99,
    },
    "whole answer, s": {
        "p50": lambda row: row.whole_s.p50,
        "p99": lambda row: row.whole_s.p99,
    },
    "tokens/s": {"": lambda row: row.tokens_per_s},
}


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw latencies and throughput over the load into a PNG file."""
    figure, axes = pyplot.subplots(1, len(_LATENCIES), figsize=(4.4 * len(_LATENCIES), 3.6))
    for axis, (title, curves) in zip(axes, _LATENCIES.items(), strict=True):
        for name, value in curves.items():
            seen = [(row.value, y) for row in rows if (y := value(row)) is not None]
            axis.plot([x for x, _ in seen], [y for _, y in seen], marker="o", markersize=4, label=name)
        axis.set(title=title, xlabel=rows[0].load)
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
        axis.grid(visible=True, alpha=0.3)
        if len(curves) > 1:
            axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
