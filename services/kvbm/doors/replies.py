"""Sends kvbm's replies. A reply that cannot be sent is dropped and counted: the engine asks again, or has ended.

send       sends a reply at once
Request    one request, with the way back to its asker: a subject on NATS or a connection of the socket
queue      leaves it to one task, which sends in order: the later replies to a fetch
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from msgspec import Struct

from services.kvbm.metrics import StoreMetrics
from shared.bus.contract import Bus, Message
from shared.errors import BusDown, PayloadTooLarge, ProtocolError

_log = logging.getLogger(__name__)


Answer = Callable[[bytes, bool], Awaitable[bool]]
"""Sends a payload to an asker, and whether it is the last one. Returns whether it was sent."""


class Request(Struct, frozen=True):
    """One request of an engine, with the way back to it."""

    operation: str
    payload: bytes
    headers: Mapping[str, str]
    """Encoding and trace. One from the socket has at most the trace."""
    answer: Answer
    connection: int = 0
    """The number of the connection that it came through: higher than those of all earlier ones. 0 is NATS."""


class ReplySender:
    """Sends the replies of one kvbm."""

    def __init__(self, bus: Bus, metrics: StoreMetrics) -> None:
        self._bus = bus
        self._metrics = metrics
        self._later: asyncio.Queue[tuple[Answer, bytes, bool]] = asyncio.Queue()
        """Replies that wait for the task. The number of open fetch tickets bounds them."""

    async def send(self, message: Message, payload: bytes, *, last: bool = False) -> bool:
        """Send a reply in the encoding of the question. Return whether it was sent."""
        try:
            await self._bus.publish(message.reply, payload, headers=message.reply_headers(last=last))
        except (BusDown, ProtocolError) as wrong:  # ProtocolError: payload too large, or invalid subject
            self._metrics.unanswered.inc()
            if isinstance(wrong, PayloadTooLarge):
                _log.error("%s: no answer: %s", message.subject, wrong)
            return False
        return True

    def queue(self, answer: Answer, payload: bytes, *, last: bool) -> None:
        """Send the reply after all that were queued before it."""
        self._later.put_nowait((answer, payload, last))

    async def run(self) -> None:
        """Send what is queued, until cancelled."""
        while True:
            answer, payload, last = await self._later.get()
            await answer(payload, last)

    async def flush(self) -> None:
        """Send all that is queued now."""
        while not self._later.empty():
            answer, payload, last = self._later.get_nowait()
            await answer(payload, last)
