"""The life of a service's process: event loop, signals, task group, readiness, drain.

    run(service, schema, serve, drain_limit_s)
        settings, logs, /live /health /metrics
        connect the bus, open discovery, follow the directory, answer Ping
        serve(runtime, config)         the service's own part: subscribes, registers, waits for `stopping`, drains
        close discovery, drain the bus, end

    starting ──▶ serving ──SIGTERM, SIGINT──▶ draining ──▶ ended, status 0
        └───────────┴── an error: status 1 (2: settings or model)
                                                 └── a second signal, or the drain limit: status 1, at once

A signal sets `runtime.stopping`. With the flag `--check` or `--check-settings` nothing is started: the status says
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
from functools import partial
from random import Random
from typing import NoReturn, TypeVar

import uvloop
from prometheus_client import CollectorRegistry

from shared import subjects
from shared.bus.nats_bus import NatsBus, connect
from shared.bus.zmq_events import ZmqEventBus
from shared.config import ServiceConfig, load
from shared.discovery.backends import open_discovery
from shared.discovery.directory import Directory
from shared.errors import ConfigError, ModelError
from shared.messages.cards import ServiceName
from shared.metrics import counter, process_registry, register_scraped
from shared.runtime import logs, observe
from shared.runtime.control import answer_control
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
CLOSE_LIMIT_S = 10.0
"""The time in seconds to close discovery, and to close the bus, after the service has drained."""
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


def run(
    service: ServiceName,
    schema: type[C],
    serve: Callable[[Runtime, C], Awaitable[None]],
    drain_limit_s: Callable[[C], float],
    *,
    client_bus: bool = False,
    check: Callable[[C], None] = lambda _: None,
    labels: Callable[[C], dict[str, str]] = lambda _: {},
    flags: Sequence[str] | None = None,
) -> NoReturn:
    """Run a service's whole process, and end it with a status.

    `drain_limit_s` is the time in seconds from the first signal to the forced end, longer than the service's own drain.
    With `client_bus` the process has a separate connection for messages of NATS clients. `check` reads the files that
    the settings name, and raises ConfigError or ModelError. `labels` are those of every metric in addition to
    namespace, service and instance. `flags` are those of the command line if not given.
    """
    instance = secrets.token_hex(8)
    flags = sys.argv[1:] if flags is None else flags
    if "--help" in flags:
        print(usage(f"headrace-{service}", schema), end="")
        sys.exit(0)
    checks = {CHECK, CHECK_SETTINGS}.intersection(flags)
    try:
        config = load(schema, flags=[flag for flag in flags if flag not in checks])
        if not subjects.is_id(config.namespace):
            raise ConfigError(f"namespace: {config.namespace!r} must be 1 to 64 letters, digits, - and _")
        if CHECK in checks:
            observe.check_host("observe.host", config.observe.host)
            if config.trace.endpoint:
                open_exporter(config.trace)
            check(config)
        if checks:
            sys.exit(0)
        added = labels(config)
        logs.start(service, instance, config.observe.log_level, config.observe.log_format, model=added.get("model", ""))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            registry = process_registry(config.namespace, service, instance, added)
            serving = partial(_serve, service, instance, config, registry, serve, separate_clients=client_bus)
            status = runner.run(_live(serving, drain_limit_s(config)))
    except (ConfigError, ModelError) as wrong:
        print("\n".join(f"headrace-{service}: {line}" for line in str(wrong).splitlines()), file=sys.stderr)
        status = EXIT_SETTINGS
    except Exception:  # noqa: BLE001 - the last resort: it is logged, and the process ends
        _log.exception("%s crashed", service)
        status = EXIT_FAILED
    sys.exit(status)


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
    """Return `ProcessHealth.targets`."""
    if service in _FOLLOWED:
        return None
    return lambda: scrape_targets(directory.instances.values()) if directory.is_synced else None


async def _serve(
    service: ServiceName,
    instance: str,
    config: C,
    registry: CollectorRegistry,
    serve: Callable[[Runtime, C], Awaitable[None]],
    health: ProcessHealth,
    stopping: asyncio.Event,
    *,
    separate_clients: bool,
) -> None:
    """Open the parts of a Runtime, serve, and close them in reverse order."""
    draw = Random()  # noqa: S311 - for ties and for ids of traces, never for secrets
    resource = _trace_resource(service, config.namespace, instance)
    async with AsyncExitStack() as opened:
        tracer = await opened.enter_async_context(open_tracer(config.trace, registry, resource, draw))
        url = await opened.enter_async_context(observe.serving(config.observe, health, registry))
        if (bus := await _unless(stopping, _connected(config, f"headrace-{service}-{instance}", health))) is None:
            return
        opened.push_async_callback(_within_limit, bus.drain, "the bus")
        client_bus: NatsBus | None = None
        if separate_clients:
            client_bus = NatsBus(config.nats, f"headrace-{service}-{instance}-clients", unreadable=bus.unreadable)
            opened.push_async_callback(_within_limit, client_bus.drain, "the bus of clients")
        discovery = open_discovery(config.discovery, registry)
        opened.push_async_callback(_within_limit, discovery.close, "discovery")
        host = config.observe.host
        events = opened.enter_context(ZmqEventBus(host, observe.advertised(host), config.observe.events))
        register_scraped(UNREADABLE, registry, lambda: bus.malformed + events.malformed)
        directory = Directory(discovery, bus, config.namespace, service=_FOLLOWED.get(service), registry=registry)
        health.targets = _targets(service, directory)
        health.unready("starting")
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(directory.run(), name="directory")
                for each in filter(None, (bus, client_bus)):
                    tasks.create_task(each.wait_closed(), name="bus")
                runtime = Runtime(
                    namespace=config.namespace,
                    service=service,
                    instance=instance,
                    machine=socket.gethostname(),
                    bus=bus,
                    events=events,
                    discovery=discovery,
                    directory=directory,
                    registry=registry,
                    tasks=tasks,
                    stopping=stopping,
                    health=health,
                    client_bus=client_bus,
                    tracer=tracer,
                    http=url,
                    draw=draw,
                )
                await answer_control(runtime)
                await serve(runtime, config)
                raise _Served
        except* _Served:
            pass


async def _connected(config: ServiceConfig, name: str, health: ProcessHealth) -> NatsBus:
    """Connect to NATS, however long that takes; until then the process is not ready."""
    waiting = f"waiting for NATS at {config.nats.url.rpartition('@')[2]}"
    health.unready(waiting)
    return await connect(config.nats, name, lambda why: health.unready(why or waiting))


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


async def _within_limit(close: Callable[[], Awaitable[None]], name: str) -> None:
    try:
        async with asyncio.timeout(CLOSE_LIMIT_S):
            await close()
    except TimeoutError:
        _log.warning("%s did not close within %g s", name, CLOSE_LIMIT_S)


def _mendable_error(group: ExceptionGroup[Exception]) -> Exception:
    """Return the first error of settings or model, which the operator can mend; without one, the whole group."""
    mendable = group.subgroup((ConfigError, ModelError))
    if mendable is None:
        return group
    first: Exception = mendable
    while isinstance(first, ExceptionGroup):
        first = first.exceptions[0]
    return first
