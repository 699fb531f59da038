"""Other names of models, by which their servers know them, and names that resemble one that does not exist. Pure.

    cards of a model ─▶ its other names ─▶ name ─▶ the model that it means
                                            └── of several models, or the own name of one: it means none of them here

A model that has lost its workers keeps its names for KEPT_S: who asks by one of them while it restarts must not get the
answer of another model. So a name that it shares with a model of other files means none, as if both had workers. Then
the other one has the name: it has replaced the model, and a frontend that started meanwhile never knew that. A model of
the same files, such as the same one under a new name, takes the name over at once.
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


KEPT_S = 600.0
"""The time in seconds for which a model without workers keeps its names against models of other files: longer than a
worker takes to load its model."""

ModelFilesKey = tuple[str, str]
"""The path and the tokenizer's digest of a model's files."""


class ModelAliases:
    """The other names of all models. A model has no more of them than it has workers."""

    def __init__(self) -> None:
        self._of_model: dict[str, frozenset[str]] = {}
        """The other names of each model that has any."""
        self._models: dict[str, tuple[str, ...]] = {}
        """The models that have a name, in order."""
        self._files: dict[str, ModelFilesKey] = {}
        """What the files of each model that has any are known by."""
        self._gone: dict[str, float] = {}
        """Models with other names that have no workers now, and since when."""

    def set_names(self, model: str, names: Iterable[str], files: ModelFilesKey) -> None:
        """Replace the other names of a model. An empty one, and its own, are none. Models with the same `files` have
        the same weights."""
        now = frozenset(names) - {"", model}
        before = self._of_model.pop(model, frozenset())
        self._gone.pop(model, None)
        self._files.pop(model, None)
        if now:
            self._of_model[model], self._files[model] = now, files
        for name in before - now:
            self._models[name] = tuple(each for each in self._models[name] if each != model)
            if not self._models[name]:
                del self._models[name]
        for name in now - before:
            self._models[name] = tuple(sorted((*self._models.get(name, ()), model)))

    def find(self, name: str, now_s: float) -> str:
        """Return the model that a name means. Empty if it is no other name, or one of several models, of which some may
        have gone."""
        models = self._meant(self._models.get(name, ()), now_s)
        return models[0] if len(models) == 1 else ""

    def lose_workers(self, model: str, now_s: float) -> None:
        """Keep the names that a model without workers had last, until it has lost them to another model."""
        if model in self._of_model:
            self._gone.setdefault(model, now_s)

    def _meant(self, models: tuple[str, ...], now_s: float) -> tuple[str, ...]:
        there = {self._files[each] for each in models if each not in self._gone}

        def is_lost(gone: str) -> bool:
            return self._files[gone] in there or (bool(there) and now_s - self._gone[gone] >= KEPT_S)

        return tuple(each for each in models if each not in self._gone or not is_lost(each))

    def refusals(self, now_s: float, *own: Container[str]) -> Iterator[str]:
        """Yield what is to be said of each name that does not mean the model which has it as another one. `own` are
        the names that models and LoRAs have themselves."""
        for name, models in ((name, self._meant(models, now_s)) for name, models in self._models.items()):
            if any(name in names for names in own):
                yield f"the name {name!r} means the model of that name, although servers of {', '.join(models)} have it"
            elif len(models) > 1:
                gone = [
                    f" ({each} has no workers now, and keeps it for {KEPT_S:g} s)"
                    for each in models
                    if each in self._gone
                ]
                yield f"the name {name!r} means no model, because servers of {', '.join(models)} have it{''.join(gone)}"

    def validate(self) -> None:
        """Assert the invariants."""
        assert all(names and not names & {"", model} for model, names in self._of_model.items())
        assert self._gone.keys() <= self._of_model.keys() == self._files.keys()
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
