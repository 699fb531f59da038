"""Starts both systems for `benchmarks/serving.py`, as real processes on loopback, and measures their cost.

    ours    nats-server, etcd, one frontend, one router, two workers: a shell and a simulated engine each. These are the
            processes of `headrace up`, with other settings; the servers of both sides have one thread each
    peer    nats-server, etcd, one frontend with its router inside, two mockers; started by the yardstick's own stack.py
            with the yardstick's own Python

All of them end with this process, even if it is killed: ours by the kernel's parent-death signal, the peer's when the
pipe to their starter closes.
"""

from __future__ import annotations

import json
import os
import pstats
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType

from msgspec import Struct

from deploy.local.stack import servers, stack
from deploy.local.stack.stack import UpOptions
from deploy.local.state import StateDirectory

NAME = "tiny"
"""The model's name in requests."""
WORKERS = 2
BLOCK_SIZE = 16
CAPACITY_BLOCKS = 65_536
START_LIMIT_S = 60.0
STOP_LIMIT_S = 60.0
NONE: Mapping[str, object] = MappingProxyType({})
_POLL_S = 0.05
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")

_PEER = """
import json, sys, stack
asked = json.loads(sys.argv[1])
for name, port in asked["ports"].items():
    setattr(stack, name, port)
with stack.Stack(**asked["stack"]) as running:
    print(json.dumps({name: child.pid for name, child in running.p.items()}), flush=True)
    sys.stdin.read()
"""
"""Runs the yardstick's stack on other ports, until its standard input is closed."""


class Cost(Struct, frozen=True):
    """The cost of all processes of one kind, so far."""

    cpu_s: float
    rss_mb: float


class RunningStack:
    """A stack that is ready."""

    def __init__(self, port: int, kinds: Mapping[int, str], observed: Mapping[str, str] | None = None) -> None:
        """Describe a stack. `kinds` has the kind of each process, by PID.

        A child has its parent's kind, but a worker's child is its engine. `observed` has the base URL of each
        program's /metrics, by the program's name.
        """
        self.port = port
        self.observed = {} if observed is None else dict(observed)
        self._kinds = dict(kinds)

    def include(self, pid: int, kind: str) -> None:
        """Count a process that was not started with the others."""
        self._kinds[pid] = kind

    def costs(self) -> dict[str, Cost]:
        """Return the cost of each kind of process, descendants included."""
        parents, costs = _processes()
        totals: dict[str, Cost] = {}
        for pid in costs:
            kind = self._kind(pid, parents)
            if kind is not None:
                total = totals.get(kind, Cost(0.0, 0.0))
                totals[kind] = Cost(total.cpu_s + costs[pid].cpu_s, total.rss_mb + costs[pid].rss_mb)
        return totals

    def pids(self, kind: str) -> list[int]:
        """Return the PIDs of the processes that were started as this kind."""
        return [pid for pid, name in self._kinds.items() if name == kind]

    def _kind(self, pid: int, parents: Mapping[int, int]) -> str | None:
        if pid in self._kinds:
            return self._kinds[pid]
        above = parents.get(pid)
        kind = None if above is None else self._kind(above, parents)
        return "engine" if kind == "shell" else kind


def _processes() -> tuple[dict[int, int], dict[int, Cost]]:
    """Return each process's parent and each process's cost, for the whole machine."""
    parents: dict[int, int] = {}
    costs: dict[int, Cost] = {}
    page_mb = os.sysconf("SC_PAGE_SIZE") / 1e6
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:  # it has ended
            continue
        pid = int(entry.name)
        parents[pid] = int(fields[1])
        costs[pid] = Cost((int(fields[11]) + int(fields[12])) * _TICK_S, int(fields[21]) * page_mb)
    return parents, costs


def ours(
    model: Path,
    directory: Path,
    *,
    worker: Mapping[str, str],
    added: Mapping[str, Mapping[str, str]] | None = None,
    profile: str = "",
) -> AbstractContextManager[RunningStack]:
    """Run our stack. `worker` has the workers' settings, by the names of their environment variables, `added` more of
    each service.

    `profile` is frontend, router or worker (the first one's shell); cProfile's table is printed at the end.
    """
    options = UpOptions(
        model=str(model), model_name=NAME, port=servers.free_ports(1)[0], workers=WORKERS, engine="simulated"
    )
    settings = {
        "worker": {"HEADRACE_CAPACITY_BLOCKS": str(CAPACITY_BLOCKS), "HEADRACE_BLOCK_SIZE": str(BLOCK_SIZE), **worker},
        "router": {"HEADRACE_LOAD_RAMP_S": "0"},  # both workers are new
    }
    for service, more in (added or {}).items():
        settings[service] = settings.get(service, {}) | dict(more)
    return launched(options, directory, settings, profile=profile)


