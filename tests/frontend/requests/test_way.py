"""A request's way, as its session's events mark it, and the log of the latest ways."""

from __future__ import annotations

from functools import partial

from services.frontend.requests.events import InstanceGone, PartReceived
from services.frontend.requests.session import Session
from services.frontend.requests.way import INSTANCES_KEPT, Way, WayLog, session_counts
from shared.hashing import pack_tokens
from shared.messages.frames import Part
from shared.messages.generate import Accepted
from shared.messages.select import Overlap, Selected

OWN = "0123456789abcdef" * 2
LIMIT = 3


def begun(log: WayLog, request: str = OWN) -> tuple[Session, Way]:
    session = Session(request, 100)
    way = log.begin(request, "m", 40, partial(session_counts, session), 10.0, 10.5)
    session.start()
    return session, way


def choose(session: Session, instance: str) -> None:
    session.on(Selected(session.request, session.attempt, instance, 0, "r1", Overlap(), "first"))


def part(session: Session, *tokens: int) -> PartReceived:
    given = Part(session.request, session.attempt, len(session.tokens), pack_tokens(tokens), None, 32, None, "", 16, 0)
    return PartReceived(session.instance, given)


def test_each_step_is_noted_when_it_comes_in_seconds_after_the_body() -> None:
    log = WayLog(LIMIT)
    session, way = begun(log)
    choose(session, "w1")
    way.note(session, 11.0)
    session.on(Accepted(OWN, 1))
    way.note(session, 11.25)
    session.on(part(session, 7))
    way.note(session, 12.0)
    session.on(part(session, 8))
    way.note(session, 13.0)
    log.validate()
    seen = way.message(14.0)
    assert (seen.tokenised_s, seen.selected_s, seen.accepted_s, seen.first_token_s) == (0.5, 1.0, 1.25, 2.0)
    assert (seen.ended_s, seen.outcome, seen.age_s) == (None, "", 4.0)
    assert (seen.attempt, seen.instances, seen.output_tokens) == (1, ("w1",), 2)
    assert (seen.cached_tokens, seen.cached_host_tokens, seen.cached_disk_tokens) == (32, 16, 0)


def test_a_worker_whose_first_part_is_faster_than_its_answer_has_accepted() -> None:
    session, way = begun(WayLog(LIMIT))
    choose(session, "w1")
    way.note(session, 11.0)
    session.on(part(session, 7))
    way.note(session, 12.0)
    assert (way.accepted_s, way.first_token_s) == (12.0, 12.0)


def test_an_attempt_that_is_lost_shows_where_it_went_on_and_keeps_its_first_times() -> None:
    session, way = begun(WayLog(LIMIT))
    choose(session, "w1")
    way.note(session, 11.0)
    session.on(part(session, 7))
    way.note(session, 12.0)
    session.on(InstanceGone("w1"))
    way.note(session, 13.0)
    choose(session, "w2")
    way.note(session, 14.0)
    assert (way.attempt, way.instances) == (2, ("w1", "w2"))
    assert (way.selected_s, way.first_token_s) == (11.0, 12.0)


def test_the_end_keeps_the_counts_and_lets_go_of_the_session() -> None:
    session, way = begun(WayLog(LIMIT))
    choose(session, "w1")
    session.on(part(session, 7, 8, 9))
    way.note(session, 14.0)
    way.end("stop", 15.0)
    way.end("cancelled", 16.0)
    assert way.counts is None
    assert (way.outcome, way.ended_s, way.output_tokens) == ("stop", 15.0, 3)
    way.note(session, 17.0)
    assert way.message(20.0).ended_s == 5.0


def test_the_log_keeps_the_latest_and_counts_all() -> None:
    log = WayLog(LIMIT)
    for number in range(2 * LIMIT):
        begun(log, f"{number:032x}")
    log.validate()
    report = log.report("f1", 2, 6, 11.0)
    assert [way.name for way in report.requests] == [f"{0:012x}"] * LIMIT
    assert (report.begun, report.arriving, report.running) == (2 * LIMIT, 2, 6)


def test_a_body_whose_time_is_unknown_or_later_begins_with_its_prompt() -> None:
    log = WayLog(LIMIT)
    for received_s in (0.0, 99.0):
        way = log.begin(OWN, "m", 1, partial(session_counts, Session(OWN, 1)), received_s, 10.0)
        assert way.message(10.0).tokenised_s == 0.0
    log.validate()


def test_only_the_latest_workers_are_kept() -> None:
    session, way = begun(WayLog(LIMIT))
    for number in range(2 * INSTANCES_KEPT):
        session.attempt, session.instance = number + 1, f"w{number}"
        way.note(session, 11.0 + number)
    assert way.instances == tuple(f"w{number}" for number in range(INSTANCES_KEPT, 2 * INSTANCES_KEPT))


def test_a_request_without_a_session_marks_its_steps_itself_and_counts_as_running() -> None:
    log, counts = WayLog(LIMIT), [(2, (0, 0, 0))]
    way = log.begin(OWN, "m", 40, lambda: counts[-1], 10.0, 10.5, passes=True)
    for now_s in (11.0, 12.0):
        way.choose(1, "w1", now_s)
        way.accept(now_s)
        way.begin_output(now_s)
    way.choose(2, "w2", 13.0)
    log.validate()
    seen = way.message(14.0)
    assert (seen.selected_s, seen.accepted_s, seen.first_token_s, seen.ended_s) == (1.0, 1.0, 1.0, None)
    assert (seen.attempt, seen.instances, seen.output_tokens) == (2, ("w1", "w2"), 2)
    assert log.report("f1", 0, 5, 14.0).running == 6
    counts.append((9, (16, 0, 0)))
    log.end_passing(way, "answered", 15.0)
    log.validate()
    report = log.report("f1", 0, 5, 16.0)
    assert report.running == 5
    [seen] = report.requests
    assert (seen.ended_s, seen.outcome, seen.output_tokens, seen.cached_tokens) == (5.0, "answered", 9, 16)
