from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Literal

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from services.frontend.protocol.errors import failure_of
from services.frontend.requests.actions import (
    Action,
    AnnounceAttempt,
    CountLoss,
    DispatchAttempt,
    EmitPromptLogprobs,
    EmitStep,
    EmitTokens,
    Fail,
    Finish,
    HandOver,
    ImagesApart,
    PublishLoad,
    RetryLater,
    SelectWorker,
    WithdrawAttempt,
)
from services.frontend.requests.events import (
    AnswerMissed,
    AttemptLost,
    ClientLeft,
    Event,
    InstanceGone,
    PartReceived,
    RetryDue,
    StopFound,
    TimeExpired,
    TurnWaited,
    Unreachable,
    Unrouted,
    Unsendable,
)
from services.frontend.requests.retry import ATTEMPTS, RESCUE_S, RetryBudget
from services.frontend.requests.session import Session, State
from shared.errors import InvalidRequest, NotFinite, Overloaded, RequestTimeout, Unavailable
from shared.hashing import pack_tokens
from shared.messages.frames import (
    BLOCKED,
    NOT_BEGUN,
    NOT_FINITE,
    SHUTTING_DOWN,
    UNFOLLOWABLE,
    FinishReason,
    Part,
    PicturePiece,
    PromptLogprobs,
    TokenLogprob,
)
from shared.messages.generate import Accepted, Refused
from shared.messages.select import Finished, Overlap, Prefilled, Selected, SelectRefused

R = "request"
MAX_TOKENS = 12
INSTANCES = st.sampled_from(["w1", "w2", "w3"])
RARE = st.integers(0, 7)
"""0 lets it happen."""


def selected(attempt: int, instance: str = "w1", decode: str = "") -> Selected:
    return Selected(R, attempt, instance, 0, "r1", Overlap(), "", decode=decode)


def part(first: int, tokens: Sequence[int], finish: FinishReason | None = None, attempt: int = 1) -> Part:
    return Part(R, attempt, first, pack_tokens(tokens), finish)


def prompt_part(first: int, count: int, attempt: int = 1) -> Part:
    given = PromptLogprobs(first, b"".join(bytes([first + at]) * 4 for at in range(count)))
    return Part(R, attempt, 0, b"", prompt_logprobs=given)


def with_prompt(due: int) -> Session:
    session = Session(R, MAX_TOKENS, prompt_logprobs=due)
    session.start()
    session.on(selected(1))
    session.on(Accepted(R, 1))
    return session


def emitted(actions: Sequence[Action]) -> list[tuple[int, int]]:
    """The first token and the count of what is passed on of the prompt's log-probabilities."""
    return [(one.given.first, one.given.count) for one in actions if isinstance(one, EmitPromptLogprobs)]


def streaming(max_tokens: int = MAX_TOKENS) -> Session:
    session = Session(R, max_tokens)
    session.start()
    session.on(selected(1))
    session.on(Accepted(R, 1))
    return session


def step(session: Session, event: Event) -> list[Action]:
    actions = session.on(event)
    session.validate()
    return actions


def copied(session: Session) -> Session:
    """With tokens of its own."""
    twin = copy.copy(session)
    twin.tokens = session.tokens[:]
    twin._retries = copy.copy(session._retries)
    twin.prompt_logprobs = copy.copy(session.prompt_logprobs)
    return twin


def state(session: Session) -> Mapping[str, object]:
    return vars(session) | {"_retries": vars(session._retries), "prompt_logprobs": vars(session.prompt_logprobs)}


def continues_alike(twin: Session, event: PartReceived, session: Session, actions: list[Action]) -> None:
    """The short way changes nothing, or does as `on` did to `session`."""
    before = copied(twin)
    token = twin.next_token(event.instance, event.part)
    twin.validate()
    if token < 0:
        assert state(twin) == state(before)
    else:
        assert state(twin) == state(session)
        assert actions == [EmitTokens([token], None)]


