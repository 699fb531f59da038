"""How long tests take: tests/durations.json, which `python -m tests --remember` writes, and what a run took more.

A key is a file of tests, `tests/router/test_service.py`, or those of its tests that are of a later tier than the file,
`tests/router/test_service.py@long`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import NamedTuple
from xml.etree import ElementTree

from tests.tiers import Tier, tier_of

FILE = Path(__file__).with_name("durations.json")
SHORT_S = 0.5
"""Seconds: a shorter file is not remembered."""
COMPARED_S = 1.0
"""Seconds of processor time: from files that take so much one sees how fast a machine is."""
MORE_S = 1.0
"""Seconds of processor time: a file that takes so much more than it did is named, if that is also a third more."""


class Duration(NamedTuple):
    """How long a file of tests takes."""

    wall_s: float
    processor_s: float
    """Processor time of pytest and of all processes that the tests start, in seconds."""

    def plus(self, other: Duration) -> Duration:
        return Duration(self.wall_s + other.wall_s, self.processor_s + other.processor_s)


UNKNOWN = Duration(0.2, 0.1)
"""The duration of a file when none is known."""
Durations = Mapping[str, Duration]


class Took(NamedTuple):
    """How long one test took."""

    key: str
    """As in durations.json."""
    file: str
    name: str
    wall_s: float
    processor_s: float


def read() -> dict[str, Duration]:
    """Return what was remembered, by key."""
    return {key: Duration(*seconds) for key, seconds in json.loads(FILE.read_text(encoding="utf-8")).items()}


def text_of(durations: Durations, files: Collection[str]) -> str:
    """Return what is to be remembered, as the text of durations.json: only long ones, only of files that are there."""
    kept = {
        key: seconds
        for key, seconds in durations.items()
        if seconds.wall_s > SHORT_S and key.partition("@")[0] in files
    }
    return "{\n" + ",\n".join(f"{json.dumps(key)}: {json.dumps(kept[key])}" for key in sorted(kept)) + "\n}\n"


def of_files(durations: Durations, tiers: Collection[Tier]) -> dict[str, Duration]:
    """Return how long the tests of these tiers take, by file."""
    found: dict[str, Duration] = {}
    for key, seconds in durations.items():
        file, _, later = key.partition("@")
        if (later or tier_of(file)) in tiers:
            found[file] = found.get(file, Duration(0.0, 0.0)).plus(seconds)
    return found


def read_report(report: Path) -> list[Took]:
    """Return the tests of a pytest's report in JUnit's format; none if the pytest ended before it wrote one.

    The file is that of the test's name, as a Hypothesis machine's own file is Hypothesis's. tests/conftest.py adds the
    tier and the processor time.
    """
    if not report.exists():
        return []
    found = []
    for case in ElementTree.parse(report).iter("testcase"):
        parts = case.get("classname", "").split(".")
        module = next((number for number, part in enumerate(parts) if part.startswith("test_")), len(parts) - 1)
        file = "/".join(parts[: module + 1]) + ".py"
        more = {one.get("name"): one.get("value", "") for one in case.iter("property")}
        key = f"{file}@{more['tier']}" if "tier" in more else file
        seconds = float(case.get("time", "0")), float(more.get("processor_s", "0"))
        found.append(Took(key, file, case.get("name", ""), *seconds))
    return found


def durations_of(tests: Iterable[Took], processor_s: float) -> dict[str, Duration]:
    """Return the durations of a bunch by key. What its pytest took for itself is shared by all alike."""
    wall: dict[str, float] = defaultdict(float)
    busy: dict[str, float] = defaultdict(float)
    for test in tests:
        wall[test.key] += test.wall_s
        busy[test.key] += test.processor_s
    rest = max(0.0, processor_s - sum(busy.values())) / max(1, len(wall))
    return {key: Duration(round(wall[key], 1), round(busy[key] + rest, 1)) for key in wall}


def slowness(measured: Durations, known: Durations) -> float:
    """Return how many times as long this machine takes as the one that wrote what is known: the median of the files
    that take long enough."""
    ratios = [
        seconds.processor_s / known[key].processor_s
        for key, seconds in measured.items()
        if key in known and known[key].processor_s >= COMPARED_S
    ]
    return median(ratios) if ratios else 1.0


def comparable(measured: Durations, known: Durations) -> dict[str, Duration]:
    """Return what was measured as the machine that wrote what is known would have measured it."""
    factor = slowness(measured, known)
    return {
        key: Duration(round(seconds.wall_s / factor, 1), round(seconds.processor_s / factor, 1))
        for key, seconds in measured.items()
    }


def more_than_known(measured: Durations, known: Durations) -> list[str]:
    """Return lines that say how much processor time tests took beyond what is known, and which files took it; both in
    seconds of the machine that wrote what is known."""
    took = {key: seconds.processor_s for key, seconds in comparable(measured, known).items()}
    before = {key: known.get(key, UNKNOWN).processor_s for key in measured}
    grown = [key for key in took if took[key] - before[key] > max(MORE_S, before[key] / 3)]
    lines = [
        f"tests took {sum(took.values()):.0f} s of processor time, {sum(before.values()):.0f} s by tests/durations.json"
        f" (this machine takes {slowness(measured, known):.2f} times as long as the one that wrote it)"
    ]
    for key in sorted(grown, key=lambda key: before[key] - took[key]):
        was = f"{before[key]:.1f} s before" if key in known else "not known before"
        lines.append(f"  {took[key] - before[key]:+6.1f} s  {key}: {took[key]:.1f} s, {was}")
    return lines
