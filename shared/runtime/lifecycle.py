"""The life of a service's process: event loop, signals, task group, readiness, drain.

    run(service)
        settings, logs, /live /health /metrics
        connect the bus, open discovery, follow the directory, answer Ping
        service.serve(runtime, config) the service's own part: subscribes, registers, waits for `stopping`, drains
        close discovery, drain the bus, end; or, if the service pauses, begin again as another instance

    starting ──▶ serving ──SIGTERM, SIGINT──▶ draining ──▶ ended, status 0
        └───────────┴── an error: status 1 (2: settings or model)
                                                 └── a second signal, or the drain limit: status 1, at once

A signal sets `runtime.stopping`. Where `run_together` runs several services, each begins to drain when the one before
has ended; if one fails, all end. With the flag `--check` or `--check-settings` nothing is started: the status says
whether the settings (and with `--check` the files that they name) are valid.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import uvloop

from shared import subjects
from shared.config import ServiceConfig, load
from shared.discovery.directory import Directory
from shared.errors import ConfigError, ModelError
from shared.messages.cards import ServiceName
from shared.metrics import counter, process_registry, register_scraped
from shared.runtime import logs, observe
from shared.runtime.control import answer_control
from shared.runtime.network import Connect
from shared.runtime.observe import ProcessHealth, scrape_targets
from shared.runtime.runtime import Runtime
from shared.runtime.usage import usage
from shared.tracing.exporter import open_exporter
from shared.tracing.tracer import open_tracer
from shared.version import VERSION

EXIT_FAILED = 1
EXIT_SETTINGS = 2
CHECK = "--check"
CHECK_SETTINGS = "--check-settings"
FORCED_LIMIT_S = 2.0
"""The time in seconds between a forced end and the hard exit of the process."""

_FOLLOWED: Mapping[ServiceName, ServiceName] = {"worker": "frontend"}
"""The service whose instances alone a service follows. Most processes of a fleet are workers: if each followed all, a
thousand that start would be a million notifications of etcd."""
YOUNG_OBJECTS = 10_000
"""The number of new objects that starts a garbage collection. Python's default, 700, is three requests of a
frontend."""
# fmt: off
UNREADABLE = counter("headrace_unreadable_messages", "",
    "Messages on any subject, and requests for a replay of KV events, that this process could not read. Those that a "
    "router counts by channel are in headrace_malformed_messages instead.",
    "A process of another version, or a stranger on NATS.")
# fmt: on

_log = logging.getLogger(__name__)


C = TypeVar("C", bound=ServiceConfig)
C_contra = TypeVar("C_contra", bound=ServiceConfig, contravariant=True)


class Paused(Protocol[C_contra]):
    """What is left of a service that pauses: it has no connection."""

    async def wait(self, stopping: asyncio.Event, /) -> bool:
        """Wait for the end of the pause. Return whether to serve again; False once `stopping` is set."""
        ...

    async def serve(self, runtime: Runtime, config: C_contra, /) -> Paused[C_contra] | None:
        """Serve again, as another instance."""
        ...


@dataclass(frozen=True)
class Service(Generic[C]):
    """A service, as its process runs it."""

    name: ServiceName
    schema: type[C]
    serve: Callable[[Runtime, C], Awaitable[Paused[C] | None]]
    """Returns None at the end, or what a pause has left."""
    drain_limit_s: Callable[[C], float]
    """Returns the time in seconds from the first signal to the forced end, longer than the service's own drain."""
    client_bus: bool = False
    """True if it has a connection of its own for messages of NATS clients."""
    publishes: bool = False
    """True if it publishes KV events."""
    check: Callable[[C], None] = lambda _: None
    """Reads the files that the settings name. Raises ConfigError or ModelError."""
    plain_loop: Callable[[C], bool] = lambda _: False
    """Returns whether the process has asyncio's own event loop: uvloop's has an io_uring, which CRIU does not save."""
    labels: Callable[[C], dict[str, str]] = lambda _: {}
    """Returns the labels of every metric in addition to namespace, service and instance."""


@dataclass(frozen=True)
class _Part(Generic[C]):
    """A service that this process runs, with its settings."""

    service: Service[C]
    config: C
    instance: str = field(default_factory=lambda: secrets.token_hex(8))


def run(service: Service[C], flags: Sequence[str] | None = None) -> NoReturn:
    """Run a service's whole process, and end it with a status. `flags` are those of the command line if not given."""
    from shared.runtime.servers import check_servers, connect_to_servers  # a process without servers loads no clients

    program = f"headrace-{service.name}"
    flags = sys.argv[1:] if flags is None else flags
    if "--help" in flags:
        print(usage(program, service.schema), end="")
        sys.exit(0)
    checks = {CHECK, CHECK_SETTINGS}.intersection(flags)

    def work() -> int:
        config = _load(service, [flag for flag in flags if flag not in checks])
        if CHECK in checks:
            observe.check_host("observe.host", config.observe.host)
            check_servers(config)
            if config.trace.endpoint:
                open_exporter(config.trace)
            service.check(config)
        return 0 if checks else _run_parts(service.name, [_Part(service, config)], connect_to_servers)

    sys.exit(_status(program, work))


