"""Other names of models, by which their servers know them, and names that resemble one that does not exist. Pure.

    cards of a model ─▶ its other names ─▶ name ─▶ the model that it means
                                            └── of several models, or the own name of one: it means none of them here

All frontends see the same cards, so a name means the same at each: a model that has lost its workers, which a frontend
that started later does not know, keeps only the names that no other model has.
"""

from __future__ import annotations

import difflib
from collections.abc import Container, Iterable, Iterator

NAMES_LISTED = 8
"""The number of models that an error lists when the requested one does not exist."""
NAMES_COMPARED = 1024
"""The number of names that are compared with one that does not exist: some milliseconds."""
COMPARED_CHARACTERS = 256
"""The length up to which a name that does not exist is compared with others."""


class ModelAliases:
    """The other names of all models. A model has no more of them than it has workers."""

    def __init__(self) -> None:
        self._of_model: dict[str, frozenset[str]] = {}
        """The other names of each model that has any."""
        self._models: dict[str, tuple[str, ...]] = {}
        """The models that have a name, in order."""
        self._gone: set[str] = set()
        """Models with other names that have no workers now."""

    def set_names(self, model: str, names: Iterable[str]) -> None:
        """Replace the other names of a model. An empty one, and its own, are none."""
        now = frozenset(names) - {"", model}
        before = self._of_model.pop(model, frozenset())
        self._gone.discard(model)
        if now:
            self._of_model[model] = now
        for name in before - now:
            self._models[name] = tuple(each for each in self._models[name] if each != model)
            if not self._models[name]:
                del self._models[name]
        for name in now - before:
            self._models[name] = tuple(sorted((*self._models.get(name, ()), model)))

    def find(self, name: str) -> str:
        """Return the model that a name means. Empty if it is no other name, or one of several models."""
        models = self._meant(self._models.get(name, ()))
        return models[0] if len(models) == 1 else ""

    def lose_workers(self, model: str) -> None:
        """Keep the names that a model without workers had last, unless other models have them."""
        if model in self._of_model:
            self._gone.add(model)

    def _meant(self, models: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(each for each in models if each not in self._gone) or models

    def refusals(self, *own: Container[str]) -> Iterator[str]:
        """Yield what is to be said of each name that does not mean the model which has it as another one. `own` are
        the names that models and LoRAs have themselves."""
        for name, models in ((name, self._meant(models)) for name, models in self._models.items()):
            if any(name in names for names in own):
                yield f"the name {name!r} means the model of that name, although servers of {', '.join(models)} have it"
            elif len(models) > 1:
                yield f"the name {name!r} means no model, because servers of {', '.join(models)} have it"

    def validate(self) -> None:
        """Assert the invariants."""
        assert all(names and not names & {"", model} for model, names in self._of_model.items())
        assert self._gone <= self._of_model.keys()
        pairs = {(name, model) for model, names in self._of_model.items() for name in names}
        assert pairs == {(name, model) for name, models in self._models.items() for model in models}
        assert all(models and list(models) == sorted(models) for models in self._models.values())


def similar_names(name: str, known: Iterable[str]) -> list[str]:
    """Return some of the known names, those that resemble `name` if any do."""
    ordered = sorted(known)
    near = (
        difflib.get_close_matches(name, ordered[:NAMES_COMPARED], n=NAMES_LISTED)
        if len(name) <= COMPARED_CHARACTERS
        else []
    )
    return near or ordered[:NAMES_LISTED]
