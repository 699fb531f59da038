"""tests/long_run.py: what `./check long` found is kept in a file of the tree."""

from __future__ import annotations

import subprocess
from datetime import date
from pathlib import Path

import msgspec
import pytest

from tests.long_run import FILE, LongRun, Step, commit_of, counts_of, main, steps_of

SUMMARY = """\
format         ok         1 s      0 s of processor time
chaos-roles    FAILED  1801 s    900 s of processor time
"""


def test_the_kept_run_can_be_read() -> None:
    if not FILE.exists():
        pytest.skip("./check long was not run yet")
    kept = msgspec.json.decode(FILE.read_bytes(), type=LongRun)
    assert kept.tests["passed"] > 0
    assert {"tests", "chaos"} <= {step.name for step in kept.steps}


def test_a_line_of_the_summary_is_a_step() -> None:
    assert steps_of(SUMMARY) == (Step("format", True, 1, 0), Step("chaos-roles", False, 1801, 900))


def test_the_last_line_of_the_tests_has_the_counts() -> None:
    assert counts_of("2 failed, 3 error, 4123 passed, 9 skipped in 812 s") == {
        "failed": 2,
        "error": 3,
        "passed": 4123,
        "skipped": 9,
    }
    assert counts_of("no tests in 3 s") == {}


def test_steps_counts_commit_and_day_are_written(tmp_path: Path) -> None:
    root, steps, tests, kept = (tmp_path / name for name in ("checkout", "summary", "output", "long.json"))
    root.mkdir()
    who = ("-c", "user.name=any", "-c", "user.email=any@example.org")
    for words in (("init",), ("commit", "--allow-empty", "-m", "first")):
        subprocess.run(["git", *who, *words], cwd=root, check=True, capture_output=True)
    steps.write_text(SUMMARY)
    tests.write_text("1 passed in 0.1s\n2 failed, 5 passed in 60 s\n")
    main(steps, tests, root, kept)
    found = msgspec.json.decode(kept.read_bytes(), type=LongRun)
    assert found.steps == steps_of(SUMMARY)
    assert found.tests == {"failed": 2, "passed": 5}
    assert found.date <= date.today()
    assert found.commit == commit_of(root)
    assert not found.commit.endswith("+")
    (root / "changed").touch()
    assert commit_of(root) == f"{found.commit}+"
