"""docs/operations.md speaks of metrics and settings that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from services.frontend.config import FrontendConfig
from services.kvbm.config import KvbmConfig
from services.router.config import RouterConfig
from services.router.metrics import RouterMetrics as RouterMetrics
from services.worker.config import WorkerConfig
from services.worker.metrics import WorkerMetrics as WorkerMetrics
from tests.chaos.plan import CLUSTERS_DECK, DECK, ROLES_DECK
from tests.metric_names import every_metric

DOCUMENT = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")


async def test_every_metric_it_names_exists() -> None:
    known = set(await every_metric())
    named = set(re.findall(r"headrace_[a-z_]+", DOCUMENT))
    assert named
    assert named <= known


def test_it_says_how_many_faults_a_chaos_run_does() -> None:
    said = re.search(
        r"`python -m tests.chaos` does (\d+) faults of this page .* `--roles` .*: (\d+) faults\."
        r".* `--clusters`.*? the (\d+) faults",
        DOCUMENT,
        re.S,
    )
    assert said
    assert [int(number) for number in said.groups()] == [len(DECK), len(ROLES_DECK), len(CLUSTERS_DECK)]


async def test_every_setting_it_names_exists() -> None:
    schemas = (FrontendConfig, RouterConfig, KvbmConfig, WorkerConfig)
    known = {".".join(path) for schema in schemas for path in settings(schema)}
    named = set(re.findall(r"`([a-z_]+\.[a-z_]+_s|[a-z]+_s|(?:limits|pool|disk|kvbm)\.[a-z_]+)`", DOCUMENT))
    assert "limits.rescue_s" in named
    assert named <= known


def settings(schema: type[msgspec.Struct], *above: str) -> Iterator[tuple[str, ...]]:
    """The path of every setting, tables included."""
    for field in msgspec.structs.fields(schema):
        yield (*above, field.name)
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from settings(field.type, *above, field.name)