def run_together(name: str, services: Sequence[tuple[Service[Any], Sequence[str]]], connect: Connect) -> NoReturn:
    """Run several services, each with its flags, as one process of this name, and end it with a status. They drain in
    their order."""

    def work() -> int:
        return _run_parts(name, [_Part(service, _load(service, flags)) for service, flags in services], connect)

    sys.exit(_status(f"headrace-{name}", work))


def _load(service: Service[C], flags: Sequence[str]) -> C:
    """Return the settings of a service. Raise ConfigError."""
    config = load(service.schema, flags=flags)
    if not subjects.is_id(config.namespace):
        raise ConfigError(f"namespace: {config.namespace!r} must be 1 to 64 letters, digits, - and _")
    return config


def _status(program: str, work: Callable[[], int]) -> int:
    """Return the exit status of `work`. An error that the operator can mend is said in a line or a few."""
    try:
        return work()
    except (ConfigError, ModelError) as wrong:
        print("\n".join(f"{program}: {line}" for line in str(wrong).splitlines()), file=sys.stderr)
        return EXIT_SETTINGS
    except Exception:  # noqa: BLE001 - the last resort: it is logged, and the process ends
        _log.exception("%s crashed", program.removeprefix("headrace-"))
        return EXIT_FAILED


def _run_parts(name: str, parts: Sequence[_Part[Any]], connect: Connect) -> int:
    """Run services until all have ended, and return the exit status. They have one log: in the form of the first one,
    from the least level on."""
    level = min((part.config.observe.log_level for part in parts), key=_log_rank)
    model = next((labels["model"] for part in parts if "model" in (labels := part.service.labels(part.config))), "")
    logs.start(name, parts[0].instance, level, parts[0].config.observe.log_format, model=model)
    limit_s = sum(part.service.drain_limit_s(part.config) for part in parts)
    plain = any(part.service.plain_loop(part.config) for part in parts)
    with asyncio.Runner(loop_factory=asyncio.new_event_loop if plain else uvloop.new_event_loop) as runner:
        return runner.run(_live(partial(_serve_in_turn, parts, connect), limit_s))


def _log_rank(level: str) -> int:
    """Return the place of a level; an unknown one is first, so that it is refused."""
    return logs.LEVELS.index(level) if level in logs.LEVELS else -1


class _Ending:
    """The signals of one process: the first starts the drain, a second one cancels `serving`."""

    def __init__(self, health: ProcessHealth, drain_limit_s: float) -> None:
        self.stopping = asyncio.Event()
        self.forced = False
        self.serving: asyncio.Task[None] | None = None
        self._health = health
        self._drain_limit_s = drain_limit_s
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._signalled, number.name)

    def _signalled(self, name: str) -> None:
        if self.stopping.is_set():
            self._force(f"a second signal ({name})")
            return
        _log.info("%s: draining", name)
        self._health.drain()
        self.stopping.set()
        self._loop.call_later(self._drain_limit_s, self._force, f"not drained in {self._drain_limit_s:g} s")

    def _force(self, reason: str) -> None:
        if not self.forced:
            _log.error("ending without a complete drain: %s", reason)
            self.forced = True
            assert self.serving is not None
            self.serving.cancel()
            self._loop.call_later(FORCED_LIMIT_S, os._exit, EXIT_FAILED)


async def _live(
    serving: Callable[[ProcessHealth, asyncio.Event], Coroutine[None, None, None]], drain_limit_s: float
) -> int:
    """Run the service, and return the exit status. Raise what `serving` raised."""
    health = ProcessHealth()
    ending = _Ending(health, drain_limit_s)
    ending.serving = asyncio.create_task(serving(health, ending.stopping))
    try:
        await ending.serving
    except asyncio.CancelledError:
        if not ending.forced:
            raise
    except ExceptionGroup as wrong:
        raise _mendable_error(wrong) from wrong
    return EXIT_FAILED if ending.forced else 0


class _Served(Exception):
    """The service has drained: this ends the remaining tasks."""


def _targets(service: ServiceName, directory: Directory) -> Callable[[], bytes | None] | None:
    """Return what /sd of a service shows, for `ProcessHealth.targets`."""
    if service in _FOLLOWED:
        return None
    return lambda: scrape_targets(directory.instances.values()) if directory.is_synced else None


