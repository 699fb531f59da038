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
from shared.errors import BusDown
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
        """Publish all that waits; whether NATS took it."""
        cancels, self._cancels = self._cancels, []
        try:
            for instance, cancel in cancels:
                subject = subjects.worker(self._namespace, instance, "cancel")
                await self._bus.publish(subject, CANCEL.encode(cancel))
            while self._events:
                model, events = next(iter(self._events.items()))
                batch = events[:EVENTS_A_MESSAGE]
                payload = LOAD_EVENTS.encode(LoadEvents(model, batch))
                await self._bus.publish(subjects.router_load(self._namespace, model), payload)
                del events[: len(batch)]
                if not events:
                    del self._events[model]
        except BusDown:
            self._wake.set()
            return False
        return True
