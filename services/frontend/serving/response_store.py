"""The responses that one frontend keeps, to be continued and looked at: so long, so many, so large, and whose. Pure.

    keep ──▶ kept ── find: used last ──▶ kept ──▶ forgotten: asked to, too old, or for room

For room, the response goes that was used least recently of the account that holds the most. So an account that holds
no more than its equal share loses nothing to others, whatever they keep, and one that is alone may have it all.
Another account's response is as one that never was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

from msgspec import Struct

Dropped = Literal["age", "count", "bytes"]
"""Why one is forgotten that nobody asked to forget."""
DROPPED: tuple[Dropped, ...] = get_args(Dropped)


class StoredResponse(Struct, frozen=True):
    """One response."""

    id: str
    account: str
    """Empty: no key was asked for."""
    conversation: bytes
    """Its messages up to and with the answer, without instructions: a JSON list."""
    response: bytes
    """As its client got it: JSON."""

    @property
    def size_bytes(self) -> int:
        """What counts."""
        return len(self.conversation) + len(self.response)


class _AccountResponses:
    """One account's."""

    def __init__(self) -> None:
        self.ids: dict[str, None] = {}
        """The one used least recently first."""
        self.size_bytes = 0


class ResponseStore:
    """By id. Times are seconds of one clock."""

    def __init__(
        self, most: int, most_bytes: int, most_s: float, dropped: Callable[[Dropped], None] = lambda _why: None
    ) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._most_s = most_s
        self._dropped = dropped
        self._kept: dict[str, tuple[StoredResponse, float]] = {}
        """With the time it was used last; the one used least recently first."""
        self._shelves: dict[str, _AccountResponses] = {}
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, kept: StoredResponse, now: float) -> None:
        """From now on. One that alone is larger than all may be is not kept."""
        assert kept.id not in self._kept, "ids are unique"
        self.expire(now)
        self._add(kept, now)
        while len(self._kept) > self._most:
            self._drop_of(max(self._shelves.values(), key=lambda shelf: len(shelf.ids)), "count")
        while self.size_bytes > self._most_bytes:
            self._drop_of(max(self._shelves.values(), key=lambda shelf: shelf.size_bytes), "bytes")

    def find(self, response_id: str, account: str, now: float) -> StoredResponse | None:
        """It is used now. None: it is not kept, or not this account's."""
        self.expire(now)
        kept, _ = self._kept.get(response_id, (None, 0.0))
        if kept is None or kept.account != account:
            return None
        self._remove(kept)
        self._add(kept, now)
        return kept

    def forget(self, response_id: str, account: str, now: float) -> bool:
        """Whether it was kept, and is no more."""
        kept = self.find(response_id, account, now)
        if kept is not None:
            self._remove(kept)
        return kept is not None

    def expire(self, now: float) -> None:
        """Those that nobody has used for so long go."""
        while self._kept:
            kept, used = next(iter(self._kept.values()))
            if now - used < self._most_s:
                return
            self._remove(kept)
            self._dropped("age")

    def _drop_of(self, shelf: _AccountResponses, why: Dropped) -> None:
        kept, _ = self._kept[next(iter(shelf.ids))]
        self._remove(kept)
        self._dropped(why)

    def _add(self, kept: StoredResponse, now: float) -> None:
        self._kept[kept.id] = (kept, now)
        shelf = self._shelves.setdefault(kept.account, _AccountResponses())
        shelf.ids[kept.id] = None
        shelf.size_bytes += kept.size_bytes
        self.size_bytes += kept.size_bytes

    def _remove(self, kept: StoredResponse) -> None:
        del self._kept[kept.id]
        shelf = self._shelves[kept.account]
        del shelf.ids[kept.id]
        shelf.size_bytes -= kept.size_bytes
        self.size_bytes -= kept.size_bytes
        if not shelf.ids:
            del self._shelves[kept.account]

    def validate(self) -> None:
        """Asserts the invariants."""
        assert len(self._kept) <= self._most
        assert self.size_bytes == sum(kept.size_bytes for kept, _ in self._kept.values()) <= self._most_bytes
        used = [at for _, at in self._kept.values()]
        assert used == sorted(used)
        for account, shelf in self._shelves.items():
            own = [kept for kept, _ in self._kept.values() if kept.account == account]
            assert list(shelf.ids) == [kept.id for kept in own] != []
            assert shelf.size_bytes == sum(kept.size_bytes for kept in own)
        assert sum(len(shelf.ids) for shelf in self._shelves.values()) == len(self._kept)