async def _serve_in_turn(
    parts: Sequence[_Part[Any]], connect: Connect, health: ProcessHealth, stopping: asyncio.Event
) -> None:
    """Serve all parts at once. The first drains when `stopping` is set, each other when the one before has ended."""

    async def serve(
        part: _Part[Any],
        health: ProcessHealth,
        stopping: asyncio.Event,
        next_health: ProcessHealth,
        next_stopping: asyncio.Event,
    ) -> None:
        await _serve(part, connect, health, stopping)
        next_health.drain()
        next_stopping.set()

    async with asyncio.TaskGroup() as tasks:
        for part in parts:
            after = ProcessHealth(), asyncio.Event()
            tasks.create_task(serve(part, health, stopping, *after), name=part.service.name)
            health, stopping = after


async def _serve(part: _Part[Any], connect: Connect, health: ProcessHealth, stopping: asyncio.Event) -> None:
    """Serve until `stopping`, and after each pause as another instance."""
    serve = part.service.serve
    while (paused := await _serve_round(part, serve, connect, health, stopping)) is not None:
        gc.unfreeze()
        gc.collect()
        if not await paused.wait(stopping):
            return
        serve, before, part = paused.serve, part.instance, replace(part, instance=secrets.token_hex(8))
        logs.change_instance(before, part.instance)
        _log.info("serving again: instance %s is now %s", before, part.instance)


async def _serve_round(
    part: _Part[Any],
    serve: Callable[[Runtime, Any], Awaitable[Paused[Any] | None]],
    connect: Connect,
    health: ProcessHealth,
    stopping: asyncio.Event,
) -> Paused[Any] | None:
    """Open the parts of a Runtime, serve, and close them in reverse order."""
    service, config, instance = part.service, part.config, part.instance
    paused: Paused[Any] | None = None
    draw = Random()  # noqa: S311 - for ties and for ids of traces, never for secrets
    registry = process_registry(config.namespace, service.name, instance, service.labels(config))
    resource = _trace_resource(service.name, config.namespace, instance)
    async with AsyncExitStack() as opened:
        tracer = await opened.enter_async_context(open_tracer(config.trace, registry, resource, draw))
        url = await opened.enter_async_context(observe.serving(config.observe, health, registry))
        name = f"headrace-{service.name}-{instance}"
        wanted = {"client_bus": service.client_bus, "publishes": service.publishes}
        connecting = connect(opened, config, name, registry, health, **wanted)
        if (network := await _unless(stopping, connecting)) is None:
            return None
        bus, events = network.bus, network.events
        register_scraped(UNREADABLE, registry, lambda: bus.malformed + events.malformed)
        followed = _FOLLOWED.get(service.name)
        directory = Directory(network.discovery, bus, config.namespace, service=followed, registry=registry)
        health.targets = _targets(service.name, directory)
        health.unready("starting")
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(directory.run(), name="directory")
                for watch in network.watches:
                    tasks.create_task(watch(), name="bus")
                runtime = Runtime(
                    namespace=config.namespace,
                    service=service.name,
                    instance=instance,
                    machine=socket.gethostname(),
                    bus=bus,
                    events=events,
                    discovery=network.discovery,
                    directory=directory,
                    registry=registry,
                    tasks=tasks,
                    stopping=stopping,
                    health=health,
                    client_bus=network.client_bus,
                    tracer=tracer,
                    http=url,
                    draw=draw,
                )
                await answer_control(runtime)
                paused = await serve(runtime, config)
                raise _Served
        except* _Served:
            pass
    return paused


def _trace_resource(service: str, namespace: str, instance: str) -> dict[str, str]:
    """Return what the spans of this process say about it."""
    return {
        "service.name": f"headrace-{service}",
        "service.namespace": namespace,
        "service.instance.id": instance,
        "service.version": VERSION,
        "host.name": socket.gethostname(),
    }


def settle_memory() -> None:
    """Exclude all present objects from garbage collection. Call this once everything permanent has been made.

    Before, a full collection stopped a frontend for 70 ms, and all collections took a twentieth of its time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)


T = TypeVar("T")


async def _unless(stopping: asyncio.Event, work: Coroutine[object, object, T]) -> T | None:
    """Return the result of `work`, or None if the process must stop first."""
    working = asyncio.create_task(work)
    stopped = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait((working, stopped), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        stopped.cancel()
        await asyncio.wait((working, stopped))


def _mendable_error(group: ExceptionGroup[Exception]) -> Exception:
    """Return the first error of settings or model, which the operator can mend; without one, the whole group."""
    mendable = group.subgroup((ConfigError, ModelError))
    if mendable is None:
        return group
    first: Exception = mendable
    while isinstance(first, ExceptionGroup):
        first = first.exceptions[0]
    return first
