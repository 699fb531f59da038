"""The object that every benchmark prints with --json, with the same shape for all."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

ROOT = Path(__file__).resolve().parents[1]
_PYTHON = f"{sys.implementation.name} {platform.python_version()}"


class Goal(Struct, frozen=True):
    """One measured figure and its goal."""

    name: str
    value: float | None
    """The figure; None if its yardstick is missing."""
    unit: str
    goal: float
    met: bool


def report(benchmark: str, command: Sequence[str], goals: Sequence[Goal], rows: Sequence[Any]) -> dict[str, Any]:
    """Return the object of a benchmark. `command` is the arguments after `python -m benchmarks.…`.

    Of paths only the last names are kept. BENCHMARK_COMMIT gives the commit if the tree is a copy without its history.
    """
    commit = os.environ.get("BENCHMARK_COMMIT") or _head()
    return {
        "benchmark": benchmark,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {_PYTHON}",
        "commit": commit,
        "command": " ".join([f"python -m benchmarks.{benchmark}", *(Path(word).name for word in command)]),
        "goals": list(goals),
        "rows": list(rows),
    }


def _head() -> str:
    asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return asked.stdout.strip()
