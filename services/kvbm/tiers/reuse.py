"""ReusePolicy: evicts the block that is least likely to be used soon, as learned from earlier uses. Pure.

    uses so far    0: ▪▪▪▪▪▪▪▪▪▪▪▪▪   two queues each, longest unused first: blocks that the tier below has too, and
                   1: ▪▪▪▪▪▪▪         blocks that it does not have. The first of each queue are compared by rate(uses,
                   …                  age) times what would be lost, that is by what their place would find; the lowest
                  7+: ▪▪▪             is evicted

A block's age is the number of calls (blocks stored or used) since the last call about it. Its rate is uses per call, as
observed for such blocks, from its age up to the age at which that is best: a block can be evicted at any time, so it is
worth what the best patience brings (Gittins' index). Ages are distinguished by their powers of two.

Blocks that have left are remembered, four for each that is stored. One that comes back is a use that was missed, and
its count of uses goes on. Without these a small tier could not learn what it would find if it were more patient.

A block that the tier below has too can still be found after it is evicted, only later: it counts _BACKED of another. If
both tiers belong to one store, this finds more in the two together than any policy that looks at one alone.

Few observations say little: each rate is drawn to that of all blocks of the age, with the weight of _PRIOR uses. That
common rate may only fall with age, so if nothing is known the oldest block is evicted. Half of what was learned is
forgotten within some 17 capacities of calls.

The idea, uses by the room and time they take, by class and age, is LHD's (Beckmann, Chen, Cidon: NSDI 2018). That it
pays for prefixes was found by Wang et al. (KVCache Cache in the Wild, ATC 2025). Queues instead of LHD's samples make
it deterministic; their price is that within a queue it is LRU, so a loop longer than the tier is lost here as there.

Measured: 1 µs for a use, 6 to 8 µs to find a victim and replace it, 1.1 KB for each block of capacity, 0.4 ms to learn
new rates.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import accumulate

from services.kvbm.tiers.eviction_queue import EvictionQueue
from shared.hashing import ContentKey

_CLASSES = 8
"""The number of classes, by uses so far; the last one is of seven uses or more."""
_AGES = 48
"""The number of ages, as powers of two: 2^47 calls are years."""
_GHOSTS = 4
"""How many blocks that have left are remembered for each that is stored."""
_PRIOR = 10.0
"""The weight, in uses, of what blocks of an age have in common."""
_BACKED = 0.3
"""The cost of losing a block that the tier below has, as a share of another's: about the time to read a block from
disk, by the time to compute it."""
_KEPT = 0.99
"""The share of the counts that is kept each time that rates are learned."""
_ROUNDS = 4
"""How often rates are learned while as many blocks come as there is capacity; but see `_ROUND_LEAST`."""
_ROUND_LEAST = 256
"""The fewest calls between two times that rates are learned."""


class ReusePolicy:
    """`reuse` in the config, and the host tier's default."""

    def __init__(self, capacity_blocks: int) -> None:
        self._calls = 0
        self._queues = [EvictionQueue() for _ in range(_CLASSES)]
        self._backed_queues = [EvictionQueue() for _ in range(_CLASSES)]
        self._backed: set[ContentKey] = set()
        """The stored blocks that the tier below has too."""
        self._stored: dict[ContentKey, tuple[int, int]] = {}
        """Class of each stored block, and the call of its last use."""
        self._ghosts: OrderedDict[ContentKey, tuple[int, int]] = OrderedDict()
        """Class and last use of the blocks that have left, last left last."""
        self._ghosts_most = _GHOSTS * capacity_blocks
        self._used = [[0.0] * _AGES for _ in range(_CLASSES)]
        self._ended = [[0.0] * _AGES for _ in range(_CLASSES)]
        """By class and age: how often a block was used at that age, and how often its wait ended there, by a use or
        forgotten."""
        self._rates = [[2.0**-age for age in range(_AGES)] for _ in range(_CLASSES)]
        self._round = max(capacity_blocks // _ROUNDS, _ROUND_LEAST)

    def stored(self, key: ContentKey) -> None:
        """Put the block into the queue of its class."""
        self._calls += 1
        ghost = self._ghosts.pop(key, None)
        self._enter(key, 0 if ghost is None else self._reused(*ghost))

    def used(self, key: ContentKey) -> None:
        """Count the use, and put the block into the queue of its next class."""
        self._calls += 1
        kind, last = self._stored[key]
        self._queue(key, kind).remove(key)
        self._enter(key, self._reused(kind, last))

    def gone(self, key: ContentKey) -> None:
        """Remember the block for a while."""
        kind, last = self._ghosts[key] = self._stored.pop(key)
        self._queue(key, kind).remove(key)
        self._backed.discard(key)
        if len(self._ghosts) > self._ghosts_most:
            _key, (kind, last) = self._ghosts.popitem(last=False)
            self._ended[kind][self._age(last)] += 1

    def backed(self, key: ContentKey, below: bool) -> None:
        """Move the block to the end of its other queue, which is its old place if it was stored or used lately."""
        if below == (key in self._backed):
            return
        kind, _last = self._stored[key]
        self._queue(key, kind).remove(key)
        (self._backed.add if below else self._backed.remove)(key)
        self._queue(key, kind).push(key)

    def victim(self, may_go: Callable[[ContentKey], bool]) -> ContentKey | None:
        """Return the first block of the queue with the lowest rate."""
        found = self._least(may_go, every=False)
        return self._least(may_go, every=True) if found is None else found

    def _least(self, may_go: Callable[[ContentKey], bool], *, every: bool) -> ContentKey | None:
        least, lowest = None, 0.0
        for queues, weight in ((self._queues, 1.0), (self._backed_queues, _BACKED)):
            for kind, queue in enumerate(queues):
                key = queue.first(may_go, every=every)
                if key is None:
                    continue
                rate = weight * self._rates[kind][self._age(self._stored[key][1])]
                if least is None or rate < lowest:
                    least, lowest = key, rate
        return least

    def _queue(self, key: ContentKey, kind: int) -> EvictionQueue:
        return (self._backed_queues if key in self._backed else self._queues)[kind]

    def _age(self, last: int) -> int:
        return (self._calls - last).bit_length()

    def _enter(self, key: ContentKey, kind: int) -> None:
        self._stored[key] = kind, self._calls
        self._queue(key, kind).push(key)
        if self._calls % self._round == 0:
            self._learn()

    def _reused(self, kind: int, last: int) -> int:
        """Count a use; return the class that follows."""
        age = self._age(last)
        self._used[kind][age] += 1
        self._ended[kind][age] += 1
        return min(kind + 1, _CLASSES - 1)

    # --- learning

    def _learn(self) -> None:
        """Make new rates from the counts, and let the counts fade."""
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
        """Raise AssertionError if the policy contradicts itself. O(capacity)."""
        queues = [*self._queues, *self._backed_queues]
        for queue in queues:
            queue.validate()
        assert sum(map(len, queues)) == len(self._stored), "a block is in no queue, or in two"
        assert all(key in self._queue(key, kind) for key, (kind, _) in self._stored.items()), "a block is misplaced"
        assert self._backed <= self._stored.keys(), "a block that has left is marked as backed"
        assert self._stored.keys().isdisjoint(self._ghosts), "a block is stored and has left"
        assert len(self._ghosts) <= self._ghosts_most, f"{len(self._ghosts)} ghosts"


def _sums(rows: Sequence[Sequence[float]]) -> list[float]:
    return [sum(column) for column in zip(*rows, strict=True)]


def _at_risk(ended: Sequence[float]) -> list[float]:
    """Return the calls that blocks spent at each age: all of it if their wait ended later, half of it if it ended
    there."""
    later, spent = 0.0, [0.0] * _AGES
    for age in range(_AGES - 1, -1, -1):
        spent[age] = (later + ended[age] / 2) * 2.0 ** (age - 1)
        later += ended[age]
    return spent


def _best_ahead(uses: Sequence[float], risk: Sequence[float]) -> list[tuple[float, float]]:
    """Return, for each age, the uses and the calls at risk from there to the age at which their ratio is best."""
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
