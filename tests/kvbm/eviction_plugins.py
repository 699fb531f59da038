"""Plug-in eviction policies, most of which do not work."""

from __future__ import annotations

from collections.abc import Callable

from services.kvbm.tiers.policies import LruPolicy
from shared.hashing import ContentKey


class YoungestPolicy:
    """Works: the youngest block goes first."""

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
    """Ends the process when it is asked for a victim."""

    def victim(self, may_go: Callable[[ContentKey], bool]) -> ContentKey | None:
        raise SystemExit(3)


class ForgetfulPolicy(YoungestPolicy):
    """Fails when it hears of a use."""

    def used(self, key: ContentKey) -> None:
        raise ValueError("\udcff")


class StubbornPolicy(YoungestPolicy):
    """Names no block, although one may go."""

    def victim(self, may_go: Callable[[ContentKey], bool]) -> ContentKey | None:
        return None


class RuthlessPolicy(YoungestPolicy):
    """Does not ask which blocks may go."""

    def victim(self, may_go: Callable[[ContentKey], bool]) -> ContentKey | None:
        return super().victim(lambda _key: True)


class DeafPolicy(YoungestPolicy):
    """Cannot be called."""

    def backed(self) -> None:
        raise NotImplementedError


class InventivePolicy(LruPolicy):
    """Names a block that is not in the tier."""

    def victim(self, may_go: Callable[[ContentKey], bool]) -> ContentKey | None:
        return bytes(16)


class NamingPolicy(LruPolicy):
    """Names no key at all."""

    def victim(self, may_go: Callable[[ContentKey], bool]) -> ContentKey | None:
        return ["one"]  # type: ignore[return-value]


class UnspeakableError(Exception):
    """An error without a text."""

    def __str__(self) -> str:
        raise self


class UnmakablePolicy(YoungestPolicy):
    """Cannot be made."""

    def __init__(self, capacity_blocks: int) -> None:
        raise UnspeakableError


class WordlessPolicy:
    """Lacks the methods of a policy."""

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity = capacity_blocks

    def stored(self, key: ContentKey) -> None:
        raise NotImplementedError
