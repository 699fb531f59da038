"""Draws a benchmark's curves, or any benchmark's goals, as a PNG. Only this module imports matplotlib.

python -m benchmarks.plot benchmarks/results/index.json …      writes index.png to the same directory
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import msgspec
from msgspec import Struct

from benchmarks.report import Goal

mpl.use("Agg")

from matplotlib import pyplot

Curve = tuple[Sequence[float], Sequence[float]]


class Panel(Struct, frozen=True):
    """One chart of an image."""

    title: str
    x: str
    y: str
    curves: Mapping[str, Curve]
    """The curves by label, each with x values and y values."""
    goal: float | None = None
    """The height of a horizontal line; None for no line."""
    log: bool = False
    """Whether the y axis is logarithmic."""


def draw(panels: Sequence[Panel], path: Path, *, columns: int) -> None:
    """Draw panels from left to right, row by row, with one legend."""
    rows = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(4.6 * columns, 3.6 * rows), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for panel, axis in zip(panels, axes.flat, strict=False):
        for label, (xs, ys) in panel.curves.items():
            axis.plot(xs, ys, marker="o" if len(xs) < 20 else "", markersize=4, label=label)
        if panel.goal is not None:
            axis.axhline(panel.goal, color="grey", linestyle="--", linewidth=1)
        if panel.log:
            axis.set_yscale("log")
        axis.set_title(panel.title, fontsize=10)
        axis.set_xlabel(panel.x, fontsize=9)
        axis.set_ylabel(panel.y, fontsize=9)
        axis.grid(visible=True, alpha=0.3)
    labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(*labels, loc="lower center", ncols=max(len(labels[0]), 1), fontsize=9)
    figure.tight_layout(rect=(0, 0.35 / figure.get_figheight(), 1, 1))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


class _Report(Struct, frozen=True):
    benchmark: str
    commit: str
    goals: list[Goal]


def draw_goals(report: Path) -> Path:
    """Draw a bar for each goal, as a multiple of it, green if it is met. Raises MsgspecError for other files."""
    read = msgspec.json.decode(report.read_bytes(), type=_Report)
    figure, axis = pyplot.subplots(figsize=(9, 1 + 0.32 * len(read.goals)))
    values = [goal.value or 0.0 for goal in read.goals]
    shares = [
        value / goal.goal if goal.goal else float(value != 0) for value, goal in zip(values, read.goals, strict=True)
    ]
    names = [
        f"{goal.name}: {value:,.4g} {goal.unit} ({goal.goal:,.4g})"
        for value, goal in zip(values, read.goals, strict=True)
    ]
    axis.barh(names, shares, color=["seagreen" if goal.met else "indianred" for goal in read.goals])
    axis.axvline(1, color="grey", linestyle="--", linewidth=1)
    axis.invert_yaxis()
    axis.tick_params(labelsize=8)
    axis.set_xlabel("value as a multiple of the goal", fontsize=9)
    axis.set_title(f"{read.benchmark}, commit {read.commit[:7]}", fontsize=10)
    figure.tight_layout()
    path = report.with_suffix(".png")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(draw_goals(Path(name)))
