"""Keeps what `./check long` found in tests/long.json: `python -m tests.long_run STEPS TESTS`.

STEPS is a file with a line for each step: its name, `ok` or `FAILED`, its seconds, those of processor time. TESTS is
what the tests printed; its last line counts them.
"""

from __future__ import annotations

import re
import subprocess
import sys
from datetime import date
from pathlib import Path

import msgspec
from msgspec import Struct

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "tests" / "long.json"


class Step(Struct, frozen=True):
    """How one step ended."""

    name: str
    ok: bool
    wall_s: int
    processor_s: int


class LongRun(Struct, frozen=True, forbid_unknown_fields=True):
    """The last `./check long`."""

    commit: str
    """The first 12 digits of its hash, and `+` if files were changed."""
    date: date
    """Day of its end."""
    steps: tuple[Step, ...]
    tests: dict[str, int]
    """How many tests passed, failed, were skipped and so on."""


def steps_of(summary: str) -> tuple[Step, ...]:
    """Read the lines of steps, such as `mypy  ok  21 s  20 s of processor time`."""
    lines = (line.split() for line in summary.splitlines())
    return tuple(Step(name, ok == "ok", int(wall), int(processor)) for name, ok, wall, _, processor, *_ in lines)


def counts_of(last_line: str) -> dict[str, int]:
    """Read the counts from a line such as `2 failed, 5 passed in 60 s`."""
    return {word: int(count) for count, word in re.findall(r"(\d+) ([a-z]+)(?:, | in )", last_line)}


def commit_of(root: Path) -> str:
    """Return the checkout's commit."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True).stdout.strip()

    return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain") else "")


def main(steps: Path, tests: Path, root: Path = ROOT, file: Path = FILE) -> None:
    """Write the file."""
    last_line = tests.read_text(encoding="utf-8").rstrip().rpartition("\n")[2]
    found = LongRun(commit_of(root), date.today(), steps_of(steps.read_text(encoding="utf-8")), counts_of(last_line))
    file.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    print(f"written to {file}: commit {found.commit}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
