"""vLLM's own metrics as text: those that a list names, each series once. Pure.

vLLM keeps them in prometheus_client's registry of this process, since a worker has one AsyncLLM. The shell passes no
PROMETHEUS_MULTIPROC_DIR on: in such a directory are the counts of other workers, and of engines that have ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

MOST_BYTES = 1 << 20
"""Bytes of the longest text that is sent. vLLM 0.32 has 60 kB for one rank."""


class KeptMetrics:
    """A collector of the families of another one whose names are in a list."""

    def __init__(self, registry: Any, names: Sequence[str]) -> None:
        """`registry` is one of prometheus_client's. A name may end in `*`, which stands for any rest."""
        self._registry = registry
        self._names = names

    def collect(self) -> Iterator[Any]:
        seen: set[tuple[str, tuple[tuple[str, str], ...]]] = set()
        for family in self._registry.collect():
            if not is_kept(family.name, self._names):
                continue
            samples = []
            for sample in family.samples:
                series = sample.name, tuple(sorted(sample.labels.items()))
                if series not in seen and not sample.name.endswith("_created"):
                    seen.add(series)
                    samples.append(sample)
            if samples:
                family.samples = samples
                yield family


def unknown_name(registry: Any, names: Iterable[str]) -> str:
    """Return a name of the list that no family of the registry has. Empty if there is none."""
    families = [family.name for family in registry.collect()]
    return next((each for each in names if not any(is_kept(family, (each,)) for family in families)), "")


def is_kept(name: str, names: Iterable[str]) -> bool:
    """Whether a family is in the list: by its name, which has no `_total`, or with it."""
    return any(
        name.startswith(each[:-1]) if each.endswith("*") else name == each.removesuffix("_total") for each in names
    )
