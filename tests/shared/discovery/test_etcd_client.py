"""shared/discovery/etcd_client.py at three etcds with TLS: the leader is killed, and frozen; an endpoint is wrong."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from pathlib import Path

import grpc
import pytest

from shared.config import DiscoveryConfig
from shared.discovery.etcd import EtcdDiscovery
from tests.authority import Authority, needs_openssl
from tests.clusters import ServerTls, etcd_cluster, leader_of
from tests.servers import EtcdServer, free_port
from tests.shared.watched import watching

DEADLINE_S = 120.0
PREFIX = "/headrace/test/"
LIVING = PREFIX + "living"
TTL_S = 10.0


def one_key(key: str, _epoch: int) -> dict[str, bytes]:
    return {key: b"new"}


@needs_openssl
async def test_when_the_leader_of_three_is_killed_or_frozen_no_key_is_lost_and_new_ones_are_seen(
    tmp_path: Path,
) -> None:
    ours = Authority(tmp_path)
    (cert, key), (our_cert, our_key) = ours.sign("127.0.0.1"), ours.sign("client", "client")
    credentials = grpc.ssl_channel_credentials(ours.pem.read_bytes(), our_key.read_bytes(), our_cert.read_bytes())
    with etcd_cluster(tmp_path, ServerTls(ours.pem, cert, key, clients=True)) as servers:
        config = DiscoveryConfig(
            endpoints=tuple(server.endpoint for server in servers),
            lease_ttl_s=TTL_S,
            tls_ca=str(ours.pem),
            tls_cert=str(our_cert),
            tls_key=str(our_key),
        )
        owner, watcher = EtcdDiscovery(config), EtcdDiscovery(config)
        registration = await owner.register(lambda epoch: {LIVING: b"%d" % epoch})
        expected = {LIVING: b"1"}
        async with watching(watcher, PREFIX) as watched, asyncio.timeout(DEADLINE_S):
            for end in (EtcdServer.kill, EtcdServer.freeze):
                leader = await asyncio.to_thread(leader_of, servers, credentials)
                end(leader)
                new = f"{PREFIX}after {end.__name__}"
                later = await owner.register(partial(one_key, new))
                await watched.until_entries({**expected, new: b"new"})
                assert registration.epoch == 1, "no lease was lost"
                assert (await watcher.list(PREFIX)).keys() == {LIVING, new}
                if end is EtcdServer.kill:
                    await asyncio.to_thread(leader.start)
                else:
                    leader.thaw()
                await later.close()
                await watched.until_entries(expected)
        await registration.close()
        await owner.close()
        await watcher.close()


async def test_of_three_endpoints_those_that_are_wrong_are_named_and_a_listing_asks_the_third(
    own_etcd: EtcdServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "shared.discovery.etcd_client")
    wrong = (f"127.0.0.1:{free_port()}", "no-such-host.invalid:1")
    for _ in range(40):  # the order is random
        discovery = EtcdDiscovery(DiscoveryConfig(endpoints=(*wrong, own_etcd.endpoint)))
        assert await discovery.list(PREFIX) == {}
        await discovery.close()
        if all(f"etcd at {endpoint}: " in caplog.text for endpoint in wrong):
            break
    else:
        pytest.fail(f"not both are named: {caplog.text}")
