"""A board of Grafana as plain data, and its JSON. Pure.

The JSON is made with Grafana's own SDK, whose types come from Grafana's schema of boards. Only `python -m
deploy.monitoring.boards` and tests need the SDK: the files under boards/ are in the repository.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from grafana_foundation_sdk.builders import dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableRefresh
from msgspec import Struct

Unit = Literal["short", "s", "percentunit", "bytes", "Bps", "reqps", "ops", "cps", "watt", "joule", "celsius", "none"]
"""Grafana's names: seconds, share of 1, bytes, bytes a second, requests, operations and counts a second."""
WIDTH, HEIGHT = 8, 8
"""Size of a panel; Grafana's boards are 24 wide."""
SOURCE = DataSourceRef(type_val="prometheus", uid="${source}")


class Query(Struct, frozen=True):
    """One query of a panel. `$namespace`, `$model` and `$__rate_interval` stand for what the viewer chose."""

    expr: str
    legend: str = ""
    """Text of the legend, in which `{{label}}` stands for a label's value."""


class Panel(Struct, frozen=True):
    """A graph over time."""

    title: str
    unit: Unit
    meaning: str
    """What it shows, and what to do when it is high."""
    queries: Sequence[Query]
    lit_by: str = ""
    """What must happen for it to show anything: a fault, or a GPU. Empty if requests are enough."""


class Row(Struct, frozen=True):
    """Panels under a heading."""

    title: str
    panels: Sequence[Panel]


class Board(Struct, frozen=True):
    """A page of Grafana."""

    uid: str
    title: str
    about: str
    rows: Sequence[Row]
    by_model: bool = False
    """Whether the viewer chooses models."""

    @property
    def panels(self) -> list[Panel]:
        return [panel for row in self.rows for panel in row.panels]


def render(board: Board) -> str:
    """Return Grafana's JSON of a board."""
    made = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.about)
        .tags(["headrace"])
        .refresh("10s")
        .time("now-1h", "now")
        .timezone("browser")
        .readonly()
        .with_variable(dashboard.DatasourceVariable("source").label("Prometheus").type("prometheus"))
        .with_variable(_choice("namespace", "label_values(process_start_time_seconds, namespace)"))
    )
    if board.by_model:
        made = made.with_variable(
            _choice("model", 'label_values(headrace_requests_total{namespace=~"$namespace"}, model)')
        )
    for row in board.rows:
        made = made.with_row(dashboard.Row(row.title))
        for panel in row.panels:
            made = made.with_panel(_graph(panel))
    return JSONEncoder(sort_keys=True, indent=1).encode(made.build()) + "\n"


def _choice(name: str, query: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(name)
        .datasource(SOURCE)
        .query(query)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
    )


def _graph(panel: Panel) -> timeseries.Panel:
    graph = (
        timeseries.Panel()
        .title(panel.title)
        .description(panel.meaning)
        .datasource(SOURCE)
        .unit(panel.unit)
        .min(0)
        .span(WIDTH)
        .height(HEIGHT)
        .line_width(1)
        .fill_opacity(10)
        .show_points(common.VisibilityMode.NEVER)
    )
    for letter, query in zip("ABCDEFGH", panel.queries, strict=False):
        graph = graph.with_target(
            prometheus.Dataquery().ref_id(letter).expr(query.expr).legend_format(query.legend or "__auto").range()
        )
    return graph
