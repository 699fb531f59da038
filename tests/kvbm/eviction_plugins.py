"""Eviction policies of somebody's own, most of which do not work."""

from __future__ import annotations

from collections.abc import Callable

from services.kvbm.tiers.policies import LruPolicy
from shared.hashing import ContentKey


class YoungestPolicy:
    """Works: who came last goes first."""

    def __init__(self, capacity_blocks: int) -> None:
        self._keys: dict[ContentKey, None] = {}

    def stored(self, key: ContentKey) -> None:
        self._keys[key] = None

    def used(self, key: ContentKey) -> None:
        self._keys[key] = self._keys.pop(key)

    def gone(self, key: ContentKey) -> None:
        del self._keys[key]

    def victim(self, may_go: Callable[[ContentKey], bool]) -> ContentKey | None:
        return next(filter(may_go, reversed(self._keys)), None)


class LeavingPolicy(YoungestPolicy):
    """Ends the process, were it asked."""

    def victim(self, may_go: Callable[[ContentKey], bool]) -> ContentKey | None:
        raise SystemExit(3)


class ForgetfulPolicy(YoungestPolicy):
    """Fails when it is told."""

    def used(self, key: ContentKey) -> None:
        raise ValueError("\udcff")


class StubbornPolicy(YoungestPolicy):
    """Lets nobody go."""

    def victim(self, may_go: Callable[[ContentKey], bool]) -> ContentKey | None:
        return None


class RuthlessPolicy(YoungestPolicy):
    """Does not ask who may go."""

    def victim(self, may_go: Callable[[ContentKey], bool]) -> ContentKey | None:
        return super().victim(lambda _key: True)


class DeafPolicy(YoungestPolicy):
    """Cannot be told."""

    def backed(self) -> None:
        raise NotImplementedError


class InventivePolicy(LruPolicy):
    """Names one that nobody knows."""

    def victim(self, may_go: Callable[[ContentKey], bool]) -> ContentKey | None:
        return bytes(16)


class NamingPolicy(LruPolicy):
    """Names no key at all."""

    def victim(self, may_go: Callable[[ContentKey], bool]) -> ContentKey | None:
        return ["one"]  # type: ignore[return-value]


class UnspeakableError(Exception):
    """Has no words."""

    def __str__(self) -> str:
        raise self


class UnmakablePolicy(YoungestPolicy):
    """Cannot be made."""

    def __init__(self, capacity_blocks: int) -> None:
        raise UnspeakableError


class WordlessPolicy:
    """Lacks what a policy needs."""

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity = capacity_blocks

    def stored(self, key: ContentKey) -> None:
        raise NotImplementedError
