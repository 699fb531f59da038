"""The KV events of one process: published on one plane, followed wherever a source publishes.

    tcp:, ipc:    zmq_events.py     a port or a socket of the source
    nats:         nats_events.py    a subject of NATS, over a connection of its own: a router that does not read is cut
                                    off from KV events alone

That connection is made when it is needed: at once if this process publishes over NATS, else with the first source that
does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from prometheus_client import CollectorRegistry

from shared.bus.contract import EventPublisher, EventSubscription
from shared.bus.jetstream import EventStore
from shared.bus.nats_bus import NatsBus
from shared.bus.nats_events import NatsEventBus
from shared.bus.zmq_events import ZmqEventBus
from shared.config import ServiceConfig
from shared.messages.cards import EVENTS_ON_NATS, EventSource
from shared.metrics import counter, register_metrics


class _OverNats(NamedTuple):
    """What events over NATS need."""

    bus: NatsBus
    store: EventStore
    events: NatsEventBus


class EventPlanes:
    """The EventBus of `shared.bus.contract` of one process."""

    # fmt: off
    _unsent = counter("headrace_unsent_event_batches", "",
        "Batches of KV events that were not sent, because NATS was away or did not read",
        "NATS is away or too slow; routers replay what they missed, or take snapshots.")
    # fmt: on

    def __init__(
        self, zmq: ZmqEventBus, config: ServiceConfig, name: str, registry: CollectorRegistry, *, publishes: bool = True
    ) -> None:
        """`name` is that of the process's connections, and one token of a subject. Only a process that `publishes`
        needs its plane."""
        self._zmq = zmq
        self._config = config
        self._name = name
        self._plane = config.observe.events_plane if publishes else "zmq"
        self._nats: _OverNats | None = None
        self._opened = asyncio.Event()
        register_metrics(self, registry)

    @property
    def malformed(self) -> int:
        return self._zmq.malformed + (0 if self._nats is None else self._nats.events.malformed)

    def open_publisher(self, *, topic: str = "", ring_batches: int = 10_000) -> EventPublisher:
        events = self._zmq if self._plane == "zmq" else self._over_nats().events
        return events.open_publisher(topic=topic, ring_batches=ring_batches)

    def subscribe(self, source: EventSource, receive: Callable[[int, bytes], None]) -> EventSubscription:
        events = self._over_nats().events if source.publish.startswith(EVENTS_ON_NATS) else self._zmq
        return events.subscribe(source, receive)

    async def run(self) -> None:
        """Keep what events over NATS need, until cancelled. Raise ConfigError if this process is to
        publish with JetStream, and NATS has none."""
        if self._plane != "zmq":
            self._over_nats()
        await self._opened.wait()
        bus, store, _ = self._over_nats()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(bus.wait_closed())
            if self._plane == "jetstream":
                tasks.create_task(store.keep())

    async def close(self) -> None:
        """Close everything that is open over NATS."""
        if self._nats is not None:
            await self._nats.events.close()
            await self._nats.bus.drain()

    def _over_nats(self) -> _OverNats:
        if self._nats is None:
            bus = NatsBus(self._config.nats, f"{self._name}-events")
            store = EventStore(bus, self._config.namespace, self._config.observe.events_stream_bytes)
            events = NatsEventBus(
                bus,
                self._config.namespace,
                self._name,
                stream=store.name if self._plane == "jetstream" else "",
                read_stream=store.read,
                unsent=lambda: self._unsent.inc(),
            )
            self._nats = _OverNats(bus, store, events)
            self._opened.set()
        return self._nats
