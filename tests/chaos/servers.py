"""NATS and etcd of a stack: one server of each and links to it that can be cut, or clusters of three on machines of
their own."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from deploy.local.stack import servers
from deploy.local.stack.stack import Value
from shared.config import DiscoveryConfig
from tests.authority import Authority
from tests.chaos.plan import MEMBERS
from tests.chaos.proxy import Proxy
from tests.namespaces import Machines
from tests.servers import free_port

ASK_LIMIT_S = 2.0
NATS_PORT, ROUTES_PORT = 4222, 6222
ROUTE_PINGS = 'ping_interval: "2s", ping_max: 2'
"""As deploy/nats/cluster.conf has it."""
ETCD_PORT, PEER_PORT, HEALTH_PORT = 2379, 2380, 2381
Ready = Callable[[], Awaitable[bool]]
Tables = dict[str, dict[str, Value]]


class ServerProgram(NamedTuple):
    """One server: its command, and whether it serves. `health_url` is asked in place of a `ready`."""

    name: str
    command: list[str]
    ready: Ready | None = None
    health_url: str = ""


class Servers(Protocol):
    """What services and clients of a stack connect to."""

    nats_url: str
    """The address for clients."""
    tls: ssl.SSLContext | None
    """The TLS of clients, if there is one."""
    discovery: DiscoveryConfig
    links: dict[tuple[str, str], Proxy]
    """(service's name, nats or etcd) → what lies between them. Empty if there is nothing."""

    def programs(self) -> list[ServerProgram]:
        """Return the servers, in the order in which they start."""
        ...

    def tables(self, service: str) -> Tables:
        """Return the settings `nats`, `discovery` and `observe` of a service."""
        ...

    def host(self, service: str) -> str:
        """Return the address at which a service is."""
        ...

    def inside(self, service: str) -> list[str]:
        """Return the command that runs a service where it belongs. Empty if that is here."""
        ...

    def cut(self, name: str) -> None:
        """Cut the machine of a server or service off."""
        ...

    def mend(self, name: str) -> None:
        """Undo that."""
        ...


class SingleServers:
    """One NATS and one etcd, both on this machine. Each service has two links of its own."""

    def __init__(self, directory: Path) -> None:
        self.tls: ssl.SSLContext | None = None
        self.links: dict[tuple[str, str], Proxy] = {}
        self._directory = directory
        self._nats_port, self._etcd_port = free_port(), free_port()
        self.nats_url = f"nats://127.0.0.1:{self._nats_port}"
        self.discovery = DiscoveryConfig(endpoints=(f"127.0.0.1:{self._etcd_port}",))

    def programs(self) -> list[ServerProgram]:
        settings = self._directory / "nats.conf"
        settings.write_text(servers.nats_settings(self._nats_port), encoding="utf-8")
        client, peer = (f"http://127.0.0.1:{port}" for port in (self._etcd_port, free_port()))
        etcd = [str(servers.etcd()), *servers.etcd_arguments(client, peer, self._directory / "etcd")]
        nats = [str(servers.nats_server()), "-c", str(settings)]
        return [
            ServerProgram("nats", nats, lambda: _greets("127.0.0.1", self._nats_port)),
            ServerProgram("etcd", etcd, health_url=f"{client}/health"),
        ]

    def tables(self, service: str) -> Tables:
        nats, etcd = (Proxy(free_port(), upstream) for upstream in (self._nats_port, self._etcd_port))
        self.links |= {(service, "nats"): nats, (service, "etcd"): etcd}
        return {
            "nats": {"url": f"nats://127.0.0.1:{nats.port}"},
            "discovery": {"endpoints": [f"127.0.0.1:{etcd.port}"]},
            "observe": {},
        }

    def host(self, service: str) -> str:
        return "127.0.0.1"

    def inside(self, service: str) -> list[str]:
        return []

    def cut(self, name: str) -> None:
        raise AssertionError(f"{name} has no machine of its own")

    mend = cut


class Clusters:
    """MEMBERS servers of each with TLS, as deploy/nats/cluster.conf has it, each on a machine of its own; and machines
    for workers."""

    def __init__(self, directory: Path, machines: Machines, apart: list[str]) -> None:
        """`apart` are the services that have machines of their own, as each server has."""
        self.links: dict[tuple[str, str], Proxy] = {}
        self._directory = directory
        self._machines = machines
        self._apart = apart
        self._authority = Authority(directory)
        cert, key = self._authority.sign("service", "service")
        self._files: dict[str, Value] = {"tls_ca": str(self._authority.pem), "tls_cert": str(cert), "tls_key": str(key)}
        self.nats_url = ",".join(f"tls://{self._machines.address(name)}:{NATS_PORT}" for name in NATS_SERVERS)
        endpoints = tuple(f"{self._machines.address(name)}:{ETCD_PORT}" for name in ETCD_MEMBERS)
        self.discovery = DiscoveryConfig(
            endpoints=endpoints, tls_ca=str(self._authority.pem), tls_cert=str(cert), tls_key=str(key)
        )
        self.tls: ssl.SSLContext | None = (context := ssl.create_default_context(cafile=self._authority.pem))
        context.load_cert_chain(cert, key)

    def programs(self) -> list[ServerProgram]:
        return [*map(self._nats, NATS_SERVERS), *map(self._etcd, ETCD_MEMBERS)]

    def tables(self, service: str) -> Tables:
        return {
            "nats": {"url": self.nats_url, **self._files},
            "discovery": {"endpoints": list(self.discovery.endpoints), **self._files},
            "observe": {"host": self.host(service), "events_curve": True},
        }

    def host(self, service: str) -> str:
        return self._machines.address(service) if service in self._apart else "127.0.0.1"

    def inside(self, service: str) -> list[str]:
        return self._machines.inside(service) if service in self._apart else []

    def cut(self, name: str) -> None:
        self._machines.cut(name)

    def mend(self, name: str) -> None:
        self._machines.mend(name)

    def _nats(self, name: str) -> ServerProgram:
        host, file = self._machines.address(name), name.replace(" ", "-")
        cert, key = self._authority.sign(host, file)
        tls = f'tls {{ cert_file: "{cert}", key_file: "{key}", ca_file: "{self._authority.pem}", verify: true }}'
        routes = ", ".join(f'"tls://{self._machines.address(one)}:{ROUTES_PORT}"' for one in NATS_SERVERS)
        settings = self._directory / f"{file}.conf"
        settings.write_text(
            f"{servers.nats_settings(NATS_PORT).replace('127.0.0.1', host)}server_name: {file}\n{tls}\n"
            f'cluster {{ name: chaos, listen: "{host}:{ROUTES_PORT}", routes: [{routes}], {tls}, {ROUTE_PINGS} }}\n',
            encoding="utf-8",
        )
        command = [*self._machines.inside(name), str(servers.nats_server()), "-c", str(settings)]
        return ServerProgram(name, command, lambda: _greets(host, NATS_PORT, MEMBERS))

    def _etcd(self, name: str) -> ServerProgram:
        host, file = self._machines.address(name), name.replace(" ", "-")
        cert, key = self._authority.sign(host, file)
        peers = ",".join(
            f"{one.replace(' ', '-')}=https://{self._machines.address(one)}:{PEER_PORT}" for one in ETCD_MEMBERS
        )
        client, peer = f"https://{host}:{ETCD_PORT}", f"https://{host}:{PEER_PORT}"
        command = [
            *(*self._machines.inside(name), str(servers.etcd())),
            *servers.etcd_arguments(client, peer, self._directory / file),
            *(f"--name={file}", f"--initial-cluster={peers}", "--heartbeat-interval=100", "--election-timeout=1000"),
            *(f"--cert-file={cert}", f"--key-file={key}", f"--trusted-ca-file={self._authority.pem}"),
            *(f"--peer-cert-file={cert}", f"--peer-key-file={key}", f"--peer-trusted-ca-file={self._authority.pem}"),
            *("--client-cert-auth", "--peer-client-cert-auth", f"--listen-metrics-urls=http://{host}:{HEALTH_PORT}"),
        ]
        return ServerProgram(name, command, health_url=f"http://{host}:{HEALTH_PORT}/health")


NATS_SERVERS = [f"nats server {number}" for number in range(MEMBERS)]
ETCD_MEMBERS = [f"etcd member {number}" for number in range(MEMBERS)]


async def _greets(host: str, port: int, members: int = 0) -> bool:
    """Return whether a NATS server speaks there, as it does first, and knows the members of its cluster."""
    try:
        async with asyncio.timeout(ASK_LIMIT_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                said = await reader.readline()
            finally:
                writer.transport.abort()
    except (OSError, TimeoutError):
        return False
    return said.startswith(b"INFO ") and len(json.loads(said[5:]).get("connect_urls", ())) >= members
