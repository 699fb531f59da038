"""What one watcher believes about a set of keys, through outages of the back end. Pure.

    absent ──seen──▶ present ──gone──▶ missing ──asked at once: its owner publishes it──▶ asked again a TTL later
      ▲                ▲      │          │  │                                                  │
      │                └──────┼── seen ──┘  └──all else──▶ absent                              │
      │                       └──gone, in doubt──▶ missing ──asked a TTL later: no proof of an end──┘
      └────────────────────────────────────────────────────┴── its owner is gone

A lease may be revoked, or a key deleted, under an owner that lives. So the owner is asked of each key that is seen to
go: only its word that it publishes the key keeps the key. Its silence does not, for that is how a frozen owner ends.

A view is *in doubt* for one TTL after each loss of sight, because leases may have ended while nobody could keep them
alive: a key that is gone then proves nothing. Its owner gets a TTL to publish again, is asked then, and is buried only
where there is proof that it is gone. While the back end is out of sight nothing is asked and nothing changes.
"""

from __future__ import annotations

from collections.abc import Mapping

from shared.discovery.contract import Added, Change, Owner, Removed, Synced


class KeyView:
    """Turns what a back end shows into changes. `now` is a monotonic clock in seconds."""

    def __init__(self, ttl_s: float) -> None:
        self.entries: dict[str, bytes] = {}
        """Present and missing keys: what the watcher was told of and not told to be gone."""
        self.missing: dict[str, float] = {}
        """Missing key → when to ask its owner; each is also in `entries`."""
        self.seen_to_go: set[str] = set()
        """Those of the missing keys that went without a doubt."""
        self._ttl_s = ttl_s
        self._synced = False
        self._blind = True
        self._losses = 0
        self._doubt_until = float("-inf")

    def update(self, now: float, found: Mapping[str, bytes], losses: int) -> list[Change]:
        """The back end shows `found`, having been lost from sight `losses` times so far."""
        self._blind = False
        if losses != self._losses:
            self._losses = losses
            self._doubt_until = now + self._ttl_s
            self.missing = dict.fromkeys(self.missing, self._doubt_until)
            self.seen_to_go.clear()
        changes: list[Change] = []
        for key in [key for key in self.entries if key not in found]:
            if now < self._doubt_until:
                self.missing.setdefault(key, now + self._ttl_s)
            elif key not in self.missing:
                self.missing[key] = now
                self.seen_to_go.add(key)
        for key, value in found.items():
            self._find(key)
            if self.entries.get(key) != value:
                self.entries[key] = value
                changes.append(Added(key, value))
        if not self._synced:
            self._synced = True
            changes.append(Synced())
        return changes

    def lost(self) -> None:
        """The back end is out of sight: the last view stands."""
        self._blind = True

    @property
    def next_due(self) -> float | None:
        """When `due` will name a key; None: not before something is seen."""
        return None if self._blind else min(self.missing.values(), default=None)

    def suspects(self, now: float) -> dict[str, bytes]:
        """Missing keys whose owners are to be asked now, with their last values."""
        if self._blind:
            return {}
        return {key: self.entries[key] for key, when in self.missing.items() if when <= now}

    def verdicts(self, now: float, asked: Mapping[str, Owner]) -> list[Change]:
        """The owners of missing keys were asked."""
        changes: list[Change] = []
        for key, owner in asked.items():
            if key not in self.missing:
                continue
            if owner == "publishes" or (owner != "gone" and key not in self.seen_to_go):
                self.missing[key] = now + self._ttl_s
            else:
                self._find(key)
                del self.entries[key]
                changes.append(Removed(key))
        return changes

    def _find(self, key: str) -> None:
        """It is missing no more."""
        self.missing.pop(key, None)
        self.seen_to_go.discard(key)

    def validate(self) -> None:
        """Asserts the invariants."""
        assert self.seen_to_go <= self.missing.keys() <= self.entries.keys()
        assert self._synced or not self.entries
        assert self.next_due is None or self.missing
