"""Draws the fleets of a plan as a PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from deploy.local.picture import new_figure, save
from deploy.local.size.plan_page import Measured, front_of, planned_of, worst_of
from deploy.local.size.plan_report import PlanReport


def draw(made: PlanReport, measured: Sequence[Measured], path: Path) -> None:
    """Draw all fleets over GPUs and latency; with measurements also the best fleet's figures next to them."""
    figure = new_figure(12 if measured else 6.4, 4)
    axes = figure.subplots(1, 2 if measured else 1, squeeze=False)
    axis, front = axes[0][0], front_of(made.rows)
    axis.scatter([row.gpus for row in made.rows], [worst_of(row) for row in made.rows], color="gray", label="tried")
    axis.plot(
        [row.gpus for row in front], [worst_of(row) for row in front], marker="o", label="none cheaper and better"
    )
    axis.axhline(1, color="black", linewidth=1)
    axis.set(xlabel="GPUs", ylabel="worst figure, as a share of its target", title=f"Fleets for {made.model}")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_ylim(0, min(3.0, 1.1 * max(map(worst_of, made.rows)) + 0.1))
    axis.legend()
    if measured:
        planned = {name: seconds for name, seconds in planned_of(made.rows[0]).items() if name != "tokens"}
        beside = axes[0][1]
        beside.plot(list(planned), [1000 * seconds for seconds in planned.values()], "o", label="planned")
        for each in measured:
            names = [name for name in planned if name in each.figures]
            beside.plot(names, [1000 * each.figures[name] for name in names], "x", label=each.name)
        beside.set(ylabel="ms", title=made.rows[0].name)
        beside.tick_params("x", rotation=30)
        beside.legend()
    figure.tight_layout()
    save(figure, path)
