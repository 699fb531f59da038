"""All tests: `.venv/bin/python -m tests [--remember] [pytest's arguments …]`.

Files are the unit of parallel work. Pytests run at once, each with a bunch of files: a long file alone, short ones of a
folder together. The longest bunches begin first. Tests that start processes wait for much of their time; so a bunch
begins as soon as the processor time that it needs for each second, and that of the bunches that run, fit on the cores.
All this goes by the durations in tests/durations.json, which `--remember` writes again. The end shows the slowest tests
and how many tests there were.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

HERE = Path(__file__).resolve().parent
DURATIONS = HERE / "durations.json"
LONG_S = 60.0
"""Seconds: a file that takes longer runs alone; bunches of shorter ones take about as long."""
TOGETHER = ("tests/integration/shared/",)
"""Folders whose files share a costly fixture: each is one bunch."""
OVERLAP = 0.25
"""Cores: by so much the expected load may be above the cores, since tests that wait do not all compute at once."""
SLOWEST = 15
"""Tests that the end names, with their seconds."""
NOTHING_TO_RUN = 5
"""pytest's status where no test fits the arguments."""
WORDS = ("failed", "error", "passed", "skipped", "deselected", "xfailed", "xpassed", "warning")
"""What pytest's last line counts; what went wrong comes first."""


class Duration(NamedTuple):
    """How long a file of tests takes."""

    wall_s: float
    processor_s: float
    """Processor time of pytest and of all processes that the tests start, in seconds."""


UNKNOWN = Duration(0.5, 0.5)
"""The duration of a file when none is known."""
Durations = Mapping[str, Duration]


def bunches(files: Iterable[str], durations: Durations) -> list[list[str]]:
    """Every file in one bunch, the bunch that takes longest first."""
    found: list[list[str]] = []
    short: dict[str, list[str]] = defaultdict(list)
    for file in sorted(files):
        shared = next((folder for folder in TOGETHER if file.startswith(folder)), None)
        if shared is None and wall_s([file], durations) > LONG_S:
            found.append([file])
        else:
            short[shared or "/".join(file.split("/")[:-1][:2])].append(file)
    for folder, of_folder in short.items():
        bunch: list[str] = []
        for file in of_folder:
            if folder not in TOGETHER and bunch and wall_s([*bunch, file], durations) > LONG_S:
                found.append(bunch)
                bunch = []
            bunch.append(file)
        found.append(bunch)
    return sorted(found, key=lambda bunch: wall_s(bunch, durations), reverse=True)


def wall_s(bunch: Iterable[str], durations: Durations) -> float:
    """Return the seconds that a bunch takes."""
    return sum(durations.get(file, UNKNOWN).wall_s for file in bunch)


def load(bunch: Iterable[str], durations: Durations) -> float:
    """Return how many cores a bunch keeps busy on average, at most 1."""
    known = [durations.get(file, UNKNOWN) for file in bunch]
    return min(1.0, sum(each.processor_s for each in known) / sum(each.wall_s for each in known))


def next_bunch(
    waiting: Iterable[Sequence[str]], running: Iterable[Sequence[str]], durations: Durations, cores: int
) -> Sequence[str] | None:
    """Return the first bunch that fits on the cores next to those that run; alone, every bunch does."""
    free = cores - sum(load(bunch, durations) for bunch in running)
    return next((bunch for bunch in waiting if load(bunch, durations) <= free + OVERLAP), None)


def counted(last_lines: Sequence[str]) -> str:
    """The sum of what pytests say in their last lines."""
    said = "\n".join(last_lines)
    totals = {word: sum(map(int, re.findall(rf"(\d+) {word}", said))) for word in WORDS}
    return ", ".join(f"{total} {word}" for word, total in totals.items() if total) or "no tests"


class Ended(NamedTuple):
    """How a pytest ended."""

    status: int
    output: str
    processor_s: float


