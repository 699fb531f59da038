"""ReusePolicy: who is least likely to be used soon goes first, as learned from what was used. Pure.

    uses so far    0: ▪▪▪▪▪▪▪▪▪▪▪▪▪   two lines each, longest unused first: those that the tier below has too, and those
                   1: ▪▪▪▪▪▪▪         that it has not. The first of each are compared by rate(uses, age), what their
                   …                  place would find, times what would be lost; the lowest goes
                  7+: ▪▪▪

A block's age is counted in tellings (blocks stored or used) since it was last told of. Its rate is uses per telling, as
seen of such blocks, from its age up to the age at which that is best: who is kept can be let go at any time, so it is
worth what the best patience brings (Gittins' index). Ages are told apart by their powers of two.

Blocks that have gone are remembered, four for each that is there. One that comes back is a use that was missed, and
its uses are counted on. Without these a small tier could not learn what it would find, were it more patient.

What the tier below has too is still found when it goes, later: it counts BACKED of another. Where both tiers are one
store's, this finds more in the two together than any policy that looks at one alone.

Few observations say little: each rate is drawn to that of all blocks of the age, with the weight of PRIOR uses. That
common rate may only fall with age, so where nothing is known the oldest goes. Half of what was learned is forgotten
within some 17 capacities of tellings.

The idea, uses by the room and time they take, by class and age, is LHD's (Beckmann, Chen, Cidon: NSDI 2018); that it
pays for prefixes, Wang et al. have found (KVCache Cache in the Wild, ATC 2025). Lines instead of LHD's samples make it
deterministic; their price is that within a line it is LRU, so a loop longer than the tier is lost here as there.

Measured: 1 µs to tell a use, 6 to 8 µs to find a victim and replace it, 1.1 KB for each block of capacity, 0.4 ms to
learn new rates.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import accumulate

from services.kvbm.tiers.eviction_queue import EvictionQueue
from shared.hashing import ContentKey

_CLASSES = 8
_AGES = 48
"""Powers of two: 2^47 tellings are years."""
_GHOSTS = 4
"""Remembered for each that is there."""
_PRIOR = 10.0
_BACKED = 0.3
"""About the time that a block takes to come from disk, of the time that it takes to be computed."""
_KEPT = 0.99
"""Of the counts, each time that rates are made; which is four times a capacity, but not every few tellings."""
_ROUNDS = 4
_ROUND_LEAST = 256


class ReusePolicy:
    """`reuse` in the config, and the host tier's default."""

    def __init__(self, capacity_blocks: int) -> None:
        self._told = 0
        self._lines = [EvictionQueue() for _ in range(_CLASSES)]
        self._backed_lines = [EvictionQueue() for _ in range(_CLASSES)]
        self._backed: set[ContentKey] = set()
        """Of those that are there."""
        self._there: dict[ContentKey, tuple[int, int]] = {}
        """Class, and when it was last used."""
        self._ghosts: OrderedDict[ContentKey, tuple[int, int]] = OrderedDict()
        """The same of those that have gone, last gone last."""
        self._ghosts_most = _GHOSTS * capacity_blocks
        self._used = [[0.0] * _AGES for _ in range(_CLASSES)]
        self._ended = [[0.0] * _AGES for _ in range(_CLASSES)]
        """By class and age: how often a block was used at that age; how often its wait ended there, used or
        forgotten."""
        self._rates = [[2.0**-age for age in range(_AGES)] for _ in range(_CLASSES)]
        self._round = max(capacity_blocks // _ROUNDS, _ROUND_LEAST)

    def stored(self, key: ContentKey) -> None:
        """It is there now."""
        self._told += 1
        ghost = self._ghosts.pop(key, None)
        self._enter(key, 0 if ghost is None else self._reused(*ghost))

    def used(self, key: ContentKey) -> None:
        """It was found."""
        self._told += 1
        kind, last = self._there[key]
        self._line(key, kind).remove(key)
        self._enter(key, self._reused(kind, last))

    def gone(self, key: ContentKey) -> None:
        """It is there no more."""
        kind, last = self._ghosts[key] = self._there.pop(key)
        self._line(key, kind).remove(key)
        self._backed.discard(key)
        if len(self._ghosts) > self._ghosts_most:
            _key, (kind, last) = self._ghosts.popitem(last=False)
            self._ended[kind][self._age(last)] += 1

    def backed(self, key: ContentKey, below: bool) -> None:
        """It is last in its new line, which is where it was in the old one if it was stored or used lately."""
        if below == (key in self._backed):
            return
        kind, _last = self._there[key]
        self._line(key, kind).remove(key)
        (self._backed.add if below else self._backed.remove)(key)
        self._line(key, kind).push(key)

    def victim(self, may_go: Callable[[ContentKey], bool]) -> ContentKey | None:
        """The first of the line with the lowest rate."""
        found = self._least(may_go, every=False)
        return self._least(may_go, every=True) if found is None else found

    def _least(self, may_go: Callable[[ContentKey], bool], *, every: bool) -> ContentKey | None:
        least, lowest = None, 0.0
        for lines, weight in ((self._lines, 1.0), (self._backed_lines, _BACKED)):
            for kind, line in enumerate(lines):
                key = line.first(may_go, every=every)
                if key is None:
                    continue
                rate = weight * self._rates[kind][self._age(self._there[key][1])]
                if least is None or rate < lowest:
                    least, lowest = key, rate
        return least

    def _line(self, key: ContentKey, kind: int) -> EvictionQueue:
        return (self._backed_lines if key in self._backed else self._lines)[kind]

    def _age(self, last: int) -> int:
        return (self._told - last).bit_length()

    def _enter(self, key: ContentKey, kind: int) -> None:
        self._there[key] = kind, self._told
        self._line(key, kind).push(key)
        if self._told % self._round == 0:
            self._learn()

    def _reused(self, kind: int, last: int) -> int:
        """Counts a use; returns the class that follows."""
        age = self._age(last)
        self._used[kind][age] += 1
        self._ended[kind][age] += 1
        return min(kind + 1, _CLASSES - 1)

    # --- learning

    def _learn(self) -> None:
        """New rates from the counts, and the counts fade."""
        ends = [_sums(self._ended), *self._ended]
        uses = [_sums(self._used), *self._used]
        best = [_best_ahead(used, _at_risk(ended)) for used, ended in zip(uses, ends, strict=True)]
        common = [(used + 0.5) / (risk + 2.0**age) for age, (used, risk) in enumerate(best[0])]
        common = list(accumulate(common, min))
        self._rates = [
            [(used + _PRIOR) / (risk + _PRIOR / usual) for (used, risk), usual in zip(each, common, strict=True)]
            for each in best[1:]
        ]
        self._used = [[count * _KEPT for count in counts] for counts in self._used]
        self._ended = [[count * _KEPT for count in counts] for counts in self._ended]

    def validate(self) -> None:
        """Raises AssertionError where the policy contradicts itself. O(capacity)."""
        lines = [*self._lines, *self._backed_lines]
        for line in lines:
            line.validate()
        assert sum(map(len, lines)) == len(self._there), "a block is in no line, or in two"
        assert all(key in self._line(key, kind) for key, (kind, _) in self._there.items()), "a block is in a wrong line"
        assert self._backed <= self._there.keys(), "a block that has gone is below"
        assert self._there.keys().isdisjoint(self._ghosts), "a block is there and has gone"
        assert len(self._ghosts) <= self._ghosts_most, f"{len(self._ghosts)} ghosts"


def _sums(rows: Sequence[Sequence[float]]) -> list[float]:
    return [sum(column) for column in zip(*rows, strict=True)]


def _at_risk(ended: Sequence[float]) -> list[float]:
    """Block tellings spent at each age: those whose wait ends later pass the whole of it, those that end in it half."""
    later, spent = 0.0, [0.0] * _AGES
    for age in range(_AGES - 1, -1, -1):
        spent[age] = (later + ended[age] / 2) * 2.0 ** (age - 1)
        later += ended[age]
    return spent


def _best_ahead(uses: Sequence[float], risk: Sequence[float]) -> list[tuple[float, float]]:
    """Of each age: uses and tellings at risk from there to the age at which their ratio is best."""
    found = []
    for start in range(_AGES):
        best = use, spent = uses[start], risk[start]
        for more, longer in zip(uses[start + 1 :], risk[start + 1 :], strict=True):
            if not longer:
                break
            use, spent = use + more, spent + longer
            if use * best[1] > best[0] * spent:
                best = use, spent
        found.append(best)
    return found
