"""How long a cancellation takes: from a client's going, as noticed here, to the worker's word that its blocks are free.

    client gone ──▶ begun ──▶ (Cancel to the worker) ──▶ a part with a finish reason ──▶ ended: observed

A worker that dies, or that never had the attempt, sends no such part: the oldest of LIMIT are forgotten.
"""

from __future__ import annotations

from prometheus_client import Histogram

from services.frontend.requests.session import Session

LIMIT = 4096


class CancelLatency:
    """Attempts whose clients went. Times are the loop's."""

    def __init__(self, seconds: Histogram) -> None:
        self._seconds = seconds
        self._begun: dict[tuple[str, int], float] = {}

    def client_gone(self, session: Session, now: float) -> None:
        """Its client went; call it before the session hears of that. One that no worker has is over at once."""
        if not session.instance:
            return
        if len(self._begun) >= LIMIT:
            del self._begun[next(iter(self._begun))]
        self._begun[session.request, session.attempt] = now

    def attempt_ended(self, request: str, attempt: int, now: float) -> None:
        """A worker told the end of an attempt that nobody waits for."""
        begun = self._begun.pop((request, attempt), None)
        if begun is not None:
            self._seconds.observe(now - begun)

    def validate(self) -> None:
        """Asserts the invariants."""
        assert len(self._begun) <= LIMIT
