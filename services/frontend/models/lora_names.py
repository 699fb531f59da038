"""The LoRAs of all workers by the name that clients ask for. Pure.

    cards come, change and go ──▶ name ──▶ (model, id) ──▶ number of workers that have it
                                               ▲
    a name that is asked for ──────────────────┘ the one with the most workers

A name has several ids (`shared/lora.py`) while workers have different files under it, as during an update. All
frontends see the same cards, so they choose the same id: the one with the most workers; among equals, the last in the
order of the ids, then of the models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from shared.lora import name_of_lora

GONE_KEPT = 256
"""The number of names that stay known after their last worker went, the latest ones."""

LoraChoice = tuple[str, str]
"""The name of the base model, and the id of the LoRA."""


class LoraNames:
    """The names, and which worker has which LoRA of which model."""

    def __init__(self) -> None:
        self._cards: dict[LoraChoice, tuple[str, ...]] = {}
        """The ids of each card, which is named by (model, instance)."""
        self._counts: dict[str, Counter[LoraChoice]] = {}
        self._gone: dict[str, None] = {}
        """Names whose last worker disappeared without unloading them. No name is here and in `_counts`."""

    def set_card(self, model: str, instance: str, ids: Iterable[str]) -> None:
        """Record the LoRAs of a worker that is there. A LoRA that it had and has no more was unloaded."""
        for name in self._replace(model, instance, tuple(dict.fromkeys(ids))):
            self._gone.pop(name, None)

    def remove_card(self, model: str, instance: str) -> None:
        """Record that a worker went, or shows its card no more."""
        for name in self._replace(model, instance, ()):
            self._gone[name] = None
            if len(self._gone) > GONE_KEPT:
                del self._gone[next(iter(self._gone))]

    def find(self, name: str) -> LoraChoice | None:
        """Return the LoRA that a name means now. None if no worker has one of that name."""
        counts = self._counts.get(name)
        if counts is None:
            return None
        return max(counts, key=lambda each: (counts[each], each[1], each[0]))

    def is_gone(self, name: str) -> bool:
        """Return whether a LoRA of that name is missing because its last worker is."""
        return name in self._gone

    @property
    def names(self) -> Mapping[str, object]:
        """The names that workers have."""
        return self._counts

    def _replace(self, model: str, instance: str, ids: tuple[str, ...]) -> list[str]:
        """Return the names that no worker has any more."""
        before = self._cards.pop((model, instance), ())
        if ids:
            self._cards[model, instance] = ids
        for each in ids:
            self._counts.setdefault(name_of_lora(each), Counter())[model, each] += 1
            self._gone.pop(name_of_lora(each), None)
        lost: list[str] = []
        for each in before:
            name = name_of_lora(each)
            counts = self._counts[name]
            counts[model, each] -= 1
            if not counts[model, each]:
                del counts[model, each]
            if not counts:
                del self._counts[name]
                lost.append(name)
        return lost

    def validate(self) -> None:
        """Assert the invariants."""
        counted: dict[str, Counter[LoraChoice]] = {}
        for (model, _), ids in self._cards.items():
            for each in ids:
                counted.setdefault(name_of_lora(each), Counter())[model, each] += 1
        assert counted == self._counts
        assert all(self._cards.values())
        assert len(self._gone) <= GONE_KEPT
        assert not self._gone.keys() & self._counts.keys()
