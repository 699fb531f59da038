"""The keys that one watcher takes to be there, through outages of the back end. Pure.

    absent ──seen──▶ present ──gone in sight──▶ missing, asked at once ──published──▶ asked again each TTL
      ▲                ▲  │                       │  │  └──silent for the first time──▶ asked again a TTL later
      │                │  └──gone in doubt──▶ missing, asked each TTL
      │                └───────── seen ───────────┘  │
      └─ in sight: all other answers; in doubt: gone ┘

A lease may be revoked, or a key deleted, while the owner lives. So when a key is deleted in sight, its owner is asked
at once, and the key stays while the owner says that it publishes it. An owner that does not answer may have stood still
for a moment, as all of a machine can at once while something takes its disk or processors. So it has a TTL to publish
the key again. If it is silent then too, it may be frozen for long, and the key is removed.

A view is *in doubt* for one TTL after each outage of the back end, because leases may have ended while no owner could
renew them: a key that is missing then proves nothing. Its owner has a TTL to publish it again. Then the owner is asked,
and the key is removed only if it is proved that the owner is gone. While the back end is out of reach, nothing is asked
and nothing changes.

docs/decisions/0043 gives the reasons.
"""

from __future__ import annotations

from collections.abc import Mapping

from shared.discovery.contract import Change, KeyAdded, KeyRemoved, OwnerAnswer, Synced


class KeyView:
    """Turns the keys that a back end shows into changes. `now` is a monotonic clock in seconds."""

    def __init__(self, ttl_s: float) -> None:
        self.entries: dict[str, bytes] = {}
        """The present and the missing keys: those reported as added and not as removed."""
        self.missing: dict[str, float] = {}
        """When to ask the owner of each missing key; the keys are also in `entries`."""
        self.deleted_in_sight: set[str] = set()
        """The missing keys that were deleted while the view was not in doubt."""
        self.silent: set[str] = set()
        """The keys of `deleted_in_sight` whose owner did not answer when it was asked last."""
        self._ttl_s = ttl_s
        self._synced = False
        self._blind = True
        self._losses = 0
        self._doubt_until = float("-inf")

    def update(self, now: float, found: Mapping[str, bytes], losses: int) -> list[Change]:
        """Compare with `found`, which the back end shows after `losses` outages so far."""
        self._blind = False
        if losses != self._losses:
            self._losses = losses
            self._doubt_until = now + self._ttl_s
            self.missing = dict.fromkeys(self.missing, self._doubt_until)
            self.deleted_in_sight.clear()
            self.silent.clear()
        changes: list[Change] = []
        for key in [key for key in self.entries if key not in found]:
            if now < self._doubt_until:
                self.missing.setdefault(key, now + self._ttl_s)
            elif key not in self.missing:
                self.missing[key] = now
                self.deleted_in_sight.add(key)
        for key, value in found.items():
            self._find(key)
            if self.entries.get(key) != value:
                self.entries[key] = value
                changes.append(KeyAdded(key, value))
        if not self._synced:
            self._synced = True
            changes.append(Synced())
        return changes

    def mark_unreachable(self) -> None:
        """Note that the back end is out of reach: the last view stays."""
        self._blind = True

    @property
    def next_due(self) -> float | None:
        """When `keys_to_verify` will return a key. None if it returns none before the next update."""
        return None if self._blind else min(self.missing.values(), default=None)

    def keys_to_verify(self, now: float) -> dict[str, bytes]:
        """Return the missing keys whose owners must be asked now, with their last values."""
        if self._blind:
            return {}
        return {key: self.entries[key] for key, when in self.missing.items() if when <= now}

    def apply_owner_answers(self, now: float, asked: Mapping[str, OwnerAnswer]) -> list[Change]:
        """Apply the answers of the owners of missing keys."""
        changes: list[Change] = []
        for key, owner in asked.items():
            if key not in self.missing:
                continue
            if self._stays(key, owner):
                self.missing[key] = now + self._ttl_s
            else:
                self._find(key)
                del self.entries[key]
                changes.append(KeyRemoved(key))
        return changes

    def _stays(self, key: str, owner: OwnerAnswer) -> bool:
        """Return whether a missing key stays after an answer of its owner."""
        if key not in self.deleted_in_sight:
            return owner != "gone"
        first_silence = owner == "silent" and key not in self.silent
        if first_silence:
            self.silent.add(key)
        else:
            self.silent.discard(key)
        return first_silence or owner == "publishes"

    def _find(self, key: str) -> None:
        """Note that a key is no longer missing."""
        self.missing.pop(key, None)
        self.deleted_in_sight.discard(key)
        self.silent.discard(key)

    def validate(self) -> None:
        """Assert the invariants."""
        assert self.silent <= self.deleted_in_sight <= self.missing.keys() <= self.entries.keys()
        assert self._synced or not self.entries
        assert self.next_due is None or self.missing
