"""One model's routing as a whole: any sequence of Selects, loads and cards leaves it valid and empty at the end."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.router.config import IndexConfig, LoadConfig, RouterConfig
from services.router.index.chains import SlotCleanup
from services.router.selection.decision_log import KEPT_CANDIDATES
from services.router.selection.eligibility import FROZEN
from services.router.selection.model_router import ModelRouter
from services.router.selection.policy import BUILT_IN
from shared.hashing import pack_hashes
from shared.messages.cards import KvLayout, ModelCard
from shared.messages.load import LoadReport
from shared.messages.select import SELECT_REPLY, Finished, Prefilled, Reserved, Select, Selected, SelectRefused

CONFIG = RouterConfig(explained=5, index=IndexConfig(limit_bytes=20_000, speculation_limit_bytes=3000))


def card(instance: str, **more: Any) -> ModelCard:
    return ModelCard("m", instance, "/m", "0", "0", 4096, 1000, 4, 1000, KvLayout("float32", 1, 1, 4, 4), **more)


def model(policy: str = "kv", config: RouterConfig = CONFIG, name: str = "r1") -> ModelRouter:
    return ModelRouter("m", name, config, BUILT_IN[policy](), Random(1))


def select(request: str, blocks: list[int], **more: Any) -> Select:
    return Select(request, 1, "f", "m", pack_hashes(blocks), 4 * len(blocks) + 1, 10, **more)


def report(instance: str, *requests: str, progress: int = 1, rate: float = 0.0) -> LoadReport:
    attempts = [(request, 1) for request in requests]
    return LoadReport(instance, 1, progress, 0, len(requests), 0, 1000, 0, 0, rate, attempts=attempts)


def chosen(router: ModelRouter, ask: Select, now_s: float = 0.0) -> Selected:
    reply = router.select(ask, now_s).reply
    assert isinstance(reply, Selected), reply
    return reply


def refused(router: ModelRouter, ask: Select) -> str:
    reply = router.select(ask, 0.0).reply
    assert isinstance(reply, SelectRefused), reply
    return reply.code


def test_every_rank_of_an_instance_is_a_candidate() -> None:
    router = model("round-robin")
    router.add_card(card("a", ranks=2))
    router.add_card(card("b"))
    replies = [router.select(select(f"r{number}", [number + 1]), 0.0).reply for number in range(3)]
    assert [(reply.instance, reply.rank) for reply in replies if isinstance(reply, Selected)] == [
        ("a", 0),
        ("a", 1),
        ("b", 0),
    ]


def test_an_answer_has_rows_only_if_asked_for_bounded_in_number_and_best_first() -> None:
    router = model()
    for number in range(KEPT_CANDIDATES + 4):
        router.add_card(card(f"w{number}"))
    assert chosen(router, select("first", [1, 2, 3])).candidates == ()
    reply = chosen(router, select("second", [1, 2, 3], explain=True))
    assert len(reply.candidates) == KEPT_CANDIDATES
    scores = [row.score for row in reply.candidates]
    assert scores == sorted(scores)
    assert router.decisions.find("second", 20)[0].selected == reply


def test_blocks_that_a_prompt_shares_with_those_before_it_are_reserved_once() -> None:
    router = model()
    router.add_card(card("a"))
    router.select(select("first", [1, 2, 3]), 0.0)
    router.select(select("sibling", [1, 2, 9]), 0.0)
    (first, sibling) = (each.reserved for each in router.load.reservations())
    assert (first.blocks, sibling.blocks) == (4, 2)


def test_an_explanation_has_the_load_and_the_predicted_first_token_at_the_choice() -> None:
    router = model()
    router.add_card(card("a"))
    router.apply_load_report(report("a", rate=100.0), 0.0)
    router.select(select("first", [1, 2, 3]), 0.0)
    router.select(select("second", [7, 8, 9]), 0.0)
    router.apply_load_event(Finished("first", 1), 0.5)
    (row,) = router.decisions.find("second", 20)[0].selected.candidates
    assert (row.queued_tokens, row.active_blocks) == (13, 4)
    assert row.predicted_s == (13 + 13) / 100
    assert row.reason == router.decisions.find("second", 20)[0].selected.reason


def test_a_request_whose_first_token_would_come_too_late_is_refused_without_a_reservation() -> None:
    router = model()
    for name in "ab":
        router.add_card(card(name))
        router.apply_load_report(report(name, rate=10.0), 0.0)
        router.select(select(f"at {name}", [1 + ord(name), 2, 3]), 0.0)
    reply = router.select(select("late", [7, 8, 9], wait_limit_s=1.0), 0.0)
    assert isinstance(reply.reply, SelectRefused)
    assert reply.reply.code == "overloaded"
    assert "wait at least 1 s for earlier prompts, the limit is 1 s" in reply.reply.reason
    assert reply.reserved is None
    assert {each.reserved.request for each in router.load.reservations()} == {"at a", "at b"}
    assert isinstance(router.select(select("no limit", [7, 8, 9]), 0.0).reply, Selected)
    assert isinstance(router.select(select("patient", [7, 8, 9], wait_limit_s=60.0), 0.0).reply, Selected)


def test_an_idle_candidate_refuses_no_prompt_however_slow_it_was() -> None:
    router = model()
    router.add_card(card("a"))
    router.apply_load_report(report("a", rate=0.001), 0.0)
    assert chosen(router, select("long", list(range(1, 60)), wait_limit_s=1.0)).instance == "a"
    assert refused(router, select("other", [7, 8, 9], wait_limit_s=1.0)) == "overloaded"


def test_retry_after_is_when_the_soonest_candidate_has_caught_up_but_at_most_a_minute() -> None:
    router = model()
    router.add_card(card("a"))
    router.apply_load_report(report("a", rate=1.0), 0.0)
    for number, expected_s in enumerate((3.0, 16.0, 29.0, 42.0, 55.0, 60.0, 60.0)):
        router.select(select(f"before {number}", [10 * number + 100, 2, 3]), 0.0)
        reply = router.select(select("late", [7, 8, 9], wait_limit_s=10.0), 0.0).reply
        assert isinstance(reply, SelectRefused)
        assert reply.retry_after_s == expected_s


def test_a_choice_that_would_be_too_late_is_repeated_among_the_candidates_in_time() -> None:
    router = model("round-robin")
    for name, rate in (("slow", 1.0), ("fast", 100.0), ("unheard", 0.0)):
        router.add_card(card(name))
        router.apply_load_report(report(name, rate=rate), 0.0)
        router.select(select(f"before at {name}", [100, 2, 3]), 0.0)
    asked = [chosen(router, select(f"r{number}", [number + 1], wait_limit_s=1.0)).instance for number in range(8)]
    assert set(asked) == {"fast", "unheard"}


def test_a_repeated_select_is_not_refused_for_the_wait_that_it_causes_itself() -> None:
    router = model()
    router.add_card(card("a"))
    router.apply_load_report(report("a", rate=1.0), 0.0)
    chosen(router, select("r", [1, 2, 3], wait_limit_s=12.0))
    assert refused(router, select("other", [7, 8, 9], wait_limit_s=12.0)) == "overloaded"
    assert chosen(router, select("r", [7, 8, 9], wait_limit_s=0.5)).instance == "a"


def test_a_repeated_select_gets_the_same_answer_one_reservation_and_one_decision() -> None:
    router = model()
    for instance in "abc":
        router.add_card(card(instance))
    first = router.select(select("r", list(range(1, 9))), 0.0)
    again = router.select(select("r", list(range(1, 9)), explain=True), 1.0)
    assert isinstance(first.reply, Selected)
    assert isinstance(again.reply, Selected)
    assert again.reply.instance == first.reply.instance
    assert first.reserved is not None
    assert again.reserved is None
    assert router.load.statistics().reservations == 1
    assert len(again.reply.candidates) == 3, "the rows are those of the choice"
    router.validate()


def test_a_repeated_earlier_attempt_is_explained_by_its_own_rows() -> None:
    router = model()
    for instance in "ab":
        router.add_card(card(instance))
    ask = select("r", [1, 2, 3], explain=True)
    first = chosen(router, ask)
    second = chosen(router, msgspec.structs.replace(ask, attempt=2, excluded=(first.instance,)))
    assert second.instance != first.instance
    assert chosen(router, ask) == first


def test_a_prompt_longer_than_any_that_may_be_hashed_is_refused_though_it_has_no_hashes() -> None:
    router = model(config=msgspec.structs.replace(CONFIG, most_hashes=10))
    router.add_card(card("a"))
    ask = select("r", [])
    assert chosen(router, msgspec.structs.replace(ask, prompt_tokens=43)).instance == "a"
    assert refused(router, msgspec.structs.replace(ask, request="s", prompt_tokens=44)) == "bad_request"


@pytest.mark.parametrize("left_s", [-1.0, float("nan")])
def test_a_select_whose_time_is_over_is_refused_and_reserves_nothing(left_s: float) -> None:
    router = model()
    router.add_card(card("a"))
    for field in ("time_left_s", "wait_limit_s"):
        assert refused(router, msgspec.structs.replace(select("r", [1]), **{field: left_s})) == "bad_request"
    assert router.load.statistics().reservations == 0


def test_a_select_that_another_router_reserved_gets_the_same_answer() -> None:
    for instance in "ab":
        router = model()
        for each in "ab":
            router.add_card(card(each))
        router.apply_load_event(Reserved("r", 1, "f", instance, 0, 400, 100, router="r2"), 0.0)
        choice = router.select(select("r", list(range(1, 100))), 0.0)
        assert isinstance(choice.reply, Selected)
        assert choice.reply.instance == instance
        assert choice.reserved is None
        assert [row.instance for row in router.decisions.find("r", 20)[0].selected.candidates] == [instance]


def test_a_reservation_of_another_router_that_replaces_a_withdrawn_choice_is_explained() -> None:
    router = model()
    for instance in "ab":
        router.add_card(card(instance))
    first = chosen(router, select("r", [1])).instance
    router.load.withdraw(("r", 1))
    other = "b" if first == "a" else "a"
    router.apply_load_event(Reserved("r", 1, "f", other, 0, 5, 2, router="r2"), 0.0)
    assert chosen(router, select("r", [1], explain=True)).instance == other
    assert [each.selected.instance for each in router.decisions.find("r", 20)] == [other]


def test_a_repeated_select_for_another_instance_moves_its_reservation() -> None:
    router = model()
    for instance in "ab":
        router.add_card(card(instance))
    first = chosen(router, select("r", [1, 2, 3])).instance
    choice = router.select(select("r", [1, 2, 3], excluded=(first,)), 0.0)
    assert isinstance(choice.reply, Selected)
    assert choice.reserved is not None
    assert [one.reserved.instance for one in router.load.reservations()] == [choice.reply.instance] != [first]
    router.validate()


def test_the_reservation_of_an_attempt_that_reports_never_have_says_so() -> None:
    router = model()
    router.add_card(card("a"))
    for unreported in (False, True):
        reserved = router.select(select(f"r{unreported}", [1], unreported=unreported), 0.0).reserved
        assert reserved is not None
        assert reserved.unreported == unreported


def test_an_attempt_that_has_ended_is_answered_and_not_reserved() -> None:
    router = model()
    router.add_card(card("a"))
    router.apply_load_event(Finished("r", 1), 0.0)
    choice = router.select(select("r", [1]), 0.0)
    assert isinstance(choice.reply, Selected)
    assert choice.reserved is None
    assert not router.load.reservations()


# --- eligibility


def test_excluded_instances_and_those_without_the_lora_are_not_chosen_and_a_refusal_says_which() -> None:
    router = model("round-robin")
    assert refused(router, select("r", [1])) == "no_instances"
    router.add_card(card("p", role="prefill"))
    assert refused(router, select("r", [1])) == "no_instances"
    router.add_card(card("a"))
    router.add_card(card("b", lora=("french",)))
    router.add_card(card("c", lora=("french", "dutch")))
    asked = [chosen(router, select(f"r{number}", [1], lora="french")).instance for number in range(4)]
    assert asked == ["b", "c", "b", "c"]
    assert chosen(router, select("x", [1], lora="french", excluded=("b",))).instance == "c"
    assert refused(router, select("y", [1], lora="dutch", excluded=("c", "a"))) == "all_excluded"
    assert refused(router, select("z", [1], lora="welsh")) == "unknown_model"
    router.remove_instance("c")
    assert refused(router, select("z", [1], lora="dutch")) == "unknown_model"
    router.validate()


def test_sessions_stay_together_while_scores_are_nearly_equal_and_follow_the_cache_otherwise() -> None:
    router = model()
    for name in "abcd":
        router.add_card(card(name))
    homes = set()
    for number in range(8):
        homes.add(chosen(router, select(f"r{number}", [100 + number], session="s")).instance)
        router.apply_load_event(Finished(f"r{number}", 1), 0.0)
    assert len(homes) == 1
    other = next(name for name in "abcd" if name not in homes)
    known = list(range(1, 50))
    router.index.add_blocks(router.caches.chains[other, 0].slot, 0, known)
    assert chosen(router, select("r", known, session="s")).instance == other


def test_only_tokens_of_the_same_or_a_higher_priority_are_ahead_of_a_request() -> None:
    router = model("least-loaded")
    router.add_card(card("a"))
    router.add_card(card("b"))
    router.apply_load_event(Reserved("batch", 1, "g", "a", 0, 90_000, 0, "r2", priority=-1), 0.0)
    router.apply_load_event(Reserved("chat", 1, "g", "b", 0, 50, 0, "r2"), 0.0)
    assert chosen(router, select("urgent", [1])).instance == "a"
    assert chosen(router, select("later", [2], priority=-1)).instance == "b"


def test_a_frozen_worker_is_passed_over_unless_it_is_the_only_one() -> None:
    router = model()
    router.add_card(card("a"))
    router.add_card(card("b"))
    router.index.add_blocks(router.caches.chains["a", 0].slot, 0, [1, 2, 3])
    for quarter in range(40):
        now_s = quarter / 4
        router.apply_load_report(report("a", "first"), now_s)
        router.apply_load_report(report("b"), now_s)
        router.tick(now_s)
    assert router.eligibility.frozen == {"a"}
    assert chosen(router, select("second", [1, 2, 3]), 10.0).instance == "b"
    assert router.decisions.get(("second", 1)).passed_over == {"a": FROZEN}
    assert chosen(router, select("third", [1, 2, 3], excluded=("b",)), 10.0).instance == "a"
    router.apply_load_report(report("a", "first", progress=2), 10.0)
    router.tick(10.0)
    rows = chosen(router, select("fourth", [1, 2, 3], explain=True), 10.0).candidates
    assert {row.instance for row in rows} == {"a", "b"}


def test_while_the_router_is_cut_off_no_worker_is_passed_over() -> None:
    router = model()
    router.add_card(card("a"))
    router.apply_load_report(report("a", "r"), 0.0)
    for quarter in range(400):
        router.tick(quarter / 4, listening=False)
    assert not router.eligibility.frozen


def shares(router: ModelRouter, now_s: float, questions: int = 400) -> Counter[str]:
    """How often each instance is chosen, for requests that end at once."""
    counted: Counter[str] = Counter()
    for number in range(questions):
        counted[chosen(router, select(f"s{number}", [10_000 + number]), now_s).instance] += 1
        router.apply_load_event(Finished(f"s{number}", 1), now_s)
    return counted


def test_an_instance_that_joins_gets_a_growing_share_of_the_requests() -> None:
    config = msgspec.structs.replace(CONFIG, load=LoadConfig(ramp_s=10))
    router = model("least-loaded", config)
    for name in "ab":
        router.add_card(card(name), 0.0)
    for name in "ab":  # both are busy: without ramp-up the idle one that joins would get every request
        router.apply_load_event(Reserved(f"busy {name}", 1, "g", name, 0, 5000, 100, "r2"), 20.0)
    router.add_card(card("new"), 20.0)
    assert shares(router, 20.0)["new"] == 0
    assert 60 <= shares(router, 22.5)["new"] <= 140
    assert 250 <= shares(router, 27.5)["new"] <= 350
    assert shares(router, 30.0)["new"] == 400
    router.validate()


# --- speculation


def test_a_routed_prompts_blocks_are_expected_there_until_the_cache_is_cleared() -> None:
    router = model()
    router.add_card(card("a"))
    router.select(select("r", [1, 2, 3]), 0.0)
    assert chosen(router, select("s", [1, 2, 4]), 1.0).overlap.device == 2
    assert router.index.bytes == 0, "the index holds only blocks of events"
    router.caches.chains["a", 0].clear()
    assert chosen(router, select("t", [1, 2, 3]), 1.0).overlap.blocks == 0


def test_a_prompt_that_waits_long_for_others_is_expected_where_it_waits_until_it_has_been_computed() -> None:
    router = model(config=msgspec.structs.replace(CONFIG, index=IndexConfig(speculation_s=5)))
    router.add_card(card("a"))
    chosen(router, select("document", [1, 2, 3]), 0.0)
    for tenths in range(300):
        router.tick(tenths / 10, listening=False)
    assert chosen(router, select("question", [1, 2, 3, 4]), 30.0).overlap.device == 3
    router.apply_load_event(Prefilled("document", 1, 0), 30.0)
    router.apply_load_event(Finished("question", 1), 30.0)
    for tenths in range(300, 360):
        router.tick(tenths / 10, listening=False)
    assert chosen(router, select("later", [1, 2, 3, 4]), 36.0).overlap.blocks == 0, "no event has said so"
    router.validate()


def test_when_a_prompt_that_waits_is_cancelled_a_question_about_it_that_waits_keeps_its_blocks_expected() -> None:
    router = model(config=msgspec.structs.replace(CONFIG, index=IndexConfig(speculation_s=5)))
    router.add_card(card("a"))
    chosen(router, select("document", [1, 2, 3]), 0.0)
    chosen(router, select("question", [1, 2, 3, 4]), 1.0)
    router.apply_load_event(Finished("document", 1), 2.0)
    for tenths in range(20, 300):
        router.tick(tenths / 10, listening=False)
    assert chosen(router, select("later", [1, 2, 3, 5]), 30.0).overlap.device == 3
    router.validate()


def test_of_a_prompt_that_waits_other_routers_hear_which_blocks_it_will_leave() -> None:
    router, other = model(), model(name="other")
    for each in (router, other):
        each.add_card(card("a"))
        each.apply_load_report(report("a", rate=1.0), 0.0)
    assert router.select(select("first", [7, 8, 9]), 0.0).awaited is None, "nothing was before it"
    waits = router.select(select("waits", [1, 2, 3]), 0.0)
    assert waits.reserved is not None
    assert waits.awaited is not None
    for event in (waits.awaited, waits.reserved):  # in any order
        other.apply_load_event(event, 0.0)
    assert other.load.reservations()[0].reserved == waits.reserved, "the blocks are kept once"
    assert chosen(other, select("question", [1, 2, 3, 4]), 1.0).overlap.device == 3
    other.apply_load_event(Prefilled("waits", 1, 0), 1.0)
    other.apply_load_event(msgspec.structs.replace(waits.awaited, awaited=pack_hashes([5])), 2.0)
    assert chosen(other, select("late", [5, 6]), 2.0).overlap.device == 0, "it has been computed already"
    other.validate()


def test_prompts_sent_to_an_instance_without_events_are_known_as_long_as_they_are_used() -> None:
    router = model(config=msgspec.structs.replace(CONFIG, index=IndexConfig(history_s=100, speculation_s=5)))
    router.add_card(card("a"))
    router.set_sends_events("a", False)
    for number in range(6):
        conversation = list(range(1, 4 + number))
        found = chosen(router, select(f"r{number}", conversation), 60.0 * number).overlap.device
        assert found == len(conversation) - 1 if number else found == 0
        router.tick(60.0 * number)
    assert chosen(router, select("late", [1, 2, 3]), 401.0).overlap.device == 0
    router.validate()


def test_when_events_are_no_longer_trusted_earlier_speculation_expires_as_before() -> None:
    router = model(config=msgspec.structs.replace(CONFIG, index=IndexConfig(history_s=100, speculation_s=5)))
    router.add_card(card("a"))
    chosen(router, select("r", [1, 2, 3]), 0.0)
    router.set_sends_events("a", False)
    assert chosen(router, select("s", [1, 2, 3, 4]), 1.0).overlap.device == 3
    router.validate()
    assert chosen(router, select("t", [1, 2, 3]), 6.0).overlap.device == 0
    assert chosen(router, select("u", [1, 2, 3]), 50.0).overlap.device == 3
    router.validate()


class RouterMachine(RuleBasedStateMachine):
    """Workers join and leave while few requests are routed and reported; the index is small enough to drop blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.router = model()
        self.now_s = 0.0
        self.cleanups: list[SlotCleanup] = []

    @rule(instance=st.sampled_from("abc"), ranks=st.integers(1, 2))
    def come(self, instance: str, ranks: int) -> None:
        changed = card(instance, ranks=ranks)
        if self.router.cards.get(instance, changed) != changed:
            self.cleanups += self.router.remove_instance(instance)
        self.router.add_card(changed, self.now_s)

    @rule(instance=st.sampled_from("abc"))
    def go(self, instance: str) -> None:
        self.cleanups += self.router.remove_instance(instance)

    @rule(instance=st.sampled_from("abc"), sends=st.booleans())
    def trust(self, instance: str, sends: bool) -> None:
        if instance in self.router.cards:
            self.router.set_sends_events(instance, sends)

    @rule(request=st.sampled_from("pqrstuv"), first=st.integers(1, 200), blocks=st.integers(0, 60))
    def ask(self, request: str, first: int, blocks: int) -> None:
        choice = self.router.select(select(request, list(range(first, first + blocks))), self.now_s)
        if self.router.cards:
            assert isinstance(choice.reply, Selected)
            assert choice.reply.instance in self.router.cards
            assert choice.reserved is None or choice.reserved.uncached_tokens >= 1
            here = [one.reserved.instance for one in self.router.load.reservations() if one.reserved.request == request]
            assert here in ([], [choice.reply.instance]), "elsewhere than answered"
            assert here or choice.reserved is None
        else:
            assert isinstance(choice.reply, SelectRefused)

    @rule(
        request=st.sampled_from("pqrstuv"), instance=st.sampled_from("abc"), rank=st.integers(0, 2), own=st.booleans()
    )
    def hear_reserved(self, request: str, instance: str, rank: int, own: bool) -> None:
        self.router.apply_load_event(
            Reserved(request, 1, "g", instance, rank, 50, 5, "r1" if own else "r2"), self.now_s
        )

    @rule(request=st.sampled_from("pqrstuv"), cached=st.integers(-5, 500))
    def hear_prefilled(self, request: str, cached: int) -> None:
        prediction = self.router.apply_load_event(Prefilled(request, 1, cached), self.now_s)
        assert prediction is None or 0 <= prediction.actual_tokens <= prediction.prompt_tokens

    @rule(request=st.sampled_from("pqrstuv"))
    def hear_finished(self, request: str) -> None:
        self.router.apply_load_event(Finished(request, 1), self.now_s)

    @rule(instance=st.sampled_from("abc"), requests=st.sets(st.sampled_from("pqrstuv")))
    def hear_report(self, instance: str, requests: set[str]) -> None:
        self.router.apply_load_report(report(instance, *requests), self.now_s)

    @rule(later_s=st.floats(0, 8))
    def wait(self, later_s: float) -> None:
        self.now_s += later_s
        self.router.tick(self.now_s)

    @invariant()
    def valid(self) -> None:
        self.router.validate()

    def teardown(self) -> None:
        for instance in "abc":
            self.cleanups += self.router.remove_instance(instance)
        for request in "pqrstuv":
            self.router.apply_load_event(Finished(request, 1), self.now_s)
        for cleanup in self.cleanups:
            while cleanup.step(10):
                pass
        self.router.tick(self.now_s + 1000)
        assert self.router.speculation.bytes == self.router.history.bytes == 0
        assert self.router.index.bytes == 0
        assert self.router.load.statistics().reservations == 0


