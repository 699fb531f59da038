"""Eligible candidates can serve, are not frozen, and get a growing share after they join."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.router.selection.eligibility import EXCLUDED, FROZEN, RAMPS_UP, TOO_LONG, Eligibility, NoCandidate
from shared.messages.cards import KvLayout, ModelCard
from shared.messages.select import Select

RAMP_S = 10.0


def card(instance: str, **more: Any) -> ModelCard:
    return ModelCard("m", instance, "/m", "0", "0", 4096, 1000, 4, 1000, KvLayout("float32", 1, 1, 4, 4), **more)


def eligibility(*cards: ModelCard, now_s: float = 0.0) -> Eligibility:
    made = Eligibility("m", Random(1), ramp_s=RAMP_S)
    for each in cards:
        made.add_card(each, now_s)
    return made


def asked(made: Eligibility, now_s: float = 0.0, **fields: Any) -> list[str]:
    """The instances that are eligible for a request, one for each rank."""
    return [seat.instance for seat in made.eligible(Select("r", 1, "f", "m", b"", 1, 1, **fields), now_s).candidates]


def refusal(made: Eligibility, **fields: Any) -> str:
    with pytest.raises(NoCandidate) as nobody:
        asked(made, **fields)
    return nobody.value.code


def test_every_rank_is_eligible_and_instances_that_join_or_leave_count_at_once() -> None:
    made = eligibility(card("a"), card("b", ranks=2))
    assert asked(made) == ["a", "b", "b"]
    made.add_card(card("c"), 0.0)
    made.remove_card("a")
    assert asked(made) == ["b", "b", "c"]


def test_if_no_candidate_can_serve_the_refusal_says_why() -> None:
    made = eligibility(card("p", role="prefill"))
    assert refusal(made) == "no_instances"
    made.add_card(card("a"), 0.0)
    made.add_card(card("b", lora=("french",)), 0.0)
    assert asked(made, lora="french") == ["b"]
    assert refusal(made, lora="welsh") == "unknown_model"
    assert refusal(made, lora="french", excluded=("b",)) == "all_excluded"
    assert asked(made, excluded=("b",)) == ["a"]


def test_a_card_whose_loras_change_counts_at_once_and_does_not_ramp_up_again() -> None:
    made = eligibility(card("a"), card("b"))
    assert refusal(made, lora="french@1") == "unknown_model"
    made.update_card(card("b", lora=("french@1",)))
    assert asked(made, RAMP_S, lora="french@1") == ["b"]
    assert asked(made, RAMP_S) == ["a", "b"]
    made.validate()
    made.update_card(card("b", lora=("french@2",)))
    assert refusal(made, lora="french@1") == "unknown_model"
    made.validate()


def test_a_candidate_without_room_for_the_prompt_is_skipped_while_others_have_room() -> None:
    small = msgspec.structs.replace(card("small"), capacity_blocks=3)
    short = msgspec.structs.replace(card("short"), context_length=10)
    made = eligibility(small, short, card("a"))
    for tokens, able in (
        (9, ["small", "short", "a"]),
        (10, ["small", "a"]),
        (13, ["a"]),
        (5000, ["small", "short", "a"]),
    ):
        ask = Select("r", 1, "f", "m", b"", tokens, 1)
        assert [seat.instance for seat in made.eligible(ask, 0.0).candidates] == able, tokens
    made.remove_card("a")
    assert asked(made) == ["small", "short"]


def test_a_frozen_instance_is_passed_over_while_others_are_available() -> None:
    made = eligibility(card("a"), card("b"), card("c"))
    made.frozen = frozenset({"a", "b"})
    assert asked(made) == ["c"]
    assert asked(made, excluded=("c",)) == ["a", "b"]


def test_each_instance_that_is_passed_over_has_one_reason() -> None:
    small = msgspec.structs.replace(card("small"), capacity_blocks=3)
    made = eligibility(small, card("tried"), card("frozen"), card("a"), card("p", role="prefill"))
    made.frozen = frozenset({"frozen", "tried", "p"})
    made.add_card(card("new", ranks=2), 50.0)
    ask = Select("r", 1, "f", "m", b"", 13, 1, excluded=("tried", "gone"))
    reasons = {"tried": EXCLUDED, "small": TOO_LONG, "frozen": FROZEN, "new": RAMPS_UP}
    assert made.eligible(ask, 50.0).passed_over == reasons
    assert made.prefilling(ask, 50.0) == ([], {"p": FROZEN})
    made.frozen = frozenset(made.cards)
    del reasons["frozen"]
    assert made.eligible(ask, 50.0).passed_over == reasons, "frozen are all: nobody is passed over for it"
    assert made.eligible(msgspec.structs.replace(ask, prompt_tokens=1, excluded=()), 100.0).passed_over == {}


@pytest.mark.parametrize("age_s", [0.0, 2.5, 5.0, 7.5, 10.0, 100.0])
def test_an_instance_that_joins_gets_a_share_that_grows_with_its_age(age_s: float) -> None:
    made = eligibility(card("a"))
    made.add_card(card("new"), 50.0)
    share = sum("new" in asked(made, 50.0 + age_s) for _ in range(1000)) / 1000
    assert abs(share - min(age_s / RAMP_S, 1.0)) < 0.06


def test_instances_that_start_or_are_found_together_do_not_ramp_up() -> None:
    made = eligibility(card("a"), now_s=7.0)
    made.add_card(card("b"), 16.9)
    assert all(asked(made, 17.0) == ["a", "b"] for _ in range(50))


def test_instances_that_ramp_up_are_eligible_if_no_others_are_left() -> None:
    made = eligibility(card("a"))
    made.add_card(card("new", lora=("l",)), 50.0)
    assert asked(made, 50.0) == ["a"]
    assert asked(made, 50.0, lora="l") == asked(made, 50.0, excluded=("a",)) == ["new"]
    made.frozen = frozenset({"a"})
    assert asked(made, 50.0) == ["new"]
    made.remove_card("a")
    assert asked(made, 50.0) == ["new"]


def test_an_instance_that_comes_again_ramps_up_again() -> None:
    made = eligibility(card("a"), card("b"))
    made.remove_card("b")
    made.add_card(card("b"), 50.0)
    assert asked(made, 50.0) == ["a"]


def prefilling(made: Eligibility, now_s: float = 0.0, *, tokens: int = 1, **fields: Any) -> list[str]:
    """The instances that may compute the prompt alone."""
    left, _ = made.prefilling(Select("r", 1, "f", "m", b"", tokens, 1, **fields), now_s)
    return [seat.instance for seat in left]


def roles(*cards: ModelCard) -> Eligibility:
    return eligibility(
        card("a"), card("d", role="decode"), card("p", role="prefill"), card("q", role="prefill"), *cards
    )


def test_whole_requests_go_to_workers_that_decode_and_prompts_alone_to_those_that_do_nothing_else() -> None:
    made = roles()
    assert asked(made) == ["a", "d"]
    assert prefilling(made) == ["p", "q"]
    made.remove_card("p")
    assert prefilling(made) == ["q"]
    assert prefilling(eligibility(card("a"))) == []
    made.validate()


def test_for_a_model_with_only_workers_that_compute_prompts_the_reason_says_so() -> None:
    made = eligibility()
    with pytest.raises(NoCandidate, match=r"^no instance serves m$"):
        asked(made)
    made.add_card(card("p", role="prefill", lora=("l",)), 0.0)
    for fields in ({}, {"lora": "l"}, {"excluded": ("p",)}):
        with pytest.raises(NoCandidate, match="only compute prompts") as refused:
            asked(made, **fields)
        assert refused.value.code == "no_instances"


def test_a_pair_needs_the_requests_lora_at_both_of_its_workers() -> None:
    made = eligibility(card("d", role="decode", lora=("other",)), card("p", role="prefill", lora=("l",)))
    assert prefilling(made, lora="l") == ["p"]
    with pytest.raises(NoCandidate, match=r"^no instance of m has the LoRA l$"):
        asked(made, lora="l")
    made.add_card(card("e", role="decode", lora=("l",)), 0.0)
    assert asked(made, lora="l") == ["e"]
    assert prefilling(made, lora="other") == []


def test_no_frozen_or_excluded_instance_computes_a_prompt_alone_even_if_no_other_is_left() -> None:
    made = roles()
    assert prefilling(made, excluded=("p",)) == ["q"]
    made.frozen = frozenset({"q"})
    assert prefilling(made) == ["p"]
    assert prefilling(made, excluded=("p",)) == []
    assert asked(made, excluded=("p", "q")) == ["a", "d"]


def test_a_prompt_without_room_is_computed_alone_nowhere() -> None:
    made = roles(msgspec.structs.replace(card("small", role="prefill"), capacity_blocks=3))
    assert prefilling(made, tokens=12) == ["p", "q", "small"]
    assert prefilling(made, tokens=13) == ["p", "q"]
    assert prefilling(made, tokens=5000) == []


def test_an_instance_that_ramps_up_computes_prompts_alone_only_when_drawn() -> None:
    made = eligibility(card("d", role="decode"))
    made.add_card(card("new", role="prefill"), 50.0)
    assert prefilling(made, 50.0) == []
    share = sum("new" in prefilling(made, 50.0 + RAMP_S / 2) for _ in range(1000)) / 1000
    assert abs(share - 0.5) < 0.06
    assert prefilling(made, 50.0 + RAMP_S) == ["new"]


def test_a_lora_is_computed_alone_where_it_is_loaded_and_a_card_that_changes_counts_at_once() -> None:
    made = roles(card("l", role="prefill", lora=("french",)))
    assert prefilling(made, lora="french") == ["l"]
    assert prefilling(made) == ["p", "q", "l"]
    made.update_card(card("p", role="prefill", lora=("french",)))
    assert prefilling(made, lora="french") == ["p", "l"]
    made.update_card(card("l", role="prefill"))
    assert prefilling(made, lora="french") == ["p"]
    assert prefilling(made, lora="welsh") == []
    made.validate()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_store_of_a_worker_is_that_of_its_latest_card(role: str) -> None:
    def stores() -> set[str | None]:
        able = made.eligible(Select("r", 1, "f", "m", b"", 1, 2), 0.0)
        return {each.store for each in (able.prefilling if role == "prefill" else able.candidates)}

    made = eligibility(card("d", role="decode"), card("x", role=role))
    assert stores() == {None}
    for fields, store in (
        ({"kvbm": "k", "kvbm_layout": "l"}, "k/l"),
        ({"kvbm": "k2", "kvbm_layout": "l"}, "k2/l"),
        ({"kvbm": "k2"}, None),
    ):
        made.update_card(card("x", role=role, **fields))
        assert store in stores()
        made.validate()


def test_a_worker_that_does_all_takes_part_in_no_pair() -> None:
    made = eligibility(card("a", kvbm="k", kvbm_layout="l"))
    assert [each.store for each in made.eligible(Select("r", 1, "f", "m", b"", 1, 1), 0.0).candidates] == [None]


def test_a_repeated_select_stays_with_its_reservations_as_long_as_they_can_serve() -> None:
    made = roles()
    ask = Select("r", 1, "f", "m", b"", 1, 2)

    def left(*reserved: str | None) -> tuple[list[str], list[str]]:
        this, following = [None if each is None else (each, 0) for each in reserved]
        able = made.eligible(ask, 0.0, (this, following))
        return [each.instance for each in able.candidates], [each.instance for each in able.prefilling]

    assert left(None, None) == (["a", "d"], ["p", "q"])
    assert left("q", "d") == (["d"], ["q"])
    assert left("q", "gone") == (["a", "d"], ["q"])
    assert left("d", None) == (["d"], [])
    assert left("gone", None) == (["a", "d"], []), "an attempt that ran where no pair is left stays with one worker"
    made.frozen = frozenset({"q"})
    assert left("q", "d") == (["a", "d"], [])


class EligibilityMachine(RuleBasedStateMachine):
    """Instances join, leave and freeze; every eligible candidate can serve."""

    def __init__(self) -> None:
        super().__init__()
        self.made = eligibility()
        self.now_s = 0.0

    @rule(
        instance=st.sampled_from("abcd"),
        lora=st.booleans(),
        ranks=st.integers(1, 2),
        role=st.sampled_from(["aggregated", "prefill", "decode"]),
    )
    def change(self, instance: str, lora: bool, ranks: int, role: str) -> None:
        if instance in self.made.cards:
            self.made.remove_card(instance)
        else:
            self.made.add_card(card(instance, lora=("l",) if lora else (), ranks=ranks, role=role), self.now_s)

    @rule(instances=st.frozensets(st.sampled_from("abcd")))
    def stand_still(self, instances: frozenset[str]) -> None:
        self.made.frozen = instances

    @rule(later_s=st.floats(0, 8))
    def wait(self, later_s: float) -> None:
        self.now_s += later_s

    @rule(lora=st.booleans(), excluded=st.frozensets(st.sampled_from("abcd")))
    def ask(self, lora: bool, excluded: frozenset[str]) -> None:
        found = {name for name, each in self.made.cards.items() if (each.lora or not lora) and name not in excluded}
        fields: dict[str, Any] = {"lora": "l" if lora else "", "excluded": tuple(excluded)}
        alone = set(prefilling(self.made, self.now_s, **fields))
        assert alone <= found - self.made.frozen
        assert all(self.made.cards[name].role == "prefill" for name in alone)
        able = {name for name in found if self.made.cards[name].role != "prefill"}
        if not able:
            refusal(self.made, **fields)
            return
        names = set(asked(self.made, self.now_s, **fields))
        assert names
        assert names <= able
        assert not names & self.made.frozen or able <= self.made.frozen

    @invariant()
    def valid(self) -> None:
        self.made.validate()


TestSeats = EligibilityMachine.TestCase
TestSeats.settings = settings(max_examples=60, stateful_step_count=25)
