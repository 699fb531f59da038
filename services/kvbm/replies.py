"""Sends kvbm's replies. A reply that cannot be sent is dropped and counted: the engine asks again, or has ended.

send       sends a reply at once
queue      leaves it to one task, which sends in order: the later replies to a fetch
"""

from __future__ import annotations

import asyncio
import logging

from services.kvbm.metrics import StoreMetrics
from services.kvbm.socket_door import SocketQuestion, answer
from shared.bus.contract import Bus, Message
from shared.errors import BusDown, PayloadTooLarge, ProtocolError

_log = logging.getLogger(__name__)


class ReplySender:
    """Sends the replies of one kvbm."""

    def __init__(self, bus: Bus, metrics: StoreMetrics) -> None:
        self._bus = bus
        self._metrics = metrics
        self._later: asyncio.Queue[tuple[Message, bytes, bool]] = asyncio.Queue()
        """Replies that wait for the task. The number of open fetch tickets bounds them."""

    async def send(self, message: Message, payload: bytes, *, last: bool = False) -> bool:
        """Send a reply in the encoding of the question, the way that it came. Return whether it was sent."""
        if isinstance(message, SocketQuestion):
            sent = answer(message, payload, last=last)
            if not sent:
                self._metrics.unanswered.inc()
            return sent
        try:
            await self._bus.publish(message.reply, payload, headers=message.reply_headers(last=last))
        except (BusDown, ProtocolError) as wrong:  # the latter: the payload is too large, or the subject is none
            self._metrics.unanswered.inc()
            if isinstance(wrong, PayloadTooLarge):
                _log.error("%s: no answer: %s", message.subject, wrong)
            return False
        return True

    def queue(self, message: Message, payload: bytes, *, last: bool) -> None:
        """Send the reply after all that were queued before it."""
        self._later.put_nowait((message, payload, last))

    async def run(self) -> None:
        """Send what is queued, until cancelled."""
        while True:
            message, payload, last = await self._later.get()
            await self.send(message, payload, last=last)

    async def flush(self) -> None:
        """Send all that is queued now."""
        while not self._later.empty():
            message, payload, last = self._later.get_nowait()
            await self.send(message, payload, last=last)
