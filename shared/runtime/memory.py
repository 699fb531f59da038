"""Connects the services of one process with each other, and with no other process."""

from __future__ import annotations

from contextlib import AsyncExitStack

from prometheus_client import CollectorRegistry

from shared.bus.memory_bus import MemoryBroker, MemoryBus
from shared.bus.memory_events import MemoryEventBus
from shared.config import ServiceConfig
from shared.discovery.memory import MemoryDiscovery, MemoryStore
from shared.runtime.network import Network, close_later
from shared.runtime.observe import ProcessHealth


class MemoryNetwork:
    """The bus, the KV events and the discovery that the services of one process share."""

    def __init__(self) -> None:
        self._broker = MemoryBroker()
        self._store = MemoryStore()

    async def connect(
        self,
        opened: AsyncExitStack,
        config: ServiceConfig,
        name: str,
        registry: CollectorRegistry,  # noqa: ARG002 - a Connect
        health: ProcessHealth,  # noqa: ARG002 - a Connect
        *,
        client_bus: bool,  # noqa: ARG002 - no client reaches this bus
        publishes: bool,  # noqa: ARG002 - a Connect
    ) -> Network:
        """Connect a service, as `shared.runtime.network.Connect` says."""
        bus = MemoryBus(self._broker, name, payload_limit_bytes=config.nats.payload_limit_bytes)
        close_later(opened, bus.drain, "the bus")
        discovery = MemoryDiscovery(self._store)
        close_later(opened, discovery.close, "discovery")
        events = MemoryEventBus(self._broker.events)
        opened.callback(events.close)
        return Network(bus, events, discovery)
