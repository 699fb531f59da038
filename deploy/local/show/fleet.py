"""Shared by the commands that query a running fleet: its address, its instances, and requests to each instance."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from msgspec import Struct

from deploy.local.state import CACHE_VARIABLE
from shared import subjects
from shared.bus.nats_bus import NatsBus, connect
from shared.config import ServiceConfig, environment, load
from shared.discovery.backends import open_discovery
from shared.discovery.catalogue import read_entry
from shared.errors import BusDown, ProtocolError, Unavailable
from shared.messages import Codec, Instance, ServiceName

CONNECT_LIMIT_S = 3.0
ANSWER_LIMIT_S = 1.0

T = TypeVar("T", bound=Struct)


class FleetConfig(ServiceConfig, frozen=True, forbid_unknown_fields=True):
    """Addresses of a fleet. Users and passwords come from the environment, for instance HEADRACE_NATS_PASSWORD.

    `observe` is unused here; the same file also configures services that join the fleet.
    """

    @property
    def nats_shown(self) -> str:
        """The URL of NATS without a password."""
        parts = urlsplit(self.nats.url)
        return f"{parts.scheme}://{parts.hostname}:{parts.port or 4222}"

    @property
    def discovery_shown(self) -> str:
        """The back end of discovery and its address."""
        discovery = self.discovery
        etcd = discovery.backend == "etcd"
        return f"etcd {','.join(discovery.endpoints)}" if etcd else f"files in {discovery.path}"


def fleet_config(*, namespace: str, nats: str, etcd: str, path: str = "", file: Path | None = None) -> FleetConfig:
    """Return the settings: flags take precedence over the environment, that over the file. Empty arguments are not set.
    Raise ConfigError."""
    flags = [f"--namespace={namespace}"]
    if nats:
        flags.append(f"--nats-url={nats}")
    if etcd:
        flags += ["--discovery-backend=etcd", f"--discovery-endpoints={etcd}"]
    elif path:
        flags += ["--discovery-backend=file", f"--discovery-path={path}"]
    variables = {name: value for name, value in environment().items() if name != CACHE_VARIABLE}
    return load(FleetConfig, file=file, flags=flags, environ=variables)


async def discovery_entries(config: FleetConfig) -> dict[str, bytes]:
    """Return discovery's keys and values. Raise DiscoveryDown."""
    discovery = open_discovery(config.discovery)
    try:
        return dict(await discovery.list(subjects.namespace_prefix(config.namespace)))
    finally:
        await discovery.close()


@asynccontextmanager
async def connect_bus(config: FleetConfig, name: str) -> AsyncIterator[NatsBus]:
    """Yield a connection to the fleet's bus. Raise BusDown."""

    def refuse(why: str) -> None:
        if why:
            raise BusDown(why)

    try:
        async with asyncio.timeout(CONNECT_LIMIT_S):
            bus = await connect(config.nats, name, refuse)
    except TimeoutError:
        raise BusDown(f"NATS did not answer within {CONNECT_LIMIT_S:g} s at {config.nats_shown}") from None
    try:
        yield bus
    finally:
        await bus.drain()


def instances_of(service: ServiceName, config: FleetConfig, values: Mapping[str, bytes]) -> list[str]:
    """Return the ids of all instances of a service. Unreadable entries are skipped; `status` shows them."""
    found: list[str] = []
    for key, value in values.items():
        try:
            entry = read_entry(config.namespace, key, value)
        except ProtocolError:
            continue
        if isinstance(entry, Instance) and entry.service == service:
            found.append(entry.instance)
    return sorted(found)


async def ask_each(
    bus: NatsBus,
    service: ServiceName,
    instances: Sequence[str],
    subject: Callable[[str], str],
    codec: Codec[T],
    payload: bytes = b"",
) -> tuple[list[T], list[str]]:
    """Send a request to each instance. Return the answers, and a note for each instance that did not answer in time."""

    async def ask(instance: str) -> T | str:
        try:
            answer = await bus.request(subject(instance), payload, timeout_s=ANSWER_LIMIT_S)
            return codec.decode(answer.payload, answer.headers)
        except (Unavailable, ProtocolError) as wrong:
            return f"{service} {instance}: {wrong}"

    answers = await asyncio.gather(*map(ask, instances))
    return [each for each in answers if not isinstance(each, str)], [each for each in answers if isinstance(each, str)]
