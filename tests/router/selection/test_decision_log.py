"""The decision log keeps the latest decisions with their outcomes, and makes reasons only on request."""

from __future__ import annotations

from services.router.selection.candidates import CandidateState, RoutingRequest, ScoredCandidate
from services.router.selection.decision_log import KEPT_CANDIDATES, DecisionLog
from services.router.selection.load import CandidateLoad, WorkerSpeed
from services.router.selection.policies.kv import KvPolicy
from services.router.selection.policy_guard import PolicyChoice
from shared.messages.select import Overlap, Prefilled, Selected
from shared.request_names import NAME_DIGITS
from tests.router.broken_policy import FailingReasonPolicy

QUESTION = RoutingRequest(100, 16)


def scored(count: int) -> list[ScoredCandidate]:
    """Return `count` candidates, the first one with three blocks and the best score."""
    load = CandidateLoad(1, 300, 20)
    first = CandidateState(("w0", 0), Overlap(2, 1), load, 1000, WorkerSpeed(1000.0))
    return [
        ScoredCandidate(first, 0.0),
        *(ScoredCandidate(CandidateState((f"w{n}", 0), Overlap(), load, 1000), float(n)) for n in range(1, count)),
    ]


def selected(request: str, attempt: int = 1) -> Selected:
    return Selected(request, attempt, "w0", 0, "r1", Overlap(2, 1), "most cached")


def kept(*requests: str, limit: int = 10, candidates: int = 3, chosen: int = 0) -> DecisionLog:
    decisions = DecisionLog(limit=limit)
    each = scored(candidates)
    for number, request in enumerate(requests):
        decisions.add(selected(request), QUESTION, PolicyChoice(KvPolicy(), each, each[chosen]), float(number), {})
        decisions.validate()
    return decisions


def test_only_the_latest_decisions_are_kept_and_a_repeated_one_counts_as_new() -> None:
    decisions = kept("a", "b", "a", "c", limit=2)
    assert [each.selected.request for each in decisions.find("", latest=9)] == ["a", "c"]
    assert [each.selected.request for each in decisions.find("", latest=1)] == ["c"]
    assert decisions.find("b", latest=9) == []


def test_a_request_is_found_by_its_clients_own_id_too() -> None:
    decisions = kept("a-b-0e", "a-b-0f", "a-b", "a", "a-0a")
    found = {name: [each.selected.request for each in decisions.find(name, latest=9)] for name in ("a-b", "a", "a-")}
    assert found == {"a-b": ["a-b-0e", "a-b-0f", "a-b"], "a": ["a-b", "a", "a-0a"], "a-": []}


def test_the_choices_of_one_request_are_found_by_the_id_of_the_whole_request() -> None:
    decisions = kept("a-0e/0", "a-0e/1", "a-0f", "b/0")
    found = {
        name: [each.selected.request for each in decisions.find(name, latest=9)] for name in ("a-0e", "a", "a-0e/1")
    }
    assert found == {"a-0e": ["a-0e/0", "a-0e/1"], "a": ["a-0e/0", "a-0e/1", "a-0f"], "a-0e/1": ["a-0e/1"]}


def test_a_request_is_found_by_the_beginning_of_our_part_of_its_id_if_that_is_long_enough() -> None:
    own, other = "0123456789abcdef" * 2, "fedcba9876543210" * 2
    decisions = kept(f"mine-{own}/0", f"mine-{own}/1", other)
    for digits in (NAME_DIGITS, 20, 32):
        found = [each.selected.request for each in decisions.find(own[:digits], latest=9)]
        assert found == [f"mine-{own}/0", f"mine-{own}/1"]
    assert [each.selected.request for each in decisions.find(other[:NAME_DIGITS], latest=9)] == [other]
    assert decisions.find(own[: NAME_DIGITS - 1], latest=9) == []


def test_rows_are_the_best_candidates_and_the_chosen_one() -> None:
    (decision,) = kept("a", candidates=KEPT_CANDIDATES + 9, chosen=KEPT_CANDIDATES + 5).find("a", latest=1)
    rows = decision.selected.candidates
    assert [row.instance for row in rows] == [*(f"w{n}" for n in range(KEPT_CANDIDATES - 1)), f"w{KEPT_CANDIDATES + 5}"]
    assert rows[0].overlap == Overlap(2, 1)
    assert (rows[0].queued_tokens, rows[0].active_blocks) == (300, 20)
    assert rows[0].predicted_s == (300 + 100 - 3 * 16) / 1000
    assert rows[1].predicted_s is None, "its speed is unknown"


def test_a_first_token_is_recorded_once_and_its_count_is_clamped() -> None:
    decisions = kept("a", "b")
    prediction = decisions.record_first_token(Prefilled("a", 1, 32, 0.5))
    assert prediction is not None
    assert (prediction.predicted_tokens, prediction.actual_tokens, prediction.new_blocks) == (48, 32, 4)
    assert decisions.record_first_token(Prefilled("a", 1, 96)) is None
    assert decisions.record_first_token(Prefilled("a", 2, 0)) is None
    too_many = decisions.record_first_token(Prefilled("b", 1, 10**9))
    assert too_many is not None
    assert too_many.actual_tokens == 100
    (decision,) = decisions.find("a", latest=1)
    assert (decision.actual_cached_tokens, decision.first_token_s) == (32, 0.5)


def test_a_first_token_with_an_unknown_count_of_cached_tokens_is_recorded_without_a_prediction() -> None:
    decisions = kept("a")
    assert decisions.record_first_token(Prefilled("a", 1, -1, 0.5)) is None
    (decision,) = decisions.find("a", latest=1)
    assert (decision.actual_cached_tokens, decision.first_token_s) == (None, 0.5)


def test_a_first_token_from_another_instance_is_not_recorded_for_a_choice_that_came_too_late() -> None:
    decisions = kept("a")
    chosen = decisions.find("a", latest=1)[0].selected.instance
    assert decisions.record_first_token(Prefilled("a", 1, 32, 0.5, instance="elsewhere")) is None
    (decision,) = decisions.find("a", latest=1)
    assert (decision.actual_cached_tokens, decision.first_token_s) == (None, None)
    assert decisions.record_first_token(Prefilled("a", 1, 32, 0.5, instance=chosen)) is not None


def test_an_end_is_recorded_once() -> None:
    decisions = kept("a")
    decisions.record_end(("a", 1), 2.5)
    decisions.record_end(("a", 1), 9.0)
    decisions.record_end(("unknown", 1), 9.0)
    assert [each.ended_s for each in decisions.find("", latest=9)] == [2.5]


def test_a_bounded_number_of_those_passed_over_is_kept() -> None:
    decisions = DecisionLog(limit=1)
    each, many = scored(1), {f"w{number}": "frozen" for number in range(KEPT_CANDIDATES + 1)}
    decisions.add(selected("a"), QUESTION, PolicyChoice(KvPolicy(), each, each[0]), 0.0, many)
    decisions.validate()
    assert list(decisions.get(("a", 1)).passed_over) == list(many)[:KEPT_CANDIDATES]


def test_a_policy_without_reasons_can_be_explained() -> None:
    decisions = DecisionLog(limit=1)
    each = scored(2)
    decisions.add(selected("a"), QUESTION, PolicyChoice(FailingReasonPolicy(), each, each[0]), 0.0, {})
    assert decisions.find("a", latest=1)[0].selected.candidates[0].reason.startswith("no reason: LookupError")