def _run(bunch: Sequence[str], arguments: Sequence[str], root: Path, report: Path) -> Ended:
    # Without its cache: pytests that run at once would write over each other's.
    command = [
        *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider"),
        *("-o", "junit_family=xunit1", f"--junitxml={report}", *arguments, *bunch),
    ]
    # Else each of the many processes that tests start would compile all its modules again.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    started = subprocess.Popen(
        command,
        cwd=root,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert started.stdout is not None
    with started.stdout as stream:
        output = stream.read()
    _, status, used = os.wait4(started.pid, 0)
    started.returncode = os.waitstatus_to_exitcode(status)
    return Ended(started.returncode, output, used.ru_utime + used.ru_stime)


def tests_of(report: Path) -> list[tuple[str, str, float]]:
    """File, name and seconds of each test in a report; none where the pytest ended before it wrote one."""
    if not report.exists():
        return []
    cases = ElementTree.parse(report).iter("testcase")
    return [(case.get("file", ""), case.get("name", ""), float(case.get("time", "0"))) for case in cases]


def durations_of(tests: Sequence[tuple[str, str, float]], processor_s: float) -> dict[str, Duration]:
    """Return the duration of each file of a bunch. Its files share its processor time as they share its wall time."""
    wall: dict[str, float] = defaultdict(float)
    for file, _, took_s in tests:
        wall[file] += took_s
    busy = processor_s / (sum(wall.values()) or 1.0)
    return {file: Duration(round(took_s, 1), round(took_s * busy, 1)) for file, took_s in wall.items()}


def main(arguments: Sequence[str], root: Path = HERE.parent) -> int:
    """Exit status: 0 if none failed. What each pytest says is shown when it has ended."""
    remember = "--remember" in arguments
    arguments = [argument for argument in arguments if argument != "--remember"]
    known = json.loads(DURATIONS.read_text(encoding="utf-8")) if DURATIONS.exists() else {}
    durations = {file: Duration(*seconds) for file, seconds in known.items()}
    files = [str(path.relative_to(root)) for path in (root / "tests").rglob("test_*.py")]
    cores = len(os.sched_getaffinity(0))
    began_s = time.monotonic()
    last_lines: list[str] = []
    tests: list[tuple[str, str, float]] = []
    measured: dict[str, Duration] = {}
    processor_s = 0.0
    failed = False
    waiting: list[Sequence[str]] = [*bunches(files, durations)]
    running: dict[Future[Ended], tuple[Sequence[str], Path]] = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(waiting)) as pool:
        try:
            while waiting or running:
                beside = [bunch for bunch, _ in running.values()]
                bunch = next_bunch(waiting, beside, durations, cores)
                if bunch is not None:
                    waiting.remove(bunch)
                    report = Path(folder) / f"{len(waiting)}.xml"
                    running[pool.submit(_run, bunch, arguments, root, report)] = bunch, report
                    continue
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    ended = future.result()
                    bunch, report = running.pop(future)
                    print(ended.output, flush=True)
                    last_lines.append(ended.output.rstrip().rpartition("\n")[2])
                    of_bunch = tests_of(report)
                    tests += of_bunch
                    measured |= durations_of(of_bunch, ended.processor_s)
                    processor_s += ended.processor_s
                    failed = failed or ended.status not in (0, NOTHING_TO_RUN)
        except KeyboardInterrupt:  # it went to all that run, as they are of the same process group
            return 130
    print(f"slowest {SLOWEST} tests:")
    for file, name, took_s in sorted(tests, key=lambda test: -test[2])[:SLOWEST]:
        print(f"{took_s:7.1f} s  {file}::{name}")
    if remember:
        kept = {file: measured[file] for file in sorted(measured) if measured[file].wall_s > UNKNOWN.wall_s}
        lines = [f"{json.dumps(file)}: {json.dumps(seconds)}" for file, seconds in kept.items()]
        DURATIONS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print(f"{processor_s:.0f} s of processor time on {cores} cores")
    print(f"{counted(last_lines)} in {time.monotonic() - began_s:.0f} s")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
