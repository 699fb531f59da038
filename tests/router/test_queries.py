"""Explanations of a router: the latest decisions over all models, with the chosen candidate always among the rows."""

from __future__ import annotations

import itertools
import math
from random import Random

import pytest

from services.router.config import RouterConfig
from services.router.queries import DECISIONS_IN_ANSWER, explain, model_state, policy_problem, requested_id
from services.router.selection.candidates import CandidateState, RoutingRequest
from services.router.selection.decision_log import KEPT_CANDIDATES
from services.router.selection.model_router import ModelRouter
from services.router.selection.policies.kv import KvPolicy
from services.router.selection.policy import BUILT_IN
from shared.hashing import pack_hashes
from shared.messages.cards import KvLayout, ModelCard
from shared.messages.codec import JSON_HEADER
from shared.messages.load import LoadReport
from shared.messages.people import EXPLANATIONS, ModelState
from shared.messages.select import Finished, Prefilled, Select
from tests.router.broken_policy import BrokenPolicy


def model(name: str, *instances: str, policy: str = "kv") -> ModelRouter:
    router = ModelRouter(name, "r1", RouterConfig(), BUILT_IN[policy](), Random(1))
    layout = KvLayout("float32", 1, 1, 4, 4)
    for instance in instances:
        router.add_card(ModelCard(name, instance, "/m", "0", "0", 4096, 1000, 4, 1000, layout), 0.0)
    return router


def ask(router: ModelRouter, request: str, now_s: float = 0.0, *, attempt: int = 1) -> None:
    router.select(Select(request, attempt, "f", router.model, pack_hashes([1, 2]), 9, 10), now_s)


@pytest.mark.parametrize(
    "payload", [b"abc", b"chatcmpl-abc", b"cmpl-abc", b"embd-abc", b"msg_abc", b'"chatcmpl-abc"', b" abc\n"]
)
def test_a_request_is_found_by_its_bare_id_or_its_answers_id(payload: bytes) -> None:
    assert requested_id(payload) == "abc"


@pytest.mark.parametrize("payload", [b"chatcmpl-", b'"cmpl-"'])
def test_an_id_that_is_only_a_prefix_is_not_empty(payload: bytes) -> None:
    assert explain("r1", [model("m", "a")], requested_id(payload), 0.0).decisions == []
    assert requested_id(payload) != ""


@pytest.mark.parametrize("payload", [b"", b'""', b"\n"])
def test_an_empty_query_names_no_request(payload: bytes) -> None:
    assert requested_id(payload) == ""


def test_bytes_that_are_not_text_name_an_unknown_request() -> None:
    assert explain("r1", [model("m", "a")], requested_id(b"\xff\xfe"), 0.0).decisions == []


def test_a_choice_is_explained_with_its_outcome() -> None:
    router = model("m", "a", "b")
    router.apply_load_report(LoadReport("a", 1, 1, 0, 0, 0, 1000, 0, 0, prefill_tokens_per_s=90.0), 0.0)
    ask(router, "r", 5.0)
    (before,) = explain("r1", [router], "r", 6.0).decisions
    assert (before.actual_cached_tokens, before.first_token_s, before.ended_s) == (None, None, None)
    router.apply_load_event(Prefilled("r", 1, 4, 0.25), 5.2)
    router.apply_load_event(Finished("r", 1), 7.0)
    router.apply_load_event(Finished("r", 1), 8.0)
    (explanation,) = explain("r1", [router], "r", 10.0).decisions
    assert (
        explanation.model,
        explanation.router,
        explanation.request,
        explanation.attempt,
        explanation.prompt_tokens,
    ) == ("m", "r1", "r", 1, 9)
    assert {row.instance for row in explanation.candidates} == {"a", "b"}
    assert {row.instance: row.predicted_s for row in explanation.candidates}["a"] == pytest.approx(0.1)
    assert explanation.reason == next(
        row.reason for row in explanation.candidates if row.instance == explanation.instance
    )
    assert (explanation.predicted_cached_tokens, explanation.actual_cached_tokens) == (0, 4)
    assert (explanation.first_token_s, explanation.ended_s, explanation.age_s) == (0.25, 2.0, 5.0)


