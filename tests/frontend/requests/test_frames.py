"""services/frontend/requests/frames.py: which frames are taken, on a clock of the test's own."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.frontend.requests.frames import RESENDS_LIMIT, EndsLost, Frames, FrameVerdict, RequestResend
from shared.messages.frames import Resent, StreamState

RETRY_S, LATE_S = 0.5, 1.0
W = "w1"
A, B = ("a", 1), ("b", 1)


def links(most_links: int = 8) -> Frames:
    return Frames(retry_s=RETRY_S, late_s=LATE_S, most_links=most_links)


def flowing(count: int) -> Frames:
    """Return links to which this many frames have come."""
    frames = links()
    for number in range(count):
        assert frames.frame_received(W, 1, number, 0.0) == "due"
    return frames


def resent(first: int, after: int, *living: tuple[str, int], epoch: int = 1) -> Resent:
    return Resent(epoch, first, after, [StreamState(*name, produced=0) for name in living])


def unheard(*attempts: tuple[str, int]) -> EndsLost:
    return EndsLost(W, frozenset(attempts))


def test_frames_in_order_are_due_and_nothing_is_asked() -> None:
    frames = flowing(3)
    assert frames.poll(100.0) == []


def test_what_came_before_is_repeated_and_what_comes_early_is_ahead() -> None:
    frames = flowing(3)
    verdicts: list[FrameVerdict] = [frames.frame_received(W, 1, number, 1.0) for number in (2, -1, 4, 3, 5, 4)]
    assert verdicts == ["repeated", "repeated", "ahead", "due", "ahead", "due"]


def test_a_gap_is_asked_for_from_the_first_that_is_missing_and_only_once_at_a_time() -> None:
    frames = flowing(3)
    frames.frame_received(W, 1, 4, 1.0)
    assert frames.next_actions(W, 1.0) == [RequestResend(W, 3)]
    frames.frame_received(W, 1, 5, 1.1)
    assert frames.next_actions(W, 1.1) == []
    frames.resend_answered(RequestResend(W, 3), resent(3, 6), ())
    for number in (3, 4, 5):
        assert frames.frame_received(W, 1, number, 1.2) == "due"
    assert frames.poll(9.0) == []


def test_other_workers_frames_are_their_own() -> None:
    frames = flowing(3)
    assert frames.frame_received("w2", 1, 0, 0.0) == "due"
    frames.frame_received("w2", 1, 2, 0.0)
    assert frames.poll(0.0) == [RequestResend("w2", 1)]


def test_a_resend_that_brings_nothing_is_asked_for_again_and_then_given_up() -> None:
    frames = flowing(3)
    frames.frame_received(W, 1, 7, 1.0)
    now_s = 1.0
    for _ in range(RESENDS_LIMIT):
        assert frames.poll(now_s) == [RequestResend(W, 3)]
        frames.validate()
        now_s += RETRY_S
    assert frames.poll(now_s) == []
    assert frames.poll(now_s + 100.0) == []
    assert frames.frame_received(W, 1, 2, now_s) == "repeated"
    assert frames.frame_received(W, 1, 9, now_s) == "due", "adrift: what comes next is taken"
    assert frames.frame_received(W, 1, 11, now_s) == "ahead"


def test_each_frame_that_comes_gives_the_resend_new_tries() -> None:
    frames = flowing(1)
    now_s = 1.0
    for number in range(1, 10):
        frames.frame_received(W, 1, 20, now_s)
        assert frames.poll(now_s) == [RequestResend(W, number)]
        now_s += RETRY_S
        assert frames.frame_received(W, 1, number, now_s) == "due"
        now_s += RETRY_S


def test_frames_that_the_worker_no_longer_has_are_skipped_and_lost_ends_are_reported() -> None:
    frames = flowing(3)
    frames.frame_received(W, 1, 9, 1.0)
    assert frames.next_actions(W, 1.0) == [RequestResend(W, 3)]
    frames.resend_answered(RequestResend(W, 3), resent(8, 10, A), (A, B))
    assert frames.next_actions(W, 1.0) == []
    assert frames.frame_received(W, 1, 8, 1.0) == "due"
    assert frames.poll(1.0) == [], "the end of b may be in the last one"
    assert frames.frame_received(W, 1, 9, 1.0) == "due"
    assert frames.poll(1.0) == [unheard(B)]
    assert frames.poll(1.0) == []


def test_an_attempt_in_doubt_is_asked_for_and_alive_if_the_worker_says_so() -> None:
    frames = flowing(3)
    frames.suspect(W, A)
    assert frames.poll(1.0) == [RequestResend(W, 3)]
    frames.resend_answered(RequestResend(W, 3), resent(3, 3, A), (A,))
    assert frames.poll(9.0) == []


def test_an_attempt_in_doubt_whose_last_frame_was_lost_gets_it() -> None:
    frames = flowing(3)
    frames.suspect(W, A)
    assert frames.poll(1.0) == [RequestResend(W, 3)]
    frames.resend_answered(RequestResend(W, 3), resent(3, 4), (A,))
    assert frames.poll(1.1) == []
    assert frames.frame_received(W, 1, 3, 1.2) == "due"
    assert frames.poll(1.2) == [unheard(A)], "whoever has heard the end does not mind"


def test_an_attempt_is_in_doubt_only_once_the_frames_that_a_report_named_have_come() -> None:
    frames = flowing(3)
    frames.report_received(W, 4, 1.0)
    frames.suspect(W, A)
    assert frames.poll(1.0) == []
    for number in (3, 4):
        frames.frame_received(W, 1, number, 1.1)
    frames.suspect(W, A)
    assert frames.poll(1.1) == [RequestResend(W, 5)]


def test_what_is_sent_again_is_not_asked_for_once_more_while_it_comes() -> None:
    frames = flowing(3)
    frames.frame_received(W, 1, 9, 1.0)
    assert frames.next_actions(W, 1.0) == [RequestResend(W, 3)]
    frames.resend_answered(RequestResend(W, 3), resent(3, 10, A), ())
    frames.frame_received(W, 1, 3, 1.1)
    frames.frame_received(W, 1, 4, 1.6)
    assert frames.poll(1.0 + 2 * RETRY_S) == []
    frames.frame_received(W, 1, 6, 2.0)
    assert frames.next_actions(W, 2.0) == [RequestResend(W, 5)], "a frame of them is missing"
    assert frames.poll(2.0 + RETRY_S) == [RequestResend(W, 5)]


def test_no_end_counts_as_lost_while_the_frame_that_may_have_it_is_being_read() -> None:
    frames = flowing(3)
    frames.suspect(W, A)
    assert frames.poll(1.0) == [RequestResend(W, 3)]
    assert frames.frame_received(W, 1, 3, 1.1) == "due"
    frames.reading = W
    frames.resend_answered(RequestResend(W, 3), resent(4, 4), (A,))
    assert frames.poll(1.1) == []
    frames.reading = ""
    assert frames.poll(1.2) == [unheard(A)]


def test_an_attempt_in_doubt_at_a_worker_that_does_not_answer_has_ended() -> None:
    frames = flowing(3)
    frames.suspect(W, A)
    for number in range(RESENDS_LIMIT):
        assert frames.poll(1.0 + number) == [RequestResend(W, 3)]
        frames.suspect(W, A)
    assert frames.poll(9.0) == [unheard(A)]


def test_a_report_of_a_frame_that_does_not_come_asks_for_it_after_its_time() -> None:
    frames = flowing(3)
    frames.report_received(W, 3, 1.0)
    assert frames.poll(1.0) == []
    frames.report_received(W, 3, 1.0 + LATE_S)
    assert frames.poll(1.0 + LATE_S) == [RequestResend(W, 3)]


def test_a_report_says_nothing_while_frames_come() -> None:
    frames = flowing(3)
    for number in range(3, 9):
        frames.report_received(W, number + 5, float(number))
        frames.frame_received(W, 1, number, number + 0.1)
        frames.report_received(W, number + 5, number + 0.2)
        assert frames.poll(number + 0.2) == []


def test_a_first_frame_that_was_lost_is_missed_by_its_report_alone() -> None:
    frames = links()
    frames.report_received(W, 0, 1.0)
    frames.report_received(W, 0, 1.0 + LATE_S)
    assert frames.poll(3.0) == [RequestResend(W, 0)]
    frames.resend_answered(RequestResend(W, 0), resent(0, 1), (A,))
    assert frames.frame_received(W, 1, 0, 3.1) == "due"


def test_a_report_of_a_numbering_that_is_over_costs_one_question() -> None:
    frames = flowing(3)
    assert frames.frame_received(W, 2, 0, 0.5) == "due"
    frames.report_received(W, 2, 1.0)
    frames.report_received(W, 2, 1.0 + LATE_S)
    assert frames.poll(1.0 + LATE_S) == [RequestResend(W, 1)]
    frames.resend_answered(RequestResend(W, 1), resent(1, 1, A, epoch=2), (A,))
    assert frames.poll(100.0) == []
    assert frames.frame_received(W, 2, 1, 100.0) == "due"


def test_a_last_frame_that_was_lost_with_its_whole_numbering_comes_once_its_attempt_is_in_doubt() -> None:
    frames = flowing(3)
    for now_s in (1.0, 1.0 + LATE_S, 9.0):
        frames.report_received(W, 0, now_s)  # of epoch 2
    assert frames.poll(9.0) == []
    frames.suspect(W, A)
    assert frames.poll(9.0) == [RequestResend(W, 3)]
    frames.resend_answered(RequestResend(W, 3), resent(1, 1, epoch=2), (A,))
    assert frames.next_actions(W, 9.0) == [RequestResend(W, 0)]
    frames.resend_answered(RequestResend(W, 0), resent(0, 1, epoch=2), (A,))
    assert frames.poll(9.1) == []
    assert frames.frame_received(W, 2, 0, 9.2) == "due"
    assert frames.poll(9.2) == [unheard(A)], "whoever has heard the end does not mind"


def test_an_attempt_is_in_doubt_though_its_worker_has_forgotten_what_its_reports_once_named() -> None:
    frames = flowing(3)
    frames.report_received(W, 3, 1.0)
    frames.frame_received(W, 1, 5, 1.1)
    assert frames.next_actions(W, 1.1) == [RequestResend(W, 3)]
    frames.resend_answered(RequestResend(W, 3), resent(0, 0, epoch=2), [A])
    frames.report_received(W, 3, 1.2)  # late, of before
    frames.report_received(W, -1, 1.3)
    frames.suspect(W, A)
    assert frames.poll(2.0) == [RequestResend(W, 0)]
    frames.resend_answered(RequestResend(W, 0), resent(0, 0, epoch=2), [A])
    assert frames.poll(2.0) == [unheard(A)]


def test_a_report_that_names_no_frame_makes_no_link() -> None:
    frames = links()
    frames.report_received(W, -1, 1.0)
    assert frames.poll(9.0) == []


def test_a_larger_epoch_starts_the_numbers_again_and_the_old_one_is_over() -> None:
    frames = flowing(3)
    assert frames.frame_received(W, 2, 0, 1.0) == "due"
    assert frames.frame_received(W, 1, 3, 1.0) == "repeated"
    assert frames.frame_received(W, 2, 1, 1.0) == "due"


def test_a_lost_beginning_of_a_larger_epoch_is_asked_for() -> None:
    frames = flowing(3)
    assert frames.frame_received(W, 2, 1, 1.0) == "ahead"
    assert frames.next_actions(W, 1.0) == [RequestResend(W, 0)]


@pytest.mark.parametrize("epoch", [2, 1])
def test_the_workers_answer_says_which_epoch_it_is_also_a_smaller_one(epoch: int) -> None:
    frames = links()
    for number in range(3):
        frames.frame_received(W, 3 - epoch, number, 0.0)
    frames.suspect(W, A)
    assert frames.poll(1.0) == [RequestResend(W, 3)]
    frames.resend_answered(RequestResend(W, 3), resent(2, 2, A, epoch=epoch), (A,))
    assert frames.next_actions(W, 1.0) == [RequestResend(W, 0)], "3 is a number of another epoch"
    frames.resend_answered(RequestResend(W, 0), resent(0, 2, A, epoch=epoch), (A,))
    assert [frames.frame_received(W, epoch, number, 1.0) for number in range(2)] == ["due", "due"]
    assert frames.poll(9.0) == []


def test_an_absurd_sequence_costs_one_question() -> None:
    frames = flowing(3)
    frames.frame_received(W, 1, 1 << 62, 1.0)
    assert frames.next_actions(W, 1.0) == [RequestResend(W, 3)]
    frames.resend_answered(RequestResend(W, 3), resent(3, 3), ())
    assert frames.poll(100.0) == []
    assert frames.frame_received(W, 1, 3, 100.0) == "due"


def test_frames_are_still_read_after_an_answer_that_names_an_absurd_first_frame() -> None:
    frames = flowing(3)
    frames.frame_received(W, 1, 5, 1.0)
    assert frames.next_actions(W, 1.0) == [RequestResend(W, 3)]
    frames.resend_answered(RequestResend(W, 3), resent(1 << 30, 6), ())
    assert frames.poll(100.0) == []
    assert frames.frame_received(W, 1, 6, 100.0) == "due"


def test_beyond_the_bound_the_link_heard_longest_ago_goes() -> None:
    frames = links(most_links=2)
    for now_s, instance in enumerate(("w1", "w2", "w1", "w3")):
        frames.frame_received(instance, now_s + 1, 0, float(now_s))
        frames.validate()
    assert frames.frame_received("w1", 3, 1, 9.0) == "due"
    assert frames.frame_received("w2", 2, 1, 9.0) == "ahead", "it is a stranger again"


class Links(RuleBasedStateMachine):
    """One worker with a short ring, and a network that loses, repeats and reorders."""

    def __init__(self) -> None:
        super().__init__()
        self.frames = links()
        self.now_s = 0.0
        self.epoch = 1
        self.next = 0
        self.taken: list[tuple[int, int]] = []
        self.wire: list[tuple[int, int]] = []

    @rule(lost=st.booleans())
    def a_frame_is_sent(self, lost: bool) -> None:
        if not lost:
            self.wire.append((self.epoch, self.next))
        self.next += 1

    @precondition(lambda self: self.wire)
    @rule(pick=st.integers(0, 3), keep=st.booleans())
    def a_frame_comes(self, pick: int, keep: bool) -> None:
        at = min(pick, len(self.wire) - 1)
        frame = self.wire[at] if keep else self.wire.pop(at)
        if self.frames.frame_received(W, *frame, self.now_s) == "due":
            self.taken.append(frame)

    @rule()
    def the_worker_forgets_us(self) -> None:
        if self.next:
            self.epoch, self.next = self.epoch + 1, 0

    @rule()
    def a_report_comes(self) -> None:
        if self.next:
            self.frames.report_received(W, self.next - 1, self.now_s)

    @rule(answered=st.booleans(), ring=st.integers(0, 4), for_s=st.sampled_from([0.1, RETRY_S, LATE_S]))
    def time_passes(self, answered: bool, ring: int, for_s: float) -> None:
        self.now_s += for_s
        for action in self.frames.poll(self.now_s):
            if isinstance(action, RequestResend) and answered:
                self.resend(action, ring)

    def resend(self, ask: RequestResend, ring: int) -> None:
        first = min(max(ask.first, self.next - ring), self.next)
        self.wire += [(self.epoch, number) for number in range(first, self.next)]
        self.frames.resend_answered(ask, resent(first, self.next, epoch=self.epoch), ())

    @invariant()
    def nothing_comes_twice_or_out_of_order(self) -> None:
        assert self.taken == sorted(set(self.taken))
        self.frames.validate()

    def teardown(self) -> None:
        """Once all is well again, all that is sent comes, and nothing is asked any more."""
        self.wire.clear()
        for _ in range(6):  # reports for LATE_S, which rounding makes longer; then two questions
            self.a_report_comes()
            self.frames.suspect(W, A)  # its reports do not name it: they cannot say that they number anew
            self.time_passes(answered=True, ring=1000, for_s=LATE_S)
            while self.wire:
                self.a_frame_comes(0, keep=False)
        begun = self.next
        for _ in range(3):
            self.a_frame_is_sent(lost=False)
            self.a_frame_comes(0, keep=False)
        assert self.taken[-3:] == [(self.epoch, number) for number in range(begun, begun + 3)]
        assert not [action for action in self.frames.poll(self.now_s + LATE_S) if isinstance(action, RequestResend)]


Links.TestCase.settings = settings(max_examples=150, stateful_step_count=30)
TestLinks = Links.TestCase
