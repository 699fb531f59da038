"""Tests: `.venv/bin/python -m tests [--tiers check,all] [--changed [BASE]] [--remember] [pytest's arguments …]`.

Files are the unit of parallel work. Pytests run at once, each with a bunch of files: a long file alone, short ones of a
folder together. The longest bunches begin first. Tests that start processes wait for much of their time; so a bunch
begins as soon as the processor time that it needs for each second, and that of the bunches that run, fit on the cores,
and no crowd of threads waits for these. All this goes by the durations in tests/durations.json, which `--remember`
brings up to date. The end shows the slowest tests, what took longer than it did, and how many tests there were.

`--tiers` names what tests/tiers.py has; without it `check` and `all` run. `--changed` runs what tests/changed.py
chooses for the files that differ from BASE (main).

TEST_CLIENTS   which third of other projects' clients runs: 0, 1 or 2, instead of the day's
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from datetime import date
from pathlib import Path
from typing import NamedTuple

from tests.changed import rows, within_budget
from tests.durations import (
    FILE,
    UNKNOWN,
    Duration,
    Durations,
    Took,
    comparable,
    durations_of,
    more_than_known,
    of_files,
    read,
    read_report,
    text_of,
)
from tests.tiers import Tier, clients_left_out, picked, third_of, tiers_of

HERE = Path(__file__).resolve().parent
LONG_S = 60.0
"""Seconds: a file that takes longer runs alone; bunches of shorter ones take about as long."""
TOGETHER = ("tests/integration/shared/", "tests/containers/")
"""Folders whose files share a costly fixture: each is one bunch."""
CROWDED = 3
"""Threads a core that run or could: while there are more, as on a slow machine or next to other programs, no further
bunch begins."""
LOOK_S = 5.0
"""Seconds between two looks whether a bunch may begin, so that the last one counts among those threads."""
OVERLAP = 0.25
"""Cores: by so much the expected load may be above the cores, since tests that wait do not all compute at once."""
SHOWN = 20
"""Files that `--changed` names of those that it leaves out."""
SLOWEST = 15
"""Tests that the end names, with their seconds."""
NOTHING_TO_RUN = 5
"""pytest's status where no test fits the arguments."""
WORDS = ("failed", "error", "passed", "skipped", "deselected", "xfailed", "xpassed", "warning")
"""What pytest's last line counts; what went wrong comes first."""
CODE = ("services", "shared", "deploy", "tests", "benchmarks")
"""Folders whose modules `--changed` looks at."""


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
    waiting: Iterable[Sequence[str]],
    running: Collection[Sequence[str]],
    durations: Durations,
    cores: int,
    runnable: int = 0,
) -> Sequence[str] | None:
    """Return the first bunch that fits on the cores next to those that run; alone, every bunch does. `runnable`: the
    threads of the whole machine that run or could."""
    if running and runnable > CROWDED * cores:
        return None
    free = cores - sum(load(bunch, durations) for bunch in running)
    return next((bunch for bunch in waiting if load(bunch, durations) <= free + OVERLAP), None)


def runnable() -> int:
    """Return how many threads of the machine run or could."""
    return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])


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


def _run(
    bunch: Sequence[str], arguments: Sequence[str], root: Path, report: Path, variables: Mapping[str, str]
) -> Ended:
    # Without its cache: pytests that run at once would write over each other's.
    command = [
        *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider"),
        *("-o", "junit_family=xunit1", f"--junitxml={report}", *arguments, *bunch),
    ]
    # Else each of the many processes that tests start would compile all its modules again.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= variables
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


def changed_files(root: Path, base: str) -> list[str]:
    """Return the paths of files that differ from where this branch left `base`, and of those that git does not know."""

    def git(*words: str) -> str:
        ran = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True)
        if ran.returncode != 0:
            sys.exit(f"git {' '.join(words)} failed: {ran.stderr.strip() or 'it found no common commit'}")
        return ran.stdout

    left = git("merge-base", "HEAD", base).strip()
    return sorted(
        {*git("diff", "--name-only", left).split("\n"), *git("ls-files", "-o", "--exclude-standard").split("\n")} - {""}
    )


