"""Decides at the door which requests are traced. Pure.

    the client's header          `trace.clients` = "follow"             "ignore"
    none, or malformed           drawn: one in 1 / `trace.sample`       drawn
    sampled                      traced, `clients_per_s` at most;       drawn
                                 those beyond are drawn
    not sampled                  not traced                             drawn

Clients that ask for traces cost the services as much as they ask for, hence the bound.
"""

from __future__ import annotations

from typing import Literal

from shared.tracing.traceparent import TraceParent


class DoorSampler:
    """The decisions of one process. `now_s` is on any clock that does not go back."""

    def __init__(self, sample: float, clients: Literal["follow", "ignore"], clients_per_s: float) -> None:
        self._sample = sample
        self._follows = clients == "follow"
        self._per_s = clients_per_s
        self._most = max(1.0, clients_per_s)
        self._left = self._most if clients_per_s > 0 else 0.0
        self._counted_s = float("-inf")

    def decide(self, given: TraceParent | None, drawn: float, now_s: float) -> bool:
        """Return whether a request is traced. `drawn` is a random number, 0 ≤ drawn < 1."""
        if given is not None and self._follows:
            if not given.sampled:
                return False
            if self._take(now_s):
                return True
        return drawn < self._sample

    def _take(self, now_s: float) -> bool:
        """Take one of the traces that clients may ask for."""
        if self._counted_s > float("-inf"):
            self._left = min(self._most, self._left + max(0.0, now_s - self._counted_s) * self._per_s)
        self._counted_s = now_s
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
