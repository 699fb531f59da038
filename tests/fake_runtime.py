"""A service's Runtime on in-process fakes of NATS, ZMQ and etcd."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry

from shared.bus.contract import Bus
from shared.bus.memory_bus import MemoryBroker
from shared.bus.memory_events import MemoryEventBus
from shared.discovery.directory import Directory
from shared.discovery.memory import MemoryDiscovery, MemoryStore
from shared.messages.cards import ServiceName
from shared.runtime.runtime import Runtime


@asynccontextmanager
async def fake_runtime(
    namespace: str, service: ServiceName, instance: str, bus: Bus, broker: MemoryBroker, store: MemoryStore
) -> AsyncIterator[Runtime]:
    """Yield a Runtime whose directory is complete and followed until the block ends. Then `runtime.tasks` must end
    too."""
    discovery = MemoryDiscovery(store)
    directory = Directory(discovery, bus, namespace)
    try:
        async with asyncio.TaskGroup() as tasks:
            following = tasks.create_task(directory.run())
            await directory.synced()
            try:
                yield Runtime(
                    namespace=namespace,
                    service=service,
                    instance=instance,
                    machine="here",
                    bus=bus,
                    events=MemoryEventBus(broker.events),
                    discovery=discovery,
                    directory=directory,
                    registry=CollectorRegistry(),
                    tasks=tasks,
                    stopping=asyncio.Event(),
                )
            finally:
                following.cancel()
    finally:
        await discovery.close()