def files_to_run(root: Path, tiers: Collection[Tier], changed: str | None, known: Durations) -> list[str]:
    """Return the files of tests to run, and print what decides that goes by the day or by a change."""
    files = [str(path.relative_to(root)) for path in (root / "tests").rglob("test_*.py")]
    texts = {file: (root / file).read_text(encoding="utf-8") for file in files}
    if changed is not None:
        code = {str(path.relative_to(root)) for folder in CODE for path in (root / folder).rglob("*.py")}
        texts |= {file: (root / file).read_text(encoding="utf-8") for file in code}
        cores = len(os.sched_getaffinity(0))

        def cost_s(file: str) -> float:
            took = known.get(file, UNKNOWN)
            return max(took.processor_s, took.wall_s / cores)

        differ = changed_files(root, changed)
        run, left_out = within_budget(rows(differ, texts), cost_s)
        print(f"{len(differ)} files differ from {changed}; {len(run)} files of tests:", *run, sep="\n  ")
        if left_out:
            shown = [*left_out[:SHOWN], *(["…"] if len(left_out) > SHOWN else [])]
            print(f"{len(left_out)} more are left to ./check and ./check all:", *shown, sep="\n  ")
        return run
    third = int(os.environ.get("TEST_CLIENTS") or third_of(date.today()))
    run = picked(texts, tiers, third)
    if "all" in tiers and "long" not in tiers:
        print(f"other projects' clients: third {third} of 0, 1, 2 (TEST_CLIENTS={third} runs it again); without:")
        print(*clients_left_out(files, third), sep="\n  ")
    return run


def main(arguments: Sequence[str], root: Path = HERE.parent) -> int:
    """Exit status: 0 if none failed. What each pytest says is shown when it has ended."""
    parser = argparse.ArgumentParser(prog="python -m tests", allow_abbrev=False)
    parser.add_argument("--tiers", type=tiers_of, default=tiers_of("check,all"))
    parser.add_argument("--changed", nargs="?", const="main", metavar="BASE")
    parser.add_argument("--remember", action="store_true", help="bring tests/durations.json up to date")
    flags, for_pytest = parser.parse_known_args(arguments)
    remembered = read()
    durations = of_files(remembered, flags.tiers)
    files = files_to_run(root, flags.tiers, flags.changed, durations)
    environment = {"TEST_TIERS": ",".join(flags.tiers)}
    cores = len(os.sched_getaffinity(0))
    began_s = time.monotonic()
    last_lines: list[str] = []
    tests: list[Took] = []
    measured: dict[str, Duration] = {}
    processor_s = 0.0
    failed = False
    waiting: list[Sequence[str]] = [*bunches(files, durations)]
    running: dict[Future[Ended], tuple[Sequence[str], Path]] = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(waiting) or 1) as pool:
        try:
            while waiting or running:
                beside = [bunch for bunch, _ in running.values()]
                bunch = next_bunch(waiting, beside, durations, cores, runnable())
                if bunch is not None:
                    waiting.remove(bunch)
                    report = Path(folder) / f"{len(waiting)}.xml"
                    running[pool.submit(_run, bunch, for_pytest, root, report, environment)] = bunch, report
                for future in wait(running, LOOK_S, FIRST_COMPLETED).done:
                    ended = future.result()
                    bunch, report = running.pop(future)
                    print(ended.output, flush=True)
                    last_lines.append(ended.output.rstrip().rpartition("\n")[2])
                    of_bunch = read_report(report)
                    tests += of_bunch
                    measured |= durations_of(of_bunch, ended.processor_s)
                    processor_s += ended.processor_s
                    failed = failed or ended.status not in (0, NOTHING_TO_RUN)
        except KeyboardInterrupt:  # it went to all that run, as they are of the same process group
            return 130
    print(f"slowest {SLOWEST} tests:")
    for test in sorted(tests, key=lambda test: -test.wall_s)[:SLOWEST]:
        print(f"{test.wall_s:7.1f} s  {test.file}::{test.name}")
    print(*more_than_known(measured, remembered), sep="\n")
    if flags.remember:
        there = {str(path.relative_to(root)) for path in (root / "tests").rglob("test_*.py")}
        FILE.write_text(text_of(remembered | comparable(measured, remembered), there), encoding="utf-8")
    print(f"{processor_s:.0f} s of processor time on {cores} cores")
    print(f"{counted(last_lines)} in {time.monotonic() - began_s:.0f} s")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