class Sessions(RuleBasedStateMachine):
    """One session among routers that reserve and workers that stream the tokens 100, 101, … wherever they begin.

    Messages are lost, repeated, late, and answered by those who were thought dead.
    """

    @initialize()
    def start(self) -> None:
        self.session = Session(R, MAX_TOKENS)
        self.emitted: list[int] = []
        self.ends: list[Action] = []
        self.client_gone = False
        self.asks: list[SelectWorker] = []
        """Not yet answered."""
        self.offers: list[tuple[DispatchAttempt, int]] = []
        """Not yet answered, with the index their stream would begin at."""
        self.streams: dict[tuple[str, int], int] = {}
        """(instance, attempt) of unfinished streams → index of the next token."""
        self.prefilling: set[tuple[str, int]] = set()
        """(instance, attempt) of streams that end with their first token."""
        self.pauses: list[RetryLater] = []
        """Under way."""
        self.now_s = 0.0
        self.reserved: set[int] = set()
        """Attempts that a router holds load for."""
        self.perform(self.session.start())

    def feed(self, event: Event) -> list[Action]:
        before = self.session.state
        twin = copied(self.session)
        actions = step(self.session, event)
        if isinstance(event, PartReceived):
            continues_alike(twin, event, self.session, actions)
        if before is State.ENDED:
            assert all(isinstance(action, PublishLoad | WithdrawAttempt) for action in actions)
        self.perform(actions)
        return actions

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case SelectWorker():
                    self.asks.append(action)
                case RetryLater():
                    self.pauses.append(action)
                case AnnounceAttempt():
                    assert {action.attempt - 1, action.attempt} <= self.reserved
                case HandOver():
                    assert self.session.tokens, "a prompt is handed over with its first token"
                case CountLoss():
                    assert action.had_tokens <= bool(self.session.tokens)
                case DispatchAttempt():
                    self.offers.append((action, len(self.session.tokens)))
                case EmitTokens():
                    self.emitted += action.tokens
                case WithdrawAttempt():
                    self.streams.pop((action.instance, action.attempt), None)
                case PublishLoad(Finished(attempt=attempt)):
                    self.reserved.discard(attempt)
                case PublishLoad(Prefilled(attempt=attempt)):
                    assert attempt in self.reserved
                case PublishLoad():
                    raise AssertionError(action)
                case Finish() | Fail():
                    self.ends.append(action)

    @precondition(lambda self: self.asks)
    @rule(instance=INSTANCES, keep=RARE, decode=st.sampled_from(["", "", "d1", "w1"]))
    def a_router_chooses(self, instance: str, keep: int, decode: str = "") -> None:
        """With `keep` of 0, another router will answer the same question again."""
        ask = self.asks.pop(0) if keep else self.asks[0]
        self.reserved |= {ask.attempt, ask.attempt + 1} if decode else {ask.attempt}
        self.feed(selected(ask.attempt, instance, decode))

    @precondition(lambda self: self.asks)
    @rule(how=st.sampled_from(["unrouted", "away", "no_instances", "all_excluded"]), rare=RARE)
    def no_router_chooses(self, how: str, rare: int) -> None:
        if rare > 1:
            return
        ask = self.asks.pop(0)
        if how == "no_instances":
            self.feed(SelectRefused(R, ask.attempt, "no_instances", "none"))
        elif how == "all_excluded":
            self.feed(SelectRefused(R, ask.attempt, "all_excluded", "none"))
        else:
            if self.session.is_choosing(ask.attempt):  # a router chose, and its answer was lost
                self.reserved |= {ask.attempt, ask.attempt + 1}
            self.feed(Unrouted(ask.attempt, away=how == "away"))

    @precondition(lambda self: self.asks)
    @rule(rare=RARE)
    def its_model_was_asleep(self, rare: int) -> None:
        """It has woken, or rarely not; no router was asked meanwhile."""
        ask = self.asks.pop(0)
        self.feed(TurnWaited(ask.attempt, "" if rare else "it stays asleep"))

    @precondition(lambda self: self.pauses)
    @rule()
    def a_pause_ends(self) -> None:
        later = self.pauses.pop(0)
        self.now_s += later.pause_s
        self.feed(RetryDue(later.attempt, self.now_s))

    @precondition(lambda self: self.offers)
    @rule(answer=st.sampled_from(["accepted", "faster", "accepted", "faster", "refused", "unreachable", "lost"]))
    def a_worker_answers(self, answer: str) -> None:
        offer, first = self.offers.pop(0)
        if answer in ("accepted", "lost", "faster"):
            self.streams[offer.instance, offer.attempt] = first
            if offer.prefill_only:
                self.prefilling.add((offer.instance, offer.attempt))
        if answer == "faster":
            self.send(offer.instance, offer.attempt, 1, None)
        if answer in ("accepted", "faster"):
            self.feed(Accepted(R, offer.attempt))
        elif answer == "refused":
            self.feed(Refused(R, offer.attempt, "overloaded", "full"))
        else:
            self.feed(Unreachable(offer.attempt, "silence"))

    @precondition(lambda self: self.streams)
    @rule(pick=st.integers(0, 5), fates=st.lists(st.sampled_from(["sent", "sent", "lost", "twice"]), max_size=5))
    def a_worker_streams(self, pick: int, fates: list[str]) -> None:
        instance, attempt = sorted(self.streams)[pick % len(self.streams)]
        for count, fate in enumerate(fates):
            first = self.streams.get((instance, attempt), MAX_TOKENS)
            if first < MAX_TOKENS:  # else it was withdrawn, or has ended
                count = min(count, MAX_TOKENS - first)
                self.send(instance, attempt, count, "length" if first + count == MAX_TOKENS else None, fate)

    @precondition(lambda self: self.streams)
    @rule(pick=st.integers(0, 5), finish=st.sampled_from(["stop", "error", "cancelled", "deadline"]), rare=RARE)
    def a_worker_ends(self, pick: int, finish: FinishReason, rare: int) -> None:
        if rare > 3:
            return
        (instance, attempt), first = sorted(self.streams.items())[pick % len(self.streams)]
        self.send(instance, attempt, min(1, MAX_TOKENS - first), finish)

    def send(self, instance: str, attempt: int, count: int, finish: FinishReason | None, fate: str = "sent") -> None:
        first = self.streams[instance, attempt]
        if count and not finish and (instance, attempt) in self.prefilling:
            count, finish = 1, "handed_over"
        tokens = [100 + at for at in range(first, first + count)]
        self.streams[instance, attempt] = first + count
        if finish:
            del self.streams[instance, attempt]
        for _ in range({"sent": 1, "lost": 0, "twice": 2}[fate]):
            stray = (instance, attempt) != (self.session.instance, self.session.attempt)
            actions = self.feed(PartReceived(instance, part(first, tokens, finish, attempt)))
            if stray:
                assert actions == ([] if finish else [WithdrawAttempt(instance, attempt)])

    @rule(fate=st.integers(0, 20), instance=INSTANCES)
    def something_happens(self, fate: int, instance: str) -> None:
        """Mostly nothing: an end leaves nothing more to see."""
        if fate <= 2:
            self.feed(InstanceGone(instance))
        elif fate == 3 and self.emitted:
            self.feed(StopFound())
        elif fate == 4:
            self.feed(TimeExpired())
        elif fate in (6, 7):
            self.feed(AttemptLost(self.session.attempt, "stalled" if fate == 6 else "unheard", "quiet"))
        elif fate == 5:
            self.client_gone |= self.session.state is not State.ENDED
            self.feed(ClientLeft())

    @invariant()
    def every_token_came_once_and_in_order(self) -> None:
        assert self.emitted == [100 + at for at in range(len(self.emitted))]
        assert 0 <= len(self.session.tokens) - len(self.emitted) <= 1

    @invariant()
    def it_ends_once(self) -> None:
        ended = self.session.state is State.ENDED
        assert len(self.ends) == (1 if ended and not self.client_gone else 0)
        if self.ends == [Finish("length")]:
            assert len(self.emitted) == MAX_TOKENS

    def teardown(self) -> None:
        if not hasattr(self, "session"):
            return
        self.feed(TimeExpired())
        assert self.session.state is State.ENDED
        while self.asks:
            self.a_router_chooses("w1", keep=1)
        assert not self.reserved, "a reservation outlives its request"


