"""EventPlanes for tests, over real servers."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import nats
from nats.js.errors import NotFoundError
from prometheus_client import CollectorRegistry

from shared import subjects
from shared.bus.event_planes import EventPlanes
from shared.bus.zmq_events import ZmqEventBus
from shared.config import NatsConfig, ObserveConfig, ServiceConfig

Plane = Literal["zmq", "nats", "jetstream"]
LIMIT_S = 60.0
NOWHERE = "nats://127.0.0.1:9"


def with_jetstream(directory: Path, more: str = "") -> str:
    """Return the settings of a nats-server with JetStream, whose files are below `directory`."""
    return f'jetstream {{ store_dir: "{directory / "jetstream"}", {more} }}\n'


@asynccontextmanager
async def event_planes(
    plane: Plane,
    nats_url: str = NOWHERE,
    *,
    user: str = "",
    namespace: str = "",
    directory: str = "",
    encrypted: bool = False,
) -> AsyncIterator[EventPlanes]:
    """Yield the events of a process that publishes on `plane`; `user` is one of `nats_users`, and `directory` and
    `encrypted` are for ZMQ. With jetstream the stream is there."""
    config = ServiceConfig(
        namespace=namespace or f"t{secrets.token_hex(6)}",
        nats=NatsConfig(url=nats_url, user=user, password=user, inbox="_INBOX_services" if user else "_INBOX"),
        observe=ObserveConfig(events_plane=plane),
    )
    with ZmqEventBus(directory=directory, encrypted=encrypted) as zmq:
        planes = EventPlanes(zmq, config, f"headrace-test-{secrets.token_hex(4)}", CollectorRegistry())
        running = asyncio.create_task(planes.run())
        try:
            if plane != "zmq":
                await planes._over_nats().bus.wait_connected()
            if plane == "jetstream":
                await stream_there(config.nats, config.namespace)
            yield planes
        finally:
            running.cancel()
            await asyncio.wait((running,))
            await planes.close()


async def stream_there(config: NatsConfig, namespace: str) -> None:
    """Return when the namespace has its stream."""
    user = config.user or None
    client = await nats.connect(config.url.split(","), user=user, password=user, inbox_prefix=config.inbox)
    try:
        async with asyncio.timeout(LIMIT_S):
            while True:
                try:
                    await client.jetstream().stream_info(subjects.event_stream(namespace)[0])
                    return
                except NotFoundError:
                    await asyncio.sleep(0.01)
    finally:
        await client.close()
