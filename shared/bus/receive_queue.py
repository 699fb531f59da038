"""A subscription's receiving end: a bounded queue and one task that hands its messages over in order.

    offer ──▶ [ waiting, bounded ] ──▶ receive(message), one at a time
      └─ over the bound: counted, told, and given back to `over`

A message that cannot be read (`receive` raised ProtocolError) is counted, and told once a minute: anybody may send one,
so a flood of them must not fill the log. The same for NATS and the in-process twin, so that both drop, count, log and
drain alike.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from shared.bus.contract import Message, Receive, SubscriptionStatistics
from shared.errors import PayloadTooLarge, ProtocolError
from shared.rate_limited_log import RateLimitedLog

PENDING_LIMIT_BYTES = 64 << 20
_FAIR_SHARE = 64
"""Messages handed over before the loop gets a turn, where `receive` never waits."""

_log = logging.getLogger(__name__)


class ReceiveQueue:
    """Owns the task from construction (in a running loop) until `drain`.

    Beyond `pending_limit` messages or PENDING_LIMIT_BYTES waiting, new ones are dropped. What cannot be read is
    logged in `unreadable`, which several queues may share.
    """

    def __init__(
        self,
        subject: str,
        receive: Receive,
        *,
        pending_limit: int,
        dropped: Callable[[int], None] | None = None,
        over: Callable[[Message], None] | None = None,
        unreadable: RateLimitedLog | None = None,
    ) -> None:
        assert pending_limit > 0
        self._subject = subject
        self._receive = receive
        self._pending_limit = pending_limit
        self._tell_dropped = dropped
        self._over = over
        self._waiting: deque[Message] = deque()
        self._waiting_bytes = 0
        self._received = 0
        self._dropped = 0
        self._failed = 0
        self._malformed = 0
        self._unreadable = RateLimitedLog() if unreadable is None else unreadable
        self._closing = False
        self._wake = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._hand_over(), name=f"receive {subject}")

    def offer(self, message: Message) -> None:
        """Queue a message, or drop it at the bound."""
        if self._closing:
            return
        self._received += 1
        size = _size_bytes(message)
        if len(self._waiting) >= self._pending_limit or self._waiting_bytes + size > PENDING_LIMIT_BYTES:
            self.lost(1)
            if self._over is not None:
                self._over(message)
            return
        self._waiting.append(message)
        self._waiting_bytes += size
        self._wake.set()

    def lost(self, count: int) -> None:
        """Count messages that were dropped, here or before they came here."""
        self._dropped += count
        if self._tell_dropped is not None:
            self._tell_dropped(self._dropped)

    def statistics(self) -> SubscriptionStatistics:
        return SubscriptionStatistics(
            received=self._received,
            dropped=self._dropped,
            pending=len(self._waiting),
            failed=self._failed,
            malformed=self._malformed,
        )

    async def drain(self) -> None:
        """Take nothing more; return when all that waits has been handed over. Idempotent.

        Called out of `receive` itself it returns at once, and what waits is handed over afterwards. Cancelled, it ends
        `receive` where it stands.
        """
        self._closing = True
        self._wake.set()
        if asyncio.current_task() is self._task:
            return
        try:
            await asyncio.wait([self._task])
        except asyncio.CancelledError:
            self._task.cancel()
            raise

    def validate(self) -> None:
        assert self._waiting_bytes == sum(_size_bytes(message) for message in self._waiting)
        assert len(self._waiting) <= self._pending_limit
        assert self._waiting_bytes <= PENDING_LIMIT_BYTES

    async def _hand_over(self) -> None:
        share = 0
        while True:
            while self._waiting:
                message = self._waiting.popleft()
                self._waiting_bytes -= _size_bytes(message)
                try:
                    await self._receive(message)
                except Exception as wrong:  # noqa: BLE001 - the subscriber's code: one bad message must not end it
                    self._went_wrong(message, wrong)
                share += 1
                if share >= _FAIR_SHARE:
                    share = 0
                    await asyncio.sleep(0)
            if self._closing:
                return
            self._wake.clear()
            await self._wake.wait()

    def _went_wrong(self, message: Message, wrong: Exception) -> None:
        """The sender's fault, or ours. (An answer over the payload limit is a ProtocolError, but of our making.)"""
        if isinstance(wrong, ProtocolError) and not isinstance(wrong, PayloadTooLarge):
            self._malformed += 1
            self._unreadable.warn(f"unreadable message on {self._subject}", f"{message.subject}: {wrong}")
        else:
            self._failed += 1
            _log.error("receiving from %s failed on %s", self._subject, message.subject, exc_info=wrong)


def _size_bytes(message: Message) -> int:
    """Payload and headers, either of which may be all of a message."""
    if not message.headers:
        return len(message.payload)
    return len(message.payload) + sum([len(name) + len(value) for name, value in message.headers.items()])
