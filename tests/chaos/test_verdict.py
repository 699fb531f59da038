"""The judge: an undisturbed run passes, and each thing that must not be is found, wherever it hides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.chaos.plan import DECK, Ask, Fault, Kind, Target
from tests.chaos.verdict import (
    CUT,
    DEADLINE,
    SILENT_AFTER_KILL_S,
    Answer,
    Happened,
    Reference,
    Sample,
    Verdict,
    ViolationKind,
    judge,
)

REFERENCES = (
    Reference("to the mill", "length", 9, 4),
    Reference("by the river and back", "stop", 12, 7),
)
ENDED_S = 100.0
ENDS: tuple[tuple[Literal["failed", "broken", "silent"], str], ...] = (("broken", ""), ("silent", ""), ("failed", CUT))
"""How an answer may end with NATS, and the code of its error."""


def answer(question: int = 0, *, at_s: float = 10.0, frontend: int = 0) -> Answer:
    """A right one."""
    due = REFERENCES[question]
    return Answer(
        ask=Ask(0.1, question, frontend, streamed=True),
        asked_s=at_s,
        frontend=frontend,
        text=due.text,
        finish=due.finish,
        prompt_tokens=due.prompt_tokens,
        completion_tokens=due.completion_tokens,
        end="answered",
        heard_s=at_s + 2.0,
    )


def bad(
    end: Literal["failed", "broken", "silent"] | None, *, at_s: float = 10.0, frontend: int = 0, code: str = ""
) -> Answer:
    """One that stopped in the middle, two seconds after it was asked for."""
    cut = answer(at_s=at_s, frontend=frontend)
    cut.text, cut.finish, cut.completion_tokens, cut.end, cut.code = cut.text[:5], "", -1, end, code
    return cut


def happened(kind: Kind, target: Target, *, at_s: float, number: int = 0) -> Happened:
    """It lasts a second and is healed after two."""
    fault = Fault(kind, target, number, for_s=1.0, pause_s=0.5)
    return Happened(fault, began_s=at_s, done_s=at_s + 0.01, undone_s=at_s + 1.0, whole_s=2.0)


def verdict(answers: Sequence[Answer] = (), faults: Sequence[Happened] = (), samples: Sequence[Sample] = ()) -> Verdict:
    return judge(REFERENCES, answers, faults, samples, {}, ENDED_S)


def kinds(judged: Verdict) -> list[ViolationKind]:
    return [violation.kind for violation in judged.violations]


RIGHT = st.builds(
    answer,
    st.integers(0, 1),
    at_s=st.floats(0, 90),
    frontend=st.integers(-1, 1),
)
FAULTS = st.lists(
    st.builds(
        lambda card, at_s, number: happened(*card, at_s=at_s, number=number),
        st.sampled_from(DECK),
        st.floats(0, 90),
        st.integers(0, 1),
    ),
    max_size=5,
)


@settings(max_examples=50)
@given(st.lists(RIGHT, max_size=10), FAULTS)
def test_right_answers_pass_whatever_happened(answers: list[Answer], faults: list[Happened]) -> None:
    judged = verdict(answers, faults)
    assert judged.good
    assert judged.answered == len(answers)


@settings(max_examples=100)
@given(st.lists(RIGHT, max_size=5), FAULTS, st.integers(-1, 1), st.floats(0, 90))
def test_a_request_without_an_end_is_always_found(
    answers: list[Answer], faults: list[Happened], frontend: int, at_s: float
) -> None:
    judged = verdict([*answers, bad(None, at_s=at_s, frontend=frontend)], faults)
    assert kinds(judged) == ["lost"]


@settings(max_examples=100)
@given(RIGHT, FAULTS, st.integers(0, 8), st.sampled_from(["answered", "failed", "broken", "silent", None]))
def test_a_wrong_token_is_always_found_however_the_answer_ended(
    answer: Answer, faults: list[Happened], at: int, end: Literal["answered", "failed", "broken", "silent"] | None
) -> None:
    answer.text, answer.end = f"{answer.text[:at]}#{answer.text[at + 1 :]}", end
    assert "wrong" in kinds(verdict([answer], faults))


@settings(max_examples=50)
@given(RIGHT, FAULTS, st.integers(0, 10))
def test_a_gap_or_a_repeat_in_an_answer_is_found(answer: Answer, faults: list[Happened], at: int) -> None:
    whole = answer.text
    for text in (whole[:at], whole + whole[at:] + "!", whole[:at] + whole[at + 1 :]):
        answer.text = text
        assert kinds(verdict([answer], faults)) == ["wrong"]


@settings(max_examples=50)
@given(RIGHT, FAULTS)
def test_tokens_counted_twice_are_found(answer: Answer, faults: list[Happened]) -> None:
    answer.completion_tokens *= 2
    assert kinds(verdict([answer], faults)) == ["usage"]


@settings(max_examples=100)
@given(st.sampled_from([card for card in DECK if card[1] not in ("frontend", "nats")]), st.integers(-1, 1))
def test_no_fault_but_those_of_frontends_and_nats_excuses_an_error(card: tuple[Kind, Target], frontend: int) -> None:
    during = [happened(*card, at_s=11.0)]
    for end in ("failed", "broken"):
        assert kinds(verdict([bad(end, frontend=frontend, code=DEADLINE)], during)) == ["error"]
    assert kinds(verdict([bad("silent", frontend=frontend)], during)) == ["lost"]


@pytest.mark.parametrize(
    ("at_s", "number", "kind", "excused"),
    [
        (11.0, 0, "kill", True),
        (12.5, 0, "kill", False),  # it had broken before
        (9.0, 0, "kill", False),  # it was asked after
        (11.0, 1, "kill", False),  # the other frontend
        (11.0, 0, "restart", False),  # a drain breaks nothing
        (11.0, 0, "freeze", False),
    ],
)
def test_a_connection_breaks_only_with_the_frontend_that_is_killed_at_its_other_end(
    at_s: float, number: int, kind: Kind, excused: bool
) -> None:
    judged = verdict([bad("broken")], [happened(kind, "frontend", at_s=at_s, number=number)])
    assert (judged.broken_with_frontend, kinds(judged)) == ((1, []) if excused else (0, ["error"]))
    failed = verdict([bad("failed")], [happened(kind, "frontend", at_s=at_s, number=number)])
    assert kinds(failed) == ["error"]


def test_a_nats_client_may_hear_nothing_more_only_right_before_a_frontend_is_killed() -> None:
    for at_s, excused in ((11.0, True), (12.0 + SILENT_AFTER_KILL_S + 1.0, False), (9.0, False)):
        judged = verdict([bad("silent", frontend=-1)], [happened("kill", "frontend", at_s=at_s)])
        assert (judged.broken_with_frontend, kinds(judged)) == ((1, []) if excused else (0, ["lost"]))


def test_with_nats_break_the_connections_to_it_and_no_others() -> None:
    for frontend, excused in ((-1, True), (0, False)):
        judged = verdict([bad("broken", frontend=frontend)], [happened("kill", "nats", at_s=11.0)])
        assert (judged.broken_with_nats, judged.good) == (int(excused), excused)
    frozen = verdict([bad("broken", frontend=-1)], [happened("freeze", "nats", at_s=11.0)])
    assert kinds(frozen) == ["error"]


def test_a_frontend_that_is_cut_off_from_nats_may_fail_nats_clients_only_and_lose_only_what_was_on_its_way() -> None:
    cases: tuple[tuple[int, float, Kind, bool], ...] = (
        (-1, 11.0, "sever nats", True),
        (-1, 13.0, "sever nats", False),
        (0, 11.0, "sever nats", False),
        (-1, 11.0, "hang nats", False),
    )
    for frontend, at_s, kind, excused in cases:
        judged = verdict([bad("failed", frontend=frontend, code=CUT)], [happened(kind, "frontend", at_s=at_s)])
        assert (judged.cut_from_nats, kinds(judged)) == ((1, []) if excused else (0, ["error"]))
    for at_s, excused in ((10.1, True), (11.0, False)):
        judged = verdict([bad("silent", frontend=-1)], [happened("sever nats", "frontend", at_s=at_s)])
        assert (judged.cut_from_nats, kinds(judged)) == ((1, []) if excused else (0, ["lost"]))


def test_a_frontend_without_nats_for_long_may_fail_the_requests_it_had_before_that_could_be_known() -> None:
    ends: tuple[Literal["failed", "silent"], ...] = ("failed", "silent")
    cases: tuple[tuple[int, float, Kind, float, bool], ...] = (
        (0, 10.0, "hang nats", 90.0, True),
        (0, 10.0, "hang nats", 10.0, False),
        (1, 10.0, "hang nats", 90.0, False),
        (0, 25.0, "sever nats", 90.0, False),
        (0, 10.0, "freeze", 90.0, False),
        (-1, 10.0, "freeze", 90.0, True),
        (-1, 51.0, "hang nats", 90.0, False),
    )
    for frontend, asked_s, kind, for_s, excused in cases:
        long = happened(kind, "frontend", at_s=9.0)
        long.undone_s = long.began_s + for_s
        for end in ends:
            judged = verdict([bad(end, at_s=asked_s, frontend=frontend, code=CUT)], [long])
            expected = excused and (end == "failed" or frontend < 0)
            assert (judged.cut_from_nats, judged.good) == (int(expected), expected), (frontend, asked_s, kind, end)


def test_while_nats_is_away_a_deadline_may_pass_and_nothing_else_may_fail() -> None:
    for code, excused in ((DEADLINE, True), ("unavailable", False)):
        judged = verdict([bad("failed", code=code)], [happened("kill", "nats", at_s=11.0)])
        assert (judged.expired_without_nats, judged.good) == (int(excused), excused)


def test_a_fault_that_does_not_heal_and_one_with_trouble_are_reported() -> None:
    sick = happened("kill", "worker", at_s=5.0)
    sick.whole_s = None
    troubled = happened("restart", "router", at_s=15.0)
    troubled.trouble = "router 0 ended with status 1"
    judged = verdict([], [sick, troubled])
    assert kinds(judged) == ["unhealed", "unhealed"]
    assert "kill worker 0" in judged.violations[0].what


def test_what_is_left_behind_is_reported() -> None:
    left = {"headrace_reservations of router 0": 2.0, "headrace_inflight_requests of frontend 0": 0.0}
    judged = judge(REFERENCES, [], [], [], left, ENDED_S)
    assert [(one.kind, one.what) for one in judged.violations] == [("left", "headrace_reservations of router 0: 2")]


def life(*, rss_bytes: Sequence[int], fds: Sequence[int], pid: int = 1) -> list[Sample]:
    """One sample every five seconds."""
    sizes = zip(rss_bytes, fds, strict=True)
    return [Sample(5.0 * at, "router 0", pid, rss, fd) for at, (rss, fd) in enumerate(sizes)]


def test_a_process_that_grows_is_found_and_one_that_warms_up_is_not() -> None:
    count, mb = 40, 1 << 20
    flat = life(rss_bytes=[100 * mb] * count, fds=[30] * count)
    warming = life(rss_bytes=[60 * mb] * 5 + [100 * mb] * (count - 5), fds=[5] * 5 + [30] * (count - 5))
    assert verdict(samples=flat).good
    assert verdict(samples=warming).good
    busy = life(rss_bytes=[100 * mb] * count, fds=[30] * (count - 5) + [60] * 4 + [30])
    assert verdict(samples=busy).good
    leaking = life(rss_bytes=[(100 + 2 * at) * mb for at in range(count)], fds=[30] * count)
    assert kinds(verdict(samples=leaking)) == ["grown"]
    opening = life(rss_bytes=[100 * mb] * count, fds=[30 + 2 * at for at in range(count)])
    assert kinds(verdict(samples=opening)) == ["grown"]
    restarted = [*flat[: count // 2], *(replace(one, pid=2, rss_bytes=200 * mb) for one in flat[count // 2 :])]
    assert verdict(samples=restarted).good, "another process under the same name is another life"


@pytest.mark.parametrize("kind", ["kill", "freeze", "partition"])
def test_with_a_server_of_a_cluster_only_answers_over_nats_may_end(kind: Kind) -> None:
    fault = happened(kind, "nats server", at_s=11.0, number=2)
    for end, code in ENDS:
        over_nats, over_http = (bad(end, frontend=frontend, code=code) for frontend in (-1, 0))
        assert verdict([over_nats], [fault]).good, (end, code)
        assert not verdict([over_http], [fault]).good, (end, code)
        late = bad(end, at_s=40.0, frontend=-1, code=code)
        assert not verdict([late], [fault]).good, (end, code)
    assert not verdict([bad("failed", frontend=-1, code=DEADLINE)], [fault]).good


@pytest.mark.parametrize("target", ["etcd member", "worker"])
def test_with_a_member_of_etcd_or_a_workers_machine_no_answer_may_end(target: Target) -> None:
    fault = happened("partition", target, at_s=11.0)
    for frontend in (-1, 0):
        for end, code in ENDS:
            assert not verdict([bad(end, frontend=frontend, code=code)], [fault]).good
