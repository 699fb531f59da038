"""What connects a service to the others, whatever carries it.

servers.py   NATS, etcd or files, and ZMQ: each service is a process
memory.py    all services are in this process
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any, NamedTuple, Protocol

from prometheus_client import CollectorRegistry

from shared.bus.contract import Bus, EventBus
from shared.config import ServiceConfig
from shared.discovery.contract import Discovery
from shared.runtime.observe import ProcessHealth

CLOSE_LIMIT_S = 10.0
"""The time in seconds to close discovery, and to close the bus, after the service has drained."""

_log = logging.getLogger(__name__)


class Network(NamedTuple):
    """What connects one service to the others."""

    bus: Bus
    events: EventBus
    discovery: Discovery
    client_bus: Bus | None = None
    """The connection for messages of NATS clients, if there is one of its own."""
    watches: Sequence[Callable[[], Coroutine[Any, Any, None]]] = ()
    """What runs as long as the service does, and raises if a connection is lost for good."""


class Connect(Protocol):
    """Connects one service, however long that takes."""

    async def __call__(
        self,
        opened: AsyncExitStack,
        config: ServiceConfig,
        name: str,
        registry: CollectorRegistry,
        health: ProcessHealth,
        *,
        client_bus: bool,
        publishes: bool,
    ) -> Network:
        """Return the network, which `opened` closes, with a `client_bus` if it is wanted, and KV events that the
        service `publishes` or only follows. `name` is that of the connection. Until it returns, `health` says why
        not."""
        ...


def close_later(opened: AsyncExitStack, close: Callable[[], Awaitable[None]], what: str) -> None:
    """Call `close` when `opened` ends, and warn if that takes longer than CLOSE_LIMIT_S."""

    async def within_limit() -> None:
        try:
            async with asyncio.timeout(CLOSE_LIMIT_S):
                await close()
        except TimeoutError:
            _log.warning("%s did not close within %g s", what, CLOSE_LIMIT_S)

    opened.push_async_callback(within_limit)