Sessions.TestCase.settings = settings(max_examples=150, stateful_step_count=30)
TestSessions = Sessions.TestCase


def test_a_request_goes_from_ask_to_finish() -> None:
    session = Session(R, 3)
    assert session.start() == [SelectWorker(1, 0, ())]
    assert step(session, selected(1)) == [DispatchAttempt(1, "w1", 0)]
    assert step(session, Accepted(R, 1)) == []
    assert step(session, PartReceived("w1", part(0, [5]))) == [
        PublishLoad(Prefilled(R, 1, 0, instance="w1")),
        EmitTokens([5], None),
    ]
    last = step(session, PartReceived("w1", part(1, [6, 7], "length")))
    assert last == [EmitTokens([6, 7], None), PublishLoad(Finished(R, 1)), Finish("length")]


def handing_over() -> Session:
    session = Session(R, MAX_TOKENS)
    session.start()
    assert step(session, selected(1, "p", "d")) == [
        DispatchAttempt(1, "p", 0, prefill_only=True),
        AnnounceAttempt(2, "d", 0, prefill="p"),
    ]
    step(session, Accepted(R, 1))
    return session


def test_images_that_another_worker_encodes_are_named_to_the_one_that_sends_the_attempt() -> None:
    session = Session(R, MAX_TOKENS)
    session.start()
    choice = replace(selected(1), encode="e", encode_images=(0, 2), encode_wait_s=1.5)
    assert step(session, choice) == [DispatchAttempt(1, "w1", 0, images=ImagesApart("e", (0, 2), 1.5))]
    assert session.is_offered(1)
    assert not session.is_offered(2)
    step(session, ClientLeft())
    assert not session.is_offered(1)


def test_a_prompt_that_is_handed_over_goes_on_at_the_worker_that_decodes_without_another_choice() -> None:
    session = handing_over()
    assert step(session, PartReceived("p", part(0, [5], "handed_over"))) == [
        PublishLoad(Prefilled(R, 1, 0, instance="p")),
        EmitTokens([5], None),
        PublishLoad(Finished(R, 1)),
        HandOver(1, "d"),
        DispatchAttempt(2, "d", 0),
    ]
    assert step(session, PartReceived("d", part(1, [6], "stop", attempt=2)))[-2:] == [
        PublishLoad(Finished(R, 2)),
        Finish("stop", stop_token=6),
    ]


def test_the_token_that_ends_an_answer_keeps_its_log_probability() -> None:
    session = Session(R, 3)
    session.start()
    step(session, selected(1))
    given = TokenLogprob(-0.5), TokenLogprob(-0.25)
    actions = step(session, PartReceived("w1", replace(part(0, [5, 6], "stop"), logprobs=given)))
    assert EmitTokens([5], given[:1]) in actions
    assert actions[-1] == Finish("stop", stop_token=6, stop_logprob=given[1])


def test_an_answer_that_ends_with_its_first_token_gives_the_worker_that_decodes_back() -> None:
    session = handing_over()
    actions = step(session, PartReceived("p", part(0, [5], "stop")))
    assert actions[-4:] == [
        PublishLoad(Finished(R, 1)),
        WithdrawAttempt("d", 2),
        PublishLoad(Finished(R, 2)),
        Finish("stop", stop_token=5),
    ]


def test_a_client_that_leaves_withdraws_the_advice_to_the_worker_that_would_decode() -> None:
    session = handing_over()
    assert step(session, ClientLeft()) == [
        WithdrawAttempt("p", 1),
        PublishLoad(Finished(R, 1)),
        WithdrawAttempt("d", 2),
        PublishLoad(Finished(R, 2)),
    ]


def test_where_a_router_did_not_answer_what_it_may_have_reserved_for_a_second_worker_is_released() -> None:
    session = Session(R, 3)
    session.start()
    step(session, Unrouted(1, "lost", away=True))
    assert step(session, RetryDue(1, 0.1)) == [SelectWorker(1, 0, ())]
    step(session, selected(1))
    last = step(session, PartReceived("w1", part(0, [5], "stop")))
    assert last[-3:] == [
        PublishLoad(Finished(R, 1)),
        PublishLoad(Finished(R, 2)),
        Finish("stop", stop_token=5),
    ]


def test_where_another_router_answered_what_the_first_may_have_reserved_for_a_second_worker_is_released() -> None:
    session = Session(R, 3)
    session.start()
    assert step(session, AnswerMissed(1)) == []
    step(session, selected(1))
    assert step(session, AnswerMissed(1)) == [], "it was asked before"
    last = step(session, PartReceived("w1", part(0, [5], "stop")))
    assert last[-3:] == [
        PublishLoad(Finished(R, 1)),
        PublishLoad(Finished(R, 2)),
        Finish("stop", stop_token=5),
    ]


def test_a_lost_prefill_worker_costs_both_reservations_and_the_next_attempt_has_a_new_number() -> None:
    session = handing_over()
    actions = step(session, InstanceGone("p"))
    assert actions[-4:] == [
        PublishLoad(Finished(R, 1)),
        WithdrawAttempt("d", 2),
        PublishLoad(Finished(R, 2)),
        SelectWorker(3, 0, ("p",)),
    ]


