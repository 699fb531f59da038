"""Connects a service over NATS, ZMQ, and etcd or files. Apart from lifecycle.py, because a process without servers
loads none of their clients."""

from __future__ import annotations

from contextlib import AsyncExitStack

from prometheus_client import CollectorRegistry

from shared.bus import nats_access
from shared.bus.event_planes import EventPlanes
from shared.bus.nats_bus import NatsBus, connect
from shared.bus.nats_servers import without_password
from shared.bus.zmq_events import ZmqEventBus
from shared.config import ServiceConfig
from shared.discovery.backends import check_settings as check_discovery
from shared.discovery.backends import open_discovery
from shared.runtime.network import Network, close_later
from shared.runtime.observe import ProcessHealth, advertised


def check_servers(config: ServiceConfig) -> None:
    """Read the files that the settings of NATS and discovery name. Raise ConfigError."""
    nats_access.check_settings(config.nats)
    check_discovery(config.discovery)


async def connect_to_servers(
    opened: AsyncExitStack,
    config: ServiceConfig,
    name: str,
    registry: CollectorRegistry,
    health: ProcessHealth,
    *,
    client_bus: bool,
    publishes: bool,
) -> Network:
    """Connect a service, as `shared.runtime.network.Connect` says. Raise ConfigError."""
    waiting = f"waiting for NATS at {without_password(config.nats.url)}"
    health.unready(waiting)
    bus = await connect(config.nats, name, lambda why: health.unready(why or waiting))
    close_later(opened, bus.drain, "the bus")
    of_clients: NatsBus | None = None
    if client_bus:
        of_clients = NatsBus(config.nats, f"{name}-clients", unreadable=bus.unreadable)
        close_later(opened, of_clients.drain, "the bus of clients")
    discovery = open_discovery(config.discovery, registry)
    close_later(opened, discovery.close, "discovery")
    seen = config.observe
    zmq = opened.enter_context(ZmqEventBus(seen.host, advertised(seen.host), seen.events, encrypted=seen.events_curve))
    events = EventPlanes(zmq, config, name, registry, publishes=publishes)
    close_later(opened, events.close, "KV events over NATS")
    watches = [each.wait_closed for each in (bus, of_clients) if each is not None]
    return Network(bus, events, discovery, of_clients, [*watches, events.run])
