"""Which LoRA a name means, while workers load, update, unload and go."""

from __future__ import annotations

from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.frontend.models import lora_names
from services.frontend.models.lora_names import LoraNames
from shared.lora import name_of_lora


def test_a_name_means_the_files_that_most_workers_have() -> None:
    names = LoraNames()
    assert names.find("sql") is None
    for instance in ("w1", "w2", "w3"):
        names.set_card("m", instance, ("sql@1", "law@1"))
    assert names.find("sql") == ("m", "sql@1")
    names.set_card("m", "w1", ("law@1", "sql@2"))
    assert names.find("sql") == ("m", "sql@1")
    names.set_card("m", "w2", ("law@1", "sql@2"))
    assert names.find("sql") == ("m", "sql@2")
    assert set(names.names) == {"sql", "law"}


def test_among_equals_it_means_the_last_in_order_whatever_came_first() -> None:
    for order in (("1", "2"), ("2", "1")):
        names = LoraNames()
        for digest in order:
            names.set_card("m", f"w{digest}", (f"sql@{digest}",))
        names.set_card("other", "w3", ("sql@2",))
        assert names.find("sql") == ("other", "sql@2")


def test_an_unloaded_lora_is_unknown_and_one_whose_workers_went_is_gone() -> None:
    names = LoraNames()
    names.set_card("m", "w1", ("sql@1", "law@1"))
    names.set_card("m", "w1", ("sql@1",))
    assert (names.find("law"), names.is_gone("law")) == (None, False)
    names.remove_card("m", "w1")
    assert (names.find("sql"), names.is_gone("sql")) == (None, True)
    names.set_card("m", "w2", ("sql@1",))
    assert (names.find("sql"), names.is_gone("sql")) == (("m", "sql@1"), False)
    names.set_card("m", "w2", ())
    assert not names.is_gone("sql")


def test_names_that_are_gone_are_kept_up_to_a_limit() -> None:
    names = LoraNames()
    names.set_card("m", "w1", [f"l{number}@1" for number in range(lora_names.GONE_KEPT + 1)])
    names.remove_card("m", "w1")
    names.validate()
    assert not names.is_gone("l0")
    assert names.is_gone("l1")


class Names(RuleBasedStateMachine):
    """Cards come and go in any order; the names agree with those that are there."""

    def __init__(self) -> None:
        super().__init__()
        self.names = LoraNames()
        self.cards: dict[tuple[str, str], tuple[str, ...]] = {}

    @rule(
        model=st.sampled_from("mn"),
        instance=st.sampled_from("abc"),
        ids=st.lists(st.sampled_from(("x@1", "x@2", "y@1", "z")), max_size=4),
    )
    def set_card(self, model: str, instance: str, ids: list[str]) -> None:
        self.names.set_card(model, instance, ids)
        self.cards[model, instance] = tuple(ids)

    @rule(model=st.sampled_from("mn"), instance=st.sampled_from("abc"))
    def remove_card(self, model: str, instance: str) -> None:
        self.names.remove_card(model, instance)
        self.cards.pop((model, instance), None)

    @invariant()
    def agrees(self) -> None:
        self.names.validate()
        for name in "xyz":
            counts = Counter(
                (model, each)
                for (model, _), ids in self.cards.items()
                for each in set(ids)
                if name_of_lora(each) == name
            )
            found = self.names.find(name)
            assert (found is None) == (not counts)
            if found is not None:
                assert counts[found] == max(counts.values())
                assert not self.names.is_gone(name)


TestNames = Names.TestCase
