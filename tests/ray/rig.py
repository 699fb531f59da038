"""A real Ray cluster of several nodes on this machine, each with an address of its own, and `up --on ray` in it.

.headrace/ray    the environment with Ray, made from requirements-ray.lock by the first test that needs it. Ray's
                 processes run in it, and so does `up`
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.clients import environment
from tests.integration.stack import ROOT

PLACE = ROOT / ".headrace" / "ray"
LOCK = ROOT / "requirements-ray.lock"
PROGRAM = Path(__file__).with_name("cluster_program.py")
HEAD = "127.0.0.2"
"""Not 127.0.0.1: Ray puts the machine's own address in its place."""
OBJECT_STORE_BYTES = 80 << 20
"""The least that Ray takes is 75 MiB."""
STARTS = 3
"""Ray gives each node 30 s to start, which can be too little on a busy machine."""


def python() -> Path:
    """The Python with Ray, which has this checkout on its path."""
    found = environment.python(PLACE, LOCK)
    [packages] = PLACE.glob("lib/python*/site-packages")
    (packages / "headrace.pth").write_text(f"{ROOT}\n", encoding="utf-8")
    return found


def node(host: str, *, cpus: int = 2, gpus: int = 0) -> dict[str, Any]:
    """The arguments of a node at an address of loopback."""
    return {"node_ip_address": host, "num_cpus": cpus, "num_gpus": gpus, "object_store_memory": OBJECT_STORE_BYTES}


class Cluster:
    """A running cluster. Its nodes are numbered as they were added; 0 is the head node."""

    def __init__(self, words: Sequence[str], own: Mapping[str, str]) -> None:
        for _ in range(STARTS):
            self._program = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=own)
            assert self._program.stdout is not None
            self.address = self._program.stdout.readline().strip()
            if self.address:
                return
            self.close()
        raise AssertionError(f"the cluster did not start {STARTS} times")

    def kill(self, index: int) -> None:
        """SIGKILL all processes of a node: Ray's, and with them those of its actors."""
        self._say(f"kill {index}")

    def add(self, arguments: Mapping[str, Any]) -> None:
        self._say(f"add {json.dumps(arguments)}")

    def close(self) -> None:
        """End it."""
        for pipe in (self._program.stdin, self._program.stdout):
            assert pipe is not None
            pipe.close()
        self._program.wait(120)

    def _say(self, line: str) -> None:
        assert self._program.stdin is not None
        self._program.stdin.write(f"{line}\n")
        self._program.stdin.flush()
        assert self._line() == "done"

    def _line(self) -> str:
        assert self._program.stdout is not None
        line = self._program.stdout.readline().strip()
        assert line, f"the cluster has ended with {self._program.poll()}"
        return line


@contextmanager
def cluster(*nodes: Mapping[str, Any], version: str = "") -> Iterator[Cluster]:
    """A cluster of these nodes, ended afterwards. With `version` it claims to be of another version of Ray."""
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # Ray's sockets need a short path
    own = {**variables(), "RAY_TMPDIR": folder, "HEADRACE_CACHE": "/of/nobody"}
    words = [str(python()), str(PROGRAM), version, *map(json.dumps, nodes)]
    try:
        started = Cluster(words, own)
        try:
            yield started
        finally:
            started.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def variables() -> dict[str, str]:
    """The environment of Ray's processes, without what would steer Headrace or Ray."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HEADRACE_", "RAY_"))}
    bin_path = f"{PLACE / 'bin'}{os.pathsep}{kept.get('PATH', '')}"
    patient = {"RAY_agent_register_timeout_ms": "600000"}  # a node ends if its agents take longer to start
    off = {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    return {**kept, **off, **patient, "PATH": bin_path}
