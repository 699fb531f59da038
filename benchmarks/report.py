"""What benchmarks print: with --json an object of the same shape for all."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
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


def print_report(benchmark: str, goals: Sequence[Goal], rows: Sequence[Mapping[str, Any]], *, as_json: bool) -> None:
    """Print what the running benchmark has found: its object, or lines to read."""
    if as_json:
        found = report(benchmark, sys.argv[1:], goals, rows)
        print(json.dumps(msgspec.to_builtins(found), indent=1))
        return
    for row in rows:
        print("  ".join(f"{name} {_shown(value)}" for name, value in row.items()))
    for goal in goals:
        print(f"{goal.name}: {_shown(goal.value)} {goal.unit}, goal {goal.goal:g}: {'met' if goal.met else 'missed'}")


def _shown(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _head() -> str:
    asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return asked.stdout.strip()
