"""Pairs of a worker that computes prompts and one that decodes: when they are chosen, and what is reserved for them."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec.structs import replace

from services.router.config import LoadConfig, RouterConfig
from services.router.selection.candidates import CandidateState, FleetAverage, RoutingRequest, WorkerSpeed
from services.router.selection.load import SPEED_S, CandidateLoad
from services.router.selection.model_router import HAND_OVER_LIMIT_S, ModelRouter
from services.router.selection.pairs import choose_pair
from services.router.selection.policies.kv import KvPolicy, split_costs
from services.router.selection.policy_guard import PolicyGuard
from shared.errors import ProtocolError
from shared.hashing import pack_hashes
from shared.messages.cards import KvLayout, ModelCard, Role
from shared.messages.load import LoadReport
from shared.messages.select import Finished, Overlap, Prefilled, Reserved, Select, Selected, SelectRefused

CONFIG = RouterConfig()
SPEED = WorkerSpeed(10_000.0, 0.01)
NOTHING = Overlap()
REQUEST = RoutingRequest(8_000, 16, fleet=FleetAverage(4.0, 10_000.0), host_s=1e-5, disk_s=1e-4)


def state(name: str, *, requests: int = 0, queued: int = 0, overlap: Overlap = NOTHING) -> CandidateState:
    return CandidateState((name, 0), overlap, CandidateLoad(requests, queued, 0), 10_000, SPEED)


def guard() -> PolicyGuard:
    return PolicyGuard(KvPolicy(), Random(1), CONFIG)


# --- the choice


def test_without_a_common_store_there_is_no_pair() -> None:
    whole = state("d")
    assert choose_pair(guard(), REQUEST, [("one", state("p"))], [("other", whole)], whole) is None
    assert choose_pair(guard(), REQUEST, [(None, state("p"))], [(None, whole)], whole) is None
    assert choose_pair(guard(), REQUEST, [], [("one", whole)], whole) is None


def test_each_half_goes_to_the_worker_that_costs_the_least_within_the_store_of_the_first() -> None:
    prefilling = [("far", state("busy", queued=200_000)), ("near", state("idle"))]
    decoding = [("far", state("free")), ("near", state("full", requests=30)), ("near", state("calm", requests=2))]
    pair = choose_pair(guard(), REQUEST, prefilling, decoding, state("free"))
    assert pair is not None
    assert (pair.prefill.chosen.candidate.id[0], pair.decode.chosen.candidate.id[0]) == ("idle", "calm")


def test_the_worker_that_decodes_finds_the_prompt_on_its_device_or_in_memory() -> None:
    taker = state("d", overlap=Overlap(device=100, host=7, disk=5))
    pair = choose_pair(guard(), REQUEST, [("s", state("p"))], [("s", taker)], taker)
    assert pair is not None
    assert pair.decode.chosen.candidate.overlap == Overlap(device=100, host=(8_000 - 1) // 16 - 100)


def test_a_pair_pays_where_others_decode_and_costs_more_the_longer_the_prompts_wait() -> None:
    taken = Overlap(host=499)
    idle_pair, idle_alone = split_costs(REQUEST, state("d"), state("p"), state("d", overlap=taken))
    assert idle_pair > idle_alone, "nothing is delayed where nothing runs"
    pair, alone = split_costs(REQUEST, state("d", requests=8), state("p"), state("d", requests=8, overlap=taken))
    assert pair < alone
    costs = [
        split_costs(REQUEST, state("d", requests=8), state("p", queued=queued), state("d", overlap=taken))[0]
        for queued in (0, 10_000, 1_000_000)
    ]
    assert costs == sorted(costs)
    assert costs[-1] > alone, "a long queue is no place for a prompt"


def test_a_worker_that_was_slow_long_ago_counts_as_the_other_of_the_pair() -> None:
    def costs(prefill: WorkerSpeed, decode: WorkerSpeed = SPEED) -> tuple[float, float]:
        whole = replace(state("d", requests=8), speed=decode)
        taker = replace(whole, overlap=Overlap(host=499))
        return split_costs(REQUEST, whole, replace(state("p"), speed=prefill), taker)

    slow, long_ago = WorkerSpeed(1000.0, 0.01), WorkerSpeed(1000.0, 0.01, old=True)
    pair, alone = costs(slow)
    assert pair > alone
    assert costs(long_ago) == costs(SPEED)
    assert costs(SPEED, long_ago) == costs(SPEED), "the one worker that decodes has no other of its kind"
    fast = WorkerSpeed(20_000.0, 0.01)
    assert costs(replace(fast, old=True)) == costs(fast)


# --- the router


def card(instance: str, role: Role, kvbm: str = "k", **more: Any) -> ModelCard:
    layout = KvLayout("float32", 1, 1, 4, 4)
    return ModelCard(
        "m", instance, "/m", "0", "0", 4096, 1000, 4, 1000, layout, role=role, kvbm=kvbm, kvbm_layout="l", **more
    )


def router_of(*cards: ModelCard, grace_s: float = 1.0, unknown_s: float = 1.0, explained: int = 1000) -> ModelRouter:
    config = RouterConfig(load=LoadConfig(grace_s=grace_s, unknown_s=unknown_s, ramp_s=0), explained=explained)
    router = ModelRouter("m", "r1", config, KvPolicy(), Random(1))
    for each in cards:
        router.add_card(each)
    return router


def select(request: str = "r", attempt: int = 1, *, first: int = 1, blocks: int = 200, **more: Any) -> Select:
    hashes = pack_hashes(list(range(first, first + blocks)))
    return Select(request, attempt, "f", "m", hashes, 4 * blocks + 1, more.pop("max_tokens", 100), **more)


def report(instance: str, running: int, *attempts: tuple[str, int], waiting_tokens: int = 0) -> LoadReport:
    return LoadReport(instance, 1, 1, 0, running, waiting_tokens, 1000, 0, 0, 10_000.0, 0.01, attempts=list(attempts))


def chosen(router: ModelRouter, ask: Select, now_s: float = 0.0) -> Selected:
    reply = router.select(ask, now_s).reply
    assert isinstance(reply, Selected), reply
    return reply


@pytest.fixture
def router() -> ModelRouter:
    """One that computes prompts, and one that decodes for eight requests."""
    made = router_of(card("p", "prefill"), card("d", "decode"))
    made.apply_load_report(report("p", 0), 0.0)
    made.apply_load_report(report("d", 8), 0.0)
    return made


def test_a_prompt_goes_to_a_pair_while_others_decode_and_both_loads_are_reserved(router: ModelRouter) -> None:
    selection = router.select(select(time_left_s=20.0), 0.0)
    assert isinstance(selection.reply, Selected)
    assert (selection.reply.instance, selection.reply.decode) == ("p", "d")
    prefill, decode = selection.reserved, selection.reserved_decode
    assert prefill is not None
    assert decode is not None
    assert (prefill.instance, prefill.attempt, prefill.uncached_tokens, prefill.delay_s) == ("p", 1, 801, 0.0)
    assert (decode.instance, decode.attempt, decode.uncached_tokens, decode.delay_s) == ("d", 2, 1, 20.0)
    router.validate()


def test_one_prompt_at_a_time_goes_to_a_prefill_worker_that_was_slow_long_ago(router: ModelRouter) -> None:
    def pair_at(now_s: float, request: str) -> bool:
        for instance, running, tokens_per_s in (("p", 0, 100.0), ("d", 8, 10_000.0 + now_s)):
            report_of = replace(report(instance, running), prefill_tokens_per_s=tokens_per_s)
            router.load.apply_report(report_of, now_s)
        return bool(chosen(router, select(request, first=1000 * int(now_s + 1)), now_s).decode)

    assert not pair_at(0.0, "first")
    assert not pair_at(SPEED_S - 1, "second")
    assert pair_at(SPEED_S, "third")
    assert not pair_at(SPEED_S + 0.5, "fourth"), "the third waits there"


def test_an_idle_worker_that_decodes_computes_the_prompt_itself_and_the_reason_has_both_costs() -> None:
    router = router_of(card("p", "prefill"), card("d", "decode"))
    reply = chosen(router, select())
    assert (reply.instance, reply.decode) == ("d", "")
    assert "a pair costs" in reply.reason


def test_workers_that_do_all_are_chosen_as_before_and_no_reason_speaks_of_pairs() -> None:
    router = router_of(card("a", "aggregated"), card("b", "aggregated"))
    router.apply_load_report(report("a", 8), 0.0)
    reply = chosen(router, select())
    assert (reply.instance, reply.decode) == ("b", "")
    assert "pair" not in reply.reason


@pytest.mark.parametrize("fields", [{"whole": True}, {"max_tokens": 1}])
def test_what_one_worker_must_do_or_ends_with_its_first_token_goes_to_no_pair(
    router: ModelRouter, fields: dict[str, Any]
) -> None:
    assert (chosen(router, select(**fields)).instance, chosen(router, select(**fields)).decode) == ("d", "")


def test_a_model_whose_workers_only_compute_prompts_is_refused_with_the_reason() -> None:
    reply = router_of(card("p", "prefill")).select(select(), 0.0).reply
    assert isinstance(reply, SelectRefused)
    assert (reply.code, "only compute prompts" in reply.reason) == ("no_instances", True)


@pytest.mark.parametrize("fault", ["excluded", "frozen", "store", "room"])
def test_a_worker_that_cannot_hand_over_now_is_in_no_pair(router: ModelRouter, fault: str) -> None:
    ask = select(excluded=("p",)) if fault == "excluded" else select()
    if fault == "frozen":
        router.eligibility.frozen = frozenset(("p",))
    if fault == "store":
        router.add_card(card("p", "prefill", kvbm="another machine's"))
    if fault == "room":
        ask = select(blocks=1020)  # its 4,081 tokens are more than 1,000 blocks of 4
    reply = chosen(router, ask)
    assert (reply.instance, reply.decode) == ("d", "")


def test_the_same_question_again_has_the_same_pair_and_reserves_nothing(router: ModelRouter) -> None:
    first = chosen(router, select())
    again = router.select(select(), 0.1)
    assert isinstance(again.reply, Selected)
    assert (again.reply.instance, again.reply.decode) == (first.instance, first.decode) == ("p", "d")
    assert (again.reserved, again.reserved_decode) == (None, None)
    assert router.load.statistics().reservations == 2


def test_the_reservation_of_the_worker_that_decodes_outlives_that_of_the_prompt(router: ModelRouter) -> None:
    chosen(router, select())
    router.apply_load_event(Finished("r", 1), 0.5)
    assert [one.reserved.instance for one in router.load.reservations()] == ["d"]


def test_what_is_handed_over_later_is_not_forgotten_before_its_time_and_is_after_it(router: ModelRouter) -> None:
    chosen(router, select(time_left_s=30.0))
    router.apply_load_report(report("d", 8), 10.0)
    assert router.load.candidate_of(("r", 2)) == ("d", 0)
    router.apply_load_report(report("d", 8), 33.0)
    assert router.load.candidate_of(("r", 2)) is None


def test_a_delay_of_another_router_is_bounded(router: ModelRouter) -> None:
    for delay_s in (-1.0, HAND_OVER_LIMIT_S + 1, float("nan"), float("inf")):
        with pytest.raises(ProtocolError, match="delay_s"):
            router.apply_load_event(Reserved("x", 1, "g", "d", 0, 1, 1, "r2", delay_s=delay_s), 0.0)


def test_a_prompt_that_would_wait_too_long_for_its_turn_is_computed_where_it_is_decoded(router: ModelRouter) -> None:
    router.apply_load_report(report("p", 1, waiting_tokens=100_000), 0.0)
    reply = chosen(router, select(wait_limit_s=5.0))
    assert (reply.instance, reply.decode) == ("d", "")


def test_a_pair_serves_where_no_single_worker_would_begin_in_time(router: ModelRouter) -> None:
    router.apply_load_report(report("d", 0, waiting_tokens=100_000), 0.0)
    assert chosen(router, select(wait_limit_s=5.0)).decode == "d"


def test_a_pair_that_costs_more_than_one_worker_says_why_it_serves(router: ModelRouter) -> None:
    for name in "pd":
        router.apply_load_report(report(name, 30, waiting_tokens=40_000), 0.0)
    cheaper = chosen(router, select("cheaper"))
    assert (cheaper.instance, cheaper.decode) == ("d", "")
    router.apply_load_report(report("p", 30, waiting_tokens=30_000), 0.0)
    reply = chosen(router, select("late", wait_limit_s=3.5))
    assert (reply.instance, reply.decode) == ("p", "d")
    assert "no single worker would begin within 3.5 s; a pair costs" in reply.reason


def test_the_log_has_both_halves_and_the_cached_tokens_of_each(router: ModelRouter) -> None:
    reply = chosen(router, select(explain=True))
    assert reply.decode == "d"
    assert reply.candidates
    computes, decodes = router.decisions.find("r", 10)
    assert (computes.selected.instance, decodes.selected.instance) == ("p", "d")
    assert "computes the prompt" in computes.selected.reason
    assert "hands over" in decodes.selected.reason


def test_a_pair_is_explained_though_the_log_has_room_for_one_decision() -> None:
    router = router_of(card("p", "prefill"), card("d", "decode"), explained=1)
    router.apply_load_report(report("d", 30), 0.0)
    reply = chosen(router, select(explain=True))
    assert (reply.instance, reply.decode) == ("p", "d")
    assert [row.instance for row in reply.candidates] == ["p"]


def test_the_reason_of_a_chosen_half_is_that_of_its_row(router: ModelRouter) -> None:
    router.apply_load_report(report("p", 2, waiting_tokens=800), 0.0)
    router.apply_load_report(report("d", 30, waiting_tokens=800), 0.0)
    assert chosen(router, select(explain=True)).decode == "d"
    for half in router.decisions.find("r", 10):
        (row,) = half.selected.candidates
        assert half.selected.reason.startswith(f"{row.reason}; ")


def test_the_cached_tokens_of_a_hand_over_are_those_of_its_second_half(router: ModelRouter) -> None:
    assert chosen(router, select()).decode == "d"
    prediction = router.apply_load_event(Prefilled("r", 2, 800, instance="d"), 1.0)
    assert prediction is not None
    assert (prediction.predicted_tokens, prediction.actual_tokens) == (800, 800)


class Roles(RuleBasedStateMachine):
    """Workers of all roles and two stores come, go and report, while requests are routed and end."""

    def __init__(self) -> None:
        super().__init__()
        self.router = router_of()
        self.now_s = 0.0

    @rule(
        instance=st.sampled_from("abcd"),
        role=st.sampled_from(["aggregated", "prefill", "decode"]),
        kvbm=st.sampled_from(["", "k", "l"]),
    )
    def come(self, instance: str, role: Role, kvbm: str) -> None:
        self.router.remove_instance(instance)
        self.router.add_card(card(instance, role, kvbm), self.now_s)

    @rule(instance=st.sampled_from("abcd"), kvbm=st.sampled_from(["", "k", "l"]))
    def move(self, instance: str, kvbm: str) -> None:
        before = self.router.cards.get(instance)
        if before is not None:
            self.router.add_card(replace(before, kvbm=kvbm), self.now_s)

    @rule(
        request=st.sampled_from("pqrs"),
        attempt=st.integers(1, 4),
        instance=st.sampled_from("abcd"),
        delay_s=st.sampled_from([0.0, 20.0]),
    )
    def hear(self, request: str, attempt: int, instance: str, delay_s: float) -> None:
        self.router.apply_load_event(
            Reserved(request, attempt, "f", instance, 0, 5, 5, "r2", delay_s=delay_s), self.now_s
        )

    @rule(instance=st.sampled_from("abcd"))
    def go(self, instance: str) -> None:
        self.router.remove_instance(instance)

    @rule(instance=st.sampled_from("abcd"), running=st.integers(0, 20), tokens=st.integers(0, 100_000))
    def tell(self, instance: str, running: int, tokens: int) -> None:
        self.router.apply_load_report(report(instance, running, waiting_tokens=tokens), self.now_s)

    @rule(
        request=st.sampled_from("pqrs"),
        attempt=st.integers(1, 3),
        blocks=st.integers(1, 60),
        whole=st.booleans(),
        wait_limit_s=st.sampled_from([0.0, 1.0]),
        excluded=st.sets(st.sampled_from("abcd"), max_size=2),
    )
    def ask(
        self, request: str, attempt: int, blocks: int, whole: bool, wait_limit_s: float, excluded: set[str]
    ) -> None:
        ask = select(
            request,
            attempt,
            blocks=blocks,
            whole=whole,
            wait_limit_s=wait_limit_s,
            excluded=tuple(sorted(excluded)),
        )
        selection = self.router.select(ask, self.now_s)
        reply, cards = selection.reply, self.router.cards
        if isinstance(reply, SelectRefused):
            able = [each for each in cards.values() if each.decodes]
            assert reply.code == "overloaded" or all(each.instance in excluded for each in able)
            return
        where = {
            one.reserved.attempt: one.reserved.instance
            for one in self.router.load.reservations()
            if one.reserved.request == request
        }
        assert where.get(attempt, reply.instance) == reply.instance, "reserved elsewhere than answered"
        if attempt in where and reply.decode:
            assert where.get(attempt + 1, reply.decode) == reply.decode, "reserved where it does not decode"
        if not reply.decode:
            assert cards[reply.instance].decodes, "a whole request where only prompts are computed"
            assert selection.reserved_decode is None
            return
        assert not whole
        assert not excluded & {reply.instance, reply.decode}
        prefill, decode = cards[reply.instance], cards[reply.decode]
        assert (prefill.role, decode.role) == ("prefill", "decode")
        assert prefill.kvbm == decode.kvbm != ""

    @rule(request=st.sampled_from("pqrs"), attempt=st.integers(1, 4))
    def end(self, request: str, attempt: int) -> None:
        self.router.apply_load_event(Finished(request, attempt), self.now_s)

    @rule(later_s=st.floats(0, 40))
    def wait(self, later_s: float) -> None:
        self.now_s += later_s
        self.router.tick(self.now_s)

    @invariant()
    def valid(self) -> None:
        self.router.validate()

    def teardown(self) -> None:
        self.router.load.remove_frontend("f")
        assert self.router.load.statistics().reservations == 0


TestRoles = Roles.TestCase
TestRoles.settings = settings(max_examples=60, stateful_step_count=30)
