from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.worker.contracts.messages import PARTS
from services.worker.requests.frame_log import FrameLog
from shared.messages.frames import STEP_FRAME, Part, StepFrame


def part(number: int = 0) -> bytes:
    """One part, as a frame's encoded list."""
    return PARTS.encode([_part(number)])


def _part(number: int) -> Part:
    return Part(request="r", attempt=1, first=number, tokens=b"")


def send(log: FrameLog, frontend: str = "f") -> int | None:
    """The sequence of the frame that was sent."""
    frame = log.next_unsent(frontend)
    if frame is None:
        return None
    log.mark_sent(frontend, frame)
    return STEP_FRAME.decode(frame).sequence


def test_frames_are_numbered_by_frontend() -> None:
    log = FrameLog("w")
    for frontend in ("f", "g", "f"):
        log.append(frontend, part())
    assert [send(log, "f"), send(log, "f"), send(log, "f"), send(log, "g")] == [0, 1, None, 0]
    assert log.last_sequences == {"f": 1, "g": 0}


def test_a_frame_is_a_step_frame_of_the_parts_that_it_was_given() -> None:
    log = FrameLog("w")
    log.append("f", PARTS.encode([_part(3), _part(4)]))
    frame = log.next_unsent("f")
    assert frame == STEP_FRAME.encode(StepFrame("w", 1, 0, [_part(3), _part(4)]))


def test_a_frame_that_was_not_sent_comes_first_again() -> None:
    log = FrameLog("w")
    log.append("f", part(1))
    assert log.next_unsent("f") == log.next_unsent("f")
    log.append("f", part(2))
    assert [send(log), send(log)] == [0, 1]


def test_frames_are_sent_again_from_where_they_were_missed() -> None:
    log = FrameLog("w")
    for number in range(4):
        log.append("f", part(number))
        send(log)
    assert log.rewind("f", 2) == (1, 2, 4)
    assert [send(log), send(log), send(log)] == [2, 3, None]


def test_what_is_no_longer_kept_cannot_be_sent_again() -> None:
    log = FrameLog("w", most_frames=2)
    for number in range(4):
        log.append("f", part(number))
        send(log)
    assert log.rewind("f", 0) == (1, 2, 4)
    assert log.lost == 0
    assert log.rewind("stranger", 7) == (1, 0, 0)


def test_what_was_not_sent_yet_is_not_sent_earlier_for_a_question_that_is_ahead() -> None:
    log = FrameLog("w")
    for number in range(3):
        log.append("f", part(number))
    send(log)
    assert log.rewind("f", 9) == (1, 1, 3)
    assert [send(log), send(log), send(log)] == [1, 2, None]


def test_frames_dropped_unsent_are_counted() -> None:
    log = FrameLog("w", most_frames=2)
    for number in range(5):
        log.append("f", part(number))
    assert log.lost == 3
    assert send(log) == 3


def test_the_bound_in_bytes_keeps_at_least_the_newest() -> None:
    log = FrameLog("w", most_bytes=10)
    for number in range(3):
        log.append("f", part(number))
        log.validate()
    assert send(log) == 2


def test_the_frontend_that_heard_nothing_for_longest_is_forgotten() -> None:
    log = FrameLog("w", most_frontends=2)
    for frontend in ("a", "b", "a", "c"):
        log.append(frontend, part())
    assert set(log.frontends) == {"a", "c"}


def numbers(log: FrameLog, frontend: str) -> tuple[int, int]:
    """(epoch, sequence) of the frame that is next."""
    frame = log.next_unsent(frontend)
    assert frame is not None
    log.mark_sent(frontend, frame)
    sent = STEP_FRAME.decode(frame)
    return sent.epoch, sent.sequence


def test_a_frontend_that_comes_again_after_it_was_forgotten_is_numbered_from_0_under_a_larger_epoch() -> None:
    log = FrameLog("w", most_frontends=2)
    for _ in range(2):
        log.append("a", part())
    assert [numbers(log, "a"), numbers(log, "a")] == [(1, 0), (1, 1)]
    for frontend in ("b", "c"):
        log.append(frontend, part())
        log.validate()
    assert "a" not in log.frontends
    epoch, first, after = log.rewind("a", 1)
    assert (first, after) == (0, 0)
    assert epoch > 1
    log.append("a", part())
    again = numbers(log, "a")
    assert again[0] >= epoch
    assert again[1] == 0
    log.forget("a")
    log.append("a", part())
    assert numbers(log, "a") > again


def test_what_a_forgotten_frontend_was_never_sent_is_counted_as_lost() -> None:
    log = FrameLog("w", most_frontends=1)
    for frontend in ("a", "b"):
        log.append(frontend, part())
    assert log.lost == 1
    log.forget("b")
    assert log.lost == 2


class LogMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.log = FrameLog("w", most_frames=4)
        self.made = 0
        self.expected = 0

    @rule()
    def append(self) -> None:
        self.log.append("f", part(self.made))
        self.made += 1
        self.expected = max(self.expected, self.made - 4)

    @precondition(lambda self: self.made)
    @rule()
    def send(self) -> None:
        sent = send(self.log)
        assert sent == (self.expected if self.expected < self.made else None)
        self.expected = min(self.expected + 1, self.made)

    @precondition(lambda self: self.made)
    @rule(first=st.integers(0, 20))
    def rewind(self, first: int) -> None:
        self.expected = min(max(first, self.made - 4, 0), self.expected)
        assert self.log.rewind("f", first) == (1, self.expected, self.made)

    @invariant()
    def consistent(self) -> None:
        self.log.validate()


TestLogMachine = LogMachine.TestCase
TestLogMachine.settings = settings(max_examples=40, stateful_step_count=25)
