"""What a watcher takes in of the keys that a back end holds, and what it leaves out. Pure.

    key and value ──▶ too large, or unreadable ──▶ left out
          └─────────▶ a place is free ──▶ taken in
                          └── none ──▶ left out, until a look at everything finds a place

Anybody who can write to the back end can fill it. What is left out costs no memory here and hides nothing: in a look at
everything the oldest keys get the places, and a key that cannot be read takes none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from shared.discovery.contract import LeftOut, Read
from shared.errors import ProtocolError


class Limits(Struct, frozen=True):
    """How much a watcher or a listing takes in."""

    entries: int = 1 << 14
    value_bytes: int = 1 << 16
    page: int = 512
    """Keys that a back end is asked for at once."""


DEFAULT = Limits()


class Intake:
    """Of one watcher; without `read` every value can be read."""

    def __init__(self, read: Read | None = None, limits: Limits = DEFAULT) -> None:
        self._read = read
        self._limits = limits
        self._looked: Mapping[str, bytes] = {}
        self.entries: dict[str, bytes] = {}
        """What was taken in; a look at everything puts the oldest first."""
        self.left_out = LeftOut(0)
        """All of it so far, and the latest one."""
        self._crowded = False
        """Whether a key was left out for want of a place since the last look."""

    @property
    def look_due(self) -> bool:
        """Whether a look at everything would take in more."""
        return self._crowded and len(self.entries) < self._limits.entries

    def look_page_by_page(self, pages: Iterable[Iterable[tuple[int, str, bytes]]]) -> None:
        """Everything that is there, as (age, key, value) in any order: the lowest age is the oldest."""
        self._crowded = False
        oldest: list[tuple[int, str, bytes]] = []
        for page in pages:
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

    def look(self, found: Mapping[str, bytes]) -> None:
        """Everything that is there, oldest first. `found` must not be changed afterwards: what is as it was in the look
        before is not counted again."""
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
        """A key was set. Whether that changes `entries`."""
        why = self._fault(key, value)
        if not why and key not in self.entries and len(self.entries) >= self._limits.entries:
            why = self._crowd()
        if why:
            self._leave_out(key, why)
            return self.remove(key)
        self.entries[key] = value
        return True

    def remove(self, key: str) -> bool:
        """A key is gone. Whether that changes `entries`."""
        return self.entries.pop(key, None) is not None

    def _fault(self, key: str, value: bytes) -> str:
        """Why a key takes no place; empty: it may have one."""
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
        return f"{self._limits.entries} older keys have all the places"

    def _leave_out(self, key: str, why: str) -> None:
        self.left_out = LeftOut(self.left_out.count + 1, key, why)

    def validate(self) -> None:
        """Asserts the invariants."""
        assert len(self.entries) <= self._limits.entries
        assert all(len(value) <= self._limits.value_bytes for value in self.entries.values())
        assert self.left_out.count or not self._crowded
