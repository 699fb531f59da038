"""BackOff: how long to wait before an engine is started again. Pure."""

from __future__ import annotations

BACK_OFF_FIRST_S = 0.25
"""Seconds before the first new start."""
BACK_OFF_MOST_S = 10.0
"""Most seconds before a new start."""
STABLE_AFTER_S = 60.0
"""Seconds after which an engine that was lost begins the back-off again."""


class BackOff:
    """The waits between the starts of one engine after another."""

    def __init__(self) -> None:
        self._next_s = BACK_OFF_FIRST_S

    def after(self, lived_s: float) -> float:
        """Return the seconds to wait after the loss of an engine that lived so long."""
        delay_s = BACK_OFF_FIRST_S if lived_s >= STABLE_AFTER_S else self._next_s
        self._next_s = min(2 * delay_s, BACK_OFF_MOST_S)
        return delay_s
