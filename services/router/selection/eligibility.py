"""Who may be chosen: the candidates of a model, and which of them a question is put to. Pure.

    all ─▶ with the LoRA ─▶ not excluded ─▶ with room for the prompt ─▶ not standing still ─▶ not waiting out its ramp
            └──────────────┴─ none left: refused   └──────────────────────────┴────────────────┴─ none: all before them

*Ramp-up.* An instance that joins others which have served for `ramp_s` or longer is idle and empty: it would get
everything at once. So it takes part in a share of the questions only, drawn for each, which grows in a straight line
from none to all over `ramp_s`. Instances that come up together, or that a new router finds, do not ramp.
"""

from __future__ import annotations

from random import Random
from typing import Literal, NamedTuple

from services.router.index.index import CandidateId
from shared.messages import ModelCard, Select

Refusal = Literal["no_instances", "all_excluded", "unknown_model"]


class Seat(NamedTuple):
    """One candidate."""

    candidate: CandidateId
    instance: str
    total_blocks: int
    since_s: float
    room_tokens: int
    """The longest prompt that it takes."""


class Nobody(Exception):
    """No candidate can serve a question."""

    def __init__(self, code: Refusal, reason: str) -> None:
        super().__init__(reason)
        self.code: Refusal = code


class Seats:
    """One model's cards, and when they came. Times are seconds on a clock that only grows."""

    def __init__(self, model: str, draw: Random, *, ramp_s: float) -> None:
        self._model = model
        self._draw = draw
        self._ramp_s = ramp_s
        self.cards: dict[str, ModelCard] = {}
        """By instance."""
        self.standing_still: frozenset[str] = frozenset()
        """Instances; whoever knows sets it."""
        self._since_s: dict[str, float] = {}
        """By instance, when its card came."""
        self._ramping: dict[str, float] = {}
        """The same, of those that ramp up."""
        self._seats: dict[str, list[Seat]] = {}
        """By LoRA, "" for any: a memo, emptied when a card comes or goes."""
        self._least_room_tokens = 0
        """Shorter prompts have room everywhere."""

    def up(self, card: ModelCard, now_s: float) -> None:
        """A card of an instance that has none."""
        assert card.instance not in self.cards
        if any(now_s - since_s >= self._ramp_s for since_s in self._since_s.values()):
            self._ramping[card.instance] = now_s
        self._since_s[card.instance] = now_s
        self.cards[card.instance] = card
        self._changed()

    def down(self, instance: str) -> None:
        """Its card is gone."""
        del self.cards[instance], self._since_s[instance]
        self._ramping.pop(instance, None)
        self._changed()

    def _changed(self) -> None:
        self._seats.clear()
        self._least_room_tokens = min(map(_room, self.cards.values()), default=0)

    def asked(self, ask: Select, now_s: float) -> list[Seat]:
        """Those to choose among for a question, never none. Raises Nobody."""
        seats = self._seats.get(ask.lora) or self._able(ask.lora)
        if ask.excluded:
            excluded = set(ask.excluded)
            able, seats = seats, [seat for seat in seats if seat.instance not in excluded]
            if not seats:
                raise Nobody("all_excluded", f"all {len(able)} candidates are excluded")
        if ask.prompt_tokens > self._least_room_tokens:
            seats = [seat for seat in seats if ask.prompt_tokens <= seat.room_tokens] or seats
        for passed_over in (self.standing_still, self._waiting(now_s)):
            if passed_over:
                seats = [seat for seat in seats if seat.instance not in passed_over] or seats
        return seats

    def _able(self, lora: str) -> list[Seat]:
        serving = [card for card in self.cards.values() if card.role == "aggregated"]
        if not serving:
            raise Nobody("no_instances", f"no instance serves {self._model}")
        able = [
            Seat((card.instance, rank), card.instance, card.capacity_blocks, self._since_s[card.instance], _room(card))
            for card in serving
            if not lora or lora in card.lora
            for rank in range(max(card.ranks, 1))
        ]
        if not able:
            raise Nobody("unknown_model", f"no instance of {self._model} has the LoRA {lora}")
        self._seats[lora] = able
        return able

    def _waiting(self, now_s: float) -> set[str]:
        """Instances that ramp up and were not drawn."""
        if not self._ramping:
            return set()
        self._ramping = {each: since_s for each, since_s in self._ramping.items() if now_s - since_s < self._ramp_s}
        return {
            instance
            for instance, since_s in self._ramping.items()
            if self._draw.random() * self._ramp_s >= now_s - since_s
        }

    def validate(self) -> None:
        """Assert every invariant."""
        assert self._since_s.keys() == self.cards.keys() >= self._ramping.keys()
        assert all(seats for seats in self._seats.values())
        for seats in self._seats.values():
            assert {seat.instance for seat in seats} <= self.cards.keys()


def _room(card: ModelCard) -> int:
    """The longest prompt, in tokens: what a worker refuses as too long for its blocks or its context is longer."""
    return min(card.capacity_blocks * card.block_size, card.context_length - 1)
