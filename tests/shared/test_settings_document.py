"""Every setting is named in some document, and docs/limits.md has the router's limits with their defaults."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import Struct
from msgspec.structs import fields

from services.frontend.config import FrontendConfig
from services.kvbm.config import KvbmConfig
from services.router.config import RouterConfig
from services.worker.config import WorkerConfig

DOCS = Path(__file__).parents[2] / "docs"
LIMITS = (DOCS / "limits.md").read_text(encoding="utf-8")


def settings(table: type[Struct], above: str = "") -> Iterator[str]:
    for field in fields(table):
        if isinstance(field.type, type) and issubclass(field.type, Struct):
            yield from settings(field.type, f"{above}{field.name}.")
        else:
            yield above + field.name


@pytest.mark.parametrize("service", [FrontendConfig, RouterConfig, WorkerConfig, KvbmConfig])
def test_every_setting_is_named_in_a_document(service: type[Struct]) -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in DOCS.glob("*.md")).replace("-", "_")
    named = set(re.findall(r"\w+", text))
    assert [each for each in settings(service) if each.rpartition(".")[2] not in named] == []


def test_the_routers_limits_have_their_defaults() -> None:
    section = LIMITS.partition("### A router\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w.]+)` \| ([\d,.]+) \|", section, re.MULTILINE)
    defaults = {}
    for name, _ in rows:
        value: object = RouterConfig()
        for part in name.split("."):
            value = getattr(value, part)
        defaults[name] = value
    assert len(rows) > 10
    assert {name: float(default.replace(",", "")) for name, default in rows} == defaults
