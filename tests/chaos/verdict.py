"""What a run amounts to: every request's fate against what it should have been, and every process's size. Pure.

answered     the text, its end and its usage are those of the undisturbed run, else the request counts as wrong
failed       an error that the client received. None may be, but where its deadline passed while NATS was away, or where
             NATS was cut from the frontend in the middle of an answer over NATS
broken       its connection broke. Only with the process at the other end of it, frontend or NATS server
silent       a NATS client gave up after a long silence. Only where a frontend was killed under it, or where NATS was
             cut from one in the moment of asking, or where its request went to a server of a cluster that was away
(none)       lost: it never ended

Faults come one at a time, so one healthy instance of each service is always there and an error needs no excuse. Clients
do what a balancer does: they take the next frontend where they cannot connect, or where `/health` says 503.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, assert_never

from msgspec import Struct

from tests.chaos.plan import Ask, Fault

ViolationKind = Literal["lost", "wrong", "usage", "error", "unhealed", "grown", "left"]
End = Literal["answered", "failed", "broken", "silent"]
DEADLINE = "deadline_exceeded"
"""The code of an error that says so."""
SILENT_AFTER_KILL_S = 15.0
"""A whole answer takes no longer in quiet times: what was asked before that, its frontend was not computing."""
LEAST_LIFE_S = 60.0
"""Least life of a process whose size is judged, in seconds."""
LEAST_SAMPLES = 8
RSS_SHARE, RSS_SLACK_BYTES = 0.10, 16 << 20
FDS_SLACK = 30
"""gRPC keeps connections that a hung etcd does not answer for 20 s; with one a second and some threads more of them."""
CUT = "unavailable"
"""The code of an error that an answer ends with which was cut off in its middle, or waited too long for NATS."""
LONG_S = 20.0
"""A frontend that is cut off waits so long for NATS on behalf of a request, and keeps its connection for as long."""
TOLD_AFTER_S = 10.0
"""Seconds after NATS is back until its clients notice."""
UNREADY_AFTER_S = 12.0
"""By then its /health has said so, and a balancer has looked."""
UNNOTICED_S = 41.0
"""Longer than that NATS hands no requests to a frontend that is not there: four times the interval of its PINGs, of
which it skips one where something was heard."""
LEFT_S = 15.0
"""By then each process has left a server of a cluster that was killed, frozen or cut off."""
FORGOTTEN_S = 20.0
"""A server that is back hands requests to connections that ended meanwhile, until two of its PINGs had no answer."""
ON_ITS_WAY_S = 0.5
"""A request takes no longer from its client to a frontend."""


class Reference(Struct, frozen=True):
    """What an undisturbed run answered."""

    text: str
    finish: str
    prompt_tokens: int
    completion_tokens: int


class Answer(Struct):
    """What one client saw so far. Times are seconds since the run began."""

    ask: Ask
    asked_s: float
    frontend: int
    """Who took it. -1 means over NATS, unknown."""
    text: str = ""
    finish: str = ""
    prompt_tokens: int = -1
    completion_tokens: int = -1
    end: End | None = None
    heard_s: float = 0.0
    """When the last piece came, the end included."""
    code: str = ""
    """Text of the error that the client received."""
    error: str = ""
    moved: bool = False
    """The frontend that it tried first took no connection."""


class Happened(Struct):
    """One fault as it was."""

    fault: Fault
    began_s: float
    done_s: float
    """The process was gone, the link was cut, …"""
    undone_s: float = 0.0
    """Started again, thawed, mended."""
    open_requests: int = 0
    healed_s: dict[str, float] = {}
    """Path → from the beginning to the first success of a request made after it."""
    whole_s: float | None = None
    """From the beginning until every instance was ready and published, and no other. None if not within the limit."""
    trouble: str = ""


class Sample(Struct, frozen=True):
    """One process's size."""

    at_s: float
    program: str
    pid: int
    rss_bytes: int
    fds: int


class Violation(Struct, frozen=True):
    """One thing that must not be."""

    kind: ViolationKind
    at_s: float
    what: str