def test_without_the_worker_that_decodes_another_one_is_chosen_once_the_prompt_is_computed() -> None:
    session = handing_over()
    assert step(session, InstanceGone("d")) == [PublishLoad(Finished(R, 2))]
    actions = step(session, PartReceived("p", part(0, [5], "handed_over")))
    assert actions[-2:] == [PublishLoad(Finished(R, 1)), SelectWorker(3, 1, ())]


def test_a_worker_that_hands_over_what_it_must_not_is_lost() -> None:
    session = streaming()
    actions = step(session, PartReceived("w1", part(0, [5], "handed_over")))
    assert [one.loss for one in actions if isinstance(one, CountLoss)] == ["senseless"]
    session = handing_over()
    actions = step(session, PartReceived("p", part(0, [], "handed_over")))
    assert [one.loss for one in actions if isinstance(one, CountLoss)] == ["senseless"]


def test_a_late_choice_of_a_pair_gives_back_what_is_not_in_use() -> None:
    session = handing_over()
    step(session, PartReceived("p", part(0, [5], "handed_over")))
    assert step(session, selected(1, "p", "e")) == [PublishLoad(Finished(R, 1))]
    step(session, ClientLeft())
    assert step(session, selected(3, "p", "d")) == [PublishLoad(Finished(R, 3)), PublishLoad(Finished(R, 4))]


def test_only_a_part_that_adds_one_token_to_its_stream_takes_the_short_way() -> None:
    session = streaming(max_tokens=3)
    assert session.next_token("w1", part(0, [5])) == -1, "routers have to be told of the first token"
    step(session, PartReceived("w1", part(0, [5])))
    for other in (
        part(0, [5]),
        part(2, [7]),
        part(1, []),
        part(1, [6, 7]),
        part(1, [6], "length"),
        part(1, [6], attempt=2),
        Part(R, 1, 1, b"\0\0\0"),
        Part(R, 1, 1, pack_tokens([6]), None, 0, (TokenLogprob(-1.0),)),
    ):
        assert session.next_token("w1", other) == -1
    assert session.next_token("w2", part(1, [6])) == -1
    assert session.next_token("w1", part(1, [6])) == 6
    assert session.next_token("w1", part(2, [1 << 31])) == 1 << 31
    assert session.next_token("w1", part(3, [8])) == -1, "max_tokens are there"
    session.on(ClientLeft())
    assert session.next_token("", part(3, [8])) == -1
    assert list(session.tokens) == [5, 6, 1 << 31]


def test_an_attempt_whose_end_was_lost_continues_after_the_tokens_so_far() -> None:
    session = streaming()
    step(session, PartReceived("w1", part(0, [5])))
    assert step(session, AttemptLost(0, "unheard", "an older one")) == []
    actions = step(session, AttemptLost(1, "unheard", "its end was lost"))
    assert actions == [
        CountLoss("unheard", had_tokens=True, attempt=1, why="its end was lost"),
        WithdrawAttempt("w1", 1),
        PublishLoad(Finished(R, 1)),
        SelectWorker(2, 1, ()),
    ]


def test_a_stop_token_counts_but_is_not_shown() -> None:
    session = streaming()
    logprobs = (TokenLogprob(-1.0), TokenLogprob(-2.0))
    actions = step(session, PartReceived("w1", Part(R, 1, 0, pack_tokens([5, 2]), "stop", 0, logprobs)))
    assert EmitTokens([5], logprobs[:1]) in actions
    assert list(session.tokens) == [5, 2]


def test_an_overlapping_part_brings_only_its_new_tokens() -> None:
    session = streaming()
    step(session, PartReceived("w1", part(0, [5, 6])))
    assert step(session, PartReceived("w1", part(1, [6, 7]))) == [EmitTokens([7], None)]
    assert step(session, PartReceived("w1", part(0, [5, 6]))) == []


def test_a_part_of_the_present_attempt_from_another_instance_is_withdrawn_there_and_not_shown() -> None:
    session = streaming()
    assert step(session, PartReceived("w2", part(0, [5]))) == [WithdrawAttempt("w2", 1)]
    assert step(session, PartReceived("w2", part(0, [5], "length"))) == []
    assert session.state is State.STREAMING
    assert step(session, PartReceived("w1", part(0, [6])))[-1] == EmitTokens([6], None)


@pytest.mark.parametrize(
    "senseless",
    [
        Part(R, 1, 0, b"\0\0\0"),
        Part(R, 1, -1, pack_tokens([5, 6])),
        part(0, [5] * (MAX_TOKENS + 1)),
        Part(R, 1, 0, pack_tokens([5, 6]), None, 0, (TokenLogprob(-1.0),)),
        Part(R, 1, 0, pack_tokens([5]), "length", 0, (TokenLogprob(-1.0, pack_tokens([5]), ()),)),
        Part(R, 1, 0, pack_tokens([5]), None, 0, (TokenLogprob(-1.0, b"\5", (-1.0,)),)),
    ],
)
def test_a_part_that_makes_no_sense_loses_the_attempt_and_its_worker(senseless: Part) -> None:
    session = streaming()
    actions = step(session, PartReceived("w1", senseless))
    assert actions == [
        CountLoss("senseless", had_tokens=False, attempt=1, why="the worker's stream is inconsistent"),
        WithdrawAttempt("w1", 1),
        PublishLoad(Finished(R, 1)),
        SelectWorker(2, 0, ("w1",)),
    ]


