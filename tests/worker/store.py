"""A kvbm of a worker's machine, on the same in-process twins as the worker's shell."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry

from services.kvbm.config import KvbmConfig, PoolConfig
from services.kvbm.service import kvbm
from shared.directory import Directory
from shared.lifecycle import Runtime
from shared.memory_bus import MemoryBus, MemoryEvents
from shared.memory_discovery import MemoryDiscovery
from tests.worker.shell import NAMESPACE, WORKER, Shell


@asynccontextmanager
async def store(shell: Shell, pool: str, instance: str, *, size_bytes: int = 8 << 20) -> AsyncIterator[None]:
    """Serves the directory `pool` until the block ends."""
    bus, discovery = MemoryBus(shell.broker), MemoryDiscovery(shell.store)
    directory = Directory(discovery, bus, NAMESPACE)
    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(directory.run())
        await directory.synced()
        runtime = Runtime(
            namespace=NAMESPACE,
            service="kvbm",
            instance=instance,
            machine="here",
            bus=bus,
            events=MemoryEvents(shell.broker),
            discovery=discovery,
            directory=directory,
            registry=CollectorRegistry(),
            tasks=tasks,
            stopping=asyncio.Event(),
        )
        config = PoolConfig(directory=pool, size_bytes=size_bytes, prefault_threads=1)
        async with kvbm(runtime, KvbmConfig(namespace=NAMESPACE, pool=config)):
            yield
        following.cancel()
    await discovery.close()


async def attached(shell: Shell, instance: str) -> None:
    """Returns when the worker's card names that kvbm; empty: none."""

    def linked() -> bool:
        card = shell.directory.cards.get(("model", WORKER))
        return card is not None and card.kvbm == instance

    await shell.peer.until(linked)


async def saved(shell: Shell, blocks: int) -> None:
    """Returns when the worker has stored so many."""
    labels = {"outcome": "saved"}

    def counted() -> float:
        return shell.runtime.registry.get_sample_value("headrace_kvbm_copied_blocks_total", labels) or 0

    await shell.peer.until(lambda: counted() >= blocks)
