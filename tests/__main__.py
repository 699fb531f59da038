"""All tests: `.venv/bin/python -m tests [--remember] [pytest's arguments …]`.

Files are the unit of parallel work. As many pytests run at once as there are cores, each with a bunch of files: a long
file alone, short ones of a folder together. The longest bunches begin first, by the durations in tests/durations.json,
which `--remember` writes again. The end shows the slowest tests and how many tests there were.
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).resolve().parent
DURATIONS = HERE / "durations.json"
LONG_S = 60.0
"""Seconds: a file that takes longer runs alone; bunches of shorter ones take about as long."""
UNKNOWN_S = 0.5
"""Seconds that a file is taken to need when no duration of it is known."""
TOGETHER = ("tests/integration/shared/",)
"""Folders whose files share a costly fixture: each is one bunch."""
SLOWEST = 15
"""Tests that the end names, with their seconds."""
NOTHING_TO_RUN = 5
"""pytest's status where no test fits the arguments."""
WORDS = ("failed", "error", "passed", "skipped", "deselected", "xfailed", "xpassed", "warning")
"""What pytest's last line counts; what went wrong comes first."""


def bunches(files: Iterable[str], durations: Mapping[str, float]) -> list[list[str]]:
    """Every file in one bunch, the bunch that takes longest first."""
    found: list[list[str]] = []
    short: dict[str, list[str]] = defaultdict(list)
    for file in sorted(files):
        shared = next((folder for folder in TOGETHER if file.startswith(folder)), None)
        if shared is None and durations.get(file, UNKNOWN_S) > LONG_S:
            found.append([file])
        else:
            short[shared or "/".join(file.split("/")[:2])].append(file)

    def takes_s(bunch: Sequence[str]) -> float:
        return sum(durations.get(file, UNKNOWN_S) for file in bunch)

    for folder, of_folder in short.items():
        bunch: list[str] = []
        for file in of_folder:
            if folder not in TOGETHER and bunch and takes_s([*bunch, file]) > LONG_S:
                found.append(bunch)
                bunch = []
            bunch.append(file)
        found.append(bunch)
    return sorted(found, key=takes_s, reverse=True)


def counted(last_lines: Sequence[str]) -> str:
    """The sum of what pytests say in their last lines."""
    said = "\n".join(last_lines)
    totals = {word: sum(map(int, re.findall(rf"(\d+) {word}", said))) for word in WORDS}
    return ", ".join(f"{total} {word}" for word, total in totals.items() if total) or "no tests"


def _run(bunch: Sequence[str], arguments: Sequence[str], root: Path, report: Path) -> subprocess.CompletedProcess[str]:
    # Without its cache: pytests that run at once would write over each other's.
    command = [
        *(
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "-o",
            "junit_family=xunit1",
            f"--junitxml={report}",
        ),
        *arguments,
        *bunch,
    ]
    return subprocess.run(
        command,
        cwd=root,
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def tests_of(report: Path) -> list[tuple[str, str, float]]:
    """File, name and seconds of each test in a report; none where the pytest ended before it wrote one."""
    if not report.exists():
        return []
    cases = ElementTree.parse(report).iter("testcase")
    return [(case.get("file", ""), case.get("name", ""), float(case.get("time", "0"))) for case in cases]


def main(arguments: Sequence[str], root: Path = HERE.parent) -> int:
    """Exit status: 0 if none failed. What each pytest says is shown when it has ended."""
    remember = "--remember" in arguments
    arguments = [argument for argument in arguments if argument != "--remember"]
    durations: dict[str, float] = json.loads(DURATIONS.read_text(encoding="utf-8")) if DURATIONS.exists() else {}
    files = [str(path.relative_to(root)) for path in (root / "tests").rglob("test_*.py")]
    began_s = time.monotonic()
    last_lines: list[str] = []
    tests: list[tuple[str, str, float]] = []
    failed = False
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        running = {}
        for number, bunch in enumerate(bunches(files, durations)):
            report = Path(folder) / f"{number}.xml"
            running[pool.submit(_run, bunch, arguments, root, report)] = report
        try:
            for ended in as_completed(running):
                result = ended.result()
                print(result.stdout, flush=True)
                last_lines.append(result.stdout.rstrip().rpartition("\n")[2])
                tests += tests_of(running[ended])
                failed = failed or result.returncode not in (0, NOTHING_TO_RUN)
        except KeyboardInterrupt:  # it went to all that run, as they are of the same process group
            pool.shutdown(cancel_futures=True)
            return 130
    print(f"slowest {SLOWEST} tests:")
    for file, name, took_s in sorted(tests, key=lambda test: -test[2])[:SLOWEST]:
        print(f"{took_s:7.1f} s  {file}::{name}")
    if remember:
        of_file: dict[str, float] = defaultdict(float)
        for file, _, took_s in tests:
            of_file[file] += took_s
        kept = {file: round(of_file[file], 1) for file in sorted(files) if of_file[file] > UNKNOWN_S}
        DURATIONS.write_text(json.dumps(kept, indent=0) + "\n", encoding="utf-8")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{used.ru_utime + used.ru_stime:.0f} s of processor time on {len(os.sched_getaffinity(0))} cores")
    print(f"{counted(last_lines)} in {time.monotonic() - began_s:.0f} s")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
