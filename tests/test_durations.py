"""tests/durations.py: what is remembered of the tests' durations, and what a run took more."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.durations import (
    Duration,
    Took,
    comparable,
    durations_of,
    more_than_known,
    of_files,
    read,
    read_report,
    text_of,
)

ROOT = Path(__file__).resolve().parents[1]
ROUTER = "tests/router/test_x.py"
STACK = "tests/integration/test_y.py"


def test_what_is_remembered_is_of_files_of_tests_that_are_there() -> None:
    files = {key.partition("@")[0] for key in read()}
    assert [file for file in files if not (file.startswith("tests/") and (ROOT / file).is_file())] == []


def test_only_long_files_that_are_there_are_remembered() -> None:
    durations = {
        ROUTER: Duration(3.0, 2.0),
        f"{ROUTER}@long": Duration(9.0, 8.0),
        STACK: Duration(0.4, 0.4),
        "tests/gone/test_z.py": Duration(5.0, 5.0),
        ".venv/lib/hypothesis/stateful.py": Duration(5.0, 5.0),
    }
    assert json.loads(text_of(durations, {ROUTER, STACK})) == {ROUTER: [3.0, 2.0], f"{ROUTER}@long": [9.0, 8.0]}


def test_a_file_takes_as_long_as_its_tests_of_the_tiers_that_run() -> None:
    durations = {ROUTER: Duration(3.0, 2.0), f"{ROUTER}@long": Duration(9.0, 8.0), STACK: Duration(1.0, 1.0)}
    assert of_files(durations, ["check"]) == {ROUTER: Duration(3.0, 2.0)}
    assert of_files(durations, ["long"]) == {ROUTER: Duration(9.0, 8.0)}
    assert of_files(durations, ["check", "all", "long"]) == {ROUTER: Duration(12.0, 10.0), STACK: Duration(1.0, 1.0)}


def test_what_a_bunch_takes_for_itself_is_shared_by_its_files() -> None:
    tests = [
        Took("a", "a", "1", 3.0, 1.0),
        Took("a", "a", "2", 1.0, 0.5),
        Took("a@long", "a", "3", 5.0, 4.0),
        Took("b", "b", "1", 4.0, 0.0),
    ]
    assert durations_of(tests, 7.0) == {"a": Duration(4.0, 2.0), "a@long": Duration(5.0, 4.5), "b": Duration(4.0, 0.5)}
    assert durations_of([], 1.0) == {}


def test_a_machine_of_hypothesis_belongs_to_the_file_that_has_it(tmp_path: Path) -> None:
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test_a.py").write_text(
        "from hypothesis.stateful import RuleBasedStateMachine, rule\n"
        "class Machine(RuleBasedStateMachine):\n    @rule()\n    def step(self): pass\n"
        "TestMachine = Machine.TestCase\n"
    )
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null"]
    options = ["--rootdir", str(tmp_path), "-o", "junit_family=xunit1", f"--junitxml={report}", str(folder)]
    subprocess.run([*command, "--import-mode=importlib", *options], check=True, capture_output=True, cwd=tmp_path)
    assert [test.file for test in read_report(report)] == ["tests/test_a.py"]
    assert read_report(tmp_path / "none.xml") == []


def test_a_later_tier_and_the_processor_time_come_from_the_report(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuite><testcase classname="tests.router.test_x" name="test_1" time="2.5"><properties>'
        '<property name="tier" value="long"/><property name="processor_s" value="1.25"/></properties></testcase>'
        "</testsuite>"
    )
    assert read_report(report) == [Took(f"{ROUTER}@long", ROUTER, "test_1", 2.5, 1.25)]


def test_a_run_on_a_slow_machine_names_only_the_files_that_grew_more_than_the_others() -> None:
    known = {f"tests/{name}.py": Duration(10.0, 10.0) for name in "abcde"}
    measured = {file: Duration(30.0, 30.0) for file in known}
    assert more_than_known(measured, known) == [
        "tests took 50 s of processor time, 50 s by tests/durations.json"
        " (this machine takes 3.00 times as long as the one that wrote it)"
    ]
    measured |= {"tests/a.py": Duration(60.0, 60.0), "tests/f.py": Duration(9.0, 9.0), "tests/g.py": Duration(0.6, 0.6)}
    assert more_than_known(measured, known)[1:] == [
        "   +10.0 s  tests/a.py: 20.0 s, 10.0 s before",
        "    +2.9 s  tests/f.py: 3.0 s, not known before",
    ]


def test_what_a_slow_machine_measures_is_remembered_in_the_seconds_of_the_first() -> None:
    known = {"a": Duration(4.0, 2.0), "b": Duration(10.0, 10.0), "short": Duration(0.6, 0.1)}
    measured = {
        "a": Duration(8.0, 4.0),
        "b": Duration(20.0, 20.0),
        "short": Duration(9.0, 9.0),
        "new": Duration(6.0, 5.0),
    }
    assert comparable(measured, known) == known | {"short": Duration(4.5, 4.5), "new": Duration(3.0, 2.5)}
    assert comparable(measured, {}) == measured
