"""Which router to ask next for one choice, how long to wait, and whether an answer is out of date. Pure.

the model's queue group ─▶ ROUTERS_TRIED routers by their id ─▶ the round is over
  ▲                                                                │
  ├── an answer came too late: each router gets twice the time ◀───┤
  ├── an answer was out of date: after STALE_ROUTER_PAUSE_S ◀──────┤
  │                                                                └─▶ neither, or no time is left: none
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from msgspec import Struct

from shared.messages.cards import ModelCard
from shared.messages.select import SelectRefused, SelectReply

STALE_ROUTER_PAUSE_S = 0.05
"""The pause before routers are asked again that have not yet heard of the workers that this frontend knows."""
ROUTERS_TRIED = 3
"""The number of routers that are asked by their id, after the queue group did not answer."""


class RouterTry(Struct, frozen=True):
    """One question to a router."""

    addressee: str
    """The model, for its queue group, or the id of one router."""
    timeout_s: float
    pause_s: float
    """The pause before the question."""
    is_retry: bool
    """Whether an earlier question had no answer."""


def some_card_serves(cards: Iterable[ModelCard], model: str, lora: str) -> bool:
    """Return whether one of the cards is that of a worker which serves the model, with this LoRA if it has a name."""
    return any(card.model == model and card.decodes and (not lora or lora in card.lora) for card in cards)


class RouterTries:
    """The questions of one choice. Times are seconds on one clock."""

    def __init__(
        self, model: str, lora: str, timeout_s: float, until_s: float, sample_routers: Callable[[int], Sequence[str]]
    ) -> None:
        """Wait `timeout_s` for each answer at first, and until `until_s` for all. `sample_routers` returns the ids of
        at most N routers."""
        self._model = model
        self._lora = lora
        self._timeout_s = self._first_timeout_s = timeout_s
        self._until_s = until_s
        self._sample_routers = sample_routers
        self._round = self._addressees()
        self._is_slow = False
        """Whether an answer of this round came too late."""
        self.stale: SelectRefused | None = None
        """The latest answer that was out of date."""

    def _addressees(self) -> Iterator[str]:
        yield self._model
        yield from self._sample_routers(ROUTERS_TRIED)

    def next_try(self, now_s: float) -> RouterTry | None:
        """Return the next question; None if no other would help, or if the time is over."""
        pause_s = 0.0
        addressee = next(self._round, None)
        if addressee is None:
            if self._is_slow:
                self._timeout_s *= 2
            elif self.stale is None:
                return None
            if self.stale is not None:
                pause_s = STALE_ROUTER_PAUSE_S
            self._is_slow = False
            self._round = self._addressees()
            addressee = next(self._round)
        left_s = self._until_s - now_s - pause_s
        if left_s <= 0:
            return None
        is_retry = addressee != self._model or self._timeout_s > self._first_timeout_s
        return RouterTry(addressee, min(self._timeout_s, left_s), pause_s, is_retry)

    def record_timeout(self) -> None:
        """Record that an answer came too late."""
        self._is_slow = True

    def accepts(self, answer: SelectReply, cards: Iterable[ModelCard]) -> bool:
        """Return whether an answer counts. It does not if the router has not yet heard of one of `cards`, the workers
        that this frontend knows, or of its LoRA: both follow discovery independently. Then the answer is `stale`."""
        if not isinstance(answer, SelectRefused) or answer.code not in ("unknown_model", "no_instances"):
            return True
        if not some_card_serves(cards, self._model, self._lora):
            return True
        self.stale = answer
        return False
