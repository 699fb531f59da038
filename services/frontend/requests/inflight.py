"""A request under way: its stream, with the clock readings that belong to it."""

from __future__ import annotations

import asyncio

from services.frontend.requests.stream import Stream


class Running:
    """One open request. Times are the loop's."""

    def __init__(self, stream: Stream, started: float, deadline: float) -> None:
        self.stream = stream
        self.started = started
        self.deadline = deadline
        self.waiting_since = started
        """Since when the client waits for a first token: of all, or of those behind a lost attempt's."""
        self.last_sign = started
        """When the present attempt was last heard of."""
        self.last_tokens: float | None = None
        """When tokens came last."""
        self.timer: asyncio.TimerHandle | None = None
