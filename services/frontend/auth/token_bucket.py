"""So much a minute: a token bucket. Pure. The clock, in seconds, is an argument.

    per_minute ──────────   full at first, and a minute after it was empty
        │  take ▼  ▲ fills by per_minute / 60 a second
        0 ───────────────
        │ debt: what is known only afterwards may be more than there was; nothing may be had until it is paid

All that is kept is when it will be full (the generic cell rate algorithm, ITU-T I.371, in its virtual scheduling form).
"""

from __future__ import annotations

MINUTE_S = 60.0
_ROUNDING = 1e-6
"""Of what is missing: whoever waited as long as he was told is not sent away for a float's last digits."""


class TokenBucket:
    """What one key may have a minute of one thing."""

    def __init__(self, per_minute: int, now: float) -> None:
        assert per_minute > 0
        self.per_minute = per_minute
        self._full_at = now

    def level(self, now: float) -> float:
        """What may be had; less than 0: so much is owed."""
        return self.per_minute - self._spent(now)

    def wait_s(self, amount: float, now: float) -> float:
        """How long until so much may be had. More than a minute brings is had when it is full, and owed then: else it
        could never be."""
        missing = min(amount, self.per_minute) - self.level(now)
        return missing / self.per_minute * MINUTE_S if missing > _ROUNDING else 0.0

    def spend(self, amount: float, now: float) -> None:
        """So much is had, or, less than 0, given back."""
        self._full_at = max(self._full_at, now) + amount / self.per_minute * MINUTE_S

    def until_full_s(self, now: float) -> float:
        """How long until it is full, if nobody takes more."""
        return max(0.0, self._full_at - now)

    def set_rate(self, per_minute: int, now: float) -> None:
        """Another limit; what was spent stays spent."""
        assert per_minute > 0
        spent, self.per_minute = self._spent(now), per_minute
        self._full_at = now + spent / per_minute * MINUTE_S

    def _spent(self, now: float) -> float:
        return self.until_full_s(now) * self.per_minute / MINUTE_S
