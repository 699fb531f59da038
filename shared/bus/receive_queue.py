"""The receiving end of a subscription: a bounded queue, and one task that delivers its messages in order.

    offer ──▶ [ waiting, limited ] ──▶ receive(message), one at a time
      └─ over the limit: counted, `dropped` and `overflowed` are called

A message that cannot be read (`receive` raises ProtocolError) is counted, and logged at most once a minute: any client
may send such messages, so a flood of them must not fill the log. The buses over NATS and inside one process share this
class, so that both drop, count, log and drain in the same way.
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
"""The number of messages delivered before the event loop gets a turn, if `receive` never waits."""

_log = logging.getLogger(__name__)


class ReceiveQueue:
    """Owns the task from construction (in a running loop) until `drain`.

    While `pending_limit` messages or PENDING_LIMIT_BYTES wait, new messages are dropped. Unreadable messages are logged
    with `unreadable`, which several queues may share.
    """

    def __init__(
        self,
        subject: str,
        receive: Receive,
        *,
        pending_limit: int,
        dropped: Callable[[int], None] | None = None,
        overflowed: Callable[[Message], None] | None = None,
        unreadable: RateLimitedLog | None = None,
    ) -> None:
        assert pending_limit > 0
        self._subject = subject
        self._receive = receive
        self._pending_limit = pending_limit
        self._tell_dropped = dropped
        self._overflowed = overflowed
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
        """Queue a message, or drop it at the limit."""
        if self._closing:
            return
        self._received += 1
        size = _size_bytes(message)
        if len(self._waiting) >= self._pending_limit or self._waiting_bytes + size > PENDING_LIMIT_BYTES:
            self._dropped += 1
            if self._tell_dropped is not None:
                self._tell_dropped(self._dropped)
            if self._overflowed is not None:
                self._overflowed(message)
            return
        self._waiting.append(message)
        self._waiting_bytes += size
        self._wake.set()

    def statistics(self) -> SubscriptionStatistics:
        return SubscriptionStatistics(
            received=self._received,
            dropped=self._dropped,
            pending=len(self._waiting),
            failed=self._failed,
            malformed=self._malformed,
        )

    async def drain(self) -> None:
        """Accept no more messages, and return when the waiting ones have been delivered. Idempotent.

        Called from `receive` itself, it returns at once, and the waiting messages are delivered afterwards. If it is
        cancelled, it cancels `receive`.
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
        """Count and log an exception. PayloadTooLarge is a ProtocolError, but the fault is ours: our answer is too
        large."""
        if isinstance(wrong, ProtocolError) and not isinstance(wrong, PayloadTooLarge):
            self._malformed += 1
            self._unreadable.warn(f"unreadable message on {self._subject}", f"{message.subject}: {wrong}")
        else:
            self._failed += 1
            _log.error("receiving from %s failed on %s", self._subject, message.subject, exc_info=wrong)


def _size_bytes(message: Message) -> int:
    """Return the size of payload and headers; a message may consist of either alone."""
    if not message.headers:
        return len(message.payload)
    return len(message.payload) + sum([len(name) + len(value) for name, value in message.headers.items()])
