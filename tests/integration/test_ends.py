"""SIGTERM when something that a drain would need is away: every process ends by itself within a bound all the same.

Status 0 says that a process ended before its own drain limit. The frontend's and the worker's, 30 and 35 s, are less
than the `stop_grace_period` of compose.yaml, after which Docker kills.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.fleet import fleet
from tests.servers import EtcdServer, NatsServer
from tests.tiny_model import write_tiny_model

Away = Callable[[NatsServer, EtcdServer], None]


def nats_dead(nats: NatsServer, _etcd: EtcdServer) -> None:
    nats.kill()


def etcd_dead(_nats: NatsServer, etcd: EtcdServer) -> None:
    etcd.kill()


def both_frozen(nats: NatsServer, etcd: EtcdServer) -> None:
    nats.freeze()
    etcd.freeze()


@pytest.mark.parametrize("away", [nats_dead, etcd_dead, both_frozen])
async def test_every_process_ends_on_sigterm_whichever_server_is_away(
    own_nats: NatsServer, own_etcd: EtcdServer, tmp_path: Path, away: Away
) -> None:
    model = str(write_tiny_model(tmp_path / "tiny"))
    with fleet(tmp_path, own_nats.url, "--discovery-endpoints", own_etcd.endpoint) as services:
        services.start("router", "router")
        services.start("worker", "worker", "--model", model, "--engine", "echo")
        services.start("frontend", "frontend")
        await asyncio.to_thread(services.wait_ready)
        await asyncio.to_thread(away, own_nats, own_etcd)
        ends = await asyncio.gather(*(asyncio.to_thread(one.stop) for one in services.services.values()))
        for service, (status, _) in zip(services.services.values(), ends, strict=True):
            assert status == 0, service.log.read_text()[-4000:]
