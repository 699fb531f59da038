"""The responses that one frontend stores, limited in age, number and size. Pure.

    keep ──▶ stored ── find: used last ──▶ stored ──▶ removed: by request, by age, or to make room

To make room, the response goes that was used least recently of the account that has the most. So an account with no
more than its equal share loses nothing to others, and an account that is alone may have it all. A response of another
account is treated as unknown.

Each response holds its whole conversation: a chain of links would be smaller, and break where one is deleted or
expires.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

from msgspec import Struct

Dropped = Literal["age", "count", "bytes"]
"""Why a response was removed without a request to do so."""
DROPPED: tuple[Dropped, ...] = get_args(Dropped)


class StoredResponse(Struct, frozen=True):
    """A response and its conversation."""

    id: str
    account: str
    """The name of the API key; empty if keys are not required."""
    conversation: bytes
    """Its messages up to and including the answer, without instructions, as a JSON list."""
    response: bytes
    """The response as its client got it, as JSON."""

    @property
    def size_bytes(self) -> int:
        """The size that counts against the limits."""
        return len(self.conversation) + len(self.response)


class _AccountResponses(Struct):
    """The responses of one account."""

    ids: dict[str, None] = {}
    """The ids, the least recently used first."""
    size_bytes: int = 0


class ResponseStore:
    """The stored responses by id. Times are seconds on one clock."""

    def __init__(
        self, most: int, most_bytes: int, most_s: float, dropped: Callable[[Dropped], None] = lambda _why: None
    ) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._most_s = most_s
        self._dropped = dropped
        self._kept: dict[str, tuple[StoredResponse, float]] = {}
        """Each response with the time of its last use, the least recently used first."""
        self._accounts: dict[str, _AccountResponses] = {}
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, kept: StoredResponse, now: float) -> None:
        """Store a response. One that is larger than the whole store may be is not stored."""
        assert kept.id not in self._kept, "ids are unique"
        self.expire(now)
        self._add(kept, now)
        while len(self._kept) > self._most:
            self._drop_of(max(self._accounts.values(), key=lambda account: len(account.ids)), "count")
        while self.size_bytes > self._most_bytes:
            self._drop_of(max(self._accounts.values(), key=lambda account: account.size_bytes), "bytes")

    def find(self, response_id: str, account: str, now: float) -> StoredResponse | None:
        """Return a response, which counts as its use; None if it is not stored, or belongs to another account."""
        self.expire(now)
        kept, _ = self._kept.get(response_id, (None, 0.0))
        if kept is None or kept.account != account:
            return None
        self._remove(kept)
        self._add(kept, now)
        return kept

    def forget(self, response_id: str, account: str, now: float) -> bool:
        """Remove a response; return whether it was stored."""
        kept = self.find(response_id, account, now)
        if kept is not None:
            self._remove(kept)
        return kept is not None

    def expire(self, now: float) -> None:
        """Remove the responses that were not used for too long."""
        while self._kept:
            kept, used = next(iter(self._kept.values()))
            if now - used < self._most_s:
                return
            self._remove(kept)
            self._dropped("age")

    def _drop_of(self, account: _AccountResponses, why: Dropped) -> None:
        kept, _ = self._kept[next(iter(account.ids))]
        self._remove(kept)
        self._dropped(why)

    def _add(self, kept: StoredResponse, now: float) -> None:
        self._kept[kept.id] = (kept, now)
        account = self._accounts.setdefault(kept.account, _AccountResponses())
        account.ids[kept.id] = None
        account.size_bytes += kept.size_bytes
        self.size_bytes += kept.size_bytes

    def _remove(self, kept: StoredResponse) -> None:
        del self._kept[kept.id]
        account = self._accounts[kept.account]
        del account.ids[kept.id]
        account.size_bytes -= kept.size_bytes
        self.size_bytes -= kept.size_bytes
        if not account.ids:
            del self._accounts[kept.account]

    def validate(self) -> None:
        """Assert the invariants."""
        assert len(self._kept) <= self._most
        assert self.size_bytes == sum(kept.size_bytes for kept, _ in self._kept.values()) <= self._most_bytes
        used = [at for _, at in self._kept.values()]
        assert used == sorted(used)
        for name, account in self._accounts.items():
            own = [kept for kept, _ in self._kept.values() if kept.account == name]
            assert list(account.ids) == [kept.id for kept in own] != []
            assert account.size_bytes == sum(kept.size_bytes for kept in own)
        assert sum(len(account.ids) for account in self._accounts.values()) == len(self._kept)
