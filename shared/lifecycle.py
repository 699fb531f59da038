"""How a service's process lives: loop, signals, task group, readiness, drain.

    run(service, serve, …)
        connect the bus, open discovery, follow the directory
        serve(runtime)                 the service's own main: subscribes, registers, waits for `stopping`, drains
        close discovery, drain the bus, end

SIGTERM and SIGINT set `runtime.stopping`; a second one, or `drain_limit_s` later, ends the process at once with status 1.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from shared.directory import Directory
from shared.discovery import Discovery
from shared.messages import ServiceName
from shared.messaging import Bus, Events


@dataclass(frozen=True)
class Runtime:
    """What every service is given. Tests build it from the in-process twins."""

    namespace: str
    service: ServiceName
    instance: str
    machine: str
    bus: Bus
    events: Events
    discovery: Discovery
    directory: Directory
    registry: CollectorRegistry
    tasks: asyncio.TaskGroup
    stopping: asyncio.Event
