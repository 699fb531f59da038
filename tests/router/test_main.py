"""The router as a process, over the real NATS and ZMQ."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import get_args

import pytest

from shared import subjects
from shared.bus.nats_bus import NatsBus, connect
from shared.bus.zmq_events import ZmqEventBus
from shared.config import DiscoveryConfig, NatsConfig, environment
from shared.discovery.contract import KeyAdded
from shared.discovery.etcd import EtcdDiscovery
from shared.discovery.file import FileDiscovery
from shared.errors import Unavailable
from shared.messages.select import SELECT, SELECT_REPLY, Selected
from tests.event_planes import Plane, event_planes
from tests.router.fleet import LIMIT_S, MODEL, NAMESPACE, ScriptedWorker, select, tokens_of
from tests.servers import EtcdServer, NatsServer


@asynccontextmanager
async def router_process(
    nats_url: str, folder: Path, *more: str, etcd: str = ""
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a router process with `more` flags while the context is open; the test may end it earlier. It finds workers
    in `etcd`, or else in `folder`."""
    flags = [
        *("--namespace", NAMESPACE),
        *("--nats-url", nats_url),
        *("--discovery-backend", "etcd" if etcd else "file"),
        *("--discovery-path", str(folder)),
        *("--discovery-endpoints", etcd or "127.0.0.1:2379"),
        *("--discovery-lease-ttl-s", "5"),
        *("--index-speculation-s", "0"),
        *more,
    ]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.router", *flags, env=environment(), stderr=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def overlap_once_it_is(bus: NatsBus, prompt: list[int], blocks: int) -> Selected:
    """Ask until the router finds `blocks` leading blocks of the prompt."""
    async with asyncio.timeout(LIMIT_S):
        for number in range(10_000):
            try:
                question = SELECT.encode(select([*prompt, 1], f"r{number}"))
                answer = await bus.request(subjects.select(NAMESPACE, MODEL), question, timeout_s=1.0)
                reply = SELECT_REPLY.decode(answer.payload)
                if isinstance(reply, Selected) and reply.overlap.device == blocks:
                    return reply
            except Unavailable:
                pass
            await asyncio.sleep(0.02)
    raise AssertionError("the router does not answer")


@pytest.mark.parametrize("plane", get_args(Plane))
async def test_a_router_that_starts_late_or_restarts_learns_what_is_cached(
    jetstream_url: str, tmp_path: Path, plane: Plane
) -> None:
    nats_url = jetstream_url
    bus = await connect(NatsConfig(url=nats_url), "test")
    discovery = FileDiscovery(tmp_path)
    async with event_planes(plane, nats_url, namespace=NAMESPACE) as events:
        worker = ScriptedWorker("a1", bus, events, discovery)
        await worker.start()
        prompt = tokens_of("x", 30)
        await worker.stores(prompt[: 4 * 20])
        async with router_process(nats_url, tmp_path) as first:
            await overlap_once_it_is(bus, prompt, 20)  # by snapshot
            await worker.stores(prompt)
            await worker.reports()
            await overlap_once_it_is(bus, prompt, 30)  # by events
            first.send_signal(signal.SIGTERM)
            _, said = await first.communicate()
            assert first.returncode == 0, said.decode()
        async with router_process(nats_url, tmp_path):
            assert (await overlap_once_it_is(bus, prompt, 30)).instance == "a1"
        await worker.stop()
    await discovery.close()
    await bus.drain()


async def test_a_router_that_starts_while_a_worker_does_not_answer_reads_its_blocks_from_the_stream(
    jetstream_url: str, tmp_path: Path
) -> None:
    bus = await connect(NatsConfig(url=jetstream_url), "test")
    discovery = FileDiscovery(tmp_path)
    async with event_planes("jetstream", jetstream_url, namespace=NAMESPACE) as events:
        worker = ScriptedWorker("a1", bus, events, discovery)
        worker.answers_snapshots = False
        await worker.start()
        prompt = tokens_of("x", 30)
        await worker.stores(prompt[: 4 * 20])
        await worker.stores(prompt)
        async with router_process(jetstream_url, tmp_path, "--source-snapshot-idle-timeout-s", "0.5"):
            assert (await overlap_once_it_is(bus, prompt, 30)).instance == "a1"
        assert worker.snapshots >= 1
        await worker.stop()
    await discovery.close()
    await bus.drain()


async def test_losing_nats_and_all_of_etcd_loses_no_known_block(
    own_nats: NatsServer, own_etcd: EtcdServer, tmp_path: Path
) -> None:
    bus = await connect(NatsConfig(url=own_nats.url), "test")
    discovery = EtcdDiscovery(DiscoveryConfig(endpoints=(own_etcd.endpoint,), lease_ttl_s=5.0))
    with ZmqEventBus("127.0.0.1") as events:
        worker = ScriptedWorker("a1", bus, events, discovery)
        await worker.start()
        prompt = tokens_of("x", 30)
        await worker.stores(prompt[: 4 * 20])
        async with router_process(own_nats.url, tmp_path, etcd=own_etcd.endpoint) as process:
            await overlap_once_it_is(bus, prompt, 20)
            await asyncio.to_thread(own_nats.stop)
            await worker.stores(prompt[: 4 * 25])  # received by ZMQ
            await asyncio.to_thread(own_nats.start)
            await overlap_once_it_is(bus, prompt, 25)
            await asyncio.to_thread(own_etcd.stop)
            await worker.stores(prompt)
            await overlap_once_it_is(bus, prompt, 30)
            await asyncio.to_thread(own_etcd.wipe)
            async with asyncio.timeout(LIMIT_S):
                async for change in discovery.watch(subjects.instance_key(NAMESPACE, "worker", "a1")):
                    if isinstance(change, KeyAdded):
                        break  # the worker is in the list again
            await overlap_once_it_is(bus, prompt, 30)
            assert process.returncode is None
        assert worker.snapshots == 1, "known all the time, never asked again"
        await worker.stop()
    await discovery.close()
    await bus.drain()


async def test_an_invalid_policy_ends_the_process_with_the_reason(nats_url: str, tmp_path: Path) -> None:
    flags = ["--nats-url", nats_url, "--discovery-backend", "file", "--discovery-path", str(tmp_path)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.router", *flags, "--policy", "best"), stderr=asyncio.subprocess.PIPE
    )
    _, said = await process.communicate()
    assert process.returncode == 2
    assert b"policy best" in said
