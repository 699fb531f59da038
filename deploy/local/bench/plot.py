"""Draws the curves of loads as a PNG."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any

from deploy.local.bench.rows import BenchRow
from deploy.local.picture import new_figure, save

_LATENCIES = {
    "time to first token, s": "first_token_s",
    "between tokens, s": "inter_token_s",
    "whole answer, s": "whole_s",
}
"""The title of each plot of latencies, and the field of BenchRow that it shows."""
LABELS_INSIDE = 4
"""The most curves whose names are in each plot; more are below all of them."""


def series(rows: Sequence[BenchRow]) -> dict[str, list[BenchRow]]:
    """Return the rows of each curve by its name."""
    found: dict[str, list[BenchRow]] = {}
    for row in rows:
        shared = "" if row.prefix_ratio is None else f"{row.prefix_ratio:.0%} shared"
        scenario = "" if row.scenario == "mixed" else row.scenario
        name = ", ".join(filter(None, (row.variant, shared, scenario)))
        found.setdefault(name, []).append(row)
    return found


def draw(curves: Mapping[str, Sequence[BenchRow]], path: Path) -> None:
    """Draw latencies and throughput over the load into a PNG file, for each of the named curves."""
    save(figure_of(curves), path)


def figure_of(curves: Mapping[str, Sequence[BenchRow]]) -> Any:
    """Return the figure of latencies and throughput."""
    figure = new_figure(4.4 * (len(_LATENCIES) + 1), 3.6)
    axes = figure.subplots(1, len(_LATENCIES) + 1)
    for axis, (title, field) in zip(axes, _LATENCIES.items(), strict=False):
        for number, (name, rows) in enumerate(curves.items()):
            for percentile, style, fill in (("p50", "-", "full"), ("p99", ":", "none")):
                label = " ".join(filter(None, (name, percentile)))
                _curve(axis, rows, attrgetter(f"{field}.{percentile}"), label)
                axis.lines[-1].set(linestyle=style, fillstyle=fill, color=f"C{number}")
        axis.set(title=title)
    for number, (name, rows) in enumerate(curves.items()):
        _curve(axes[-1], rows, attrgetter("tokens_per_s"), name)
        axes[-1].lines[-1].set(color=f"C{number}")
    axes[-1].set(title="tokens/s")
    if len(curves) <= LABELS_INSIDE:
        axes[0].legend(fontsize="small")
    else:
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small")
    loads = " or ".join(dict.fromkeys(row.load for rows in curves.values() for row in rows))
    for axis in axes:
        axis.set(xlabel=loads)
        axis.set_ylim(bottom=0)  # after all curves: it ends the axis's own scaling
    figure.set_layout_engine("constrained")
    return figure


def _curve(axis: Any, rows: Sequence[BenchRow], value: Callable[[BenchRow], float | None], name: str) -> None:
    """Draw one curve; a load of several rounds has their median."""
    seen: dict[float, list[float]] = {}
    for row in rows:
        if (found := value(row)) is not None:
            seen.setdefault(row.value, []).append(found)
    axis.plot(sorted(seen), [median(seen[x]) for x in sorted(seen)], marker="o", markersize=4, label=name or None)
    axis.set_xscale("log", base=2)
    axis.grid(visible=True, alpha=0.3)
