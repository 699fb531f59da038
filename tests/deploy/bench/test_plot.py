from __future__ import annotations

from pathlib import Path

import pytest

from deploy.local.bench import plot
from deploy.local.bench.plan import Point
from deploy.local.bench.rows import BenchRow, Result, RowKey, row_of


def row(variant: str, number: int, rate: float, first_s: float) -> BenchRow:
    done = [Result("done", first_s=first_s * share, ended_s=1.0, gaps_s=(0.1,), events=2) for share in (1, 1, 5)]
    return row_of(Point("open", rate, 3), done, 1.0 / first_s, 0.1, key=RowKey(variant, number))


ROWS = [row("a", 1, 1.0, 0.1), row("b", 1, 1.0, 9.0), row("a", 2, 1.0, 0.3), row("a", 1, 4.0, 0.2)]


def test_each_fleet_is_a_curve_that_is_seen_whole_and_rounds_have_their_median() -> None:
    curves = plot.series(ROWS)
    assert {name: len(rows) for name, rows in curves.items()} == {"a": 3, "b": 1}
    figure = plot.figure_of(curves)
    for axis in figure.axes:
        assert axis.get_ylim()[0] == 0
        assert max(max(line.get_ydata()) for line in axis.lines) < axis.get_ylim()[1]
    first, *_ = figure.axes[0].lines
    assert (list(first.get_xdata()), list(first.get_ydata())) == ([1.0, 4.0], [pytest.approx(0.2), pytest.approx(0.2)])


def test_a_name_with_the_signs_of_formulas_is_drawn_as_it_is(tmp_path: Path) -> None:
    plot.draw(plot.series([row("model=$x_{$", 1, 1.0, 0.1)]), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_many_curves_are_named_below_the_plots(tmp_path: Path) -> None:
    plot.draw(plot.series([row(f"fleet {number}", 1, 1.0, 0.1) for number in range(6)]), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
