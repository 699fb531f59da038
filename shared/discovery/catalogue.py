"""The known instances and model cards, the refused cards, and the reasons. Pure.

    card ──▶ accepted ◀──▶ refused(reason)

The first acceptable card of a model is its *reference*. Later cards must have the same tokenizer and block size, since
both determine a prompt's hashes. A card that changes one of these moves to the end of the order. Each decision follows
from the cards and their order alone, so it may change when the reference goes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from typing import assert_never

from msgspec import Struct

from shared import subjects
from shared.errors import ProtocolError
from shared.hashing import self_test
from shared.messages.cards import ASLEEP, INSTANCE, MODEL_CARD, PROTOCOL, Instance, ModelCard
from shared.messages.codec import JSON_HEADER

BLOCK_SIZE_LIMIT = 1 << 16
"""The maximum block size in tokens. The self-test of a block size takes time and memory in proportion to it."""
MODEL_NAME_LIMIT = 1 << 10
"""The maximum length of an escaped name: nats-server closes a connection that sends a subject of more than 4 KiB."""
RANKS_LIMIT = 1 << 10
"""The maximum number of ranks: each is a candidate in every choice."""


SERVE_AGAIN = {ASLEEP: "wake", "drained": "resume"}
"""The states of workers that were asked not to serve → the command after which they do."""


class InstanceUp(Struct, frozen=True):
    """An instance appeared, or has another epoch or address."""

    instance: Instance


class InstanceDown(Struct, frozen=True):
    """An instance is gone."""

    instance: Instance


class CardUp(Struct, frozen=True):
    """A compatible model card appeared or changed."""

    card: ModelCard


class CardDown(Struct, frozen=True):
    """An accepted model card disappeared, or is refused now."""

    card: ModelCard


class CardRefused(Struct, frozen=True):
    """A card contradicts this program or the model's other cards, and is not served.

    The end of a refused card is not reported.
    """

    card: ModelCard
    reason: str


DirectoryChange = InstanceUp | InstanceDown | CardUp | CardDown | CardRefused
Entry = Instance | ModelCard
CardName = tuple[str, str]
"""The name of a card: (model, instance)."""


def read_entry(namespace: str, key: str, value: bytes) -> Entry:
    """Decode the value of a key. Raise ProtocolError if it does not parse, or belongs under another key."""
    entry: Entry
    if key.startswith(subjects.instances_prefix(namespace)):
        entry = INSTANCE.decode(value, JSON_HEADER)
        expected = subjects.instance_key(namespace, entry.service, entry.instance)
    elif key.startswith(subjects.models_prefix(namespace)):
        entry = MODEL_CARD.decode(value, JSON_HEADER)
        expected = subjects.model_key(namespace, entry.model, entry.instance)
    else:
        raise ProtocolError("the key is neither an instance's nor a model card's")
    if key != expected:
        raise ProtocolError(f"the value belongs under {expected}")
    if not subjects.is_id(entry.instance):
        raise ProtocolError(f"instance: {entry.instance!r} is not an id")
    if isinstance(entry, ModelCard) and not 0 < len(subjects.escape(entry.model)) <= MODEL_NAME_LIMIT:
        raise ProtocolError(
            f"model: the name is empty, or longer than {MODEL_NAME_LIMIT} characters when escaped: {entry.model!r:.60}"
        )
    return entry


class Catalogue:
    """Takes entries as they appear and disappear, and returns the changes that follow."""

    def __init__(self) -> None:
        self.instances: dict[str, Instance] = {}
        self.cards: dict[CardName, ModelCard] = {}
        """The accepted cards."""
        self.refused: dict[CardName, str] = {}
        """The reason of refusal of every other card."""
        self._entries: dict[str, Entry] = {}
        """The value of each key: all of the above."""
        self._known: dict[str, dict[str, ModelCard]] = {}
        """The cards of each model by instance, accepted or not, in order of arrival."""
        self._reference: dict[str, ModelCard] = {}
        """The reference of each model: the first of its cards that is acceptable by itself."""

    def set(self, key: str, entry: Entry) -> list[DirectoryChange]:
        """Set a key to a value. Raise ProtocolError if another key has this instance's id."""
        match entry:
            case Instance():
                before = self.instances.get(entry.instance)
                if before is not None and before.service != entry.service:
                    raise ProtocolError(f"instance: the id {entry.instance} belongs to a {before.service} already")
                self._entries[key] = entry
                self.instances[entry.instance] = entry
                return [InstanceUp(entry), *self._judge_protocol(before, entry)]
            case ModelCard():
                self._entries[key] = entry
                return self._set_card(entry)
            case _:
                assert_never(entry)

    def remove(self, key: str) -> list[DirectoryChange]:
        """Remove a key; an unknown key is ignored."""
        entry = self._entries.pop(key, None)
        match entry:
            case None:
                return []
            case Instance():
                del self.instances[entry.instance]
                return [InstanceDown(entry), *self._judge_protocol(entry, None)]
            case ModelCard():
                return self._remove_card(entry)
            case _:
                assert_never(entry)

    def everything(self) -> list[DirectoryChange]:
        """Return the changes that lead from nothing to the present state."""
        return [
            *(InstanceUp(instance) for instance in self.instances.values()),
            *(CardUp(card) for card in self.cards.values()),
            *(CardRefused(self._known[model][instance], why) for (model, instance), why in self.refused.items()),
        ]

    def _set_card(self, card: ModelCard) -> list[DirectoryChange]:
        known = self._known.setdefault(card.model, {})
        before = known.get(card.instance)
        if before is not None and _agreed(before) != _agreed(card):
            del known[card.instance]
        known[card.instance] = card
        if before is None and card.model in self._reference:
            return self._decide(card)
        return self._judge(card.model)

    def _remove_card(self, card: ModelCard) -> list[DirectoryChange]:
        known = self._known[card.model]
        del known[card.instance]
        if not known:
            del self._known[card.model]
        name = (card.model, card.instance)
        self.refused.pop(name, None)
        gone: list[DirectoryChange] = [CardDown(self.cards.pop(name))] if name in self.cards else []
        return gone + (self._judge(card.model) if self._reference.get(card.model) == card else [])

    def _judge_protocol(self, before: Instance | None, after: Instance | None) -> list[DirectoryChange]:
        """Decide again on the cards of an instance, if its protocol has changed."""
        one = before or after
        if one is None or _protocol(before) == _protocol(after):
            return []
        models = [model for model, known in self._known.items() if one.instance in known]
        return [change for model in models for change in self._judge(model)]

    def _judge(self, model: str) -> list[DirectoryChange]:
        """Determine a model's reference again, and decide on all its cards."""
        cards = list(self._known.get(model, {}).values())
        self._reference.pop(model, None)
        for card in cards:
            if not self._fault(card):
                self._reference[model] = card
                break
        # Refusals first, so that two accepted cards never contradict each other.
        cards.sort(key=lambda card: not self._reason(card))
        return [change for card in cards for change in self._decide(card)]

    def _decide(self, card: ModelCard) -> list[DirectoryChange]:
        name = (card.model, card.instance)
        before = self.cards.get(name)
        reason = self._reason(card)
        if not reason:
            self.refused.pop(name, None)
            self.cards[name] = card
            return [] if before == card else [CardUp(card)]
        changes: list[DirectoryChange] = []
        if before is not None:
            changes.append(CardDown(self.cards.pop(name)))
        if self.refused.get(name) != reason:
            self.refused[name] = reason
            changes.append(CardRefused(card, reason))
        return changes

    def _reason(self, card: ModelCard) -> str:
        """Return why a card is refused. Empty if it is accepted."""
        return self._fault(card) or _contradiction(card, self._reference[card.model])

    def _fault(self, card: ModelCard) -> str:
        """Return what is wrong with a card by itself. Empty if nothing is."""
        if not 1 <= card.block_size <= BLOCK_SIZE_LIMIT:
            return f"block_size: {card.block_size} is not within 1 … {BLOCK_SIZE_LIMIT}"
        if not 1 <= card.ranks <= RANKS_LIMIT:
            return f"ranks: {card.ranks} is not within 1 … {RANKS_LIMIT}"
        ours = _self_test(card.block_size)
        if card.hash_self_test != ours:
            return f"hash_self_test: the card has {card.hash_self_test!r}, this program computes {ours!r}"
        theirs = _protocol(self.instances.get(card.instance))
        if abs(theirs - PROTOCOL) > 1:
            return f"protocol: the instance speaks {theirs}, this program {PROTOCOL}"
        return ""

    def validate(self) -> None:
        """Assert the invariants."""
        known = {(model, instance) for model, cards in self._known.items() for instance in cards}
        assert known == self.cards.keys() | self.refused.keys()
        assert not self.cards.keys() & self.refused.keys()
        assert len(self._entries) == len(self.instances) + len(known)
        assert {model for model, _ in self.cards} == self._reference.keys()
        for (model, instance), card in self.cards.items():
            assert self._known[model][instance] == card
            assert _agreed(card) == _agreed(self._reference[model])
        assert all(self.refused.values())


