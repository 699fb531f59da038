"""podman in namespaces of its own: processes, mounts and network.

    this machine ── unshare ──▶ catatonit (process 1) ── nsenter ──▶ podman, Docker's CLI, Compose
                                    │
                                    └─ containers, bridges, rules of iptables, ip_forward, tmpfs volumes

So ports, rules and mounts are never this machine's, and all of it ends with process 1, whatever happens to the tests.
Images and the layers of builds stay in `.headrace/containers`. With `network=False` the engine has this machine's
network: builds fetch packages.
"""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.integration.stack import eventually

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
HOME = ROOT / ".headrace" / "containers"
LIMIT_S = 900.0
"""Seconds that a command may take; the longest is a build."""
SOCKET = "run/podman.sock"
HEALTH_S = 1.0
"""Seconds between two rounds of health checks."""
_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)
_CONTAINERS = """[containers]
default_ulimits = ["nofile=20000:20000", "nproc=20000:20000"]
init_path = "/usr/bin/catatonit"
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
[network]
network_backend = "netavark"
network_config_dir = "{home}/networks"
"""
_STORAGE = """[storage]
driver = "overlay"
graphroot = "{home}/storage"
runroot = "/run/containers/storage"
"""


def write_settings() -> None:
    """Write podman's settings into HOME."""
    (HOME / "docker" / "config").mkdir(parents=True, exist_ok=True)
    (HOME / "docker" / "config" / "config.json").write_text("{}", encoding="utf-8")
    (HOME / "containers.conf").write_text(_CONTAINERS.format(home=HOME), encoding="utf-8")
    (HOME / "storage.conf").write_text(_STORAGE.format(home=HOME), encoding="utf-8")
    (HOME / "registries.conf").write_text('unqualified-search-registries = ["docker.io"]\n', encoding="utf-8")


