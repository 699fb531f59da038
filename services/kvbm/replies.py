"""Answers on their way. One that cannot be sent is dropped and counted: who asked will ask again, or has gone.

answer     at once
later      by one task, in order: the replies to a fetch, which come by and by
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from services.kvbm.metrics import StoreMetrics
from shared.bus.contract import Bus, Message
from shared.errors import BusDown, PayloadTooLarge, ProtocolError

_log = logging.getLogger(__name__)


class ReplySender:
    """Of one kvbm."""

    def __init__(self, bus: Bus, metrics: StoreMetrics) -> None:
        self._bus = bus
        self._metrics = metrics
        self._later: deque[tuple[Message, bytes, bool]] = deque()
        """Bounded by what fetch tickets there may be."""
        self._waiting = asyncio.Event()

    async def send(self, message: Message, payload: bytes, *, last: bool = False) -> bool:
        """In the encoding of the question. Whether it was sent."""
        try:
            await self._bus.publish(message.reply, payload, headers=message.reply_headers(last=last))
        except (BusDown, ProtocolError) as wrong:  # the latter: too large, or to what is no subject
            self._metrics.unanswered.inc()
            if isinstance(wrong, PayloadTooLarge):
                _log.error("%s: no answer: %s", message.subject, wrong)
            return False
        return True

    def queue(self, message: Message, payload: bytes, *, last: bool) -> None:
        """After all that was to come later before."""
        self._later.append((message, payload, last))
        self._waiting.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._waiting.wait()
            self._waiting.clear()
            await self.flush()

    async def flush(self) -> None:
        """All that was to come later."""
        while self._later:
            message, payload, last = self._later.popleft()
            await self.send(message, payload, last=last)
