"""Shared by the commands that query a running fleet: its address, its instances, and requests to each instance."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal, TypeVar

from msgspec import Struct

from deploy.local.state import CACHE_VARIABLE
from shared import subjects
from shared.bus.nats_bus import NatsBus, connect
from shared.bus.nats_servers import server_urls, without_password
from shared.config import ServiceConfig, environment, load
from shared.discovery.backends import open_discovery
from shared.discovery.catalogue import Entry, read_entry
from shared.errors import BusDown, ConfigError, ProtocolError, Unavailable
from shared.messages.cards import Instance, ServiceName
from shared.messages.codec import Codec

CONNECT_LIMIT_S = 3.0
"""The time in seconds that each server of NATS has to answer."""
ANSWER_LIMIT_S = 1.0
_PLURALS = {"worker": "workers", "process": "processes"}
_LISTED = 8
"""Most ids in one error."""

T = TypeVar("T", bound=Struct)


class FleetConfig(ServiceConfig, frozen=True, forbid_unknown_fields=True):
    """Addresses of a fleet. Users and passwords come from the environment, for instance HEADRACE_NATS_PASSWORD.

    `observe` is unused here; the same file also configures services that join the fleet.
    """

    @property
    def nats_shown(self) -> str:
        """The URLs of NATS without passwords."""
        return without_password(self.nats.url)

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

    limit_s = CONNECT_LIMIT_S * len(server_urls(config.nats.url))
    try:
        async with asyncio.timeout(limit_s):
            bus = await connect(config.nats, name, refuse)
    except TimeoutError:
        raise BusDown(f"NATS did not answer within {limit_s:g} s at {config.nats_shown}") from None
    try:
        yield bus
    finally:
        await bus.drain()


def readable_entries(namespace: str, values: Mapping[str, bytes]) -> Iterator[Entry]:
    """Yield what discovery's keys and values say. Unreadable entries are skipped; `status` shows them."""
    for key, value in values.items():
        try:
            yield read_entry(namespace, key, value)
        except ProtocolError:
            continue


def instances_of(service: ServiceName, config: FleetConfig, values: Mapping[str, bytes]) -> list[str]:
    """Return the ids of all instances of a service."""
    entries = readable_entries(config.namespace, values)
    return sorted(each.instance for each in entries if isinstance(each, Instance) and each.service == service)


def by_prefix(prefix: str, instances: Sequence[str], kind: Literal["worker", "process"]) -> str:
    """Return the id that is `prefix`, or the only one that begins with it; `kind` names what has the ids. Raise
    ConfigError."""
    if prefix in instances:
        return prefix
    found = [instance for instance in instances if instance.startswith(prefix)]
    if len(found) != 1:
        many = f"several {_PLURALS[kind]} begin with {prefix!r}" if found else f"no {kind} begins with {prefix!r}"
        raise ConfigError(f"{many}: {', '.join((found or instances)[:_LISTED])}")
    return found[0]


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