def test_a_gap_withdraws_and_asks_again_without_excluding() -> None:
    session = streaming()
    step(session, PartReceived("w1", part(0, [5])))
    actions = step(session, PartReceived("w1", part(2, [7])))
    assert actions == [
        CountLoss("gap", had_tokens=True, attempt=1, why="a part of the stream was lost"),
        WithdrawAttempt("w1", 1),
        PublishLoad(Finished(R, 1)),
        SelectWorker(2, 1, ()),
    ]


def test_only_the_finish_lost_is_no_reason_to_ask_again() -> None:
    session = streaming(max_tokens=2)
    step(session, PartReceived("w1", part(0, [5, 6])))
    assert step(session, InstanceGone("w1"))[-1] == Finish("length")


def goes_on(session: Session) -> None:
    """The next attempt is taken on."""
    step(session, selected(session.attempt))
    step(session, Accepted(R, session.attempt))


def failed(actions: list[Action]) -> Exception:
    """What ended it."""
    assert isinstance(actions[-1], Fail)
    return actions[-1].error


def test_fruitless_attempts_in_a_row_are_bounded_and_the_end_tells_of_each() -> None:
    session = streaming()
    step(session, InstanceGone("w1"))
    goes_on(session)
    step(session, PartReceived("w1", part(0, [5], attempt=2)))
    for _ in range(ATTEMPTS):
        assert isinstance(step(session, AttemptLost(session.attempt, "stalled", "no token came"))[-1], SelectWorker)
        goes_on(session)
    wrong = failed(step(session, AttemptLost(session.attempt, "unheard", "its end was lost")))
    assert isinstance(wrong, Unavailable)
    assert str(wrong) == (
        "3 attempts in a row brought no token; attempt 1 at w1: the worker is gone; attempt 2 at w1: no token came; "
        "attempt 3 at w1: no token came; attempt 4 at w1: no token came; attempt 5 at w1: its end was lost"
    )


def test_a_prompt_that_kills_engine_after_engine_after_its_first_tokens_is_stopped() -> None:
    session = streaming()

    def dies(death: int) -> list[Action]:
        step(session, PartReceived("w1", part(death, [5], attempt=session.attempt)))
        return step(session, PartReceived("w1", Part(R, session.attempt, death + 1, b"", "error", error="it died")))

    for death in range(ATTEMPTS):
        dies(death)
        goes_on(session)
    assert "4 attempts ended with their worker" in str(failed(dies(ATTEMPTS)))


@pytest.mark.parametrize(("finish", "error"), [("error", SHUTTING_DOWN), ("cancelled", "")])
def test_a_stream_outlives_any_number_of_rolling_restarts(finish: FinishReason, error: str) -> None:
    session = Session(R, MAX_TOKENS)
    session.start()
    for attempt in range(1, 4 * ATTEMPTS):
        session.on(selected(attempt, f"w{attempt}"))
        session.on(Accepted(R, attempt))
        if attempt in (2, 5):
            session.on(PartReceived(f"w{attempt}", part(len(session.tokens), [100], attempt=attempt)))
        back = Part(R, attempt, len(session.tokens), b"", finish, error=error)
        note, told, asked = step(session, PartReceived(f"w{attempt}", back))
        assert isinstance(note, CountLoss)
        assert (note.loss, note.had_tokens, note.attempt) == ("handed_back", attempt in (2, 5), attempt)
        assert told == PublishLoad(Finished(R, attempt))
        assert isinstance(asked, SelectWorker)
        assert (asked.attempt, asked.produced, asked.excluded[-1]) == (attempt + 1, len(session.tokens), f"w{attempt}")


def test_a_grammar_that_cannot_be_followed_is_its_request_s_fault_and_tried_nowhere_else() -> None:
    session = Session(R, MAX_TOKENS, grammar_param="structured_outputs.regex")
    session.start()
    session.on(selected(1, "w1"))
    session.on(Accepted(R, 1))
    told, end = step(session, PartReceived("w1", Part(R, 1, 0, b"", "error", error=f"{UNFOLLOWABLE}: too large")))
    assert told == PublishLoad(Finished(R, 1))
    assert isinstance(end, Fail)
    assert isinstance(end.error, InvalidRequest)
    assert end.error.param == "structured_outputs.regex"
    assert "too large" in str(end.error)


def test_a_request_that_waited_for_a_worker_in_vain_is_refused_as_one_that_would_have_to() -> None:
    session = Session(R, MAX_TOKENS, wait_s=7.5)
    session.start()
    assert session.on(selected(1, "w1")) == [DispatchAttempt(1, "w1", 0, wait_s=7.5)]
    told, _ = step(session, Refused(R, 1, "overloaded", "full"))[1:]
    assert told == PublishLoad(Finished(R, 1))
    assert session.on(selected(2, "w2")) == [DispatchAttempt(2, "w2", 0, wait_s=7.5)], "it has lost nothing"
    session.on(Accepted(R, 2))
    told, end = step(session, PartReceived("w2", Part(R, 2, 0, b"", "error", error=f"{NOT_BEGUN}: it is full")))
    assert told == PublishLoad(Finished(R, 2))
    assert isinstance(end, Fail)
    assert isinstance(end.error, Overloaded)
    assert (failure_of(end.error).status, failure_of(end.error).retry_after_s) == (429, 8)
    assert str(end.error).startswith(NOT_BEGUN)
    session = Session(R, MAX_TOKENS, wait_s=3600.0)
    session.start()
    session.on(selected(1, "w1"))
    _, end = step(session, PartReceived("w1", Part(R, 1, 0, b"", "error", error=NOT_BEGUN)))
    assert isinstance(end, Fail)
    assert failure_of(end.error).retry_after_s == 60


def test_a_request_that_has_lost_an_attempt_waits_at_workers_until_its_deadline() -> None:
    session = Session(R, MAX_TOKENS, wait_s=7.5)
    session.start()
    session.on(selected(1, "w1"))
    session.on(InstanceGone("w1"))
    assert session.on(selected(2, "w2")) == [DispatchAttempt(2, "w2", 0)]


