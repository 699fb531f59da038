"""Which candidates of a model may serve a request, and the ramp-up of those that have just joined. Pure.

    all ─▶ with the LoRA ─▶ not excluded ─▶ room for the prompt ─▶ not frozen ─▶ not held back by ramp-up
            └──────────────┴─ none left: refused   └────────────────┴────────────┴─ none left: this filter is skipped

A repeated Select stays with the candidates that its reservations are at, as long as they are eligible.

*Ramp-up.* An instance that joins others which have served for `ramp_s` or longer is idle and has an empty cache, so it
would get every request at once. Therefore it takes part in a random share of the requests only. The share grows
linearly from none to all over `ramp_s`. Instances that start together, or that a new router finds, do not ramp up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from random import Random
from typing import Literal, NamedTuple

from msgspec.structs import replace

from services.router.index.index import CandidateId
from services.router.index.inheritance import StoreId, store_id_of
from shared.messages.cards import ModelCard
from shared.messages.select import Select

Refusal = Literal["no_instances", "all_excluded", "unknown_model"]

EXCLUDED = "excluded by the frontend, after an attempt that failed there"
TOO_LONG = "the prompt is too long for it"
FROZEN = "frozen: it has work and makes no step, or its reports do not arrive"
RAMPS_UP = "it has just joined, and ramps up"


Reservations = tuple[CandidateId | None, CandidateId | None]
"""Where an attempt is reserved, and where the next one is, which decodes after a pair's first half. None if it is not
reserved."""
NOT_RESERVED: Reservations = (None, None)


class EligibleCandidate(NamedTuple):
    """One data-parallel rank of an instance, with the figures that the filters need."""

    id: CandidateId
    instance: str
    total_blocks: int
    since_s: float
    prompt_limit_tokens: int
    """Length of the longest prompt that it accepts."""
    places: int = 0
    """How many requests it computes at once; 0 if unknown."""
    store: StoreId | None = None
    """The store that it exchanges blocks with, as far as it needs one: prompts are handed over through it."""


class Eligible(NamedTuple):
    """The candidates to choose among, and the instances that were left out."""

    candidates: list[EligibleCandidate]
    passed_over: dict[str, str]
    """Instance → why it may not serve the request."""
    prefilling: Sequence[EligibleCandidate] = ()
    """Candidates that may compute the prompt for one of `candidates`. Empty if one candidate must do all."""
    reserved: Reservations = NOT_RESERVED


_Filtered = tuple[list[EligibleCandidate], dict[str, str]]
"""What filters left, and `Eligible.passed_over`."""


class NoCandidate(Exception):
    """No candidate can serve a request."""

    def __init__(self, code: Refusal, reason: str) -> None:
        super().__init__(reason)
        self.code: Refusal = code


class Eligibility:
    """The model cards of one model, and when they came. Times are seconds on a monotonic clock."""

    def __init__(self, model: str, draw: Random, *, ramp_s: float) -> None:
        self._model = model
        self._draw = draw
        self._ramp_s = ramp_s
        self.cards: dict[str, ModelCard] = {}
        """Model cards by instance."""
        self.frozen: frozenset[str] = frozenset()
        """Instances that are frozen; the owner sets it from the load reports."""
        self._since_s: dict[str, float] = {}
        """Instance → when its card came."""
        self._ramping: dict[str, float] = {}
        """Instance → when its card came, for instances that ramp up."""
        self._by_lora: dict[str, list[EligibleCandidate]] = {}
        """LoRA id ("" for none) → its candidates that answer whole requests; a memo, emptied when a card comes or
        goes."""
        self._prefilling: dict[str, list[EligibleCandidate]] = {}
        """Cache: LoRA id → prefill-only candidates that have it."""
        self._shortest_limit_tokens = 0
        """Prompts up to this length have room at every candidate."""

    def add_card(self, card: ModelCard, now_s: float) -> None:
        """Add the card of an instance that has none."""
        assert card.instance not in self.cards
        if any(now_s - since_s >= self._ramp_s for since_s in self._since_s.values()):
            self._ramping[card.instance] = now_s
        self._since_s[card.instance] = now_s
        self.cards[card.instance] = card
        self._changed()

    def update_card(self, card: ModelCard) -> None:
        """Replace the card of an instance that has one; it does not ramp up again."""
        assert card.instance in self.cards
        self.cards[card.instance] = card
        self._changed()

    def remove_card(self, instance: str) -> None:
        """Remove the card of an instance."""
        del self.cards[instance], self._since_s[instance]
        self._ramping.pop(instance, None)
        self._changed()

    def _changed(self) -> None:
        self._by_lora.clear()
        self._prefilling.clear()
        self._shortest_limit_tokens = min(map(_prompt_limit_tokens, self.cards.values()), default=0)

    def eligible(self, select: Select, now_s: float, reserved: Reservations = NOT_RESERVED) -> Eligible:
        """Return the candidates to choose among, at least one that can do all. Raise NoCandidate."""
        whole, passed_over = self._whole(select, now_s)
        prefilling: list[EligibleCandidate] = []
        if not select.whole and select.max_tokens > 1:
            prefilling, without = self.prefilling(select, now_s)
            passed_over |= without
        this, following = reserved
        if any(each.id == this for each in prefilling):
            prefilling = [each for each in prefilling if each.id == this]
            whole = [each for each in whole if each.id == following] or whole
        elif this is not None:
            prefilling = []
            whole = [each for each in whole if each.id == this] or whole
        return Eligible(whole, passed_over, prefilling, reserved)

    def _whole(self, select: Select, now_s: float) -> _Filtered:
        able = self._by_lora.get(select.lora) or self._serving(select.lora)
        if select.excluded and all(each.instance in select.excluded for each in able):
            raise NoCandidate("all_excluded", f"all {len(able)} candidates are excluded")
        return self._filtered(able, select, now_s, skips=True)

    def prefilling(self, select: Select, now_s: float) -> _Filtered:
        """Return the candidates that may compute the prompt alone, perhaps none: here no filter is skipped."""
        if select.lora not in self._prefilling:
            self._prefilling[select.lora] = self._candidates("prefill", select.lora)
        able = self._prefilling[select.lora]
        return self._filtered(able, select, now_s, skips=False) if able else ([], {})

    def _filtered(self, candidates: list[EligibleCandidate], select: Select, now_s: float, *, skips: bool) -> _Filtered:
        """Return what the filters leave. With `skips` a filter that would leave no candidate is skipped."""
        passed_over: dict[str, str] = {}
        for instances, why in self._filters(candidates, select, now_s):
            left = [each for each in candidates if each.instance not in instances]
            if left or not skips:
                passed_over.update((each.instance, why) for each in candidates if each.instance in instances)
                candidates = left
        return candidates, passed_over

    def _filters(
        self, candidates: list[EligibleCandidate], select: Select, now_s: float
    ) -> Iterator[tuple[Set[str], str]]:
        """Yield instances to leave out, and why, filter by filter; no filter without any."""
        if select.excluded:
            yield frozenset(select.excluded), EXCLUDED
        if select.prompt_tokens > self._shortest_limit_tokens:
            yield {each.instance for each in candidates if each.prompt_limit_tokens < select.prompt_tokens}, TOO_LONG
        if self.frozen:
            yield self.frozen, FROZEN
        ramping = self._not_ramped_up(now_s)
        if ramping:
            yield ramping, RAMPS_UP

    def _serving(self, lora: str) -> list[EligibleCandidate]:
        if not any(card.decodes for card in self.cards.values()):
            only = ": its instances only compute prompts" if self.cards else ""
            raise NoCandidate("no_instances", f"no instance serves {self._model}{only}")
        able = self._candidates("", lora)
        if not able:
            raise NoCandidate("unknown_model", f"no instance of {self._model} has the LoRA {lora}")
        self._by_lora[lora] = able
        return able

    def _candidates(self, role: Literal["prefill", ""], lora: str) -> list[EligibleCandidate]:
        """Return the candidates that only compute prompts, or those that answer whole requests."""
        return [
            EligibleCandidate(
                (card.instance, rank),
                card.instance,
                card.capacity_blocks,
                self._since_s[card.instance],
                _prompt_limit_tokens(card),
                card.max_running,
                store_id_of(card) if card.role in ("prefill", "decode") else None,
            )
            for card in self.cards.values()
            if (card.role == "prefill" if role else card.decodes) and (not lora or lora in card.lora)
            for rank in ranks_of(card)
        ]

    def _not_ramped_up(self, now_s: float) -> set[str]:
        """Return the instances that ramp up and were not drawn for this request."""
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
        assert all(candidates for candidates in self._by_lora.values())
        for candidates in (*self._by_lora.values(), *self._prefilling.values()):
            assert {each.instance for each in candidates} <= self.cards.keys()


def _prompt_limit_tokens(card: ModelCard) -> int:
    """Return the length of the longest prompt that the worker accepts: a longer one exceeds its blocks or its
    context."""
    return min(card.capacity_blocks * card.block_size, card.context_length - 1)


def ranks_of(card: ModelCard) -> range:
    """Return the ranks of the worker: each is a candidate."""
    return range(max(card.ranks, 1))


def same_worker(before: ModelCard, after: ModelCard) -> bool:
    """Return whether the cards differ at most in the store that the worker is attached to, and in its LoRAs. If so,
    the worker's own blocks and its reservations are still valid."""
    return replace(before, kvbm=after.kvbm, kvbm_layout=after.kvbm_layout, lora=after.lora) == after
