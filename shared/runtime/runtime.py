"""Runtime: everything that a service is given, made by its process or by a test."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from prometheus_client import CollectorRegistry

from shared import subjects
from shared.bus.contract import Bus, EventBus
from shared.discovery.contract import Discovery
from shared.discovery.directory import Directory
from shared.messages.cards import INSTANCE, EventSource, Instance, Role, ServiceName, TurnTaker
from shared.messages.codec import JSON_HEADER
from shared.notes import ProcessNotes
from shared.runtime.observe import ProcessHealth
from shared.tracing.tracer import Tracer
from shared.version import VERSION


@dataclass(frozen=True)
class Runtime:
    """Everything that a service is given. Tests build it from the in-process twins."""

    namespace: str
    service: ServiceName
    instance: str
    machine: str
    bus: Bus
    events: EventBus
    discovery: Discovery
    directory: Directory
    registry: CollectorRegistry
    tasks: asyncio.TaskGroup
    stopping: asyncio.Event
    health: ProcessHealth = field(default_factory=ProcessHealth)
    client_bus: Bus | None = None
    """The connection for messages of NATS clients, if the process has one: a flood of them breaks this connection, and
    not that to other services."""
    notes: ProcessNotes = field(default_factory=ProcessNotes)
    """What happened lately to requests, for `headrace explain`."""
    tracer: Tracer | None = None
    """Makes the spans of traced requests. None if tracing is off."""
    http: str = ""
    """The base URL of /live, /health and /metrics of this process, for the address book; empty in tests without one."""
    started: float = field(default_factory=time.time)
    wall: Callable[[], float] = time.time
    """The wall clock in seconds since 1970. Durations are measured with the event loop's clock."""
    draw: Random = field(default_factory=Random)
    """The random numbers, for ties and never for secrets; a simulation seeds them."""

    def address(
        self,
        epoch: int,
        subjects_by_operation: dict[str, str],
        *,
        events: EventSource | None = None,
        api: str = "",
        layouts: dict[str, EventSource] | None = None,
        state: str = "",
        peers: str = "",
        role: Role = "aggregated",
        turns: TurnTaker | None = None,
        model: str = "",
        device: str = "",
    ) -> dict[str, bytes]:
        """Return the key and value of this process's address book entry under the lease of `epoch`."""
        entry = Instance(
            namespace=self.namespace,
            service=self.service,
            instance=self.instance,
            epoch=epoch,
            machine=self.machine,
            pid=os.getpid(),
            started=self.started,
            version=VERSION,
            subjects=subjects_by_operation,
            events=events,
            http=self.http or api,
            api=api,
            layouts=layouts or {},
            pid_namespace=pid_namespace(),
            state=state,
            peers=peers,
            role=role,
            turns=turns,
            model=model,
            device=device,
        )
        key = subjects.instance_key(self.namespace, self.service, self.instance)
        return {key: INSTANCE.encode(entry, JSON_HEADER)}


def pid_namespace() -> int:
    """Return the number of this process's PID namespace; 0 if the kernel has none."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino  # noqa: PTH116
    except OSError:
        return 0
