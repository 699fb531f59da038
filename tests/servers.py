"""Real servers for tests: nats-server and etcd, on loopback ports the test picks, with faults on demand.

    running ──kill/stop──▶ down ──restart──▶ running          same port, same data
       │ freeze ▲ thaw                wipe: stop, delete the data, start
       ▼        │
      frozen ───┘

The calls block until the server is in the new state; from a running event loop use `asyncio.to_thread`. A server dies
with the thread that started it (PR_SET_PDEATHSIG), so none outlives its tests.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

from deploy.local.stack import servers
from shared.socket_path import reachable

_START_LIMIT_S = 180.0
_POLL_S = 0.02
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
_FIRST_PORT = 10_000
_SHARE = 50
"""Ports that a process takes for itself at once."""
_left: list[int] = []
"""The ports that are this process's and were not given yet; a caller may bind its port late."""
_held: list[int] = []
"""Open files whose locks say which ports are this process's; they end with it."""


def free_port() -> int:
    """A free loopback port that neither a client's ephemeral port nor `headrace up` can take; another one each time.

    Test processes of one user never get the same one, though each may bind its port late.
    """
    while True:
        if not _left:
            _left.extend(_share())
        port = _left.pop()
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


def _share() -> list[int]:
    """Ports that no other process of this user has. The kernel gives them back when this one ends."""
    locks = Path(tempfile.gettempdir(), f"headrace-test-ports-{os.getuid()}")
    locks.mkdir(mode=0o700, exist_ok=True)
    starts = list(range(_FIRST_PORT, servers.FIRST_PORT, _SHARE))
    random.shuffle(starts)
    for start in starts:
        lock = os.open(locks / str(start), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        _held.append(lock)
        return random.sample(range(start, start + _SHARE), _SHARE)
    raise RuntimeError(f"test processes have all ports from {_FIRST_PORT} to {servers.FIRST_PORT - 1}")


class Server(Protocol):
    """A server, as a fault needs it."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def kill(self) -> None: ...

    def freeze(self) -> None: ...

    def thaw(self) -> None: ...

    def restart(self) -> None: ...


class _Process:
    """One child: started, ready, ended, frozen."""

    def __init__(self, name: str, log: Path) -> None:
        self._name = name
        self._log = log
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    @property
    def running(self) -> bool:
        return self._child is not None and self._child.poll() is None

    def start(self, command: list[str], directory: Path | None = None) -> None:
        assert not self.running, f"{self._name} already runs"
        with self._log.open("ab") as log:
            self._child = subprocess.Popen(command, stdout=log, stderr=log, cwd=directory, preexec_fn=_die_with_parent)

    def wait_ready(self, ready: Callable[[], bool]) -> None:
        """Asks until `ready` says yes; a child that ended or took too long raises with the end of its log."""
        deadline = time.monotonic() + _START_LIMIT_S
        while not ready():
            if not self.running or time.monotonic() > deadline:
                self.end(signal.SIGKILL)
                raise RuntimeError(f"{self._name} did not start:\n{self._log.read_text(errors='replace')[-2000:]}")
            time.sleep(_POLL_S)

    def freeze(self) -> None:
        """Returns when all its threads stand still: a signal alone leaves one that runs a moment more."""
        assert self._child is not None
        self.send(signal.SIGSTOP)
        threads = Path(f"/proc/{self._child.pid}/task")
        deadline = time.monotonic() + _START_LIMIT_S
        while any(_state(thread) != "T" for thread in threads.iterdir()):
            assert time.monotonic() < deadline, f"{self._name} does not stop"
            time.sleep(_POLL_S)

    def send(self, number: signal.Signals) -> None:
        assert self._child is not None
        self._child.send_signal(number)

    def end(self, number: signal.Signals) -> None:
        if self._child is None:
            return
        if self.running:
            self._child.send_signal(number)
            self._child.send_signal(signal.SIGCONT)
        try:
            self._child.wait(10)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._child = None


def _state(thread: Path) -> str:
    """Return the state of a thread: one letter of /proc."""
    return (thread / "stat").read_text().rpartition(")")[2].split()[0]


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class NatsServer:
    """One nats-server with a payload limit of 8 MiB; `settings` is more of its configuration language."""

    def __init__(self, directory: Path, settings: str = "", port: int | None = None) -> None:
        self.port = free_port() if port is None else port
        self._configuration = directory / "nats.conf"
        self._process = _Process("nats-server", directory / "nats.log")
        self._configure(settings)

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self) -> None:
        self._process.start([str(servers.nats_server()), "-c", str(self._configuration)])
        self._process.wait_ready(self._answers)

    def stop(self) -> None:
        self._process.end(signal.SIGTERM)

    def kill(self) -> None:
        self._process.end(signal.SIGKILL)

    def freeze(self) -> None:
        self._process.freeze()

    def thaw(self) -> None:
        self._process.send(signal.SIGCONT)

    def restart(self) -> None:
        self.stop()
        self.start()

    def retire(self) -> None:
        """Enter lame duck mode: it accepts nothing more, and asks its clients to leave before it stops."""
        self._process.send(signal.SIGUSR2)

    def reload(self, settings: str) -> None:
        """Load new settings while running; clients that they no longer admit are disconnected."""
        self._configure(settings)
        self._process.send(signal.SIGHUP)

    def _configure(self, settings: str) -> None:
        fixed = f'listen: "127.0.0.1:{self.port}"\nmax_payload: 8MB\n'
        self._configuration.write_text(fixed + settings, encoding="utf-8")

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as connection:
                return connection.recv(4) == b"INFO"
        except OSError:
            return False


class EtcdServer:
    """One etcd without fsync and with short elections; its data survives `restart` and not `wipe`. At a port, or at a
    socket in `directory`. `more` are flags that override those here; `tls` is its certificate, its key, and the
    authority of the clients' certificates if it asks for them."""

    def __init__(
        self,
        directory: Path,
        port: int | None = None,
        *,
        socket: bool = False,
        more: Sequence[str] = (),
        tls: tuple[Path, Path, Path | None] | None = None,
    ) -> None:
        self.port = free_port() if port is None else port
        self._peer_port = free_port()
        self._health_port = self.port if tls is None else free_port()
        self._more = more
        self._tls = tls
        self._data = directory / "etcd"
        self._socket = directory / servers.ETCD_SOCKET if socket else None
        self._process = _Process("etcd", directory / "etcd.log")

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}" if self._socket is None else f"unix:{self._socket}"

    @property
    def running(self) -> bool:
        return self._process.running

    def start(self) -> None:
        self.launch()
        self.wait_ready()

    def wait_ready(self) -> None:
        self._process.wait_ready(self._healthy)

    def launch(self) -> None:
        """Start, and do not wait: a member of a cluster is ready only when most others are."""
        scheme = "http" if self._tls is None else "https"
        client = f"{scheme}://{self.endpoint}" if self._socket is None else f"unix://{servers.ETCD_SOCKET}"
        peer = f"http://127.0.0.1:{self._peer_port}"
        self._process.start(
            [
                str(servers.etcd()),
                f"--data-dir={self._data}",
                f"--listen-client-urls={client}",
                f"--advertise-client-urls={client}",
                f"--listen-peer-urls={peer}",
                f"--initial-advertise-peer-urls={peer}",
                f"--initial-cluster=default={peer}",
                "--unsafe-no-fsync",
                "--heartbeat-interval=20",
                "--election-timeout=200",
                "--log-level=warn",
                *self._tls_flags(),
                *self._more,
            ],
            self._data.parent,
        )

    def _tls_flags(self) -> list[str]:
        if self._tls is None:
            return []
        cert, key, clients = self._tls
        asks = [] if clients is None else ["--client-cert-auth", f"--trusted-ca-file={clients}"]
        health = f"--listen-metrics-urls=http://127.0.0.1:{self._health_port}"
        return [f"--cert-file={cert}", f"--key-file={key}", health, *asks]

    def stop(self) -> None:
        self._process.end(signal.SIGTERM)

    def kill(self) -> None:
        self._process.end(signal.SIGKILL)

    def freeze(self) -> None:
        self._process.freeze()

    def thaw(self) -> None:
        self._process.send(signal.SIGCONT)

    def restart(self) -> None:
        self.stop()
        self.start()

    def wipe(self) -> None:
        """Restart with an empty store."""
        self.stop()
        shutil.rmtree(self._data, ignore_errors=True)
        self.start()

    def _healthy(self) -> bool:
        at_socket = self._socket is not None
        try:
            with ExitStack() as opened, socket.socket(socket.AF_UNIX if at_socket else socket.AF_INET) as connection:
                connection.settimeout(1.0)
                where = reachable(str(self._socket), opened) if at_socket else ("127.0.0.1", self._health_port)
                connection.connect(where)
                connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
                return b'"health":"true"' in connection.makefile("rb").read()
        except OSError:
            return False


@contextmanager
def nats_server(directory: Path, settings: str = "") -> Iterator[NatsServer]:
    """A running nats-server, ended on leaving."""
    server = NatsServer(directory, settings)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def etcd_server(directory: Path, *, socket: bool = False) -> Iterator[EtcdServer]:
    """A running etcd, ended on leaving."""
    server = EtcdServer(directory, socket=socket)
    server.start()
    try:
        yield server
    finally:
        server.kill()
