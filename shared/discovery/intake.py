"""Limits which keys of a back end a watcher takes in, and counts those that it leaves out. Pure.

    key and value ──▶ too large, or unreadable ──▶ left out
          └─────────▶ a place is free ──▶ taken in
                          └── no place ──▶ left out, until a new listing finds a place

Any client that can write to the back end can fill it. A key that is left out uses no memory here and displaces no
other: in a listing the oldest keys get the places, and an unreadable key takes none.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable, Mapping

from msgspec import Struct

from shared.discovery.contract import LeftOut, Read
from shared.errors import ProtocolError


class IntakeLimits(Struct, frozen=True):
    """The limits of a watcher or a listing."""

    entries: int = 1 << 14
    """The maximum number of keys."""
    value_bytes: int = 1 << 16
    """The maximum size of a value."""
    page: int = 512
    """The maximum number of keys that a back end is asked for at once."""


DEFAULT = IntakeLimits()


class Intake:
    """The keys of one watcher. Without `read`, every value counts as readable."""

    def __init__(self, read: Read | None = None, limits: IntakeLimits = DEFAULT) -> None:
        self._read = read
        self._limits = limits
        self._looked: Mapping[str, bytes] = {}
        self.entries: dict[str, bytes] = {}
        """The keys that were taken in; a listing puts the oldest first."""
        self.left_out = LeftOut(0)
        """The number of keys left out so far, and the latest one."""
        self._crowded = False
        """Whether a key was left out because no place was free, since the last listing."""

    @property
    def reload_due(self) -> bool:
        """Whether a new listing would take in more keys."""
        return self._crowded and len(self.entries) < self._limits.entries

    async def load_pages(self, pages: AsyncIterable[Iterable[tuple[int, str, bytes]]]) -> None:
        """Take in a listing of everything, as (age, key, value) in any order; the lowest age is the oldest."""
        self._crowded = False
        oldest: list[tuple[int, str, bytes]] = []
        async for page in pages:
            for entry in page:
                if why := self._fault(*entry[1:]):
                    self._leave_out(entry[1], why)
                else:
                    oldest.append(entry)
            oldest.sort()
            for _, key, _ in oldest[self._limits.entries :]:
                self._leave_out(key, self._crowd())
            del oldest[self._limits.entries :]
        self.entries = {key: value for _, key, value in oldest}

    def load(self, found: Mapping[str, bytes]) -> None:
        """Take in a listing of everything, oldest first.

        `found` must not be changed afterwards: a key that is left out again, unchanged since the last listing, is not
        counted again.
        """
        before, self._looked = self._looked, found
        self._crowded = False
        entries: dict[str, bytes] = {}
        for key, value in found.items():
            why = self._fault(key, value) or (self._crowd() if len(entries) >= self._limits.entries else "")
            if not why:
                entries[key] = value
            elif before.get(key) != value:
                self._leave_out(key, why)
        self.entries = entries

    def put(self, key: str, value: bytes) -> bool:
        """Take in a key that was set. Return whether that changes `entries`."""
        why = self._fault(key, value)
        if not why and key not in self.entries and len(self.entries) >= self._limits.entries:
            why = self._crowd()
        if why:
            self._leave_out(key, why)
            return self.remove(key)
        self.entries[key] = value
        return True

    def remove(self, key: str) -> bool:
        """Drop a key that was removed. Return whether that changes `entries`."""
        return self.entries.pop(key, None) is not None

    def _fault(self, key: str, value: bytes) -> str:
        """Return why a key gets no place. Empty if it may have one."""
        if len(value) > self._limits.value_bytes:
            return f"its value has {len(value)} bytes, more than {self._limits.value_bytes}"
        if self._read is None:
            return ""
        try:
            self._read(key, value)
        except ProtocolError as wrong:
            return str(wrong)
        return ""

    def _crowd(self) -> str:
        self._crowded = True
        return f"there are {self._limits.entries} older keys, which is the limit"

    def _leave_out(self, key: str, why: str) -> None:
        self.left_out = LeftOut(self.left_out.count + 1, key, why)

    def validate(self) -> None:
        """Assert the invariants."""
        assert len(self.entries) <= self._limits.entries
        assert all(len(value) <= self._limits.value_bytes for value in self.entries.values())
        assert self.left_out.count or not self._crowded
