"""Publishes without waiting for an answer: load events to the routers of a model, and single messages.

    publish_load, post ──▶ [ waiting, limited ] ──▶ at once if nothing was sent lately, else after `batch_s`

Everything that comes within `batch_s` is sent together, load events as one message per model. While NATS is away, load
events wait, up to a limit: a lost Finished would leave load at a router until a lease ends. Single messages are
dropped, so they must be such that their sender repeats them.
"""

from __future__ import annotations

import asyncio
import logging

from prometheus_client import CollectorRegistry

from shared import subjects
from shared.bus.contract import Bus
from shared.errors import BusDown, ProtocolError
from shared.messages.select import LOAD_EVENTS, LoadEvent, LoadEvents
from shared.metrics import counter, register_metrics

BUS_DOWN_S = 0.5
EVENTS_LIMIT = 65_536
"""The maximum number of load events of one model that wait."""
EVENTS_A_MESSAGE = 4096

_log = logging.getLogger(__name__)


class Outbox:
    """Collects messages, and publishes them in `run`."""

    # fmt: off
    _unsent = counter("headrace_unsent_load_events", "",
        "Load events dropped while NATS was away",
        "NATS was away; reports make it good, and for a gateway's requests the end of their time.")
    _unsendable = counter("headrace_unsendable_messages", "",
        "Messages dropped because their subject or size was invalid",
        "A message is larger than NATS allows: raise its `max_payload`.")
    # fmt: on

    def __init__(self, bus: Bus, namespace: str, registry: CollectorRegistry, *, batch_s: float) -> None:
        self._bus = bus
        self._namespace = namespace
        self._batch_s = batch_s
        self._posted: list[tuple[str, bytes]] = []
        self._events: dict[str, list[LoadEvent]] = {}
        self._wake = asyncio.Event()
        register_metrics(self, registry)

    def post(self, subject: str, payload: bytes) -> None:
        """Publish one message soon; it is dropped while NATS is away."""
        self._posted.append((subject, payload))
        self._wake.set()

    def publish_load(self, model: str, event: LoadEvent) -> None:
        """Publish a load event to every router of a model soon."""
        waiting = self._events.setdefault(model, [])
        if len(waiting) >= EVENTS_LIMIT:
            del waiting[: EVENTS_LIMIT // 2]
            self._unsent.inc(EVENTS_LIMIT // 2)
            _log.error("dropped %d load events of model %s: NATS is away", EVENTS_LIMIT // 2, model)
        waiting.append(event)
        self._wake.set()

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            sent = await self.flush()
            await asyncio.sleep(self._batch_s if sent else BUS_DOWN_S)

    async def flush(self) -> bool:
        """Publish everything that waits. Return whether NATS accepted it. Calls may overlap: each takes what it
        sends."""
        posted, self._posted = self._posted, []
        try:
            for subject, payload in posted:
                await self._publish(subject, payload)
            while self._events:
                await self._publish_events(*next(iter(self._events.items())))
        except BusDown:
            self._wake.set()
            return False
        return True

    async def _publish_events(self, model: str, events: list[LoadEvent]) -> None:
        batch = events[:EVENTS_A_MESSAGE]
        del events[: len(batch)]
        if not events:
            del self._events[model]
        try:
            payload = LOAD_EVENTS.encode(LoadEvents(model, batch))
            await self._publish(subjects.router_load(self._namespace, model), payload)
        except BusDown:
            self._events[model] = batch + self._events.get(model, [])
            raise

    async def _publish(self, subject: str, payload: bytes) -> None:
        """Publish a message, or raise BusDown. One with an invalid subject is dropped: a peer sent an invalid name."""
        try:
            await self._bus.publish(subject, payload)
        except ProtocolError as wrong:
            self._unsendable.inc()
            _log.error("a message was dropped: %s", wrong)
