"""docs/metrics.md, from the rows of all metrics: `python -m tests.metrics_page` writes it."""

from __future__ import annotations

import inspect
from itertools import chain
from pathlib import Path
from typing import Any

import deploy.local.autoscale.autoscale
import services.frontend.auth.access
import services.frontend.metrics
import services.kvbm.metrics
import services.router.metrics
import services.worker.kv_connector.metrics
import services.worker.metrics
import services.worker.reports.gpus
import services.worker.reports.observations
import services.worker.turns.metrics
import shared.bus.event_planes
import shared.bus.outbox
import shared.discovery.directory
import shared.discovery.etcd
import shared.runtime.lifecycle
import shared.tracing.exporter
import shared.tracing.tracer
from shared.metrics import MetricRow, rows_of

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
SECTIONS = {
    "Frontends": [services.frontend.metrics, services.frontend.auth.access],
    "Routers": [services.router.metrics],
    "Workers": [
        services.worker.metrics,
        services.worker.kv_connector.metrics,
        services.worker.reports.gpus,
        services.worker.reports.observations,
    ],
    "Models by turns": [services.worker.turns.metrics],
    "Block stores": [services.kvbm.metrics],
    "`headrace autoscale`": [deploy.local.autoscale.autoscale],
    "Every service, or several": [
        shared.bus.event_planes,
        shared.bus.outbox,
        shared.discovery.directory,
        shared.discovery.etcd,
        shared.runtime.lifecycle,
        shared.tracing.exporter,
        shared.tracing.tracer,
    ],
}
"""The modules with the rows of each section. Paragraphs before the first section stay as they are on the page."""
COLUMNS = "| metric | type | labels | meaning | when it is high |\n| --- | --- | --- | --- | --- |\n"


def written(page: str) -> str:
    """The page with its sections made from the rows."""
    first = page.index(f"## {next(iter(SECTIONS))}\n")
    return page[:first] + "\n".join(
        f"## {title}\n\n{COLUMNS}{''.join(map(_line, sorted(chain(*map(_rows, modules)), key=_name)))}"
        for title, modules in SECTIONS.items()
    )


def _rows(module: Any) -> list[MetricRow[Any]]:
    classes = [each for _, each in inspect.getmembers(module, inspect.isclass) if each.__module__ == module.__name__]
    return [row for place in (module, *classes) for row in rows_of(place).values()]


def _name(row: MetricRow[Any]) -> str:
    return f"{row.name}_total" if row.kind == "counter" else row.name


def _line(row: MetricRow[Any]) -> str:
    labels = ", ".join(f"`{label}`" for label in row.labels.split()) or "—"
    return f"| `{_name(row)}` | {row.kind} | {labels} | {row.text.rstrip('.')}. | {row.advice or '—'} |\n"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
