"""Attempts that reports of workers never have: their requests go to the server that a worker is attached to.

    select ─▶ Select: reserved ── mark_prefilled ─▶ Prefilled ── finish ─▶ Finished

So each attempt for which a router may have a reservation ends with Finished, whatever became of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from msgspec.structs import replace

from services.frontend.requests.events import Unrouted
from services.frontend.requests.service import RequestService
from shared.messages.select import Finished, Prefilled, Select, SelectReply


class UnreportedAttempts:
    """The attempts of one request."""

    def __init__(self, service: RequestService, asked: Select, deadline: float) -> None:
        """`asked` has what routers need to know of the request. `deadline` is on the loop's clock."""
        self._service, self._deadline = service, deadline
        self._asked = replace(asked, whole=True, unreported=True)
        self.latest = 0
        """The number of the latest attempt for which a router may have a reservation."""
        self._ended = 0
        """The number of the latest attempt that was reported as ended. Those before it were, too."""

    async def select(self, excluded: Iterable[str], *, waits: bool, explain: bool = False) -> SelectReply | Unrouted:
        """Have a router reserve the next attempt. With `waits` it refuses one that would wait for too long."""
        self.latest += 1
        select = replace(
            self._asked,
            attempt=self.latest,
            excluded=tuple(excluded),
            explain=explain,
            time_left_s=max(0.0, self._deadline - asyncio.get_running_loop().time()),
            wait_limit_s=self._service.limits.wait_s if waits else 0.0,
        )
        answer = await self._service.calls.ask_routers(select, self._deadline)
        assert answer is not None, "the answer is always wanted"
        return answer

    def mark_prefilled(self, instance: str, took_s: float) -> None:
        """Report the first text of the latest attempt, `took_s` after the request came."""
        first = Prefilled(self._asked.request, self.latest, -1, took_s, instance=instance)
        self._service.publish_load(self._asked.model, first)

    def forget_hashes(self) -> None:
        """Let go of the prompt's hashes. No attempt follows."""
        self._asked = replace(self._asked, hashes=b"")

    def finish(self, last: int | None = None) -> None:
        """Report the end of all attempts, or of those up to `last`. Idempotent."""
        last = self.latest if last is None else last
        for attempt in range(self._ended + 1, last + 1):
            self._service.publish_load(self._asked.model, Finished(self._asked.request, attempt))
        self._ended = max(self._ended, last)
