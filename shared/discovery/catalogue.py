"""Which instances and model cards there are, which cards are refused, and why. Pure.

    card ──▶ accepted ◀──▶ refused(reason)

The first acceptable card of a model is its *reference*: later cards must agree with it in what a prompt's hashes are
made of, the tokenizer and the block size. A card that changes these goes to the end of the line. Each verdict follows
from the cards and their order alone, so it changes when the reference goes.
"""

from __future__ import annotations

from functools import cache
from typing import assert_never

from msgspec import Struct

from shared import subjects
from shared.errors import ProtocolError
from shared.hashing import self_test
from shared.messages import INSTANCE, JSON_HEADER, MODEL_CARD, PROTOCOL, Instance, ModelCard

BLOCK_SIZE_LIMIT = 1 << 16
"""Tokens; a self-test over a block size from the wire costs time and memory in proportion."""
MODEL_NAME_LIMIT = 1 << 10
"""Escaped; over a subject of 4 KiB nats-server closes the connection."""
RANKS_LIMIT = 1 << 10
"""Each rank is a candidate in every choice."""


class InstanceUp(Struct, frozen=True):
    """An instance came, or came anew with another epoch or address."""

    instance: Instance


class InstanceDown(Struct, frozen=True):
    """An instance is gone."""

    instance: Instance


class CardUp(Struct, frozen=True):
    """A compatible model card came or changed."""

    card: ModelCard


class CardDown(Struct, frozen=True):
    """An accepted model card is gone, or was refused after all."""

    card: ModelCard


class CardRefused(Struct, frozen=True):
    """A card that contradicts this program or the model's other cards; it is not served.

    Nothing is told when a refused card goes.
    """

    card: ModelCard
    reason: str


DirectoryChange = InstanceUp | InstanceDown | CardUp | CardDown | CardRefused
Entry = Instance | ModelCard
CardName = tuple[str, str]
"""(model, instance)."""


def read_entry(namespace: str, key: str, value: bytes) -> Entry:
    """The typed value of a key. Raises ProtocolError if it does not parse or is not what its key says."""
    entry: Entry
    if key.startswith(subjects.instances_prefix(namespace)):
        entry = INSTANCE.decode(value, JSON_HEADER)
        expected = subjects.instance_key(namespace, entry.service, entry.instance)
    elif key.startswith(subjects.models_prefix(namespace)):
        entry = MODEL_CARD.decode(value, JSON_HEADER)
        expected = subjects.model_key(namespace, entry.model, entry.instance)
    else:
        raise ProtocolError("neither an instance nor a model card")
    if key != expected:
        raise ProtocolError(f"the value belongs under {expected}")
    if not subjects.is_id(entry.instance):
        raise ProtocolError(f"instance: {entry.instance!r} is no id")
    if isinstance(entry, ModelCard) and not 0 < len(subjects.escape(entry.model)) <= MODEL_NAME_LIMIT:
        raise ProtocolError(
            f"model: no name, or one over {MODEL_NAME_LIMIT} characters as a subject: {entry.model!r:.60}"
        )
    return entry


class Catalogue:
    """Takes entries as they come and go, and tells what that changes."""

    def __init__(self) -> None:
        self.instances: dict[str, Instance] = {}
        self.cards: dict[CardName, ModelCard] = {}
        """The accepted ones."""
        self.refused: dict[CardName, str] = {}
        """Why each other card is refused."""
        self._entries: dict[str, Entry] = {}
        """Key → value, everything above."""
        self._known: dict[str, dict[str, ModelCard]] = {}
        """Model → instance → card, accepted or not, in order of arrival."""
        self._reference: dict[str, ModelCard] = {}
        """Model → the first of its cards that is acceptable by itself."""

    def set(self, key: str, entry: Entry) -> list[DirectoryChange]:
        """A key came or has a new value. Raises ProtocolError where another key has this instance's id."""
        match entry:
            case Instance():
                before = self.instances.get(entry.instance)
                if before is not None and before.service != entry.service:
                    raise ProtocolError(f"instance: {entry.instance} is a {before.service} already")
                self._entries[key] = entry
                self.instances[entry.instance] = entry
                return [InstanceUp(entry), *self._judge_protocol(before, entry)]
            case ModelCard():
                self._entries[key] = entry
                return self._set_card(entry)
            case _:
                assert_never(entry)

    def remove(self, key: str) -> list[DirectoryChange]:
        """A key is gone; unknown ones are ignored."""
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
        """The changes that lead from nothing to what is known."""
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
        """An instance changed: its cards may be refused or accepted for it."""
        one = before or after
        if one is None or _protocol(before) == _protocol(after):
            return []
        models = [model for model, known in self._known.items() if one.instance in known]
        return [change for model in models for change in self._judge(model)]

    def _judge(self, model: str) -> list[DirectoryChange]:
        """Find a model's reference anew and decide on all its cards."""
        cards = list(self._known.get(model, {}).values())
        self._reference.pop(model, None)
        for card in cards:
            if not self._fault(card):
                self._reference[model] = card
                break
        # Those that go first: at no time do two cards stand that contradict each other.
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
        """Why a card is refused; empty: it is not."""
        return self._fault(card) or _contradiction(card, self._reference[card.model])

    def _fault(self, card: ModelCard) -> str:
        """What is wrong with a card whatever the others say."""
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
        """Asserts the invariants."""
        known = {(model, instance) for model, cards in self._known.items() for instance in cards}
        assert known == self.cards.keys() | self.refused.keys()
        assert not self.cards.keys() & self.refused.keys()
        assert len(self._entries) == len(self.instances) + len(known)
        assert {model for model, _ in self.cards} == self._reference.keys()
        for (model, instance), card in self.cards.items():
            assert self._known[model][instance] == card
            assert _agreed(card) == _agreed(self._reference[model])
        assert all(self.refused.values())


def _protocol(instance: Instance | None) -> int:
    """An instance that is not known yet is taken to speak as we do."""
    return PROTOCOL if instance is None else instance.protocol


def _agreed(card: ModelCard) -> tuple[str, int]:
    """What all cards of a model must have in common."""
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
