"""Questions about a pair that come again: what stays reserved and explained when workers or reservations have changed
meanwhile, and how two routers agree."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from services.router.config import LoadConfig, RouterConfig
from services.router.selection.model_router import ModelRouter, Selection
from services.router.selection.policies.baselines import RoundRobinPolicy
from services.router.selection.policies.kv import KvPolicy
from services.router.selection.policy import Policy
from shared.hashing import pack_hashes
from shared.messages.cards import KvLayout, ModelCard, Role
from shared.messages.load import LoadReport
from shared.messages.select import Finished, Select, Selected

CONFIG = RouterConfig(load=LoadConfig(ramp_s=0))


def card(instance: str, role: Role, kvbm: str = "k") -> ModelCard:
    layout = KvLayout("float32", 1, 1, 4, 4)
    return ModelCard("m", instance, "/m", "0", "0", 4096, 1000, 4, 1000, layout, role=role, kvbm=kvbm, kvbm_layout="l")


def fleet(policy: Policy | None = None, name: str = "r1", *, decoding: str = "de", kvbm: str = "k") -> ModelRouter:
    """One worker that computes prompts, and workers that decode for eight requests each."""
    router = ModelRouter("m", name, CONFIG, policy or KvPolicy(), Random(1))
    router.add_card(card("p", "prefill"))
    for instance in decoding:
        router.add_card(card(instance, "decode", kvbm if instance == "e" else "k"))
    for instance in ("p", *decoding):
        running = 0 if instance == "p" else 8
        router.apply_load_report(LoadReport(instance, 1, 1, 0, running, 0, 1000, 0, 0, 10_000.0, 0.01), 0.0)
    return router


def select(request: str = "r", attempt: int = 1, **more: Any) -> Select:
    number = sum(request.encode())
    hashes = pack_hashes(list(range(1000 * number, 1000 * number + 200)))
    return Select(request, attempt, "f", "m", hashes, 801, 100, **more)


def pair_of(selection: Selection) -> tuple[str, str]:
    assert isinstance(selection.reply, Selected), selection.reply
    return selection.reply.instance, selection.reply.decode


def reserved(router: ModelRouter) -> dict[int, str]:
    """Attempt → the worker where it is reserved; there is one request."""
    return {one.reserved.attempt: one.reserved.instance for one in router.load.reservations()}


def other(decode: str) -> str:
    return "e" if decode == "d" else "d"


@pytest.mark.parametrize("gone", ["excluded", "removed"])
def test_if_the_worker_that_decodes_is_gone_the_pair_that_is_answered_is_the_one_that_is_reserved(gone: str) -> None:
    router = fleet()
    _, decode = pair_of(router.select(select(), 0.0))
    if gone == "removed":
        router.remove_instance(decode)
    again = router.select(select(excluded=(decode,)), 0.1)
    assert pair_of(again) == ("p", other(decode))
    assert reserved(router) == {1: "p", 2: other(decode)}
    assert again.reserved_decode is not None
    router.validate()


def test_if_no_pair_is_left_the_second_reservation_goes_with_the_first() -> None:
    router = fleet(decoding="d")
    assert pair_of(router.select(select(), 0.0)) == ("p", "d")
    assert pair_of(router.select(select(excluded=("p",)), 0.1)) == ("d", "")
    assert reserved(router) == {1: "d"}


def test_if_only_another_stores_worker_is_left_it_does_all_and_nothing_stays_reserved_elsewhere() -> None:
    router = fleet(kvbm="another machine's")
    assert pair_of(router.select(select(), 0.0)) == ("p", "d")
    assert pair_of(router.select(select(excluded=("d",)), 0.1)) == ("e", "")
    assert reserved(router) == {1: "e"}


def test_a_question_that_comes_after_the_prompt_was_computed_does_not_move_the_worker_that_decodes() -> None:
    router = fleet()
    _, decode = pair_of(router.select(select(), 0.0))
    router.apply_load_event(Finished("r", 1), 0.5)
    late = router.select(select(excluded=(decode,)), 1.0)
    assert (late.reserved, late.reserved_decode) == (None, None)
    assert reserved(router) == {2: decode}


def test_an_attempt_that_has_ended_reserves_no_worker_that_would_decode() -> None:
    router = fleet()
    for attempt in (1, 2):
        router.apply_load_event(Finished("r", attempt), 0.0)
    router.select(select(), 0.0)
    assert reserved(router) == {}
    router.apply_load_event(Finished("s", 1), 0.0)
    router.select(select("s"), 0.0)
    assert reserved(router) == {}


def test_when_the_worker_that_decodes_changes_the_explanation_of_the_other_half_names_the_new_one() -> None:
    router = fleet()
    _, decode = pair_of(router.select(select(), 0.0))
    again = router.select(select(excluded=(decode,), explain=True), 0.1)
    computes, decodes = router.decisions.find("r", 2)
    assert decodes.selected.instance == other(decode)
    assert f"{other(decode)} decodes" in computes.selected.reason
    assert isinstance(again.reply, Selected)
    assert again.reply.reason == computes.selected.reason


def test_after_a_lost_answer_the_next_pair_is_explained_as_of_its_own_choice() -> None:
    router = fleet(decoding="d")
    router.select(select(), 0.0)
    for attempt in (1, 2):  # what the service does if the answer cannot be sent
        router.load.withdraw(("r", attempt))
    again = router.select(select(), 5.0)
    assert again.reserved is not None
    assert again.reserved_decode is not None
    assert [each.at_s for each in router.decisions.find("r", 10)] == [5.0, 5.0]


def test_a_router_that_heard_both_reservations_of_another_one_answers_the_same_pair() -> None:
    first, second = fleet(), fleet(name="r2")
    made = first.select(select(), 0.0)
    for event in (made.reserved, made.reserved_decode):
        assert event is not None
        second.apply_load_event(event, 0.0)
    second.apply_load_report(LoadReport("p", 1, 1, 0, 0, 500_000, 1000, 0, 0, 10_000.0, 0.01), 0.0)
    again = second.select(select(), 0.1)
    assert pair_of(again) == pair_of(made), "though it would not choose it now"
    assert (again.reserved, again.reserved_decode) == (None, None)


def test_if_only_the_first_of_both_reservations_was_heard_the_second_one_is_made() -> None:
    first, second = fleet(), fleet(name="r2")
    made = first.select(select(), 0.0)
    assert made.reserved is not None
    second.apply_load_event(made.reserved, 0.0)
    reply = second.select(select(), 0.1).reply
    assert isinstance(reply, Selected)
    held = reserved(second)
    assert held[1] == reply.instance
    assert held.get(2, "") == reply.decode
    second.validate()


def test_the_attempt_that_takes_over_is_answered_with_the_worker_that_it_is_reserved_at() -> None:
    router = fleet()
    _, decode = pair_of(router.select(select(), 0.0))
    taken = router.select(select(attempt=2, whole=True), 0.5)
    assert pair_of(taken) == (decode, "")
    assert taken.reserved is None


def test_round_robin_takes_turns_among_the_workers_that_decode() -> None:
    router = fleet(RoundRobinPolicy())
    chosen: list[tuple[str, str]] = []
    for name in "abcdef":
        chosen.append(pair_of(router.select(select(name), 0.0)))
        router.apply_load_event(Finished(name, 1), 0.0)  # or the next prompt would wait for it
    assert all(prefill == "p" for prefill, _ in chosen)
    assert [decode for _, decode in chosen] == ["d", "e"] * 3


def test_a_fault_of_the_policy_is_known_whichever_of_the_choices_it_was_in() -> None:
    class FailsForPrompts(KvPolicy):
        def reason(self, request: Any, candidate: Any) -> str:
            if candidate.id[0] == "p":
                raise ValueError("no words")
            return super().reason(request, candidate)

    busy, idle = fleet(FailsForPrompts(), decoding="d"), fleet(FailsForPrompts(), decoding="d")
    assert pair_of(busy.select(select(), 0.0)) == ("p", "d")
    assert busy.select(select("s"), 0.0).fault is not None
    idle.apply_load_report(LoadReport("d", 1, 1, 0, 0, 0, 1000, 0, 0, 10_000.0, 0.01), 0.0)
    alone = idle.select(select(), 0.0)
    assert pair_of(alone) == ("d", "")
    assert alone.fault is not None
