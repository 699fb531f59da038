"""What a service tells without waiting for an answer: load events to the routers of a model, and single messages.

    tell, post ──▶ [ waiting, bounded ] ──▶ at once if nothing went lately, else once `batch_s` is over

What comes up within `batch_s` goes out together, load events as one message a model. While NATS is away load events
wait, up to a bound (a lost Finished would leave load at a router until a lease ends); single messages are dropped, so
they must be such as come up again by themselves.
"""

from __future__ import annotations

import asyncio
import logging

from prometheus_client import CollectorRegistry

from shared import subjects
from shared.bus.contract import Bus
from shared.errors import BusDown, ProtocolError
from shared.messages import LOAD_EVENTS, LoadEvent, LoadEvents
from shared.metrics import counter

BUS_DOWN_S = 0.5
EVENTS_LIMIT = 65_536
"""Load events waiting, of one model."""
EVENTS_A_MESSAGE = 4096

_log = logging.getLogger(__name__)


class Outbox:
    """Collects, and publishes in `run`."""

    def __init__(self, bus: Bus, namespace: str, registry: CollectorRegistry, *, batch_s: float) -> None:
        self._bus = bus
        self._namespace = namespace
        self._batch_s = batch_s
        self._posted: list[tuple[str, bytes]] = []
        self._events: dict[str, list[LoadEvent]] = {}
        self._wake = asyncio.Event()
        self._unsent = counter(registry, "headrace_unsent_load_events", "Load events dropped while NATS was away")
        self._unsendable = counter(
            registry, "headrace_unsendable_messages", "Messages told to others that no bus would take"
        )

    def post(self, subject: str, payload: bytes) -> None:
        """One message; dropped while NATS is away."""
        self._posted.append((subject, payload))
        self._wake.set()

    def publish_load(self, model: str, event: LoadEvent) -> None:
        """Tell every router of a model."""
        waiting = self._events.setdefault(model, [])
        if len(waiting) >= EVENTS_LIMIT:
            del waiting[: EVENTS_LIMIT // 2]
            self._unsent.inc(EVENTS_LIMIT // 2)
            _log.error("dropped %d load events of model %s: NATS is away", EVENTS_LIMIT // 2, model)
        waiting.append(event)
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            sent = await self.flush()
            await asyncio.sleep(self._batch_s if sent else BUS_DOWN_S)

    async def flush(self) -> bool:
        """Publish all that waits; whether NATS took it. Several may run at once: each takes out what it sends."""
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
        """Raises BusDown. What no bus would take is dropped: a peer gave a name that is no subject."""
        try:
            await self._bus.publish(subject, payload)
        except ProtocolError as wrong:
            self._unsendable.inc()
            _log.error("not sent: %s", wrong)
