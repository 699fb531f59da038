"""services/worker/turns/decider.py: which models are awake, by cases and by random ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.worker.turns.config import TurnsConfig
from services.worker.turns.decider import (
    ANSWER_HOLDS_S,
    BUSY_PAUSE_S,
    FIRST_PAUSE_S,
    IDLE_S,
    MOST_FRONTENDS,
    MOST_MODELS,
    SILENT_S,
    WANTED_S,
    DeviceTurns,
    TurnOrder,
)
from shared.messages.turns import ModelTurn, TurnStage, WantModel

RULES = TurnsConfig(turn_s=30.0, least_awake_s=3.0)


def device(*models: str, rules: TurnsConfig = RULES) -> DeviceTurns:
    """A device whose models all sleep."""
    turns = DeviceTurns(rules)
    for model in models:
        turns.worker_seen(model, f"worker-{model}", "asleep", 0.0)
    return turns


def want(turns: DeviceTurns, model: str, now_s: float, *, waiting: int = 1, frontend: str = "f") -> ModelTurn:
    turn = turns.wanted(WantModel(frontend, model, waiting, 0.0), now_s)
    turns.validate()
    return turn


def order(model: str, operation: str) -> TurnOrder:
    assert operation in ("wake", "sleep")
    return TurnOrder(model, f"worker-{model}", "wake" if operation == "wake" else "sleep")


def answer(
    turns: DeviceTurns, one: TurnOrder, failed: str, stage: TurnStage, *, busy: bool = False, now_s: float
) -> None:
    """The worker answers, and discovery says the same."""
    turns.answered(one, failed, stage, busy=busy, now_s=now_s)
    turns.worker_seen(one.model, one.instance, stage, now_s)
    turns.validate()


def awake(turns: DeviceTurns, model: str, now_s: float) -> None:
    """Wake a model for which there is room."""
    want(turns, model, now_s)
    assert turns.decide(now_s) == [order(model, "wake")]
    answer(turns, order(model, "wake"), "", "awake", now_s=now_s)
    want(turns, model, now_s, waiting=0)


def test_a_model_that_is_waited_for_wakes_and_one_that_is_not_sleeps_on() -> None:
    turns = device("a", "b")
    assert turns.decide(1.0) == []
    assert want(turns, "b", 1.0).why == "its turn comes next"
    assert turns.decide(1.0) == [order("b", "wake")]
    assert turns.decide(1.1) == []
    assert want(turns, "b", 1.2).why == "it is waking"
    answer(turns, order("b", "wake"), "", "awake", now_s=2.0)
    assert want(turns, "b", 2.0).stage == "awake"


def test_a_model_that_is_not_in_use_goes_as_soon_as_another_one_is_waited_for_but_not_before_its_least_time() -> None:
    turns = device("a", "b")
    awake(turns, "a", 0.0)
    assert want(turns, "b", 1.0).why == "a has its turn"
    assert turns.decide(1.0) == []
    want(turns, "b", 2.9)
    assert turns.decide(2.9) == []
    assert turns.decide(3.0) == [order("a", "sleep")]
    assert turns.decide(3.1) == []
    answer(turns, order("a", "sleep"), "", "asleep", now_s=3.5)
    want(turns, "b", 3.5)
    assert turns.decide(3.5) == [order("b", "wake")]


def test_a_model_in_use_keeps_its_turn_and_no_longer() -> None:
    turns = device("a", "b")
    awake(turns, "a", 0.0)
    for tenth in range(1, 300):
        now_s = tenth / 10
        turns.worker_reported("a", "worker-a", busy=True, now_s=now_s)
        turns.worker_reported("b", "worker-b", busy=False, now_s=now_s)
        want(turns, "b", now_s)
        assert turns.decide(now_s) == []
    assert turns.decide(30.0) == [order("a", "sleep")]


def test_a_model_that_nothing_else_is_waited_for_stays_awake() -> None:
    turns = device("a", "b")
    awake(turns, "a", 0.0)
    assert turns.decide(86_400.0) == []


def test_the_least_recently_used_of_several_goes_and_those_in_use_last() -> None:
    turns = device("a", "b", "c", rules=TurnsConfig(awake=2, turn_s=30.0, least_awake_s=3.0))
    awake(turns, "a", 0.0)
    awake(turns, "b", 1.0)
    turns.worker_reported("a", "worker-a", busy=True, now_s=10.0)
    turns.worker_reported("a", "worker-a", busy=False, now_s=10.2)
    want(turns, "c", 20.0)
    assert turns.decide(20.0) == [order("b", "sleep")]

    turns = device("a", "b", "c", rules=TurnsConfig(awake=2, turn_s=30.0, least_awake_s=3.0))
    awake(turns, "a", 0.0)
    awake(turns, "b", 1.0)
    turns.worker_reported("b", "worker-b", busy=True, now_s=20.0)
    want(turns, "c", 20.0)
    assert turns.decide(20.0) == [order("a", "sleep")]


def test_models_wake_in_the_order_in_which_the_wait_for_them_began() -> None:
    turns = device("a", "b", "c")
    want(turns, "c", 0.0)
    want(turns, "a", 0.1)
    assert want(turns, "b", 0.2).why == "its turn comes after those of 2 others"
    assert turns.decide(0.2) == [order("c", "wake")]


def test_requests_whose_frontend_is_silent_are_forgotten() -> None:
    turns = device("a", "b")
    awake(turns, "a", 0.0)
    want(turns, "b", 1.0)
    assert turns.decide(1.0 + WANTED_S) == []
    assert turns.decide(10.0) == []
    assert turns.shown(10.0)[1].waiting == 0


def test_a_wake_that_fails_leaves_the_model_asleep_says_so_and_is_tried_again_after_a_pause() -> None:
    turns = device("a", "b")
    want(turns, "a", 0.0)
    want(turns, "b", 0.1)
    assert turns.decide(0.1) == [order("a", "wake")]
    answer(turns, order("a", "wake"), "no memory", "asleep", now_s=1.0)
    turn = want(turns, "a", 1.0)
    assert (turn.stage, turn.failed) == ("asleep", "no memory")
    assert turns.decide(1.0) == [order("b", "wake")]  # others do not wait for it
    answer(turns, order("b", "wake"), "", "awake", now_s=1.1)
    assert want(turns, "a", 1.0 + FIRST_PAUSE_S - 0.1).failed == "no memory"
    assert want(turns, "a", 1.0 + FIRST_PAUSE_S).failed == ""
    assert turns.decide(1.0 + FIRST_PAUSE_S) == [order("b", "sleep")]


def reports(turns: DeviceTurns, *models: str, from_s: float, until_s: float) -> None:
    """The workers of these models report, and no other one does."""
    now_s = from_s
    while now_s < until_s:
        now_s += 0.25
        for model in models:
            turns.worker_reported(model, f"worker-{model}", busy=False, now_s=now_s)
    turns.validate()


def test_a_silent_worker_that_holds_the_device_is_named_to_those_who_would_wait_in_vain() -> None:
    turns = device("a", "b", "c")
    awake(turns, "a", 0.0)
    reports(turns, "a", "b", "c", from_s=0.0, until_s=5.0)
    want(turns, "b", 5.0)
    assert turns.decide(5.0) == [order("a", "sleep")]
    reports(turns, "b", "c", from_s=5.0, until_s=4.0 + SILENT_S)
    assert want(turns, "b", 4.0 + SILENT_S).failed == ""
    reports(turns, "b", "c", from_s=4.0 + SILENT_S, until_s=7.0 + SILENT_S)
    told = want(turns, "b", 7.0 + SILENT_S)
    silent = "its worker worker-a has been silent for 12 s: resume it if it is stopped, or end it"
    assert told.failed == f"a holds cpu; a: {silent}"
    assert want(turns, "a", 7.0 + SILENT_S).failed == silent
    assert turns.decide(7.0 + SILENT_S) == []


def test_an_order_that_a_worker_may_have_lost_is_given_again_once_it_reports() -> None:
    turns = device("a", "b")
    want(turns, "a", 0.0)
    assert turns.decide(0.0) == [order("a", "wake")]
    turns.worker_seen("a", "worker-a", "drained", 0.5)  # it has begun
    reports(turns, "b", from_s=0.5, until_s=1.5 + SILENT_S)
    assert want(turns, "b", 1.5 + SILENT_S).failed.startswith("a holds cpu; a: its worker worker-a has been silent")
    want(turns, "b", 1.5 + SILENT_S, waiting=0)
    turns.worker_seen("a", "worker-a", "asleep", 1.5 + SILENT_S)
    reports(turns, "a", "b", from_s=1.5 + SILENT_S, until_s=2.5 + SILENT_S)
    want(turns, "a", 2.5 + SILENT_S)
    assert turns.decide(2.5 + SILENT_S) == [order("a", "wake")]


def test_a_worker_that_is_frozen_before_it_begins_to_wake_holds_nothing() -> None:
    turns = device("a", "b")
    want(turns, "a", 0.0)
    assert turns.decide(0.0) == [order("a", "wake")]
    reports(turns, "b", from_s=0.0, until_s=1.0 + SILENT_S)
    want(turns, "b", 1.0 + SILENT_S)
    assert turns.decide(1.0 + SILENT_S) == [order("b", "wake")]


def test_a_silent_worker_is_asked_for_nothing_and_its_model_fails_at_once() -> None:
    turns = device("a", "b")
    reports(turns, "b", from_s=0.0, until_s=1.0 + SILENT_S)
    assert want(turns, "a", 1.0 + SILENT_S).failed.startswith("its worker worker-a has been silent")
    assert turns.decide(1.0 + SILENT_S) == []
    want(turns, "b", 1.0 + SILENT_S)
    assert turns.decide(1.0 + SILENT_S) == [order("b", "wake")]
    turns.worker_seen("a", "worker-a2", "asleep", 2.0 + SILENT_S)
    assert want(turns, "a", 2.0 + SILENT_S).failed == ""


def test_no_worker_is_silent_because_this_process_or_the_bus_stood_still() -> None:
    turns = device("a", "b")
    reports(turns, "a", "b", from_s=0.0, until_s=1.0)
    reports(turns, "b", from_s=100.0, until_s=101.0)
    assert want(turns, "a", 101.0).failed == ""


def test_a_worker_that_does_something_else_is_asked_again_and_nothing_is_said_to_have_failed() -> None:
    turns = device("a")
    want(turns, "a", 0.0)
    assert turns.decide(0.0) == [order("a", "wake")]
    answer(turns, order("a", "wake"), "the engine is starting", "asleep", busy=True, now_s=0.0)
    turn = want(turns, "a", 0.1)
    assert (turn.failed, turn.why) == ("", "the engine is starting")
    assert turns.decide(0.1) == []
    assert turns.decide(BUSY_PAUSE_S) == [order("a", "wake")]


def test_a_sleep_that_fails_is_said_to_those_who_wait_and_another_model_goes() -> None:
    turns = device("a", "b", "c", rules=TurnsConfig(awake=2, turn_s=30.0, least_awake_s=3.0))
    awake(turns, "a", 0.0)
    awake(turns, "b", 1.0)
    want(turns, "c", 9.0)
    assert turns.decide(9.0) == [order("a", "sleep")]
    answer(turns, order("a", "sleep"), "an attempt does not end", "awake", now_s=10.0)
    assert want(turns, "c", 10.0).why == "a, b have their turn; a: an attempt does not end"
    assert turns.decide(10.0) == [order("b", "sleep")]


def test_a_sleep_that_is_refused_for_now_is_tried_again_and_begins_no_new_turn() -> None:
    turns = device("a", "b")
    awake(turns, "a", 0.0)
    for now_s in (30.0, 30.0 + BUSY_PAUSE_S):
        want(turns, "a", now_s)  # it is in use
        want(turns, "b", now_s)
        assert turns.decide(now_s) == [order("a", "sleep")]
        answer(turns, order("a", "sleep"), "the engine is starting", "awake", busy=True, now_s=now_s)
        assert turns.decide(now_s) == []
    shown = {turn.model: turn for turn in turns.shown(now_s)}
    assert (shown["a"].stage, shown["a"].for_s) == ("awake", now_s)


def test_a_worker_that_dies_at_any_stage_makes_room_and_its_next_one_begins_asleep() -> None:
    stages: tuple[TurnStage, ...] = ("waking", "awake", "falling asleep")
    for stage in stages:
        turns = device("a", "b")
        want(turns, "a", 0.0)
        [waking] = turns.decide(0.0)
        if stage != "waking":
            answer(turns, waking, "", "awake", now_s=0.0)
            want(turns, "a", 0.0, waiting=0)
        want(turns, "b", 4.0)
        assert turns.decide(4.0) == ([order("a", "sleep")] if stage == "falling asleep" else []) or stage == "awake"
        turns.worker_seen("a", "", "gone", 5.0)
        want(turns, "b", 5.0)
        assert turns.decide(5.0) == [order("b", "wake")]
        turns.worker_seen("a", "next", "asleep", 6.0)
        turns.answered(waking, "", "awake", now_s=6.0)  # of the worker that is gone
        assert [turn.stage for turn in turns.shown(6.0)] == ["asleep", "waking"]
        turns.validate()


def test_a_model_stays_awake_for_as_long_as_its_wake_took_and_no_longer_than_a_turn() -> None:
    for wake_s, least_s in ((10.0, 10.0), (100.0, 30.0)):
        turns = device("a", "b")
        want(turns, "a", 0.0)
        [waking] = turns.decide(0.0)
        answer(turns, waking, "", "awake", now_s=wake_s)
        want(turns, "a", wake_s, waiting=0)
        want(turns, "b", wake_s + least_s - 0.1)
        assert turns.decide(wake_s + least_s - 0.1) == []
        assert turns.decide(wake_s + least_s) == [order("a", "sleep")]


def test_what_discovery_says_late_does_not_count_against_an_answer() -> None:
    turns = device("a", "b")
    want(turns, "a", 0.0)
    [waking] = turns.decide(0.0)
    answer(turns, waking, "", "awake", now_s=1.0)
    turns.worker_seen("a", "worker-a", "drained", 1.1)
    want(turns, "b", 1.1)
    assert turns.decide(1.1) == []
    turns.worker_seen("a", "worker-a", "awake", 1.2)
    turns.worker_seen("a", "worker-a", "drained", 1.3)  # an operator did that
    want(turns, "b", 1.0 + ANSWER_HOLDS_S)
    assert turns.decide(1.0 + ANSWER_HOLDS_S) == [order("a", "sleep")]


def test_a_drained_model_holds_the_device_until_another_one_is_waited_for() -> None:
    turns = device("a", "b")
    turns.worker_seen("a", "worker-a", "drained", 0.0)
    assert want(turns, "a", 0.0).why == "its worker is drained; an operator can let it resume"
    assert turns.decide(0.0) == []
    want(turns, "b", 0.1)
    assert turns.decide(0.1) == [order("a", "sleep")]


def test_if_too_many_are_awake_the_one_that_is_not_in_use_goes_to_sleep() -> None:
    turns = device("a", "b")
    turns.worker_seen("a", "worker-a", "awake", 0.0)
    turns.worker_seen("b", "worker-b", "awake", 0.0)
    turns.worker_reported("a", "worker-a", busy=True, now_s=4.0)
    assert turns.decide(4.0) == [order("b", "sleep")]


def test_an_order_without_an_answer_leaves_what_discovery_says() -> None:
    turns = device("a")
    want(turns, "a", 0.0)
    [waking] = turns.decide(0.0)
    turns.worker_seen("a", "worker-a", "awake", 1.0)
    turns.answered(waking, "no answer", None, busy=True, now_s=2.0)
    assert turns.shown(2.0)[0].stage == "awake"


def loads(turns: DeviceTurns, model: str, now_s: float) -> ModelTurn:
    turn = turns.wanted(WantModel(f"worker-{model}", model, 0, 0.0, loads=True), now_s)
    turns.validate()
    return turn


def test_a_model_gives_way_to_one_whose_engine_loads_and_wakes_after_that() -> None:
    turns = device("a")
    awake(turns, "a", 0.0)
    assert loads(turns, "b", 2.9).stage == "gone"
    assert turns.decide(2.9) == [], "not before its least time"
    assert turns.decide(3.0) == [order("a", "sleep")]
    answer(turns, order("a", "sleep"), "", "asleep", now_s=3.1)
    loads(turns, "b", 3.2)
    assert want(turns, "a", 3.2).why == "b loads, and needs the room"
    assert want(turns, "b", 3.2).why == "its engine is loading"
    assert turns.decide(3.2) == []
    turns.worker_seen("b", "worker-b", "asleep", 3.3)
    assert turns.decide(3.3) == [order("a", "wake")]


def test_an_engine_that_loads_again_is_not_asked_to_wake_meanwhile() -> None:
    turns = device("a", "b")
    loads(turns, "a", 0.0)
    want(turns, "a", 0.0)
    want(turns, "b", 0.0)
    assert turns.decide(0.0) == []
    want(turns, "a", WANTED_S)
    assert turns.decide(WANTED_S) == [order("a", "wake")], "nothing was heard of its engine since"


def test_two_engines_that_load_leave_no_room_for_a_third_model() -> None:
    turns = device("a", "b", rules=TurnsConfig(awake=2))
    want(turns, "a", 0.0)
    want(turns, "b", 0.0)
    loads(turns, "c", 0.0)
    assert turns.decide(0.0) == [order("a", "wake")]
    loads(turns, "d", 0.1)
    assert turns.decide(0.1) == []
    assert want(turns, "b", 0.1).why == "c, d load, and need the room"


def test_models_frontends_and_the_waits_of_unknown_models_are_bounded() -> None:
    turns = device(*(f"m{number:03}" for number in range(MOST_MODELS)))
    assert not turns.worker_seen("one more", "w", "asleep", 0.0)
    assert want(turns, "one more", 0.0).stage == "gone"
    loads(turns, "one more", 0.0)
    for number in range(MOST_FRONTENDS + 5):
        turns.wanted(WantModel(f"f{number}", "m000", 1, 0.0), 0.0)
    turns.validate()
    assert turns.shown(0.0)[0].waiting == MOST_FRONTENDS
    turns.worker_seen("m001", "", "gone", 0.0)
    turns.decide(0.0)
    assert turns.worker_seen("one more", "w", "asleep", 0.0)


MODELS = ("a", "b", "c", "d")
TICK_S = 0.1


@given(seed=st.integers(0, 1 << 30), awake_at_once=st.integers(1, 3))
@settings(max_examples=10)
def test_no_model_starves_however_much_the_others_are_used(seed: int, awake_at_once: int) -> None:
    draw = Random(seed)
    rules, slowest_s = TurnsConfig(awake=awake_at_once, turn_s=5.0, least_awake_s=1.0), 2.0
    turns = device(*MODELS, rules=rules)
    due: list[tuple[float, TurnOrder]] = []
    up: set[str] = set()
    waited_s = dict.fromkeys(MODELS, 0.0)
    bound_s = len(MODELS) * (rules.turn_s + 2 * slowest_s + 4 * TICK_S)
    for tick in range(1500):
        now_s = tick * TICK_S
        for at_s, one in [each for each in due if each[0] <= now_s]:
            due.remove((at_s, one))
            (up.add if one.operation == "wake" else up.discard)(one.model)
            answer(turns, one, "", "awake" if one.operation == "wake" else "asleep", now_s=now_s)
        for model in MODELS:  # all are asked for without a pause
            waited_s[model] = 0.0 if model in up else waited_s[model] + TICK_S
            assert waited_s[model] <= bound_s, model
            turns.wanted(WantModel("f", model, int(model not in up), waited_s[model]), now_s)
            turns.worker_reported(model, f"worker-{model}", busy=model in up, now_s=now_s)
        due += [(now_s + draw.uniform(0.0, slowest_s), one) for one in turns.decide(now_s)]
        turns.validate()


@dataclass
class _Worker:
    """A worker as it really is."""

    number: int = 0
    stage: TurnStage = "asleep"
    since_s: float = 0.0
    orders: list[TurnOrder] = field(default_factory=list)
    used_since_s: float | None = None
    """Since when it computes."""

    def name(self, model: str) -> str:
        return f"worker-{model}-{self.number}"


class TurnsMachine(RuleBasedStateMachine):
    """Workers that wake, fail, die and are used, frontends that wait and leave, and a decider that is started again."""

    @initialize(awake_at_once=st.integers(1, 3))
    def begin(self, awake_at_once: int) -> None:
        self.config = TurnsConfig(awake=awake_at_once, turn_s=5.0, least_awake_s=1.0)
        self.now_s = 0.0
        self.workers = {model: _Worker() for model in MODELS}
        self.waiting: dict[tuple[str, str], float] = {}
        self.left_s: dict[str, float] = {}
        """When a frontend left that had waited for a model."""
        self.forgetful_s = 0.0
        """Since when the decider has seen all."""
        self.turns = DeviceTurns(self.config)
        self.start_again()

    @rule()
    def start_again(self) -> None:
        """The decider is killed, and learns from discovery what is so; orders that are under way have no owner."""
        self.turns, self.forgetful_s = DeviceTurns(self.config), self.now_s
        for model, worker in self.workers.items():
            self.show(model, worker)

    def show(self, model: str, worker: _Worker) -> None:
        between = worker.stage in ("waking", "falling asleep")  # of which discovery says only that it does not serve
        self.turns.worker_seen(model, worker.name(model), "drained" if between else worker.stage, self.now_s)

    @rule(model=st.sampled_from(MODELS), frontend=st.sampled_from(("f", "g")))
    def wait(self, model: str, frontend: str) -> None:
        self.waiting.setdefault((model, frontend), self.now_s)

    @rule(model=st.sampled_from(MODELS), frontend=st.sampled_from(("f", "g")))
    def leave(self, model: str, frontend: str) -> None:
        """A client, or its whole frontend, goes without a word."""
        if self.waiting.pop((model, frontend), None) is not None:
            self.left_s[model] = self.now_s

    @rule(model=st.sampled_from(MODELS))
    def use(self, model: str) -> None:
        worker = self.workers[model]
        if worker.stage == "awake" and worker.used_since_s is None:
            worker.used_since_s = self.now_s

    @rule(model=st.sampled_from(MODELS))
    def stop_using(self, model: str) -> None:
        self.workers[model].used_since_s = None

    @rule(model=st.sampled_from(MODELS))
    def die(self, model: str) -> None:
        """A worker is killed; another one starts asleep, and discovery lists it at once or later."""
        worker = self.workers[model]
        self.workers[model] = _Worker(worker.number + 1, since_s=self.now_s)
        self.turns.worker_seen(model, "", "gone", self.now_s)
        self.show(model, self.workers[model])

    @precondition(lambda self: any(worker.orders for worker in self.workers.values()))
    @rule(data=st.data(), outcome=st.sampled_from(("done", "failed", "lost answer")))
    def end_order(self, data: st.DataObject, outcome: str) -> None:
        model = data.draw(st.sampled_from([model for model, worker in self.workers.items() if worker.orders]))
        worker = self.workers[model]
        one = worker.orders.pop(0)
        wakes = one.operation == "wake"
        done = outcome != "failed"
        worker.stage = "awake" if wakes == done else "asleep"
        worker.since_s, worker.used_since_s = self.now_s, None
        if outcome == "lost answer":
            self.show(model, worker)
            self.turns.answered(one, "no answer", None, busy=True, now_s=self.now_s)
        else:
            self.turns.answered(one, "" if done else "it failed", worker.stage, now_s=self.now_s)
            self.show(model, worker)

    @rule(tenths=st.integers(1, 30))
    def pass_time(self, tenths: int) -> None:
        for _ in range(tenths):
            self.now_s += TICK_S
            for (model, frontend), since_s in self.waiting.items():
                if self.workers[model].stage != "awake":
                    self.turns.wanted(WantModel(frontend, model, 1, self.now_s - since_s), self.now_s)
                else:
                    self.turns.wanted(WantModel(frontend, model, 0, 0.0), self.now_s)
            for model, worker in self.workers.items():
                busy = worker.used_since_s is not None
                self.turns.worker_reported(model, worker.name(model), busy=busy, now_s=self.now_s)
            for one in self.turns.decide(self.now_s):
                self.obey(one)
        self.waiting = {key: since for key, since in self.waiting.items() if self.workers[key[0]].stage != "awake"}

    def obey(self, one: TurnOrder) -> None:
        worker = self.workers[one.model]
        assert one.instance == worker.name(one.model)
        if worker.stage in ("waking", "falling asleep"):  # of a decider before this one
            self.turns.answered(one, "it does something else", "drained", busy=True, now_s=self.now_s)
            return
        held_s = self.now_s - max(worker.since_s, self.forgetful_s)
        if one.operation == "wake":
            assert worker.stage == "asleep"
            waits = any(model == one.model for model, _ in self.waiting)
            left_s = self.left_s.get(one.model, -WANTED_S)
            assert waits or self.now_s - left_s <= WANTED_S + TICK_S, "nothing waits for it"
        else:
            assert worker.stage == "awake"
            assert held_s >= self.config.least_awake_s - 1e-6, "it has just woken"
            used = worker.used_since_s
            assert used is None or self.now_s - used <= IDLE_S or held_s >= self.config.turn_s - 1e-6, "it is in use"
        worker.stage, worker.since_s = ("waking" if one.operation == "wake" else "falling asleep"), self.now_s
        worker.orders.append(one)

    @invariant()
    def room_is_kept(self) -> None:
        if not hasattr(self, "turns"):
            return
        self.turns.validate()
        assert sum(worker.stage != "asleep" for worker in self.workers.values()) <= self.config.awake


@pytest.mark.parametrize("outcome", ["failed", "done"])
def test_what_a_worker_does_for_the_decider_before_is_over_as_soon_as_discovery_says_so(outcome: str) -> None:
    """Else it is ordered to sleep when it sleeps already, or has just woken."""
    machine = TurnsMachine()
    machine.begin(awake_at_once=1)
    machine.wait(frontend="f", model="b")
    machine.pass_time(tenths=1)
    machine.wait(frontend="f", model="a")
    machine.start_again()
    machine.pass_time(tenths=5 if outcome == "failed" else 2)
    worker = machine.workers["b"]
    worker.orders.clear()
    worker.stage, worker.since_s = ("asleep" if outcome == "failed" else "awake"), machine.now_s
    machine.show("b", worker)
    machine.pass_time(tenths=4)  # it asserts that no order is wrong
    machine.room_is_kept()


TurnsMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestTurnsMachine = TurnsMachine.TestCase
