"""Eviction policies: which block leaves a tier first. Their interface, the built-in ones, and how one is found by name.
Pure.

    tier ──stored, used, backed, gone──▶ policy ──victim──▶ tier ──gone──▶ policy

The tier decides which blocks *may* go: none that is held or copied. The policy decides which of them goes.

A policy of your own is a class with these methods (`backed` may be left out). It is made with its tier's capacity in
blocks, and named in the config as `module:attribute`. `GuardedPolicy` runs it, and says what happens when it fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

from services.kvbm.tiers.eviction_queue import EvictionQueue
from services.kvbm.tiers.reuse import ReusePolicy
from shared.errors import ConfigError
from shared.hashing import ContentKey
from shared.plugin import FAILURES, load_plugin, problem_of

MayGo = Callable[[ContentKey], bool]


class EvictionPolicy(Protocol):
    """An eviction policy, which hears of every block in its tier. It hears of the blocks of one prefix last block
    first, so that blocks that were stored together leave from the end of their prefix."""

    def stored(self, key: ContentKey) -> None:
        """Record that the block has come into the tier."""
        ...

    def used(self, key: ContentKey) -> None:
        """Record that the block, which is in the tier, was found by a request."""
        ...

    def backed(self, key: ContentKey, below: bool) -> None:
        """Record whether the tier below has the block too, which is in this tier. False until the first call."""
        ...

    def gone(self, key: ContentKey) -> None:
        """Record that the block has left the tier, as a victim or otherwise."""
        ...

    def victim(self, may_go: MayGo) -> ContentKey | None:
        """Return a block in the tier for which `may_go` holds; None if there is none. The block stays until `gone`."""
        ...


class LruPolicy:
    """`lru`: evicts the block that was unused for the longest time."""

    def __init__(self, capacity_blocks: int) -> None:
        assert capacity_blocks > 0, f"a tier of {capacity_blocks} blocks"
        self._queue = EvictionQueue()

    def stored(self, key: ContentKey) -> None:
        """Put the block at the end of the queue."""
        self._queue.push(key)

    def used(self, key: ContentKey) -> None:
        """Put the block at the end of the queue again."""
        self._queue.push(key)

    def backed(self, key: ContentKey, below: bool) -> None:
        """Do nothing: the policy does not look at the tier below."""

    def gone(self, key: ContentKey) -> None:
        """Forget the block, which must be in the tier."""
        self._queue.remove(key)

    def victim(self, may_go: MayGo) -> ContentKey | None:
        """Return the oldest block that may go."""
        return self._queue.first(may_go, every=True)

    def __contains__(self, key: ContentKey) -> bool:
        return key in self._queue

    def validate(self) -> None:
        """Raise AssertionError if the policy contradicts itself."""
        self._queue.validate()


class GuardedPolicy:
    """A plug-in policy, with an LRU policy next to it that hears the same.

        trusted ──raises; names a block that is not there or may not go, or none if one may──▶ off: LRU, for good

    The first failure is the last, since a policy that missed a call no longer knows its tier. Its calls are not timed.
    """

    def __init__(self, policy: EvictionPolicy, capacity_blocks: int) -> None:
        self._policy: EvictionPolicy | None = policy
        self._lru = LruPolicy(capacity_blocks)
        self.problem = ""
        """Why the plug-in is off; empty while it is trusted."""

    def stored(self, key: ContentKey) -> None:
        """Pass the call to both."""
        self._lru.stored(key)
        self._call("stored", key)

    def used(self, key: ContentKey) -> None:
        """Pass the call to both."""
        self._lru.used(key)
        self._call("used", key)

    def backed(self, key: ContentKey, below: bool) -> None:
        """Pass the call to the plug-in, if it has the method."""
        self._call("backed", key, below)

    def gone(self, key: ContentKey) -> None:
        """Pass the call to both."""
        self._lru.gone(key)
        self._call("gone", key)

    def victim(self, may_go: MayGo) -> ContentKey | None:
        """Return the plug-in's victim if it is right, else that of LRU."""
        if self._policy is None:
            return self._lru.victim(may_go)
        try:
            victim = self._policy.victim(may_go)
            right = isinstance(victim, bytes) and victim in self._lru and may_go(victim)
        except FAILURES as wrong:  # a policy is a plug-in: whatever it does, blocks are stored
            self._off(problem_of(wrong))
            return self._lru.victim(may_go)
        if right:
            return victim
        instead = self._lru.victim(may_go)
        if victim is not None or instead is not None:
            self._off("it named no block, where one may go" if victim is None else "it named a block that may not go")
        return instead

    def _call(self, method: str, *arguments: ContentKey | bool) -> None:
        called = getattr(self._policy, method, None)  # None if the plug-in is off, too
        if called is not None:
            try:
                called(*arguments)
            except FAILURES as wrong:  # as above
                self._off(problem_of(wrong))

    def _off(self, problem: str) -> None:
        self._policy, self.problem = None, problem


BUILT_IN: dict[str, Callable[[int], EvictionPolicy]] = {"reuse": ReusePolicy, "lru": LruPolicy}
DEFAULT = "reuse"
"""The host tier's default. By benchmarks/eviction.py it is the best, for memory alone and with a disk."""
DISK_DEFAULT = "lru"
"""The disk tier's default. After `reuse` it finds as much as any other, with a fifth of the memory for each block, and
a disk has many."""


def make_policy(name: str, capacity_blocks: int) -> EvictionPolicy:
    """Make a policy for one tier, built in or `module:attribute`. Raise ConfigError."""
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