class Verdict(Struct, frozen=True):
    """All of it."""

    requests: int
    answered: int
    moved: int
    broken_with_frontend: int
    broken_with_nats: int
    cut_from_nats: int
    """Over NATS, by a frontend that was cut off from it meanwhile."""
    expired_without_nats: int
    violations: list[Violation]

    @property
    def good(self) -> bool:
        return not self.violations


def judge(
    references: Sequence[Reference],
    answers: Sequence[Answer],
    faults: Sequence[Happened],
    samples: Sequence[Sample],
    left: Mapping[str, float],
    ended_s: float,
) -> Verdict:
    """`left`: what is held though no client asks any longer, by metric and program."""
    violations: list[Violation] = []
    excuses = {"frontend": 0, "nats": 0, "cut": 0, "deadline": 0}
    for answer in answers:
        reference = references[answer.ask.question]
        violations += _content(answer, reference)
        if answer.end != "answered":
            excuse = _excuse(answer, faults)
            if excuse:
                excuses[excuse] += 1
            else:
                violations.append(_ended_badly(answer, ended_s))
    for fault in faults:
        if fault.whole_s is None or fault.trouble:
            what = f"{fault.fault.name}: {fault.trouble or 'not whole again'}"
            violations.append(Violation("unhealed", fault.began_s, what))
    violations += _growth(samples)
    violations += [Violation("left", ended_s, f"{what}: {value:g}") for what, value in left.items() if value]
    return Verdict(
        requests=len(answers),
        answered=sum(answer.end == "answered" for answer in answers),
        moved=sum(answer.moved for answer in answers),
        broken_with_frontend=excuses["frontend"],
        broken_with_nats=excuses["nats"],
        cut_from_nats=excuses["cut"],
        expired_without_nats=excuses["deadline"],
        violations=sorted(violations, key=lambda one: one.at_s),
    )


def _content(answer: Answer, reference: Reference) -> list[Violation]:
    """What it said. An answer that did not end well must be the beginning of the right one."""
    name = f"question {answer.ask.question} by {_door(answer)}, asked at {answer.asked_s:.2f}"
    if answer.end != "answered":
        if reference.text.startswith(answer.text):
            return []
        return [Violation("wrong", answer.heard_s, f"{name}: {_difference(answer.text, reference.text)}")]
    if answer.text != reference.text:
        return [Violation("wrong", answer.heard_s, f"{name}: {_difference(answer.text, reference.text)}")]
    if answer.finish != reference.finish:
        return [Violation("wrong", answer.heard_s, f"{name}: ends with {answer.finish}, not {reference.finish}")]
    counted, due = ((one.prompt_tokens, one.completion_tokens) for one in (answer, reference))
    return [] if counted == due else [Violation("usage", answer.heard_s, f"{name}: counts {counted}, not {due}")]


def _ended_badly(answer: Answer, ended_s: float) -> Violation:
    name = f"question {answer.ask.question} by {_door(answer)}, asked at {answer.asked_s:.2f}"
    match answer.end:
        case None | "silent":
            return Violation("lost", answer.heard_s, f"{name}: no end by {ended_s:.2f}, {len(answer.text)} characters")
        case "failed" | "broken":
            return Violation("error", answer.heard_s, f"{name}: {answer.end}: {answer.error}")
        case "answered":
            raise AssertionError("an answer is no bad end")
        case _:
            assert_never(answer.end)


def _excuse(answer: Answer, faults: Sequence[Happened]) -> Literal["frontend", "nats", "cut", "deadline", ""]:
    """Why it may have ended without an answer. Empty if it may not."""
    for happened in faults:
        kind, target = happened.fault.kind, happened.fault.target
        under_it = answer.asked_s <= happened.done_s and happened.began_s <= answer.heard_s
        if target == "frontend" and kind == "kill":
            if answer.end == "broken" and answer.frontend == happened.fault.number and under_it:
                return "frontend"
            latest_s = answer.heard_s + SILENT_AFTER_KILL_S
            if answer.end == "silent" and answer.asked_s <= happened.done_s and happened.began_s <= latest_s:
                return "frontend"
        if target == "frontend" and _cut_for_long(answer, happened):
            return "cut"
        if target == "nats server" and (excuse := _with_its_server(answer, happened)):
            return excuse
        if target == "frontend" and kind == "sever nats" and answer.frontend < 0:
            if answer.end == "failed" and answer.code == CUT and under_it:
                return "cut"
            if answer.end == "silent" and 0 <= happened.done_s + ON_ITS_WAY_S - answer.asked_s <= 2 * ON_ITS_WAY_S:
                return "cut"
        if target == "nats" and kind in ("kill", "restart"):
            if answer.end == "broken" and answer.frontend < 0 and under_it:
                return "nats"
            within = answer.asked_s <= happened.undone_s and happened.began_s <= answer.heard_s
            if answer.end == "failed" and answer.code == DEADLINE and within:
                return "deadline"
    return ""


