"""What is kept of a run: one JSON object in the shape of the benchmarks, and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from msgspec import Struct

from benchmarks.report import Goal, report
from tests.chaos.storm import Outcome, Settings
from tests.chaos.verdict import ViolationKind

_KINDS: Mapping[ViolationKind, str] = {
    "lost": "requests without an end",
    "wrong": "answers with wrong tokens",
    "usage": "answers with wrong usage",
    "error": "errors shown to clients",
    "unhealed": "faults that did not heal",
    "grown": "processes that grew",
    "left": "things still held at the end",
}


class Row(Struct, frozen=True):
    """All faults of one kind. Seconds from their beginning, their own duration included."""

    fault: str
    times: int
    duration_s: float
    """Median."""
    new_requests_after_s: float
    """By the worst path; median."""
    new_requests_after_most_s: float
    whole_after_s: float
    """Every instance ready and published, and no other; median."""
    whole_after_most_s: float


def rows(outcome: Outcome) -> list[Row]:
    """By kind of fault, the slowest first."""
    kinds: dict[str, list[tuple[float, float, float]]] = {}
    for one in outcome.faults:
        if one.whole_s is not None:
            worst_s = max(one.healed_s.values(), default=0.0)
            kinds.setdefault(f"{one.fault.kind}: {one.fault.target}", []).append(
                (one.undone_s - one.began_s, worst_s, one.whole_s)
            )
    table: list[Row] = []
    for fault, times in kinds.items():
        durations, healed, whole = zip(*times, strict=True)
        table.append(Row(fault, len(times), median(durations), median(healed), max(healed), median(whole), max(whole)))
    return sorted(table, key=lambda row: -row.new_requests_after_s)


def account(settings: Settings, outcome: Outcome, command: Sequence[str]) -> dict[str, Any]:
    """The JSON object."""
    verdict = outcome.verdict
    goals = [
        Goal(name, count, "", 0, count == 0)
        for kind, name in _KINDS.items()
        for count in [sum(one.kind == kind for one in verdict.violations)]
    ]
    told = report("chaos", command, goals, rows(outcome))
    return told | {
        "command": " ".join(["python -m tests.chaos", *(Path(word).name for word in command)]),
        "seed": settings.seed,
        "detection": settings.detection,
        "took_s": outcome.took_s,
        "faults": len(outcome.faults),
        "tokens": outcome.tokens,
        "hand_overs": outcome.hand_overs,
        "counts": {
            "requests": verdict.requests,
            "answered": verdict.answered,
            "broken_with_frontend": verdict.broken_with_frontend,
            "broken_with_nats": verdict.broken_with_nats,
            "cut_from_nats": verdict.cut_from_nats,
            "expired_without_nats": verdict.expired_without_nats,
            "moved": verdict.moved,
        },
        "violations": verdict.violations,
    }


def summary(outcome: Outcome) -> str:
    """For people."""
    verdict = outcome.verdict
    lines = [
        f"{row.fault:22} {row.times:3} times  new requests after {row.new_requests_after_s:6.2f} s, at most "
        f"{row.new_requests_after_most_s:6.2f};  whole after {row.whole_after_s:6.2f} s, at most "
        f"{row.whole_after_most_s:6.2f}"
        for row in rows(outcome)
    ]
    lines.append(
        f"{verdict.requests} requests in {outcome.took_s:.0f} s, {outcome.tokens} tokens: {verdict.answered} answered, "
        f"{verdict.broken_with_frontend} broke with their frontend, {verdict.broken_with_nats} with NATS, "
        f"{verdict.cut_from_nats} were cut from it with their frontend, "
        f"{verdict.expired_without_nats} expired without NATS; {verdict.moved} moved; "
        f"{outcome.hand_overs} prompts handed over; {len(outcome.faults)} faults; "
        f"{len(verdict.violations)} wrong"
    )
    return "\n".join(lines)


def draw(outcome: Outcome, path: Path) -> None:
    """Time to heal by fault, and the size of every process, over the run."""
    from benchmarks.plot import Curve, Panel, draw  # matplotlib takes a second to import

    targets = sorted({one.fault.target for one in outcome.faults})
    healed: dict[str, Curve] = {
        target: (
            [one.began_s / 60 for one in outcome.faults if one.fault.target == target],
            [max(one.healed_s.values(), default=0.0) for one in outcome.faults if one.fault.target == target],
        )
        for target in targets
    }
    programs = sorted({sample.program for sample in outcome.samples})
    memory, files = (
        {
            program: (
                [sample.at_s / 60 for sample in outcome.samples if sample.program == program],
                [float(getattr(sample, field)) / unit for sample in outcome.samples if sample.program == program],
            )
            for program in programs
        }
        for field, unit in (("rss_bytes", 1e6), ("fds", 1))
    )
    draw([Panel("New requests after a fault, by the worst path", "minutes", "s", healed, log=True)], path, columns=1)
    sizes = [Panel("Memory", "minutes", "MB", memory), Panel("File descriptors", "minutes", "", files)]
    draw(sizes, path.with_stem(f"{path.stem}_sizes"), columns=2)
