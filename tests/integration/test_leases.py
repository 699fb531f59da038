"""etcd stands still for longer than the leases, under load: all of them end at once when it moves again.

Real processes, real NATS and etcd. The test has a view of discovery of its own, which is the one that services have.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp

from shared.bus.nats_bus import connect
from shared.config import DiscoveryConfig, NatsConfig
from shared.discovery.catalogue import DirectoryChange, InstanceDown
from shared.discovery.directory import Directory
from shared.discovery.etcd import EtcdDiscovery
from shared.errors import DiscoveryDown
from tests.integration.fleet import fleet
from tests.servers import EtcdServer, NatsServer
from tests.tiny_model import write_tiny_model

NAMESPACE = "leases"
TTL_S = 2.0
LIMIT_S = 180.0


async def outlast_leases(discovery: EtcdDiscovery) -> None:
    """Ask a frozen etcd until three calls have failed: each takes as long as a lease, and it may answer a first one."""
    failed = 0
    while failed < 3:
        try:
            await discovery.list("/headrace/")
        except DiscoveryDown:
            failed += 1


async def test_when_all_leases_end_at_once_every_request_is_answered_and_only_the_dead_worker_goes(
    own_nats: NatsServer, own_etcd: EtcdServer, tmp_path: Path
) -> None:
    model = str(write_tiny_model(tmp_path / "tiny"))
    where = ("--namespace", NAMESPACE, "--discovery-endpoints", own_etcd.endpoint)
    with fleet(tmp_path, own_nats.url, *where, "--discovery-lease-ttl-s", str(TTL_S)) as services:
        services.start("router", "router")
        for name in ("first", "second", "dies"):
            services.start("worker", name, "--model", model, "--engine", "echo")
        frontend = services.start("frontend", "frontend")
        await asyncio.to_thread(services.wait_ready)

        bus = await connect(NatsConfig(url=own_nats.url), "test")
        discovery = EtcdDiscovery(DiscoveryConfig(endpoints=(own_etcd.endpoint,), lease_ttl_s=TTL_S))
        directory = Directory(discovery, bus, NAMESPACE)
        answered, stopping, lost = 0, False, list[int]()

        async def ask() -> None:
            nonlocal answered
            question = {"model": "tiny", "prompt": "the mill turns", "max_tokens": 4}
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(LIMIT_S)) as http:
                while not stopping:
                    async with http.post(f"{frontend.url}/v1/completions", json=question) as response:
                        assert response.status == 200, await response.text()
                        await response.read()
                    answered += 1

        async def answer_more() -> None:
            due = answered + 10
            while answered < due:  # noqa: ASYNC110 - answers come one by one
                await asyncio.sleep(0.01)

        def note(change: DirectoryChange) -> None:
            if isinstance(change, InstanceDown):
                lost.append(change.instance.pid)

        def epochs() -> dict[int, int]:
            return {each.pid: each.epoch for each in directory.instances.values()}

        try:
            async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
                following = tasks.create_task(directory.run())
                await directory.synced()
                directory.subscribe(note)
                pids = {one.process.pid for one in services.services.values()}
                before = epochs()
                assert before.keys() == pids
                asking = tasks.create_task(ask())
                await answer_more()
                await asyncio.to_thread(own_etcd.freeze)
                await answer_more()
                dead = services.services["dies"]
                dead.kill()
                await outlast_leases(discovery)
                await answer_more()
                own_etcd.thaw()
                while any(epoch == before[pid] for pid, epoch in epochs().items()):
                    await answer_more()
                await answer_more()
                assert set(epochs()) == pids - {dead.process.pid}
                assert lost == [dead.process.pid]
                stopping = True
                await asking
                following.cancel()
        finally:
            await bus.drain()
            await discovery.close()
