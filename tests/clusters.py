"""Clusters of real servers as a test's own: nats-servers with routes between them, etcds that elect a leader."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import grpc

from shared.discovery.etcd_client import rpc
from tests.servers import EtcdServer, NatsServer, free_port

CLUSTER_CONF = Path(__file__).resolve().parents[1] / "deploy" / "nats" / "cluster.conf"
FORM_LIMIT_S = 120.0
CONF_PASSWORD = re.compile(r"\$([A-Z]+)_PASSWORD")
_POLL_S = 0.02


class ServerTls(NamedTuple):
    """The files of a server with TLS. With `clients` it asks clients for certificates of that authority."""

    authority: Path
    cert: Path
    key: Path
    clients: bool = False


def nats_users() -> str:
    """Return the users of deploy/nats/cluster.conf; the password of each is its name."""
    text = CLUSTER_CONF.read_text(encoding="utf-8")
    return CONF_PASSWORD.sub(lambda name: f'"{name[1].lower()}"', text[text.index("accounts {") :])


def nats_tls(files: ServerTls) -> str:
    """Return the settings of a nats-server with TLS."""
    asks = f', ca_file: "{files.authority}", verify: true' if files.clients else ""
    return f'tls {{ cert_file: "{files.cert}", key_file: "{files.key}"{asks} }}\n'


@contextmanager
def nats_cluster(directory: Path, settings: str = "", size: int = 3) -> Iterator[list[NatsServer]]:
    """Running nats-servers that know each other, ended on leaving. `{folder}` in the settings is that of each."""
    routes = [free_port() for _ in range(size)]
    known = ", ".join(f'"nats://127.0.0.1:{port}"' for port in routes)
    with ExitStack() as running:
        servers = list[NatsServer]()
        for number, port in enumerate(routes):
            folder = directory / f"nats-{number}"
            folder.mkdir()
            name = f'server_name: "nats-{number}"\n'
            cluster = f'cluster {{ name: "test", listen: "127.0.0.1:{port}", routes: [{known}] }}\n'
            server = NatsServer(folder, name + cluster + settings.replace("{folder}", str(folder)))
            running.callback(server.kill)
            server.start()
            servers.append(server)
        _until(lambda: all(_known(server.port) == size for server in servers), "the nats-servers know each other")
        yield servers


def url_of(servers: Sequence[NatsServer], scheme: str = "nats") -> str:
    """Return `nats.url` of a cluster."""
    return ",".join(f"{scheme}://127.0.0.1:{server.port}" for server in servers)


@contextmanager
def etcd_cluster(directory: Path, tls: ServerTls | None = None, size: int = 3) -> Iterator[list[EtcdServer]]:
    """Running etcds with a leader, ended on leaving."""
    peers = [free_port() for _ in range(size)]
    members = ",".join(f"etcd-{number}=http://127.0.0.1:{port}" for number, port in enumerate(peers))
    with ExitStack() as running:
        servers = list[EtcdServer]()
        for number, port in enumerate(peers):
            folder = directory / f"etcd-{number}"
            folder.mkdir()
            peer = f"http://127.0.0.1:{port}"
            server = EtcdServer(
                folder,
                more=(
                    f"--name=etcd-{number}",
                    f"--listen-peer-urls={peer}",
                    f"--initial-advertise-peer-urls={peer}",
                    f"--initial-cluster={members}",
                    "--heartbeat-interval=100",
                    "--election-timeout=1000",
                ),
                tls=tls and (tls.cert, tls.key, tls.authority if tls.clients else None),
            )
            running.callback(server.kill)
            server.launch()
            servers.append(server)
        for server in servers:
            server.wait_ready()
        yield servers


def leader_of(servers: Sequence[EtcdServer], credentials: grpc.ChannelCredentials | None = None) -> EtcdServer:
    """Return the member that leads, by what one of them says."""
    leads = dict[int, EtcdServer]()
    leader = 0
    for server in servers:
        if not server.running:
            continue
        target = f"127.0.0.1:{server.port}"
        opened = grpc.secure_channel(target, credentials) if credentials else grpc.insecure_channel(target)
        with opened as channel:
            status = rpc.MaintenanceStub(channel).Status(rpc.StatusRequest(), timeout=FORM_LIMIT_S)
        leads[status.header.member_id] = server
        leader = status.leader
    return leads[leader]


def _known(port: int) -> int:
    """Return how many servers a nats-server offers to its clients."""
    with socket.create_connection(("127.0.0.1", port), timeout=5.0) as connection:
        line = connection.makefile("rb").readline()
    return len(json.loads(line.removeprefix(b"INFO ")).get("connect_urls", ()))


def _until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + FORM_LIMIT_S
    while not true():
        assert time.monotonic() < deadline, f"not in {FORM_LIMIT_S:g} s: {what}"
        time.sleep(_POLL_S)