TestModelRouter = RouterMachine.TestCase
TestModelRouter.settings = settings(max_examples=60, stateful_step_count=30)


def test_reservations_of_another_router_at_an_unknown_instance_or_rank_are_ignored() -> None:
    router = model()
    router.add_card(card("a"))
    for request, instance, rank in (("r", "a", 0), ("s", "gone", 0), ("t", "a", 1)):
        router.apply_load_event(Reserved(request, 1, "f", instance, rank, 8, 2, router="r2"), 0.0)
    assert [one.reserved.instance for one in router.load.reservations()] == ["a"]


def test_counts_beyond_what_a_message_can_carry_are_clamped() -> None:
    router = model()
    router.add_card(card("a"))
    most = (1 << 64) - 1
    router.apply_load_report(LoadReport("a", 1, 1, 0, 0, most, 1000, most, 0), 0.0)
    for request in ("r", "s"):
        ask = select(request, [1, 2], explain=True)
        reply = chosen(router, ask)
        assert SELECT_REPLY.decode(SELECT_REPLY.encode(reply)) == reply


def test_a_decision_is_plain_json() -> None:
    router = model()
    router.add_card(card("a"))
    router.select(select("r", [1]), 0.0)
    assert (
        msgspec.json.decode(msgspec.json.encode([each.selected for each in router.decisions.find("r", 1)]))[0][
            "instance"
        ]
        == "a"
    )