def test_a_stream_goes_on_elsewhere_where_a_worker_did_not_begin_with_it() -> None:
    session = Session(R, MAX_TOKENS, wait_s=7.5)
    session.start()
    session.on(selected(1, "w1"))
    step(session, PartReceived("w1", part(0, [5])))
    step(session, AttemptLost(1, "gap", "a part was lost"))
    assert session.on(selected(2, "w1")) == [DispatchAttempt(2, "w1", 0)]
    actions = step(session, PartReceived("w1", Part(R, 2, 1, b"", "error", error=NOT_BEGUN)))
    assert actions == [
        CountLoss("handed_back", had_tokens=False, attempt=2, why=NOT_BEGUN),
        PublishLoad(Finished(R, 2)),
        SelectWorker(3, 1, ("w1",)),
    ]


def test_numbers_that_are_not_finite_end_their_request_with_an_error_and_are_tried_nowhere_else() -> None:
    session = Session(R, MAX_TOKENS)
    session.start()
    session.on(selected(1, "w1"))
    session.on(Accepted(R, 1))
    told, end = step(session, PartReceived("w1", Part(R, 1, 0, b"", "error", error=f"{NOT_FINITE}: its logits")))
    assert told == PublishLoad(Finished(R, 1))
    assert isinstance(end, Fail)
    assert isinstance(end.error, NotFinite)
    assert failure_of(end.error).status == 500
    assert failure_of(end.error).retry_after_s is None


def test_a_picture_that_is_blocked_is_its_request_s_fault_and_tried_nowhere_else() -> None:
    session = Session(R, MAX_TOKENS)
    session.start()
    session.on(selected(1, "w1"))
    session.on(Accepted(R, 1))
    _, end = step(session, PartReceived("w1", Part(R, 1, 0, b"", "error", error=BLOCKED)))
    assert isinstance(end, Fail)
    assert isinstance(end.error, InvalidRequest)
    assert (end.error.param, end.error.code, end.error.status) == ("prompt", "content_policy_violation", 400)


def test_a_stream_that_is_lost_on_the_way_again_and_again_goes_on_as_long_as_it_grows() -> None:
    session = streaming()
    for at in range(MAX_TOKENS - 2):
        step(session, PartReceived("w1", part(at, [5], attempt=session.attempt)))
        assert step(session, PartReceived("w1", part(at + 2, [7], attempt=session.attempt)))[-1] == SelectWorker(
            at + 2, at + 1, ()
        )
        goes_on(session)


def test_after_a_loss_a_request_waits_for_a_worker_and_excluded_ones_are_asked_again() -> None:
    session = streaming()
    assert step(session, InstanceGone("w1"))[-1] == SelectWorker(2, 0, ("w1",))
    assert step(session, SelectRefused(R, 2, "all_excluded", "none left")) == [RetryLater(2, 0.1, "none left")]
    assert not session.is_choosing(2)
    assert step(session, RetryDue(1, 0.1)) == []
    assert step(session, RetryDue(2, 0.1)) == [SelectWorker(2, 0, ())]
    assert step(session, SelectRefused(R, 2, "no_instances", "none")) == [RetryLater(2, 0.2, "none")]
    assert step(session, RetryDue(2, 0.4)) == [SelectWorker(2, 0, ())]
    assert step(session, Unrouted(2)) == [RetryLater(2, 0.4, "no router answered")]
    assert step(session, RetryDue(2, 0.8)) == [SelectWorker(2, 0, ())]
    assert step(session, selected(2)) == [DispatchAttempt(2, "w1", 0)]


def test_waiting_ends_after_its_time_with_what_was_wrong() -> None:
    session = streaming()
    step(session, InstanceGone("w1"))
    now_s, pauses_s = 0.0, []
    while True:
        [later] = step(session, SelectRefused(R, 2, "no_instances", "none", retry_after_s=7.0))
        assert isinstance(later, RetryLater)
        pauses_s.append(later.pause_s)
        now_s += later.pause_s
        actions = step(session, RetryDue(2, now_s))
        if not isinstance(actions[-1], SelectWorker):
            break
    assert RESCUE_S <= now_s < RESCUE_S + 2.0
    assert pauses_s[:6] == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0]
    wrong = failed(actions)
    assert isinstance(wrong, Unavailable)
    assert wrong.retry_after_s == 7.0
    assert str(wrong) == "no worker can take the request: none; attempt 1 at w1: the worker is gone"


def test_a_token_gives_the_next_rescue_its_whole_time() -> None:
    session = streaming()
    step(session, InstanceGone("w1"))
    step(session, Unrouted(2))
    step(session, RetryDue(2, 0.1))
    goes_on(session)
    step(session, PartReceived("w1", part(0, [5], attempt=2)))
    step(session, InstanceGone("w1"))
    assert step(session, Unrouted(4)) == [RetryLater(4, 0.1, "no router answered")]
    assert isinstance(step(session, RetryDue(4, 1000.0))[-1], SelectWorker)


def test_a_turn_that_has_come_gives_a_rescue_its_whole_time_and_every_worker() -> None:
    session = streaming()
    step(session, InstanceGone("w1"))
    step(session, Unrouted(2))
    assert step(session, RetryDue(2, 0.1)) == [SelectWorker(2, 0, ("w1",))]
    assert step(session, TurnWaited(2)) == [SelectWorker(2, 0, ())]
    assert step(session, TurnWaited(1)) == []
    assert step(session, Unrouted(2)) == [RetryLater(2, 0.1, "no router answered")]
    assert step(session, RetryDue(2, 1000.0)) == [SelectWorker(2, 0, ())]


