"""A kvbm of a worker's machine, on the same in-process twins as the worker's shell."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.kvbm.config import KvbmConfig, PoolConfig
from services.kvbm.service import kvbm
from shared.bus.memory_bus import MemoryBus
from tests.fake_runtime import fake_runtime
from tests.worker.shell import NAMESPACE, WORKER, Shell


@asynccontextmanager
async def store(
    shell: Shell,
    pool: str,
    instance: str,
    *,
    size_bytes: int = 8 << 20,
    namespace: str = NAMESPACE,
    arenas: int = 1,
) -> AsyncIterator[None]:
    """Serves the directory `pool` until the block ends."""
    async with fake_runtime(namespace, "kvbm", instance, MemoryBus(shell.broker), shell.broker, shell.store) as runtime:
        config = PoolConfig(directory=pool, size_bytes=size_bytes, prefault_threads=1, arenas=arenas)
        async with kvbm(runtime, KvbmConfig(namespace=namespace, pool=config)):
            yield


async def attached(shell: Shell, instance: str) -> None:
    """Return when the worker's card names that kvbm. Empty if there is none."""

    def linked() -> bool:
        card = shell.directory.cards.get(("model", WORKER))
        return card is not None and card.kvbm == instance

    await shell.peer.until(linked)


async def saved(shell: Shell, blocks: int) -> None:
    """Return when the worker has stored `blocks` blocks."""
    labels = {"outcome": "saved"}

    def counted() -> float:
        return shell.runtime.registry.get_sample_value("headrace_kvbm_copied_blocks_total", labels) or 0

    await shell.peer.until(lambda: counted() >= blocks)