def read_catalogue(namespace: str, values: Mapping[str, bytes]) -> tuple[Catalogue, list[str]]:
    """Return the catalogue that services make of discovery's values, if cards came in the order in which their
    instances started; and each key that it leaves out, with the reason."""
    catalogue, unreadable = Catalogue(), list[str]()
    entries: dict[str, Entry] = {}
    for key, value in sorted(values.items()):
        try:
            entries[key] = read_entry(namespace, key, value)
        except ProtocolError as wrong:
            unreadable.append(f"{key}: {wrong}")
    started = {each.instance: each.started for each in entries.values() if isinstance(each, Instance)}
    for key, entry in sorted(entries.items(), key=lambda item: started.get(item[1].instance, 0.0)):
        try:
            catalogue.set(key, entry)
        except ProtocolError as wrong:
            unreadable.append(f"{key}: {wrong}")
    return catalogue, unreadable


def idle_workers(entries: Iterable[Instance], model: str = "") -> str:
    """Return how many workers of a model, or of all, sleep or are drained because they were asked to, and the commands
    after which they serve again. Empty if there are none."""
    states = Counter(one.state for one in entries if one.turns is None and model in ("", one.model))
    found = ((states[state], state, command) for state, command in SERVE_AGAIN.items())
    return ", ".join(f"{number} {state} (`headrace {command} ID`)" for number, state, command in found if number)


def _protocol(instance: Instance | None) -> int:
    """Return an instance's protocol version; an unknown instance counts as having ours."""
    return PROTOCOL if instance is None else instance.protocol


def _agreed(card: ModelCard) -> tuple[str, int]:
    """Return the fields that all cards of a model must have in common."""
    return card.tokenizer_digest, card.block_size


def _contradiction(card: ModelCard, reference: ModelCard) -> str:
    if card.block_size != reference.block_size:
        return (
            f"block_size: the card has {card.block_size}, {reference.instance} came first with {reference.block_size}"
        )
    if card.tokenizer_digest != reference.tokenizer_digest:
        return (
            f"tokenizer_digest: the card has {card.tokenizer_digest!r}, "
            f"{reference.instance} came first with {reference.tokenizer_digest!r}"
        )
    return ""


@cache
def _self_test(block_size: int) -> str:
    return self_test(block_size)