def test_a_model_that_stays_asleep_ends_the_request_also_after_a_loss() -> None:
    session = streaming()
    step(session, InstanceGone("w1"))
    wrong = failed(step(session, TurnWaited(2, "the model is asleep")))
    assert isinstance(wrong, Unavailable)
    assert str(wrong) == "the model is asleep; attempt 1 at w1: the worker is gone"


def test_while_nats_is_away_a_fresh_request_waits_too() -> None:
    session = Session(R, 3)
    session.start()
    assert step(session, Unrouted(1, "NATS is not connected", away=True)) == [
        RetryLater(1, 0.1, "NATS is not connected")
    ]
    assert step(session, RetryDue(1, 0.1)) == [SelectWorker(1, 0, ())]


@pytest.mark.parametrize("answer", [Unrouted(1), SelectRefused(R, 1, "no_instances", "none")])
def test_a_request_without_a_loss_fails_at_once_if_there_is_no_worker(answer: Event) -> None:
    session = Session(R, 3)
    session.start()
    assert isinstance(failed(step(session, answer)), Unavailable)


def test_a_fresh_request_that_all_refuse_for_their_load_does_not_wait_either() -> None:
    session = Session(R, 3)
    session.start()
    session.on(selected(1))
    assert step(session, Refused(R, 1, "overloaded", "full"))[-1] == SelectWorker(2, 0, ("w1",))
    wrong = failed(step(session, SelectRefused(R, 2, "all_excluded", "none left")))
    assert "attempt 1 at w1: refused: full" in str(wrong)


def test_a_router_that_is_sure_of_too_long_a_wait_is_overload() -> None:
    session = Session(R, 3)
    session.start()
    wrong = failed(step(session, SelectRefused(R, 1, "overloaded", "a minute", retry_after_s=60.0)))
    assert isinstance(wrong, Overloaded)
    assert wrong.retry_after_s == 60.0


def test_refusals_of_a_request_that_is_rescued_count_as_nothing_once_a_worker() -> None:
    session = streaming()
    step(session, InstanceGone("w1"))
    for number in range(2, 9):
        step(session, selected(session.attempt, f"w{number}"))
        assert isinstance(step(session, Refused(R, session.attempt, "overloaded", "full"))[-1], SelectWorker)
    for _ in range(ATTEMPTS - 1):
        step(session, selected(session.attempt, "w1"))
        assert isinstance(step(session, Refused(R, session.attempt, "overloaded", "full"))[-1], SelectWorker)
    step(session, selected(session.attempt, "w1"))
    wrong = failed(step(session, Refused(R, session.attempt, "overloaded", "full")))
    assert "refused: full" in str(wrong), "a router that names the excluded again and again"


def test_the_limits_are_the_callers() -> None:
    session = Session(R, 3, RetryBudget(attempts=1, rescue_s=0.0))
    session.start()
    step(session, selected(1))
    assert "1 attempts in a row" in str(failed(step(session, Unreachable(1, "no answer"))))


def test_a_request_that_waits_outlives_kill_after_kill_of_the_worker_it_waits_at() -> None:
    session = Session(R, 3)
    session.start()
    for _ in range(2 * ATTEMPTS):
        goes_on(session)
        assert isinstance(step(session, InstanceGone("w1"))[-1], SelectWorker)
    goes_on(session)
    assert EmitTokens([5], None) in step(session, PartReceived("w1", part(0, [5], attempt=session.attempt)))


@pytest.mark.parametrize(("limit", "text"), [("deadline", "deadline has passed"), ("first_token", "no token came")])
def test_a_limit_of_time_ends_it_in_any_state_and_tells_of_what_was_lost(
    limit: Literal["deadline", "first_token"], text: str
) -> None:
    session = streaming()
    step(session, InstanceGone("w1"))
    step(session, Unrouted(2))
    assert session.state is State.WAITING
    wrong = failed(step(session, TimeExpired(limit)))
    assert isinstance(wrong, RequestTimeout)
    assert text in str(wrong)
    assert "attempt 1 at w1: the worker is gone" in str(wrong)


@pytest.mark.parametrize(
    ("event", "error"),
    [
        (Unsendable(1, "too large"), InvalidRequest),
        (Refused(R, 1, "bad_request", "no"), InvalidRequest),
        (TimeExpired(), RequestTimeout),
    ],
)
def test_an_offer_that_fails_for_good_ends_the_request(event: Event, error: type[Exception]) -> None:
    session = Session(R, 3)
    session.start()
    session.on(selected(1))
    last = step(session, event)[-1]
    assert isinstance(last, Fail)
    assert isinstance(last.error, error)


def test_retry_after_comes_from_the_router() -> None:
    session = Session(R, 3)
    session.start()
    [_, last] = step(session, SelectRefused(R, 1, "no_instances", "none", retry_after_s=7.0))
    assert isinstance(last, Fail)
    assert isinstance(last.error, Unavailable)
    assert last.error.retry_after_s == 7.0


def embedding(vector: bytes, finish: FinishReason | None = "stop", tokens: Sequence[int] = ()) -> Part:
    return Part(R, 1, 0, pack_tokens(tokens), finish, 4, embedding=vector)


def test_an_embedding_is_the_full_answer_and_the_cached_tokens_of_its_prompt_are_reported() -> None:
    session = streaming_embedding()
    actions = step(session, PartReceived("w1", embedding(b"12345678")))
    assert actions == [
        PublishLoad(Prefilled(R, 1, 4, instance="w1")),
        PublishLoad(Finished(R, 1)),
        Finish("stop", b"12345678"),
    ]


