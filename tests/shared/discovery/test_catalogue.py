"""shared/discovery/catalogue.py: which cards are accepted, which refused, and why."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from shared import subjects
from shared.discovery.catalogue import (
    BLOCK_SIZE_LIMIT,
    RANKS_LIMIT,
    CardDown,
    CardRefused,
    CardUp,
    Catalogue,
    DirectoryChange,
    InstanceDown,
    InstanceUp,
    read_entry,
)
from shared.errors import ProtocolError
from shared.hashing import self_test
from shared.messages.cards import INSTANCE, MODEL_CARD, PROTOCOL, Instance, KvLayout, ModelCard
from shared.messages.codec import JSON_HEADER

NAMESPACE = "test"


def instance(name: str, *, protocol: int = PROTOCOL, epoch: int = 1) -> Instance:
    return Instance(NAMESPACE, "worker", name, epoch, "machine", 1, 0.0, "0.1.0", protocol=protocol)


def card(name: str, *, model: str = "m/1.5", block_size: int = 16, tokenizer: str = "t", test: str = "") -> ModelCard:
    return ModelCard(
        model=model,
        instance=name,
        path="/models/m",
        tokenizer_digest=tokenizer,
        hash_self_test=test or (self_test(block_size) if 0 < block_size <= 64 else ""),
        context_length=2048,
        vocab_size=1000,
        block_size=block_size,
        capacity_blocks=100,
        kv_layout=KvLayout("float32", 2, 1, 8, block_size),
    )


def instance_key(one: Instance) -> str:
    return subjects.instance_key(NAMESPACE, one.service, one.instance)


def card_key(one: ModelCard) -> str:
    return subjects.model_key(NAMESPACE, one.model, one.instance)


def put(catalogue: Catalogue, one: Instance | ModelCard) -> list[DirectoryChange]:
    changes = catalogue.set(instance_key(one) if isinstance(one, Instance) else card_key(one), one)
    catalogue.validate()
    return changes


def remove(catalogue: Catalogue, one: Instance | ModelCard) -> list[DirectoryChange]:
    changes = catalogue.remove(instance_key(one) if isinstance(one, Instance) else card_key(one))
    catalogue.validate()
    return changes


def test_entries_are_read_by_their_keys() -> None:
    one, other = instance("a1"), card("a1")
    assert read_entry(NAMESPACE, instance_key(one), INSTANCE.encode(one, JSON_HEADER)) == one
    assert read_entry(NAMESPACE, card_key(other), MODEL_CARD.encode(other, JSON_HEADER)) == other


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        (instance_key(instance("a1")), b"{", "instance"),
        (instance_key(instance("a1")), b"\xff", "instance"),
        (instance_key(instance("a1")), b'{"namespace": 1}', "instance"),
        (instance_key(instance("a1")), INSTANCE.encode(instance("b2"), JSON_HEADER), "belongs under"),
        (card_key(card("a1")), MODEL_CARD.encode(card("a1", model="other"), JSON_HEADER), "belongs under"),
        (card_key(card("a1")), MODEL_CARD.encode(card("a1")), "model card"),
        (instance_key(instance("a b")), INSTANCE.encode(instance("a b"), JSON_HEADER), "not an id"),
        (card_key(card("a.>")), MODEL_CARD.encode(card("a.>"), JSON_HEADER), "not an id"),
        (card_key(card("a1", model="")), MODEL_CARD.encode(card("a1", model=""), JSON_HEADER), "the name is empty"),
        (
            card_key(card("a1", model="水" * 200)),
            MODEL_CARD.encode(card("a1", model="水" * 200), JSON_HEADER),
            "longer than 1024",
        ),
        ("/headrace/test/else/x", b"{}", "neither"),
    ],
)
def test_a_value_that_is_not_what_its_key_says_is_an_error(key: str, value: bytes, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        read_entry(NAMESPACE, key, value)


def test_instances_come_change_and_go() -> None:
    catalogue = Catalogue()
    first, second = instance("a1"), instance("a1", epoch=2)
    assert put(catalogue, first) == [InstanceUp(first)]
    assert put(catalogue, second) == [InstanceUp(second)]
    assert remove(catalogue, second) == [InstanceDown(second)]
    assert remove(catalogue, second) == []


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (card("b2", test="00"), "hash_self_test"),
        (card("b2", block_size=32), "block_size"),
        (card("b2", block_size=0), "block_size"),
        (card("b2", block_size=BLOCK_SIZE_LIMIT + 1), "block_size"),
        (card("b2", tokenizer="u"), "tokenizer_digest"),
        (msgspec.structs.replace(card("b2"), ranks=0), "ranks"),
        (msgspec.structs.replace(card("b2"), ranks=RANKS_LIMIT + 1), "ranks"),
    ],
)
def test_a_card_that_contradicts_is_refused_by_the_name_of_the_field(wrong: ModelCard, field: str) -> None:
    catalogue = Catalogue()
    assert put(catalogue, card("a1")) == [CardUp(card("a1"))]
    [refusal] = put(catalogue, wrong)
    assert isinstance(refusal, CardRefused)
    assert refusal.reason.startswith(f"{field}: ")
    assert catalogue.refused == {(wrong.model, "b2"): refusal.reason}
    assert remove(catalogue, wrong) == []
    assert not catalogue.refused


@pytest.mark.parametrize(("protocol", "refused"), [(PROTOCOL - 1, False), (PROTOCOL + 1, False), (PROTOCOL + 2, True)])
def test_a_neighbouring_protocol_is_spoken_and_a_further_one_refused(protocol: int, refused: bool) -> None:
    catalogue = Catalogue()
    put(catalogue, card("a1"))
    changes = put(catalogue, instance("a1", protocol=protocol))
    assert [type(change) for change in changes] == ([InstanceUp, CardDown, CardRefused] if refused else [InstanceUp])
    changes = put(catalogue, instance("a1"))
    assert [type(change) for change in changes] == ([InstanceUp, CardUp] if refused else [InstanceUp])


def test_refused_cards_are_judged_again_when_the_card_they_contradict_goes() -> None:
    catalogue = Catalogue()
    put(catalogue, card("a1"))
    put(catalogue, card("b2", block_size=32))
    put(catalogue, card("c3", block_size=32))
    put(catalogue, card("d4"))
    changes = remove(catalogue, card("a1"))
    # Those of block size 32 came before d4, so they serve now; d4 is out before they are in.
    assert [type(change) for change in changes] == [CardDown, CardDown, CardRefused, CardUp, CardUp]
    assert catalogue.cards.keys() == {("m/1.5", "b2"), ("m/1.5", "c3")}


def test_a_card_that_changes_its_block_size_goes_to_the_end_of_the_line() -> None:
    catalogue = Catalogue()
    put(catalogue, card("a1"))
    put(catalogue, card("b2"))
    assert [type(change) for change in put(catalogue, card("a1", block_size=32))] == [CardDown, CardRefused]
    assert catalogue.cards.keys() == {("m/1.5", "b2")}


def test_models_do_not_contradict_one_another() -> None:
    catalogue = Catalogue()
    put(catalogue, card("a1"))
    assert put(catalogue, card("a1", model="other", block_size=32)) == [
        CardUp(card("a1", model="other", block_size=32))
    ]


NAMES = st.sampled_from(["a", "b", "c"])
MODELS = st.sampled_from(["m", "n"])


class Publishing(RuleBasedStateMachine):
    """Instances and cards come, change and go; the reported changes must add up and never contradict one another."""

    def __init__(self) -> None:
        super().__init__()
        self.catalogue = Catalogue()
        self.instances: dict[str, Instance] = {}
        self.cards: dict[tuple[str, str], ModelCard] = {}

    def take(self, changes: Iterable[DirectoryChange]) -> None:
        for change in changes:
            match change:
                case InstanceUp():
                    self.instances[change.instance.instance] = change.instance
                case InstanceDown():
                    assert self.instances.pop(change.instance.instance) == change.instance
                case CardUp():
                    self.cards[change.card.model, change.card.instance] = change.card
                case CardDown():
                    assert self.cards.pop((change.card.model, change.card.instance)) == change.card
                case CardRefused():
                    assert (change.card.model, change.card.instance) not in self.cards

    @rule(name=NAMES, protocol=st.sampled_from([PROTOCOL, PROTOCOL, PROTOCOL + 9]), epoch=st.integers(1, 2))
    def set_instance(self, name: str, protocol: int, epoch: int) -> None:
        self.take(put(self.catalogue, instance(name, protocol=protocol, epoch=epoch)))

    @rule(
        name=NAMES,
        model=MODELS,
        block_size=st.sampled_from([16, 16, 32]),
        tokenizer=st.sampled_from(["t", "t", "u"]),
        test=st.sampled_from(["", "", "00"]),
    )
    def set_card(self, name: str, model: str, block_size: int, tokenizer: str, test: str) -> None:
        one = card(name, model=model, block_size=block_size, tokenizer=tokenizer, test=test)
        self.take(put(self.catalogue, one))

    @rule(name=NAMES)
    def remove_instance(self, name: str) -> None:
        self.take(remove(self.catalogue, instance(name)))

    @rule(name=NAMES, model=MODELS)
    def remove_card(self, name: str, model: str) -> None:
        self.take(remove(self.catalogue, card(name, model=model)))

    @invariant()
    def what_was_told_adds_up(self) -> None:
        self.catalogue.validate()
        assert self.instances == self.catalogue.instances
        assert self.cards == self.catalogue.cards
        for model in ("m", "n"):
            agreed = {(one.tokenizer_digest, one.block_size) for (name, _), one in self.cards.items() if name == model}
            assert len(agreed) <= 1

    @invariant()
    def a_late_subscriber_hears_the_same(self) -> None:
        late = Publishing()
        late.take(self.catalogue.everything())
        assert (late.instances, late.cards) == (self.instances, self.cards)


TestPublishing = Publishing.TestCase
TestPublishing.settings = settings(max_examples=60, stateful_step_count=30)
