"""docs/gpu.md: its settings, paths, metrics and errors are those that there are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from deploy.local.stack.block_store import DEFAULTS
from deploy.local.usage import GPU_MEMORY_SHARE
from services.worker.config import CopyPath, CudaConfig, WorkerConfig
from services.worker.kv_connector.metrics import KvbmMetrics
from services.worker.metrics import WorkerMetrics

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
SETTINGS = TEXT.partition("## Settings")[2].partition("## Memory")[0]
SAID = TEXT.partition("| it says |")[2].partition("\n\n")[0]


def written(default: object) -> str:
    return str(default).lower() if isinstance(default, bool) else str(default)


def test_the_settings_and_their_defaults_are_those_that_there_are() -> None:
    rows = {
        name: default
        for names, default in re.findall(r"^\| (`.+?`) \| (.+?) \|", SETTINGS, re.M)
        for name in re.findall(r"`([a-z_.]+)`", names)
    }
    expected = {f"cuda.{field.name}": written(field.default) for field in msgspec.structs.fields(CudaConfig)}
    assert {name: default for name, default in rows.items() if name.startswith("cuda.")} == expected
    defaults = {field.name: written(field.default) for field in msgspec.structs.fields(WorkerConfig)}
    others = {name: default for name, default in rows.items() if "." not in name}
    assert others == {name: defaults[name] for name in others}


def test_every_way_of_copying_has_its_row() -> None:
    ways = TEXT.partition("## Copies")[2].partition("## What to watch")[0]
    assert {"auto", *re.findall(r"^\| `(\w+)` \|", ways, re.M)} == {"copy_path", *get_args(CopyPath)}


def test_its_metrics_are_ones_that_a_worker_has() -> None:
    registry = CollectorRegistry()
    WorkerMetrics(registry)
    KvbmMetrics(registry)
    there = {f"{family.name}_total" if family.type == "counter" else family.name for family in registry.collect()}
    named = set(re.findall(r"headrace_\w+", TEXT))
    assert len(named) >= 6
    assert named <= there


def test_up_does_what_it_says() -> None:
    assert f"`--gpu-memory-share` ({GPU_MEMORY_SHARE})" in TEXT
    assert DEFAULTS["cuda"] == (8, 32 << 30)
    assert "an eighth of the machine's memory, at most 32 GiB" in TEXT


def sources() -> str:
    """All that could say it, with strings that go on in the next line as one."""
    files = [*(ROOT / "services").rglob("*.py"), *(ROOT / "deploy").rglob("*.py")]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    return re.sub(r"\{[^{}\n]*\}|%[a-z.\d]+", "…", re.sub(r'"\n\s*f?"', "", text))


@pytest.mark.parametrize("cell", re.findall(r"^\| ([^|\n]+?) \|", SAID, re.M)[1:])
def test_what_it_quotes_is_what_is_said(cell: str) -> None:
    code = sources()
    pieces = [piece.strip() for piece in re.split(r"…|; |:| \(.*?\)", cell)]
    assert any(len(piece) > 7 for piece in pieces)
    for piece in pieces:
        assert piece in code, piece