@pytest.mark.parametrize(
    "senseless",
    [embedding(b""), embedding(b"1234"), embedding(b"12345678", None), embedding(b"12345678", tokens=[5])],
    ids=["none", "short", "not the end", "with a token"],
)
def test_what_is_no_embedding_of_the_size_asked_for_makes_no_sense(senseless: Part) -> None:
    actions = step(streaming_embedding(), PartReceived("w1", senseless))
    assert CountLoss("senseless", False, 1, "the worker's stream is inconsistent") in actions
    assert SelectWorker(2, 0, ("w1",)) in actions


def test_an_embedding_that_was_not_asked_for_is_inconsistent() -> None:
    assert CountLoss("senseless", False, 1, "the worker's stream is inconsistent") in step(
        streaming(), PartReceived("w1", embedding(b"1234"))
    )


def streaming_embedding() -> Session:
    session = Session(R, 1, embedding_bytes=8)
    session.start()
    session.on(selected(1))
    session.on(Accepted(R, 1))
    return session


def test_the_token_that_ended_the_output_is_named_at_its_end() -> None:
    session = streaming(max_tokens=5)
    actions = step(session, PartReceived("w1", part(0, [5, 6], "stop")))
    assert actions[1:] == [EmitTokens([5], None), PublishLoad(Finished(R, 1)), Finish("stop", stop_token=6)]
    session = streaming(max_tokens=2)
    assert step(session, PartReceived("w1", part(0, [5, 6], "length")))[-1] == Finish("length")


def test_log_probabilities_of_the_prompt_come_before_the_first_token() -> None:
    session = with_prompt(5)
    assert emitted(session.on(PartReceived("w1", prompt_part(1, 2)))) == [(1, 2)]
    assert emitted(session.on(PartReceived("w1", prompt_part(3, 3)))) == [(3, 3)]
    assert session.prompt_logprobs.due == 0
    assert any(isinstance(one, EmitTokens) for one in session.on(PartReceived("w1", part(0, [7]))))
    session.validate()


def test_another_attempt_does_not_repeat_what_came_of_the_prompt() -> None:
    session = with_prompt(5)
    session.on(PartReceived("w1", prompt_part(1, 3)))
    session.on(InstanceGone("w1"))
    session.on(selected(2, "w2"))
    assert emitted(session.on(PartReceived("w2", prompt_part(1, 2, attempt=2)))) == []
    assert emitted(session.on(PartReceived("w2", prompt_part(3, 3, attempt=2)))) == [(4, 2)]
    session.validate()


@pytest.mark.parametrize("lost", [prompt_part(4, 2), part(0, [7]), part(0, [], "stop")])
def test_a_gap_in_the_prompts_log_probabilities_loses_the_attempt(lost: Part) -> None:
    session = with_prompt(5)
    session.on(PartReceived("w1", prompt_part(1, 2)))
    actions = session.on(PartReceived("w1", lost))
    assert any(isinstance(one, CountLoss) and one.loss == "gap" for one in actions)
    session.validate()


@pytest.mark.parametrize(
    "wrong", [prompt_part(0, 1), prompt_part(3, 4), Part(R, 1, 0, b"", prompt_logprobs=PromptLogprobs(1, b"a"))]
)
def test_senseless_log_probabilities_of_the_prompt_lose_the_attempt(wrong: Part) -> None:
    actions = with_prompt(5).on(PartReceived("w1", wrong))
    assert any(isinstance(one, CountLoss) and one.loss == "senseless" for one in actions)


def picture(first: int, content: bytes, finish: FinishReason | None = None, *, attempt: int = 1, at: int = 1) -> Part:
    return Part(R, attempt, 0, b"", finish, picture=PicturePiece(at, first, content, b"p"))


def streaming_picture() -> Session:
    session = Session(R, 1, makes_picture=True)
    session.start()
    session.on(selected(1))
    session.on(Accepted(R, 1))
    return session


def test_a_pictures_file_is_joined_and_each_step_is_passed_on() -> None:
    session = streaming_picture()
    assert step(session, PartReceived("w1", picture(0, b""))) == [EmitStep(1, b"p")]
    assert step(session, PartReceived("w1", picture(0, b"one", at=2))) == [EmitStep(2, b"p", 0, b"one")]
    actions = step(session, PartReceived("w1", picture(3, b"two", "stop", at=2)))
    assert actions[0] == EmitStep(2, b"p", 3, b"two")
    assert actions[-1] == Finish("stop")
    assert [type(one.event) for one in actions if isinstance(one, PublishLoad)] == [Prefilled, Finished]


def test_a_picture_begins_again_with_the_next_attempt() -> None:
    session = streaming_picture()
    step(session, PartReceived("w1", picture(0, b"one")))
    step(session, InstanceGone("w1"))
    step(session, selected(2, "w2"))
    assert step(session, PartReceived("w2", picture(0, b"whole", attempt=2)))[0] == EmitStep(1, b"p", 0, b"whole")
    actions = step(session, PartReceived("w2", picture(5, b"", "stop", attempt=2)))
    assert actions[-1] == Finish("stop")


@pytest.mark.parametrize(
    "wrong",
    [
        picture(4, b"two"),
        Part(R, 1, 0, b"", "stop"),
        Part(R, 1, 0, pack_tokens([5]), None),
    ],
)
def test_a_piece_that_does_not_follow_costs_the_attempt(wrong: Part) -> None:
    session = streaming_picture()
    step(session, PartReceived("w1", picture(0, b"one")))
    actions = step(session, PartReceived("w1", wrong))
    assert any(isinstance(one, CountLoss) for one in actions)
    assert session.state is State.CHOOSING


def test_a_text_with_a_piece_of_a_picture_is_senseless() -> None:
    session = with_prompt(0)
    [counted, *_] = step(session, PartReceived("w1", picture(0, b"one")))
    assert isinstance(counted, CountLoss)
    assert counted.loss == "senseless"
