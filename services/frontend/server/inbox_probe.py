"""Whether NATS clients still listen at their inboxes.

    served(inbox) ──▶ every PROBE_S a message asks: one of the answer, or, where none came, one that says nothing
                  ──▶ the server answers "no responders" ──▶ Gone, out of whatever the block waits for

A client that went is so noticed within two PROBE_S of its going, in the queue and in a prefill as in decode.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from services.frontend.metrics import Metrics
from shared.bus.contract import LAST_HEADER, Bus
from shared.errors import BusDown
from shared.messages import JSON_HEADER

PROBE_S = 0.3
PROBES_PER_TURN = 64
"""Of the event loop: 4,096 clients that wait at once must not stop the streams of others."""


class ClientGone(Exception):
    """Nobody listens at the inbox any more."""


class ClientInbox:
    """One client's, while it is served."""

    def __init__(self, bus: Bus, subject: str, end: asyncio.Timeout) -> None:
        self.keepalive: bytes | None = None
        """A message that the client passes over; None: there is none, so it is asked only by messages of its answer."""
        self._bus = bus
        self._connections: int | None = None
        """Of the bus, when the answer's first message was sent."""
        self._subject = subject
        self._end: asyncio.Timeout | None = end
        self._clock = asyncio.get_running_loop().time
        self._due = True
        """The next message asks."""
        self._asked_s = self._asked_before_s = self._clock()
        """When it was asked last, and the time before."""

    async def send(self, payload: bytes, headers: Mapping[str, str] = JSON_HEADER) -> None:
        """A message of the answer; with the last one, NATS has them all. Raises BusDown, also where one before it may
        be lost: an answer with a gap must not get an end."""
        if self._connections is None:
            self._connections = self._bus.connections
        elif self._connections != self._bus.connections:
            raise BusDown("NATS was away in the middle of the answer")
        if LAST_HEADER in headers:
            self.keepalive = None  # a client that has its answer goes: it must not be asked any more
        await self._publish(payload, headers)
        if LAST_HEADER in headers:
            await self._bus.confirm(self._connections)

    async def _publish(self, payload: bytes, headers: Mapping[str, str]) -> None:
        if not self._due:
            await self._bus.publish(self._subject, payload, headers=headers)
            return
        self._due = False
        self._asked_before_s, self._asked_s = self._asked_s, self._clock()
        await self._bus.publish(self._subject, payload, headers=headers, gone=self._found_gone)

    async def probe(self) -> None:
        """PROBE_S have passed. Raises BusDown."""
        if self._due and self.keepalive is not None:
            await self._publish(self.keepalive, JSON_HEADER)
        self._due = True

    def close(self) -> float:
        """No longer served. For how long nobody can have listened, at most."""
        self._end = None
        return self._clock() - self._asked_before_s

    def _found_gone(self) -> None:
        end, self._end = self._end, None
        if end is not None:  # once: a second time, while the block still ends, would raise
            end.reschedule(self._clock())


class ClientInboxes:
    """Those of all requests that came by NATS."""

    def __init__(self, bus: Bus, metrics: Metrics) -> None:
        self._bus = bus
        self._metrics = metrics
        self._served: dict[ClientInbox, None] = {}

    @asynccontextmanager
    async def watch(self, subject: str) -> AsyncIterator[ClientInbox]:
        """Raises Gone out of the block as soon as nobody is found to listen."""
        end = asyncio.timeout(None)
        inbox = ClientInbox(self._bus, subject, end)
        self._served[inbox] = None
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
            raise ClientGone from None
        finally:
            del self._served[inbox]

    async def run(self) -> None:
        """Asks, until cancelled."""
        while True:
            await asyncio.sleep(PROBE_S)
            for number, inbox in enumerate(list(self._served), 1):
                try:
                    await inbox.probe()
                except BusDown:
                    break  # nobody can be asked now
                if not number % PROBES_PER_TURN:
                    await asyncio.sleep(0)
