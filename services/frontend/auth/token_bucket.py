"""A token bucket for rate limits per minute. Pure. Time, in seconds, is an argument.

    per_minute ──────────   full at first, and a minute after it was empty
        │ spend ▼  ▲ refills by per_minute / 60 a second
        0 ───────────────
        │ debt: an amount that is known only afterwards may exceed the level; it must be refilled before the next use

The only state is the time at which the bucket will be full (the generic cell rate algorithm of ITU-T I.371 in its
virtual scheduling form).
"""

from __future__ import annotations

MINUTE_S = 60.0
_ROUNDING = 1e-6
"""Tolerance for float rounding, so that a client that waited for `wait_s` is not refused again."""


class TokenBucket:
    """The rate limit of one key for one unit, requests or tokens."""

    def __init__(self, per_minute: int, now: float) -> None:
        assert per_minute > 0
        self.per_minute = per_minute
        self._full_at = now

    def level(self, now: float) -> float:
        """Return the amount that is available; a negative one is owed."""
        return self.per_minute - self._spent(now)

    def wait_s(self, amount: float, now: float) -> float:
        """Return the seconds until `amount` is available. More than `per_minute` is granted once the bucket is full,
        since it would never be otherwise; the rest is then owed."""
        missing = min(amount, self.per_minute) - self.level(now)
        return missing / self.per_minute * MINUTE_S if missing > _ROUNDING else 0.0

    def spend(self, amount: float, now: float) -> None:
        """Subtract an amount; a negative one is given back."""
        self._full_at = max(self._full_at, now) + amount / self.per_minute * MINUTE_S

    def until_full_s(self, now: float) -> float:
        """Return the seconds until the bucket is full if nothing more is spent."""
        return max(0.0, self._full_at - now)

    def set_rate(self, per_minute: int, now: float) -> None:
        """Change the limit; what was spent stays spent."""
        assert per_minute > 0
        spent, self.per_minute = self._spent(now), per_minute
        self._full_at = now + spent / per_minute * MINUTE_S

    def _spent(self, now: float) -> float:
        return self.until_full_s(now) * self.per_minute / MINUTE_S
