"""What the frontend tells without waiting for an answer: Cancel to workers, load events to routers.

What comes up within BATCH_S goes out together, load events as one message a model. While NATS is away load events wait,
up to a bound (a lost Finished would leave load at a router until a lease ends); Cancels are dropped, because a worker
that streams on is cancelled again by its own parts.
"""

from __future__ import annotations

import asyncio
import logging

from services.frontend.metrics import Metrics
from shared import subjects
from shared.errors import BusDown, ProtocolError
from shared.messages import CANCEL, LOAD_EVENTS, Cancel, LoadEvent, LoadEvents
from shared.messaging import Bus

BATCH_S = 0.005
BUS_DOWN_S = 0.5
EVENTS_LIMIT = 65_536
"""Load events waiting, of one model."""
EVENTS_A_MESSAGE = 4096

_log = logging.getLogger(__name__)


class Outbox:
    """Collects, and publishes in `run`."""

    def __init__(self, bus: Bus, namespace: str, metrics: Metrics) -> None:
        self._bus = bus
        self._namespace = namespace
        self._metrics = metrics
        self._cancels: list[tuple[str, Cancel]] = []
        self._events: dict[str, list[LoadEvent]] = {}
        self._wake = asyncio.Event()

    def cancel(self, instance: str, request: str, attempt: int) -> None:
        """Tell a worker to free an attempt."""
        self._metrics.cancellations.inc()
        self._cancels.append((instance, Cancel(request, attempt)))
        self._wake.set()

    def tell(self, model: str, event: LoadEvent) -> None:
        """Tell every router of a model."""
        waiting = self._events.setdefault(model, [])
        if len(waiting) >= EVENTS_LIMIT:
            del waiting[: EVENTS_LIMIT // 2]
            self._metrics.unsent.inc(EVENTS_LIMIT // 2)
            _log.error("dropped %d load events of model %s: NATS is away", EVENTS_LIMIT // 2, model)
        waiting.append(event)
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            sent = await self.flush()
            await asyncio.sleep(BATCH_S if sent else BUS_DOWN_S)

    async def flush(self) -> bool:
        """Publish all that waits; whether NATS took it. Several may run at once: each takes out what it sends."""
        cancels, self._cancels = self._cancels, []
        try:
            for instance, cancel in cancels:
                await self._publish(subjects.worker(self._namespace, instance, "cancel"), CANCEL.encode(cancel))
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
        """Raises BusDown. What no bus would take is dropped: a peer gave a name that is no subject."""
        try:
            await self._bus.publish(subject, payload)
        except ProtocolError as wrong:
            self._metrics.unsendable.inc()
            _log.error("not sent: %s", wrong)
