"""Who leaves a tier first: the interface of eviction policies, and how one is found by name. Pure.

    tier ──stored, used, backed, gone──▶ policy ──victim──▶ tier ──gone──▶ policy

The tier decides who *may* go: nobody that is pinned or copied, and in a prefix-aware tier no parent whose child is
there, since a block is of use only behind its parents. The policy decides who of these goes.

A policy of your own is a class with these methods (`backed` may be left out), made with its tier's capacity in blocks,
and named in the config as `module:attribute`. It runs behind `GuardedPolicy`, which says what happens when it fails.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol, cast

from services.kvbm.tiers.eviction_queue import EvictionQueue
from services.kvbm.tiers.reuse import ReusePolicy
from shared.errors import ConfigError
from shared.hashing import ContentKey
from shared.plugin import FAILURES, load_plugin, problem_of

MayGo = Callable[[ContentKey], bool]


class EvictionPolicy(Protocol):
    """Told of every block in its tier. Blocks of one prefix are told last block first, so that what was told together
    leaves from its end."""

    def stored(self, key: ContentKey) -> None:
        """It is in the tier now, and was not before."""
        ...

    def used(self, key: ContentKey) -> None:
        """It is in the tier, and was found by somebody."""
        ...

    def backed(self, key: ContentKey, below: bool) -> None:
        """It is in the tier, and whether the tier below has it too may have changed. False until it is told."""
        ...

    def gone(self, key: ContentKey) -> None:
        """It was in the tier and is no more, as a victim or otherwise."""
        ...

    def victim(self, may_go: MayGo) -> ContentKey | None:
        """One that is in the tier and for which `may_go` holds; None where there is none. It stays until `gone`."""
        ...


class LruPolicy:
    """`lru`: who was longest unused goes."""

    def __init__(self, capacity_blocks: int) -> None:
        assert capacity_blocks > 0, f"a tier of {capacity_blocks} blocks"
        self._line = EvictionQueue()

    def stored(self, key: ContentKey) -> None:
        """Youngest."""
        self._line.push(key)

    def used(self, key: ContentKey) -> None:
        """Youngest again."""
        self._line.push(key)

    def backed(self, key: ContentKey, below: bool) -> None:
        """Does not matter here."""

    def gone(self, key: ContentKey) -> None:
        """It must have been there."""
        self._line.remove(key)

    def victim(self, may_go: MayGo) -> ContentKey | None:
        """The oldest."""
        return self._line.first(may_go, every=True)

    def __contains__(self, key: ContentKey) -> bool:
        return key in self._line

    def validate(self) -> None:
        """Raises AssertionError where the policy contradicts itself."""
        self._line.validate()


class S3FifoPolicy:
    """`s3-fifo`: algorithm 1 of Yang et al., FIFO queues are all you need for cache eviction (SOSP 2023).

    stored ──▶ small (a tenth) ──used twice──▶ main ──used since──▶ back to its end
       │           └──else──▶ gone, a ghost      └──else──▶ gone
       └──ghost──▶ main
    """

    def __init__(self, capacity_blocks: int) -> None:
        self._small, self._main = EvictionQueue(), EvictionQueue()
        self._uses: dict[ContentKey, int] = {}
        """Of those that are there; up to 3."""
        self._ghosts: OrderedDict[ContentKey, None] = OrderedDict()
        self._small_most = max(1, capacity_blocks // 10)
        self._ghosts_most = max(1, capacity_blocks - self._small_most)

    def stored(self, key: ContentKey) -> None:
        """Into main, where it was let go too early the last time."""
        self._uses[key] = 0
        known = key in self._ghosts
        if known:
            del self._ghosts[key]
        (self._main if known else self._small).push(key)

    def used(self, key: ContentKey) -> None:
        """Counted; nothing moves."""
        self._uses[key] = min(self._uses[key] + 1, 3)

    def backed(self, key: ContentKey, below: bool) -> None:
        """Does not matter here."""

    def gone(self, key: ContentKey) -> None:
        """Remembered for a while, if main has not seen it."""
        del self._uses[key]
        if key in self._main:
            self._main.remove(key)
            return
        self._small.remove(key)
        self._ghosts[key] = None
        if len(self._ghosts) > self._ghosts_most:
            self._ghosts.popitem(last=False)

    def victim(self, may_go: MayGo) -> ContentKey | None:
        """From small while it has its tenth, else from main."""
        order = (self._from_small, self._from_main)
        if len(self._small) < self._small_most:
            order = (self._from_main, self._from_small)
        tries = (look(may_go, every) for every in (False, True) for look in order)
        return next((key for key in tries if key is not None), None)

    def _from_small(self, may_go: MayGo, every: bool) -> ContentKey | None:
        while (key := self._small.first(may_go, every=every)) is not None and self._uses[key] > 1:
            self._uses[key] = 0
            self._small.remove(key)
            self._main.push(key)
        return key

    def _from_main(self, may_go: MayGo, every: bool) -> ContentKey | None:
        while (key := self._main.first(may_go, every=every)) is not None and self._uses[key] > 0:
            self._uses[key] -= 1
            self._main.push(key)
        return key

    def validate(self) -> None:
        """Raises AssertionError where the policy contradicts itself. O(capacity)."""
        self._small.validate()
        self._main.validate()
        assert len(self._small) + len(self._main) == len(self._uses), "a block is in no queue, or in two"
        assert all((key in self._small) != (key in self._main) for key in self._uses)
        assert self._uses.keys().isdisjoint(self._ghosts), "a block is there and has gone"
        assert len(self._ghosts) <= self._ghosts_most, f"{len(self._ghosts)} ghosts"


class GuardedPolicy:
    """Somebody's own policy, with LRU beside it that is told the same.

        trusted ──raises; names one that is not there or may not go, or none where there is one──▶ off: LRU, for good

    The first failure is the last, since a policy that missed a telling knows its tier no more. It is not timed.
    """

    def __init__(self, policy: EvictionPolicy, capacity_blocks: int) -> None:
        self._policy: EvictionPolicy | None = policy
        self._lru = LruPolicy(capacity_blocks)
        self.problem = ""
        """Why it is off; empty while it is trusted."""

    def stored(self, key: ContentKey) -> None:
        """To both."""
        self._lru.stored(key)
        if self._policy is not None:
            self._tell(self._policy.stored, key)

    def used(self, key: ContentKey) -> None:
        """To both."""
        self._lru.used(key)
        if self._policy is not None:
            self._tell(self._policy.used, key)

    def backed(self, key: ContentKey, below: bool) -> None:
        """To the policy, if it wants to know."""
        told = getattr(self._policy, "backed", None)
        if told is not None:
            self._tell(told, key, below)

    def gone(self, key: ContentKey) -> None:
        """To both."""
        self._lru.gone(key)
        if self._policy is not None:
            self._tell(self._policy.gone, key)

    def victim(self, may_go: MayGo) -> ContentKey | None:
        """The policy's, if it is one."""
        if self._policy is None:
            return self._lru.victim(may_go)
        try:
            named = self._policy.victim(may_go)
            right = isinstance(named, bytes) and named in self._lru and may_go(named)
        except FAILURES as wrong:  # a policy is a plug-in: whatever it does, blocks are stored
            self._off(problem_of(wrong))
            return self._lru.victim(may_go)
        if right:
            return named
        instead = self._lru.victim(may_go)
        if named is not None or instead is not None:
            self._off("it named nobody, where one may go" if named is None else "it named one that may not go")
        return instead

    def _tell(self, told: Callable[..., None], *what: ContentKey | bool) -> None:
        try:
            told(*what)
        except FAILURES as wrong:  # as above
            self._off(problem_of(wrong))

    def _off(self, problem: str) -> None:
        self._policy, self.problem = None, problem


BUILT_IN: dict[str, Callable[[int], EvictionPolicy]] = {
    "reuse": ReusePolicy,
    "lru": LruPolicy,
    "s3-fifo": S3FifoPolicy,
}
DEFAULT = "reuse"
"""The host tier's: by benchmarks/eviction.py the best of one tier alone, and of two."""
DISK_DEFAULT = "lru"
"""Behind `reuse` it finds as much as any other, with a fifth of the memory for each block, and disks have many."""


def named(name: str, capacity_blocks: int) -> EvictionPolicy:
    """A policy of its own for one tier, built in or `module:attribute`. Raises ConfigError."""
    if name in BUILT_IN:
        return BUILT_IN[name](capacity_blocks)
    plugin = load_plugin("eviction policy", name, BUILT_IN)
    try:
        made = plugin(capacity_blocks)
        missing = [each for each in ("stored", "used", "gone", "victim") if not callable(getattr(made, each, None))]
    except FAILURES as wrong:  # it may do anything while it is made
        raise ConfigError(f"eviction policy {name}: {problem_of(wrong)}") from wrong
    if missing:
        raise ConfigError(f"eviction policy {name}: it has no {', '.join(missing)}")
    return GuardedPolicy(cast(EvictionPolicy, made), capacity_blocks)
