"""A fleet on clusters of NATS and etcd with TLS, a user of NATS for each kind of service, and encrypted KV events: a
server ends under streams, and none is lost.

Real processes: three nats-servers with the rules of deploy/nats/cluster.conf, three etcds, and all four services.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from deploy.local.stack import servers
from shared.messages.cards import ServiceName
from tests.authority import Authority, needs_openssl
from tests.clusters import (
    CLUSTER_CONF,
    CONF_PASSWORD,
    ServerTls,
    etcd_cluster,
    leader_of,
    nats_cluster,
    nats_tls,
    nats_users,
    url_of,
)
from tests.integration.fleet import Fleet, fleet
from tests.paced_streams import PacedStreams
from tests.servers import EtcdServer, NatsServer
from tests.tiny_model import write_tiny_model

NAMESPACE = "clusters"
LIMIT_S = 300.0
STREAMS, TOKENS = 16, 120
pytestmark = needs_openssl


class Clusters:
    """Three servers of NATS and three of etcd, and the flags of services that use them."""

    def __init__(self, folder: Path, nats: list[NatsServer], etcd: list[EtcdServer], authority: Authority) -> None:
        self.folder, self.nats, self.etcd = folder, nats, etcd
        cert, key = authority.sign("service", "service")
        self.credentials = grpc.ssl_channel_credentials(authority.pem.read_bytes(), key.read_bytes(), cert.read_bytes())
        files = {"tls-ca": authority.pem, "tls-cert": cert, "tls-key": key}
        self.flags = (
            *("--namespace", NAMESPACE, "--nats-inbox", "_INBOX_services", "--observe-events-curve", "true"),
            *("--discovery-endpoints", ",".join(server.endpoint for server in etcd)),
            *(f"--{table}-{name}={path}" for table in ("nats", "discovery") for name, path in files.items()),
        )

    def start(self, services: Fleet, service: ServiceName, name: str, *flags: str) -> None:
        password = self.folder / f"{service}.password"
        password.write_text(service)
        user = {"HEADRACE_NATS_USER": service, "HEADRACE_NATS_PASSWORD_FILE": str(password)}
        services.start(service, name, *flags, more=user)

    def server_of(self, services: Fleet, name: str) -> NatsServer:
        """Return the server to which a process is connected, by its log."""
        port = re.findall(r"connected to NATS at \w+://127\.0\.0\.1:(\d+)", services.services[name].log.read_text())[-1]
        return next(server for server in self.nats if server.port == int(port))


@pytest.fixture
def clusters(tmp_path: Path) -> Iterator[Clusters]:
    authority = Authority(tmp_path)
    tls = ServerTls(authority.pem, *authority.sign("127.0.0.1"), clients=True)
    with nats_cluster(tmp_path, nats_tls(tls) + nats_users()) as nats, etcd_cluster(tmp_path, tls) as etcd:
        yield Clusters(tmp_path, nats, etcd, authority)


@pytest.mark.parametrize(
    "end",
    [
        NatsServer.kill,
        pytest.param(NatsServer.freeze, marks=pytest.mark.tier("long")),
        pytest.param(NatsServer.retire, marks=pytest.mark.tier("long")),
    ],
    ids=["kill", "freeze", "retire"],
)
async def test_no_stream_is_lost_with_a_server_of_nats_and_a_worker_comes_while_etcd_has_lost_its_leader(
    tmp_path: Path, clusters: Clusters, end: Callable[[NatsServer], None]
) -> None:
    model = str(write_tiny_model(tmp_path / "tiny"))
    paced = ("--engine", "simulated", "--simulated-fixed-s", "0.02", "--simulated-output-tokens", "0")
    with fleet(tmp_path, url_of(clusters.nats), *clusters.flags) as services:
        clusters.start(
            services, "kvbm", "kvbm", "--pool-directory", str(tmp_path / "pool"), "--pool-size-bytes", "67108864"
        )
        clusters.start(services, "router", "router")
        clusters.start(services, "worker", "worker", "--model", model, *paced)
        clusters.start(services, "frontend", "frontend")
        await asyncio.to_thread(services.wait_ready)
        url = services.services["frontend"].url
        load = PacedStreams(TOKENS)
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(load.run(url, "tiny", STREAMS, LIMIT_S))
            while load.came < STREAMS * TOKENS // 10:  # noqa: ASYNC110 - pieces come in many tasks
                await asyncio.sleep(0.01)
            end(clusters.server_of(services, "frontend"))
            await reading
        assert load.lost == []

        leader = await asyncio.to_thread(leader_of, clusters.etcd, clusters.credentials)
        leader.kill()
        clusters.start(services, "worker", "late", "--model", model, "--model-name", "late", *paced)
        await asyncio.to_thread(services.wait_ready, "late")
        late = PacedStreams(4)
        async with asyncio.timeout(LIMIT_S):
            while not late.came:
                late.lost.clear()
                await late.run(url, "late", 1, LIMIT_S)
        assert late.lost == []
        for name, service in services.services.items():
            assert "ermissions violation" not in service.log.read_text(), name


def test_the_file_of_a_server_is_one_that_nats_server_accepts(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.sign("127.0.0.1")
    text = CONF_PASSWORD.sub("secret", CLUSTER_CONF.read_text(encoding="utf-8"))
    for file, real in (("server.pem", cert), ("server.key", key), ("fleet.pem", authority.pem)):
        text = text.replace(f"/etc/nats/{file}", str(real))
    (tmp_path / "nats.conf").write_text(text)
    done = subprocess.run([servers.nats_server(), "-t", "-c", tmp_path / "nats.conf"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
