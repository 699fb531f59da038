"""Two services of small_service.py in one process: `python -m tests.shared.small_services FLAGS -- FLAGS`."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable

from shared.messages.cards import ServiceName
from shared.runtime.lifecycle import Service, run_together
from shared.runtime.memory import MemoryNetwork
from shared.runtime.runtime import Runtime
from tests.shared import small_service
from tests.shared.small_service import SmallConfig

NAMES: tuple[ServiceName, ...] = ("frontend", "router")
limit_s: Callable[[SmallConfig], float] = lambda config: config.drain_limit_s  # noqa: E731 - as services give it


async def serve(runtime: Runtime, config: SmallConfig) -> None:
    """Serve as small_service does, once both are in the directory."""
    both = asyncio.Event()

    def changed(_change: object) -> None:
        if {each.service for each in runtime.directory.instances.values()} == {*NAMES}:
            both.set()

    runtime.directory.subscribe(changed)
    registration = await runtime.discovery.register(lambda epoch: runtime.address(epoch, {}))
    await both.wait()
    await small_service.serve(runtime, config)
    await registration.close()
    logging.getLogger(__name__).info("the %s has drained", runtime.service)


if __name__ == "__main__":
    middle = sys.argv.index("--")
    flags = (sys.argv[1:middle], sys.argv[middle + 1 :])
    parts = [(Service(name, SmallConfig, serve, limit_s), given) for name, given in zip(NAMES, flags, strict=True)]
    run_together("small", parts, MemoryNetwork().connect)