def test_the_latest_decisions_of_all_models_come_oldest_first() -> None:
    first, second = model("m1", "a"), model("m2", "a")
    for number in range(DECISIONS_IN_ANSWER):
        ask(first, f"x{number}", 2.0 * number)
        ask(second, f"y{number}", 2.0 * number + 1)
    explanation = [each.request for each in explain("r1", [first, second], "", 100.0).decisions]
    assert explanation == [
        f"{letter}{number}" for number in range(DECISIONS_IN_ANSWER // 2, DECISIONS_IN_ANSWER) for letter in "xy"
    ]


def test_all_attempts_of_a_request_are_explained() -> None:
    router = model("m", "a", "b")
    for attempt in (1, 2):
        ask(router, "r", float(attempt), attempt=attempt)
    ask(router, "another")
    assert [each.attempt for each in explain("r1", [router], "r", 3.0).decisions] == [1, 2]


def test_the_chosen_candidate_is_among_the_rows_even_with_a_bad_score() -> None:
    names = [f"w{number:02}" for number in range(2 * KEPT_CANDIDATES)]
    router = model("m", *names, policy="round-robin")
    for number in range(2 * KEPT_CANDIDATES):
        ask(router, f"r{number}")
        (explanation,) = explain("r1", [router], f"r{number}", 0.0).decisions
        assert len(explanation.candidates) == KEPT_CANDIDATES
        assert explanation.instance in {row.instance for row in explanation.candidates}


class ExtremeScorePolicy(KvPolicy):
    """Returns infinite scores; its worker has a speed of almost 0."""

    def score(self, request: RoutingRequest, candidate: CandidateState) -> float:
        return math.inf if candidate.id[0] == "a" else -math.inf


def test_infinite_scores_and_times_can_be_encoded_in_json() -> None:
    router = ModelRouter("m", "r1", RouterConfig(), ExtremeScorePolicy(), Random(1))
    for card in model("m", "a", "b").cards.values():
        router.add_card(card)
    for instance in "ab":
        router.apply_load_report(LoadReport(instance, 1, 1, 0, 0, 0, 1000, 0, 0, prefill_tokens_per_s=1e-310), 0.0)
    ask(router, "r")
    explanation = explain("r1", [router], "r", 0.0)
    assert [row.instance for row in explanation.decisions[0].candidates] == ["b", "a"]
    assert EXPLANATIONS.decode(EXPLANATIONS.encode(explanation, JSON_HEADER), JSON_HEADER) == explanation


def test_times_are_rounded_to_microseconds() -> None:
    router = model("m", "a")
    router.apply_load_report(LoadReport("a", 1, 1, 0, 0, 0, 1000, 0, 0, prefill_tokens_per_s=700.0), 0.0)
    ask(router, "r", 1 / 3)
    router.apply_load_event(Prefilled("r", 1, 4, 2 / 3), 1.0)
    router.apply_load_event(Finished("r", 1), 1.0)
    (explanation,) = explain("r1", [router], "r", 4 / 3 + 1e-9).decisions
    assert (explanation.age_s, explanation.first_token_s, explanation.ended_s) == (1.0, 0.666667, 0.666667)
    assert explanation.candidates[0].predicted_s == 0.012857


def test_the_problem_shown_for_a_policy_is_that_of_the_worst_model() -> None:
    clock = itertools.count().__next__  # a second passes at each call
    fine = ModelRouter("m", "r1", RouterConfig(), KvPolicy(), Random(1))
    failing = ModelRouter("m", "r1", RouterConfig(policy="mine:Broken"), BrokenPolicy(), Random(1))
    slow = ModelRouter("m", "r1", RouterConfig(policy_strikes=0), KvPolicy(), Random(1), clock)
    for router in (fine, failing, slow):
        router.add_card(next(iter(model(router.model, "a").cards.values())))
        ask(router, "r")
    (explanation,) = explain("r1", [failing], "r", 0.0).decisions
    assert explanation.reason == (
        "mine:Broken failed (ZeroDivisionError: a mistake in a policy), "
        "kv chose: uncached 9 + fetch 0 + waiting 0 + running 0"
    )
    assert policy_problem([fine]) == ""
    assert policy_problem([fine, failing]) == "failed: kv made 1 of its choices"
    assert policy_problem([fine, failing, slow]) == "off: kv chooses"


def test_a_models_state_has_its_sizes() -> None:
    router = model("m", "a", "b")
    ask(router, "r")
    assert model_state(router) == ModelState("m", 2, 1, 0, 0)
