"""The whole worker as a process, on a real NATS, with real ZMQ events."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import assert_never

from shared import subjects
from shared.bus.contract import Bus
from shared.bus.nats_bus import connect
from shared.bus.zmq_events import ZmqEventBus
from shared.config import NatsConfig
from shared.discovery.contract import Discovery, KeyAdded, KeyRemoved, LeftOut, Synced
from shared.discovery.file import FileDiscovery
from shared.messages.cards import INSTANCE, Instance
from shared.messages.codec import JSON_HEADER
from shared.messages.generate import Accepted
from shared.messages.kv_events import EVENT_BATCH, AllBlocksCleared
from tests.worker.shell import EOS, LIMIT_S, NAMESPACE, Peer, request, write_model

PROMPT = list(range(10, 50))


async def test_a_worker_process_serves_over_nats_and_drains_on_sigterm(nats_url: str, tmp_path: Path) -> None:
    settings = tmp_path / "worker.toml"
    settings.write_text(
        f'namespace = "{NAMESPACE}"\nmodel = "{write_model(tmp_path / "model")}"\nengine = "echo"\n'
        f'[nats]\nurl = "{nats_url}"\n[discovery]\nbackend = "file"\npath = "{tmp_path / "discovery"}"\n',
        encoding="utf-8",
    )
    discovery = FileDiscovery(tmp_path / "discovery")
    bus = await connect(NatsConfig(url=nats_url), "test")
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "services.worker", "--config", str(settings))
    try:
        async with asyncio.timeout(LIMIT_S):
            await follow(process, discovery, bus)
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await discovery.close()
        await bus.drain()


async def follow(process: asyncio.subprocess.Process, discovery: Discovery, bus: Bus) -> None:
    """Until every key that the worker published is gone again."""
    keys: set[str] = set()
    told = False
    instance: Instance | None = None
    async for change in discovery.watch(subjects.namespace_prefix(NAMESPACE)):
        match change:
            case KeyAdded(key, value):
                keys.add(key)
                if key.startswith(subjects.instances_prefix(NAMESPACE)):
                    instance = INSTANCE.decode(value, JSON_HEADER)
            case KeyRemoved(key):
                keys.remove(key)
            case Synced() | LeftOut():
                pass
            case _:
                assert_never(change)
        if instance is not None and len(keys) == 2 and not told:
            await serve_one(bus, instance)
            process.send_signal(signal.SIGTERM)
            told = True
        if told and not keys:
            return


async def serve_one(bus: Bus, instance: Instance) -> None:
    """One request; the KV events it made come by replay."""
    peer = Peer(bus, worker=instance.instance)
    await peer.open()
    assert await peer.generate(request("r", PROMPT)) == Accepted("r", 1)
    assert await peer.ended("r") == "stop"
    assert peer.tokens("r") == [*PROMPT, EOS]
    assert instance.events is not None
    with ZmqEventBus() as events:
        subscription = events.subscribe(instance.events, peer.take_batch)
        batches = await subscription.replay(0, timeout_s=LIMIT_S)
        subscription.close()
    assert [sequence for sequence, _ in batches] == list(range(len(batches)))
    assert EVENT_BATCH.decode(batches[0][1]).events == [AllBlocksCleared()]
    assert len(batches) > 1
