"""Notices NATS clients that no longer listen at their inboxes.

    watch(inbox) ──▶ every PROBE_S a message probes the inbox: one of the answer or, if none is due, a keepalive
                 ──▶ nats-server answers "no responders" ──▶ NoListener is raised from whatever the block awaits

So a client that leaves is noticed within two PROBE_S, whether its request is queued, in prefill or in decode.

NATS does not report that a subscriber left, but answers a message to its inbox with "no responders". To ask the server
for its subscriptions needs a system account.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from services.frontend.metrics import Metrics
from shared.bus.contract import LAST_HEADER, Bus
from shared.errors import BusDown
from shared.messages.codec import JSON_HEADER

PROBE_S = 0.3
"""Seconds between two probes of one inbox."""
PROBES_PER_TURN = 64
"""Probes sent in one turn of the event loop, so that 4,096 waiting clients do not stop the streams of others."""


class NoListener(Exception):
    """No client listens at the inbox any longer."""


class ClientInbox:
    """The inbox of one client while its request is served."""

    def __init__(self, bus: Bus, subject: str, end: asyncio.Timeout) -> None:
        self.keepalive: bytes | None = None
        """A message that the client ignores, sent as a probe. None means only messages of the answer probe the
        inbox."""
        self._bus = bus
        self._connections: int | None = None
        """The bus's count of connections when the first message of the answer was sent."""
        self._subject = subject
        self._end: asyncio.Timeout | None = end
        self._clock = asyncio.get_running_loop().time
        self._due = True
        """Whether the next message is to probe."""
        self._asked_s = self._asked_before_s = self._clock()
        """When the inbox was probed last, and the time before that."""

    async def send(self, payload: bytes, headers: Mapping[str, str] = JSON_HEADER) -> None:
        """Send a message of the answer. When the last one is sent, nats-server has them all.

        Raise BusDown, also if an earlier message may be lost: an answer with a gap must not get an end."""
        if self._connections is None:
            self._connections = self._bus.connections
        elif self._connections != self._bus.connections:
            raise BusDown("the connection to NATS was lost in the middle of the answer")
        if LAST_HEADER in headers:
            self.keepalive = None  # the client may leave once it has its answer, so stop probing
        await self._publish(payload, headers)
        if LAST_HEADER in headers:
            await self._bus.confirm(self._connections)

    async def _publish(self, payload: bytes, headers: Mapping[str, str]) -> None:
        if not self._due:
            await self._bus.publish(self._subject, payload, headers=headers)
            return
        self._due = False
        self._asked_before_s, self._asked_s = self._asked_s, self._clock()
        await self._bus.publish(self._subject, payload, headers=headers, no_responders=self._found_gone)

    async def probe(self) -> None:
        """Make the next message a probe; if none came since the last call, send a keepalive. Raise BusDown.

        To be called every PROBE_S."""
        if self._due and self.keepalive is not None:
            await self._publish(self.keepalive, JSON_HEADER)
        self._due = True

    def close(self) -> float:
        """Stop probing. Return the longest time in seconds for which the inbox can have had no listener."""
        self._end = None
        return self._clock() - self._asked_before_s

    def _found_gone(self) -> None:
        end, self._end = self._end, None
        if end is not None:  # a second call, while the block unwinds, would raise
            end.reschedule(self._clock())


class ClientInboxes:
    """The inboxes of all requests that came over NATS and are being served."""

    def __init__(self, bus: Bus, metrics: Metrics) -> None:
        self._bus = bus
        self._metrics = metrics
        self._watched: dict[ClientInbox, None] = {}

    @asynccontextmanager
    async def watch(self, subject: str) -> AsyncIterator[ClientInbox]:
        """Probe the inbox while the block runs; raise NoListener from the block as soon as no client listens."""
        end = asyncio.timeout(None)
        inbox = ClientInbox(self._bus, subject, end)
        self._watched[inbox] = None
        unnoticed_s = 0.0
        try:
            async with end:
                try:
                    yield inbox
                finally:
                    unnoticed_s = inbox.close()
        except TimeoutError:
            if not end.expired():
                raise
            self._metrics.unnoticed.observe(unnoticed_s)
            raise NoListener from None
        finally:
            del self._watched[inbox]

    async def run(self) -> None:
        """Probe all watched inboxes every PROBE_S until cancelled."""
        while True:
            await asyncio.sleep(PROBE_S)
            for number, inbox in enumerate(list(self._watched), 1):
                try:
                    await inbox.probe()
                except BusDown:
                    break  # no inbox can be probed now
                if not number % PROBES_PER_TURN:
                    await asyncio.sleep(0)
