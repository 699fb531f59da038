"""Machines whose clocks are two hours apart: streams, migrations, leases and new workers are as with one clock.

Debian's `libfaketime` has every library of a process read another wall clock; without it this skips. The simulated
engine does not run under it, which refuses its sleeps.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from shared import subjects
from shared.config import DiscoveryConfig
from shared.discovery.etcd import EtcdDiscovery
from shared.messages.cards import INSTANCE, ServiceName
from shared.messages.codec import JSON_HEADER
from tests.integration.fleet import Fleet, fleet
from tests.paced_streams import PacedStreams
from tests.tiny_model import write_tiny_model

NAMESPACE = "clocks"
HOUR_S = 3600.0
LIMIT_S = 180.0
STREAMS, TOKENS = 8, 1200
WORKERS = ("ahead", "behind")
LIBRARY = next(map(str, Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1")), "")


def start(services: Fleet, service: ServiceName, name: str, skew_s: float, *flags: str) -> None:
    """Start a service whose wall clock is off. Its monotonic clock, and the times of files, are this machine's."""
    clock = {"LD_PRELOAD": LIBRARY, "FAKETIME": f"{skew_s:+.0f}s"}
    services.start(service, name, *flags, more=clock | {"FAKETIME_DONT_FAKE_MONOTONIC": "1", "NO_FAKE_STAT": "1"})


async def started_s(etcd_endpoint: str) -> list[float]:
    """Return when the instances started, each by its own clock, in seconds after now."""
    discovery = EtcdDiscovery(DiscoveryConfig(endpoints=(etcd_endpoint,)))
    try:
        entries = await discovery.list(subjects.instances_prefix(NAMESPACE))
    finally:
        await discovery.close()
    return sorted(INSTANCE.decode(value, JSON_HEADER).started - time.time() for value in entries.values())


@pytest.mark.skipif(not LIBRARY, reason="no libfaketime (Debian's package)")
async def test_nothing_depends_on_clocks_that_agree(tmp_path: Path, nats_url: str, etcd_endpoint: str) -> None:
    worker = ("--model", str(write_tiny_model(tmp_path / "tiny")), "--threads", "1")
    with fleet(tmp_path, nats_url, "--namespace", NAMESPACE, "--discovery-endpoints", etcd_endpoint) as services:
        start(services, "router", "router", HOUR_S)
        start(services, "worker", "ahead", HOUR_S, *worker)
        start(services, "worker", "behind", -HOUR_S, *worker)
        services.start("frontend", "frontend")
        await asyncio.to_thread(services.wait_ready)
        apart = await started_s(etcd_endpoint)
        assert apart[0] < -HOUR_S < 0 < HOUR_S / 2 < apart[-1], "the clocks are not apart"
        url = services.services["frontend"].url
        load = PacedStreams(TOKENS)
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(load.run(url, "tiny", STREAMS, LIMIT_S))
            while load.came < STREAMS * TOKENS // 10:  # noqa: ASYNC110 - pieces come in many tasks
                await asyncio.sleep(0.01)
            victim, other = sorted(
                WORKERS, key=lambda name: -services.services[name].metric("headrace_inflight_requests")
            )
            services.services[victim].kill()
            start(services, "router", "late router", -HOUR_S)
            await reading
        assert load.lost == []
        assert services.services["frontend"].metric("headrace_model_migration_total") > 0
        start(services, "worker", "again", -HOUR_S, *worker)
        await asyncio.to_thread(services.wait_ready, "again", "late router")
        for gone in ("router", other):
            services.services[gone].kill()
        more = PacedStreams(4)
        async with asyncio.timeout(LIMIT_S):
            while more.lost or not more.came:
                more.lost.clear()
                await more.run(url, "tiny", 1, LIMIT_S)