def _with_its_server(answer: Answer, happened: Happened) -> Literal["nats", "cut", ""]:
    """Why an answer over NATS may have ended with a server of a cluster: the client or its frontend was connected to
    it. Core NATS sends nothing again, so that a request may be lost as well."""
    if answer.frontend >= 0:
        return ""
    if answer.end == "silent":
        asked = answer.asked_s <= happened.undone_s + FORGOTTEN_S
        return "nats" if asked and happened.began_s <= answer.heard_s + SILENT_AFTER_KILL_S else ""
    if answer.asked_s > happened.undone_s or not happened.began_s <= answer.heard_s <= happened.undone_s + LEFT_S:
        return ""
    return "nats" if answer.end == "broken" else "cut" if answer.code == CUT else ""


def _cut_for_long(answer: Answer, happened: Happened) -> bool:
    """Whether a frontend was away from NATS for too long for it: asked before that could be known, and refused, or
    handed by NATS to a connection that is given up."""
    kind, began_s, undone_s = happened.fault.kind, happened.began_s, happened.undone_s
    over_nats = answer.frontend < 0
    known_s = began_s + (UNNOTICED_S if over_nats else UNREADY_AFTER_S)
    if kind not in ("freeze", "sever nats", "hang nats") or undone_s - began_s < LONG_S or answer.asked_s > known_s:
        return False
    if answer.end == "silent":
        return over_nats and answer.asked_s >= began_s - ON_ITS_WAY_S
    told = answer.end == "failed" and answer.code == CUT and began_s <= answer.heard_s <= undone_s + TOLD_AFTER_S
    return told and (over_nats or (answer.frontend == happened.fault.number and kind != "freeze"))


def _growth(samples: Sequence[Sample]) -> list[Violation]:
    """Processes that lived long enough: the least they were at the end of their life, when little was asked, against
    the least they were in the first half of it, without its beginning."""
    lives: dict[tuple[str, int], list[Sample]] = {}
    for sample in samples:
        lives.setdefault((sample.program, sample.pid), []).append(sample)
    found: list[Violation] = []
    for (program, _), life in lives.items():
        if len(life) < LEAST_SAMPLES or life[-1].at_s - life[0].at_s < LEAST_LIFE_S:
            continue
        quarter = len(life) // 4
        early, late = life[quarter : 2 * quarter], life[-quarter:]
        rss, fds = min(one.rss_bytes for one in early), min(one.fds for one in early)
        rss_now, fds_now = min(one.rss_bytes for one in late), min(one.fds for one in late)
        if rss_now > rss * (1 + RSS_SHARE) + RSS_SLACK_BYTES:
            found.append(Violation("grown", life[-1].at_s, f"{program}: from {rss} to {rss_now} bytes"))
        if fds_now > fds + FDS_SLACK:
            found.append(Violation("grown", life[-1].at_s, f"{program}: from {fds} to {fds_now} file descriptors"))
    return found


def _door(answer: Answer) -> str:
    kind = "stream" if answer.ask.streamed else "whole"
    return f"{'NATS' if answer.frontend < 0 else f'frontend {answer.frontend}'} ({kind})"


def _difference(text: str, due: str) -> str:
    at = next((at for at, (one, other) in enumerate(zip(text, due, strict=False)) if one != other), None)
    at = min(len(text), len(due)) if at is None else at
    return f"at character {at} of {len(due)} {text[at : at + 20]!r}, not {due[at : at + 20]!r}"
