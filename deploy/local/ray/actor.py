"""What runs on the nodes of a Ray cluster: an actor that runs one program, and the check of a node.

Ray sends this module's code to the nodes (cluster.py registers it), so that Headrace need not be on their Python's
path: in the package it is not. Headrace itself must be there, in the Python that Ray runs in, in the same version.

    actor ──PR_SET_PDEATHSIG──▶ program      the program dies with its actor; its output is the actor's, for Ray's logs
    program ends by itself ──a delay──▶ the actor ends itself ──▶ Ray starts it again, here or at another node
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

SHORT_RUN_S = 30.0
"""A program that ran for less is started again later."""
DELAY_S, LONG_DELAY_S = 1.0, 5.0
"""Seconds until Ray starts a program again, after a long and after a short run."""
LINES_KEPT = 10
"""Last lines of a program's output that `up` may show."""
KILL_WAIT_S = 5.0


def find_headrace(version: str) -> None:
    """Put Headrace on the path of this process and of those that it starts. Raise RuntimeError if it is not installed
    here, or in another version."""
    with contextlib.suppress(ImportError):
        tree = str(import_module("headrace").TREE)
        sys.path.insert(0, tree)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (tree, os.environ.get("PYTHONPATH"))))
    try:
        found = import_module("shared.version").VERSION
    except ImportError:
        raise RuntimeError(f"Headrace is not installed in the Python of Ray, {sys.executable}") from None
    if found != version:
        raise RuntimeError(f"the Python of Ray, {sys.executable}, has Headrace {found}; `up` is Headrace {version}")


def check_node(
    version: str, host: str, paths: Sequence[tuple[str, str]], ports: int, wanted: int
) -> tuple[str, list[int]]:
    """Return what is wrong with this node, and `ports` free ports of `host`, its address. What is wrong is empty if
    nothing is. `paths` are flags and the paths that they name; `wanted` is a port that must be free. 0 means none."""
    try:
        find_headrace(version)
    except RuntimeError as wrong:
        return str(wrong), []
    from deploy.local.stack import servers

    for flag, path in paths:
        if not Path(path).exists():
            return f"{flag} {path}: no such file or directory there; each node needs it at this path", []
    if wanted and not servers.is_free(wanted, host):
        return f"port {wanted} is taken; choose another with --port", []
    return "", servers.free_ports(ports, host)


class ProgramActor:
    """One program with the files that it needs. Its calls are `status` and `drain`."""

    def __init__(
        self, name: str, fleet: str, version: str, order: Mapping[str, Any], settings: Mapping[str, str]
    ) -> None:
        """Start the program. `order` has the fields of order.Order, `settings` those of services in the environment of
        `up`, which replace any in that of Ray."""
        find_headrace(version)
        from deploy.local.stack import servers
        from deploy.local.stack.block_store import pool_directory, private_pool
        from shared.private_directory import private_directory

        ray = import_module("ray")
        node, host = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        self._name, self._node, self._host = name, node, host
        self._ray, self._me = ray, ray.get_runtime_context().current_actor
        self._held = contextlib.ExitStack()
        place = private_directory(Path(tempfile.gettempdir()), f"{fleet}-{node[:8]}-{name}")
        self._directory = self._held.enter_context(place)
        self._url_file = self._directory / "url"
        self._url_file.unlink(missing_ok=True)
        for file, text in order["files"].items():
            path = self._directory / file
            path.write_text(text, encoding="utf-8")
        pool = f"{fleet}-{node[:8]}"
        if order["owns_pool"]:
            self._held.enter_context(private_pool(name=pool))
        places = {"host": host, "peers": f"{host}:0", "pool": str(pool_directory(pool))}
        places["url_file"] = str(self._url_file)
        programs = {"": (sys.executable, "-P"), "nats": (str(servers.nats_server()),), "etcd": (str(servers.etcd()),)}
        command = (*programs[order["server"]], *order["arguments"])
        variables = {name: places[place] for name, place in order["variables"].items()}
        inherited = servers.program_environment().items()
        kept = {name: value for name, value in inherited if not name.startswith("HEADRACE_")}
        self._environment = {**kept, **settings, **variables}
        self._said: deque[str] = deque(maxlen=LINES_KEPT)
        self._stopping = threading.Event()
        self._ended = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._status: int | None = None
        words = (*servers.tether(), *command)
        # The kernel sends the program its signal when the thread ends that has started it.
        threading.Thread(target=self._run, args=(words,), daemon=True).start()

    def __repr__(self) -> str:
        """Return the name, which Ray puts before each line of its log."""
        return self._name

    def status(self) -> dict[str, Any]:
        """Return the fields of watch.ActorReport."""
        url = self._url_file.read_text(encoding="utf-8").strip() if self._url_file.exists() else ""
        process = self._process
        return {
            "node": self._node,
            "host": self._host,
            "pid": process.pid if process is not None else 0,
            "url": url,
            "status": self._status,
            "said": list(self._said),
        }

    def drain(self, limit_s: float) -> None:
        """Let the program end by SIGTERM, or kill it after the limit. Remove its files."""
        self._stopping.set()
        process = self._process
        if process is not None and not self._ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)
            if not self._ended.wait(limit_s):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                self._ended.wait(KILL_WAIT_S)
        self._held.close()

    def _run(self, words: Sequence[str]) -> None:
        """Run the program to its end; then end this process, so that Ray starts both again."""
        began_s = time.monotonic()
        process = self._process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=self._directory,
            env=self._environment,
            process_group=0,
        )
        reader = threading.Thread(target=self._read, args=(process,), daemon=True)
        reader.start()
        status = process.wait()
        reader.join(1.0)  # a process that the program has left may hold the pipe
        self._status = status
        self._ended.set()
        if not self._stopping.wait(DELAY_S if time.monotonic() - began_s >= SHORT_RUN_S else LONG_DELAY_S):
            # Ray reports a process that ends in another way as a fault of its own.
            self._ray.kill(self._me, no_restart=False)

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._said.append(line.decode(errors="replace").rstrip())
            with contextlib.suppress(OSError):
                os.write(1, line)