@contextmanager
def launched(
    options: UpOptions,
    directory: Path,
    settings: Mapping[str, Mapping[str, str]],
    *,
    profile: str = "",
    start_limit_s: float = START_LIMIT_S,
) -> Iterator[RunningStack]:
    """Run what `up` would run with these options.

    `settings` adds settings to each service, by the service's name and the names of their environment variables.
    """
    state_dir = StateDirectory(directory)
    ports = servers.free_ports(stack.ports_needed(options))
    plan = stack.plan(options, state_dir, ports, python=sys.executable, cores=os.cpu_count() or 1, password="benchmark")
    for part in (state_dir.run, state_dir.logs):
        part.mkdir(parents=True, exist_ok=True)
    for file, text in plan.files.items():
        file.write_text(text, encoding="utf-8")
    table = directory / "profile"
    kinds: dict[int, str] = {}
    started: list[subprocess.Popen[bytes]] = []
    observed = {launch.program.name: launch.observe for launch in plan.launches if launch.observe}
    with ExitStack() as children:
        for launch in plan.launches:
            name = launch.program.name
            service = name.partition("-")[0]
            command = list(launch.arguments)
            if profile and name in (profile, f"{profile}-0"):
                command[2:2] = ["-m", "cProfile", "-o", str(table)]
            child = children.enter_context(child_process(name, command, state_dir, settings.get(service, {})))
            kinds[child.pid] = "shell" if service == "worker" else service
            started.append(child)
        for url in observed.values():
            _wait_healthy(f"{url}/health", started, state_dir.logs, start_limit_s)
        yield RunningStack(options.port, kinds, observed)
    if profile:
        pstats.Stats(str(table)).sort_stats("tottime").print_stats(40)


@contextmanager
def child_process(
    name: str, command: list[str], state_dir: StateDirectory, settings: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program that is ended by SIGTERM, and dies with this process."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HEADRACE_")}
    tethered = [*servers.tether(), *command]
    with (state_dir.logs / f"{name}.log").open("wb") as log:
        child = subprocess.Popen(
            tethered, cwd=state_dir.run, env=servers.ENVIRONMENT | clean | dict(settings), stdout=log, stderr=log
        )
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _wait_healthy(url: str, children: Sequence[subprocess.Popen[bytes]], logs: Path, limit_s: float) -> None:
    """Wait until `url` answers. Raises SystemExit with the ends of the logs, at the latest after `limit_s`."""
    deadline_s = time.monotonic() + limit_s
    while True:
        try:
            with urllib.request.urlopen(url, timeout=1.0):
                return
        except OSError:
            if time.monotonic() > deadline_s or any(child.poll() is not None for child in children):
                ends = "\n".join(f"== {log.name}\n{log.read_text()[-1000:]}" for log in sorted(logs.glob("*.log")))
                raise SystemExit(f"{url} did not get ready:\n{ends}") from None
            time.sleep(_POLL_S)


@contextmanager
def peer(
    yardstick: Path, directory: Path, *, speedup: float, more: Mapping[str, object] = NONE
) -> Iterator[RunningStack]:
    """Run the yardstick's stack: KV routing, events on ZMQ, requests on NATS, discovery in etcd. `more` are other
    arguments of its `Stack`."""
    names = ("ETCD", "ETCDP", "NATS", "NATSM", "HTTP")
    ports = dict(zip(names, servers.free_ports(len(names)), strict=True))
    workers = range(int(str(more.get("workers", WORKERS))))
    first = next(port for port in range(20_000, 32_000) if all(servers.is_free(port + each) for each in workers))
    wanted = {
        "rundir": str(directory),
        "workers": WORKERS,
        "speedup": f"{speedup:g}",
        "block_size": BLOCK_SIZE,
        "gpu_blocks": CAPACITY_BLOCKS,
        "model_name": NAME,
        **more,
    }
    asked = json.dumps({"ports": ports | {"SYS0": first}, "stack": wanted})
    command = [str(yardstick / "venv" / "bin" / "python"), "-c", _PEER, asked]
    environment = os.environ | servers.ENVIRONMENT
    with subprocess.Popen(
        command,
        cwd=yardstick,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as starter:
        assert starter.stdout is not None
        line = starter.stdout.readline()
        if not line:
            raise SystemExit(f"the yardstick did not start:\n{starter.communicate()[1][-3000:]}")
        kinds = {pid: "mocker" if name.startswith("mock") else name for name, pid in json.loads(line).items()}
        try:
            yield RunningStack(ports["HTTP"], kinds)
        finally:
            starter.communicate(timeout=STOP_LIMIT_S)