def variables() -> dict[str, str]:
    """The environment of everything that runs here."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HEADRACE_", "COMPOSE_"))}
    return kept | {
        "CONTAINERS_CONF": str(HOME / "containers.conf"),
        "CONTAINERS_STORAGE_CONF": str(HOME / "storage.conf"),
        "CONTAINERS_REGISTRIES_CONF": str(HOME / "registries.conf"),
        "DISABLE_HC_SYSTEMD": "true",  # health checks go by `Engine.check_health`
        "DOCKER_HOST": f"unix:///{SOCKET}",
        "DOCKER_CONFIG": str(HOME / "docker" / "config"),
        "PATH": f"{HOME / 'docker' / 'bin'}:{os.environ['PATH']}:/usr/sbin:/sbin",
    }


class Engine:
    """podman's service, and commands next to it. One at a time has HOME."""

    def __init__(self, *, network: bool = True) -> None:
        self._network = network
        self._started: list[subprocess.Popen[bytes]] = []
        self._ended = threading.Event()
        self._health = threading.Thread(target=self._check_always, name="health checks")

    def __enter__(self) -> Self:
        """Start it, with no container of an earlier one left."""
        own = ("--net",) if self._network else ()
        # podman keeps sockets, lists of mounts and locks there
        first = "mount -t tmpfs tmpfs /run && mount -t tmpfs tmpfs /dev/shm && exec catatonit -P"
        first = f"ip link set lo up && {first}" if self._network else first
        spaces = ("--mount", "--pid", "--fork", "--mount-proc", "--kill-child=KILL", *own)
        # setpriv: the kernel kills it when this process ends, however it does
        self._start("setpriv", "--pdeathsig", "KILL", "unshare", *spaces, "sh", "-c", first)
        try:
            eventually(self._is_pausing, limit_s=60.0, what="process 1 of the namespaces")
            self.podman("container", "rm", "--all", "--force")
            self.podman("volume", "rm", "--all", "--force")
            self.podman("network", "prune", "--force")
            self._start(*self._inside(), "podman", "system", "service", "--time=0", f"unix:///{SOCKET}")
            eventually(self._answers, limit_s=60.0, what="podman's service answers")
        except BaseException:
            self.close()
            raise
        self._health.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all processes, networks and mounts."""
        self._ended.set()
        self._health.join()
        self.close()

    def close(self) -> None:
        """Kill process 1; the kernel kills all others with it."""
        for process in reversed(self._started):
            process.kill()
            process.wait()
        eventually(lambda: not processes(), limit_s=60.0, what="all processes have ended")
        remove_cgroups()

    @property
    def parent(self) -> subprocess.Popen[bytes]:
        """The process whose end is the end of all."""
        return self._started[0]

    def _start(self, *command: str) -> None:
        with (HOME / "engine.log").open("ab") as log:
            started = subprocess.Popen(command, env=variables(), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._started.append(started)

    def _first(self) -> int:
        """Process 1 of the namespaces, by this machine's number. 0 if it is not there yet."""
        pid = self.parent.pid
        assert self.parent.poll() is None, "unshare has ended: see engine.log"
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(children[0]) if children else 0

    def _is_pausing(self) -> bool:
        first = self._first()
        return first != 0 and Path(f"/proc/{first}/comm").read_text().strip() == "catatonit"

    def _inside(self, directory: Path = ROOT) -> tuple[str, ...]:
        return ("nsenter", "--target", str(self._first()), "--mount", "--pid", "--net", "env", "-C", str(directory))

    def run(self, *command: str, directory: Path = ROOT, extra: Mapping[str, str] = {}) -> str:
        """Run a command inside and return what it prints. Fail with all that it said if its status is not 0."""
        ran = subprocess.run(
            [*self._inside(directory), *command],
            env={**variables(), **extra},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert ran.returncode == 0, f"{' '.join(command)}: {ran.returncode}\n{ran.stdout[-4000:]}\n{ran.stderr[-4000:]}"
        return ran.stdout

    def podman(self, *words: str) -> str:
        return self.run("podman", *words)

    def build(self, name: str, file: Path, context: Path, *more: str) -> None:
        """Build an image, of images that are here."""
        words = ("--isolation", "chroot", "--network", "host", "--pull-never", "--layers")
        self.podman("build", *words, "--tag", name, "--file", str(file), *more, str(context))

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Let the calling thread make its sockets in the containers' network."""
        with (
            Path(f"/proc/self/task/{threading.get_native_id()}/ns/net").open() as back,
            Path(f"/proc/{self._first()}/ns/net").open() as there,
        ):
            _set_network(there.fileno())
            try:
                yield
            finally:
                _set_network(back.fileno())

    def ask(self, path: str) -> Any:
        """GET a path of podman's API. Raise OSError, and ValueError for what is no JSON."""
        connection = _Unix(f"/proc/{self._first()}/root/{SOCKET}")
        try:
            connection.request("GET", path, headers={"Host": "podman"})
            return json.loads(connection.getresponse().read())
        except http.client.HTTPException as wrong:
            raise OSError(str(wrong)) from wrong
        finally:
            connection.close()

    def _answers(self) -> bool:
        with suppress(OSError, ValueError):
            return bool(self.ask("/v4.0.0/libpod/info"))
        return False

    def _check_always(self) -> None:
        while not self._ended.wait(HEALTH_S):
            with suppress(OSError, ValueError, AssertionError):  # containers come and go, and podman's service ends
                for container in self.ask("/v4.0.0/libpod/containers/json"):
                    self.ask(f"/v4.0.0/libpod/containers/{container['Id']}/healthcheck")


def _set_network(descriptor: int) -> None:
    if _LIBC.setns(descriptor, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


class _Unix(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("podman", timeout=60.0)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def processes() -> list[int]:
    """Return the processes that an engine of this checkout started and that have not ended, by their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdecimal() and f"CONTAINERS_CONF={HOME}/".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return [pid for pid in found if pid != os.getpid()]


def cgroups() -> list[Path]:
    """Return podman's control groups, children first."""
    mounted = Path("/sys/fs/cgroup")
    tops = [*mounted.glob("libpod_parent"), *mounted.glob("*/libpod_parent")]
    found = {each for top in tops for each in top.glob("**/")}  # with the top itself
    return sorted(found, key=lambda each: -len(each.parts))


def remove_cgroups() -> None:
    """Remove podman's control groups in which nothing runs, which a killed engine leaves."""
    for group in cgroups():
        with suppress(OSError):  # busy: another podman's
            group.rmdir()
