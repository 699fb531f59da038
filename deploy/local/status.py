"""`headrace status`: asks discovery once, listens to the workers' load reports for a moment, shows both."""

from __future__ import annotations

import asyncio
import logging
import time
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from deploy.local.overview import Overview, layout, overview
from shared import subjects
from shared.config import DiscoveryConfig, NatsConfig, load
from shared.discovery_backends import open_discovery
from shared.errors import BusDown, ProtocolError
from shared.messages import LOAD_REPORT, LoadReport
from shared.messaging import Message
from shared.nats_bus import NatsBus, connect

CONNECT_LIMIT_S = 3.0
LISTEN_S = 0.3
"""Workers report every 250 ms."""


class StatusConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """What to ask; users and passwords come from the environment, HEADRACE_NATS_PASSWORD for instance."""

    namespace: str = "default"
    nats: NatsConfig = NatsConfig()
    discovery: DiscoveryConfig = DiscoveryConfig()


def settings(*, namespace: str, nats: str, etcd: str, path: str) -> StatusConfig:
    """Flags over environment; what is empty stays as it is. Raises ConfigError."""
    flags = [f"--namespace={namespace}"]
    if nats:
        flags.append(f"--nats-url={nats}")
    if etcd:
        flags += ["--discovery-backend=etcd", f"--discovery-endpoints={etcd}"]
    elif path:
        flags += ["--discovery-backend=file", f"--discovery-path={path}"]
    return load(StatusConfig, flags=flags)


def show(config: StatusConfig, *, as_json: bool) -> int:
    """Print the overview. Raises DiscoveryDown. NATS's absence is a note in it."""
    logging.basicConfig(level=logging.CRITICAL)  # what a retry loop says of itself; the notes say it once
    view = asyncio.run(_look(config))
    print(msgspec.json.format(msgspec.json.encode(view)).decode() if as_json else layout(view))
    return 0


async def _look(config: StatusConfig) -> Overview:
    discovery = open_discovery(config.discovery)
    try:
        values = await discovery.list(subjects.namespace_prefix(config.namespace))
    finally:
        await discovery.close()
    reports: dict[str, LoadReport] = {}
    notes: list[str] = []
    try:
        async with asyncio.timeout(CONNECT_LIMIT_S):
            bus = await connect(config.nats, "headrace status")
    except TimeoutError:
        notes.append(f"NATS does not answer within {CONNECT_LIMIT_S:g} s, so the load is not known")
    else:
        try:
            await _listen(bus, config.namespace, reports)
        except BusDown as wrong:
            notes.append(f"the load is not known: {wrong}")
        finally:
            await bus.drain()
    return overview(
        config.namespace, _shown(config.nats.url), _backend(config.discovery), values, reports, notes, time.time()
    )


async def _listen(bus: NatsBus, namespace: str, reports: dict[str, LoadReport]) -> None:
    async def hear(message: Message) -> None:
        try:
            report = LOAD_REPORT.decode(message.payload)
        except ProtocolError:  # of a newer or broken worker; it shows as one that was not heard
            return
        reports[report.instance] = report

    await bus.subscribe(subjects.worker(namespace, "*", "load"), hear)
    await asyncio.sleep(LISTEN_S)


def _backend(discovery: DiscoveryConfig) -> str:
    return f"etcd {','.join(discovery.endpoints)}" if discovery.backend == "etcd" else f"files in {discovery.path}"


def _shown(url: str) -> str:
    """Without a password."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}:{parts.port or 4222}"
