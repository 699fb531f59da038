"""What does a gateway in front of two vLLM servers cost: `headrace route`, and those that others use?

    load generator ── HTTP, SSE ──▶ gateway ──▶ two servers with an engine's time (`gateways_server.py`)

direct      one server, without a gateway
route       `headrace route`: tokenises, routes by what was sent where, continues what a server's death cut off
route-text  the same with `--by text`: text passes through unread, as with the others
others      vllm-router and smg (Rust; text passes through unread) and LiteLLM's proxy (Python), each if it is in
            --rivals, an environment of its own: python -m venv DIR; DIR/bin/pip install 'litellm[proxy]==1.108.7'
            vllm-router==0.1.17 smg==1.13.0 (1 GB)

All gateways are up at once, in front of the same servers, and take turns. A step takes 20 ms; prompts are 256 tokens
and share nothing, answers 64 tokens, streamed. The CPU time of all processes of a gateway counts, that of the servers
and of the load generator does not. `--kill` has a server killed one second after the first of 128 streams began, and
counts the requests without a whole answer.

What could mislead: the servers and the load generator take cores too, so with 256 streams on two cores first tokens
wait for them, direct as well. The gateways that do not run idle meanwhile, and their health checks cost little.

    python -m benchmarks.gateways [--rivals DIR] [--only route-text,vllm-router] [--streams 1,32,256] [--repeats 3]
                                  [--kill] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
from msgspec import Struct

from benchmarks.report import Goal, report
from benchmarks.serving_load import Generator, GeneratorReport
from benchmarks.serving_stacks import NAME, RunningStack, child_process
from deploy.local.stack.servers import free_ports
from deploy.local.state import StateDirectory

STREAMS = (1, 32, 256)
INPUT_TOKENS, OUTPUT_TOKENS = 256, 64
SIZES = ("--isl", str(INPUT_TOKENS), "--osl", str(OUTPUT_TOKENS))
STEP_S = 0.02
ROUNDS = 4
"""Requests of each stream, one after another."""
KILLED_STREAMS = 128
KILL_AFTER_S = 1.0
START_LIMIT_S = 180.0
FIRST_GOAL_MS = 3.0
DIRECT, OURS, TEXT, LITELLM, VLLM_ROUTER, SMG = "direct", "route", "route-text", "litellm", "vllm-router", "smg"
CPU_GOALS = {OURS: {LITELLM: 0.08, VLLM_ROUTER: 2.0}, TEXT: {VLLM_ROUTER: 1.3}}
"""One of ours → gateway → our CPU time a token, divided by its own."""


class GatewayRow(Struct, frozen=True):
    """One run in front of the servers."""

    gateway: str
    streams: int
    killed: bool
    """Whether a server was killed meanwhile."""
    us_a_token: float
    """CPU time of all processes of the gateway, in µs a token that came."""
    rss_mb: float
    lost: int
    """Requests without a whole answer."""
    requests: int
    load: GeneratorReport


class Gateway(Struct, frozen=True):
    """How a gateway is started."""

    name: str
    command: Sequence[str]
    """Empty for the server itself."""
    port: int
    variables: Mapping[str, str] = {}
    serving: str = ""
    """What it prints for each server that it uses. Empty if it prints nothing like that."""


class Servers:
    """The two servers, which can be killed and started again at their ports."""

    def __init__(self, model: Path, directory: StateDirectory) -> None:
        self.ports = free_ports(2)
        self._model, self._directory = model, directory
        self._running: list[ExitStack] = [ExitStack(), ExitStack()]
        self._pids = [0, 0]

    def __enter__(self) -> Servers:
        for number in range(2):
            self.start(number)
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._running:
            one.close()

    def start(self, number: int) -> None:
        """Start a server that does not run."""
        command = [sys.executable, "-m", "benchmarks.gateways_server", "--port", str(self.ports[number])]
        command += ["--model", str(self._model), "--name", NAME, "--step-s", str(STEP_S)]
        child = self._running[number].enter_context(child_process(f"server-{number}", command, self._directory, {}))
        self._pids[number] = child.pid
        _wait(lambda: _answers(self.ports[number], "/health"), f"server {number}")

    def kill(self, number: int) -> None:
        """Kill a server."""
        os.kill(self._pids[number], signal.SIGKILL)
        self._running[number].close()


def gateways(rivals: Path | None, servers: Sequence[int], directory: Path) -> list[Gateway]:
    """Return every gateway that is there, ours first, in front of the servers at these ports."""
    ports, urls = free_ports(6), [f"http://127.0.0.1:{port}" for port in servers]
    command = [sys.executable, "-m", "deploy.local.cli", "route", *urls, "--port", str(ports[0])]
    found = [
        Gateway(DIRECT, [], servers[0]),
        Gateway(OURS, [*command, "--state", str(directory / "route")], ports[0], serving=": serves\n"),
        Gateway(
            TEXT,
            [*command[:-1], str(ports[5]), "--by", "text", "--state", str(directory / TEXT)],
            ports[5],
            serving=": serves\n",
        ),
    ]
    if rivals is None:
        return found
    programs = rivals / "bin"
    listed = ["--worker-urls", *urls, "--host", "127.0.0.1", "--port"]
    metrics = ["--prometheus-port", str(ports[3])]
    if (programs / VLLM_ROUTER).exists():
        found.append(Gateway(VLLM_ROUTER, [str(programs / VLLM_ROUTER), *listed, str(ports[1]), *metrics], ports[1]))
    if (programs / SMG).exists():
        found.append(Gateway(SMG, [str(programs / SMG), "launch", *listed, str(ports[2])], ports[2]))
    if (programs / LITELLM).exists():
        file = directory / "litellm.json"
        models = [
            {
                "model_name": NAME,
                "litellm_params": {"model": f"hosted_vllm/{NAME}", "api_base": f"{url}/v1", "api_key": "none"},
            }
            for url in urls
        ]
        file.write_text(json.dumps({"model_list": models}), encoding="utf-8")  # JSON is YAML
        command = [str(programs / LITELLM), "--config", str(file), "--host", "127.0.0.1", "--port", str(ports[4])]
        open_door = {"LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true"}
        found.append(Gateway(LITELLM, command, ports[4], open_door))
    return found


@contextmanager
def running(gateway: Gateway, directory: StateDirectory) -> Iterator[RunningStack]:
    """Run a gateway until it answers."""
    if not gateway.command:
        yield RunningStack(gateway.port, {})
        return
    with child_process(gateway.name, list(gateway.command), directory, gateway.variables) as child:
        log = directory.logs / f"{gateway.name}.log"

        def ready() -> bool:
            if child.poll() is not None:
                raise SystemExit(f"{gateway.name} ended:\n{log.read_text()[-3000:]}")
            serves = not gateway.serving or log.read_text().count(gateway.serving) == 2
            return serves and _completes(gateway.port)

        _wait(ready, gateway.name, log)
        yield RunningStack(gateway.port, {child.pid: gateway.name})


def _wait(ready: Callable[[], bool], what: str, log: Path | None = None) -> None:
    """Wait until it is ready. Raises SystemExit after START_LIMIT_S."""
    deadline_s = time.monotonic() + START_LIMIT_S
    while not ready():
        if time.monotonic() > deadline_s:
            raise SystemExit(f"{what} did not get ready:\n{log.read_text()[-3000:] if log else ''}")
        time.sleep(0.1)


def _answers(port: int, path: str, body: bytes | None = None) -> bool:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", body, {"Content-Type": "application/json"} if body else {}
    )
    try:
        with urllib.request.urlopen(request, timeout=5.0) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _completes(port: int) -> bool:
    body = {"model": NAME, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    return _answers(port, "/v1/chat/completions", json.dumps(body).encode())


class GatewaysBench:
    """Makes all runs, in order."""

    def __init__(self, flags: argparse.Namespace, directory: Path) -> None:
        self.rows: list[GatewayRow] = []
        self._flags = flags
        self._directory = directory
        self._generator = Generator(None, directory)

    def run(self) -> None:
        """Start everything, and run each case with each gateway in turn."""
        state = StateDirectory(self._directory / "state")
        for part in (state.run, state.logs):
            part.mkdir(parents=True, exist_ok=True)
        with Servers(self._generator.model, state) as servers, ExitStack() as started:
            up = {
                gateway.name: started.enter_context(running(gateway, state))
                for gateway in gateways(self._flags.rivals, servers.ports, self._directory)
                if not self._flags.only or gateway.name in self._flags.only.split(",")
            }
            for stack in up.values():
                self._generator.run(stack, 16, 64, *SIZES)
            for _ in range(1 if self._flags.quick else self._flags.repeats):
                for streams in map(int, self._flags.streams.split(",")):
                    for name, stack in up.items():
                        self._one(name, stack, streams)
            if self._flags.kill:
                for name, stack in up.items():
                    if name != DIRECT:
                        self._kill(name, stack, servers)

    def _one(self, name: str, stack: RunningStack, streams: int, *, killed: bool = False) -> None:
        rounds = 2 if self._flags.quick else ROUNDS
        requests = max(8, streams * rounds)
        ramp = ("--ramp", str(OUTPUT_TOKENS * STEP_S))  # no waves of requests
        load, spent = self._generator.run(stack, streams, requests, *SIZES, *ramp)
        tokens = max(1, load.n * OUTPUT_TOKENS)
        cpu_s, rss_mb = (sum(getattr(cost, name) for cost in spent.values()) for name in ("cpu_s", "rss_mb"))
        lost = requests - load.n + load.short_streams
        self.rows.append(GatewayRow(name, streams, killed, 1e6 * cpu_s / tokens, rss_mb, lost, requests, load))
        if not self._flags.json:
            print(line(self.rows[-1]), flush=True)

    def _kill(self, name: str, stack: RunningStack, servers: Servers) -> None:
        """Kill the second server while a gateway has streams on both; start it again."""
        timer = threading.Timer(KILL_AFTER_S, servers.kill, (1,))
        timer.start()
        self._one(name, stack, KILLED_STREAMS, killed=True)
        timer.join()
        servers.start(1)
        self._generator.run(stack, 16, 64, *SIZES)


def line(row: GatewayRow) -> str:
    """Return a row as text."""
    load = row.load
    return (
        f"{row.gateway:12} {row.streams:4} streams{', a server killed' if row.killed else ''}: "
        f"{row.us_a_token:7.1f} µs a token  first token {load.ttft_p50_ms:.1f} / {load.ttft_p99_ms:.1f} ms  "
        f"gap p99 {load.gap_p99_ms} ms  {load.n * OUTPUT_TOKENS / load.elapsed_s:7.0f} tokens/s  "
        f"{row.rss_mb:.0f} MB  lost {row.lost} of {row.requests} {load.errors or ''}"
    )


def goals(rows: Sequence[GatewayRow]) -> list[Goal]:
    """Compare medians; a goal without its yardstick is not met."""
    found: list[Goal] = []
    quiet = [row for row in rows if not row.killed]

    def median(gateway: str, streams: int, figure: Callable[[GatewayRow], float]) -> float | None:
        values = [figure(row) for row in quiet if (row.gateway, row.streams) == (gateway, streams)]
        return statistics.median(values) if values else None

    for streams in sorted({row.streams for row in quiet}):
        ours, direct = (median(name, streams, lambda row: row.load.ttft_p50_ms) for name in (OURS, DIRECT))
        value = None if ours is None or direct is None else ours - direct
        met = value is not None and value <= FIRST_GOAL_MS
        found.append(Goal(f"first token p50, {streams} streams, above direct", value, "ms", FIRST_GOAL_MS, met))
        for name, rival, goal in ((name, *each) for name, rivals in CPU_GOALS.items() for each in rivals.items()):
            ours, theirs = (median(one, streams, lambda row: row.us_a_token) for one in (name, rival))
            value = None if ours is None or not theirs else ours / theirs
            met = value is not None and value <= goal
            found.append(Goal(f"CPU a token of {name}, {streams} streams, of {rival}'s", value, "times", goal, met))
    killed = [row for row in rows if row.killed and row.gateway == OURS]
    return found + [
        Goal("requests lost when a server is killed", row.lost, "requests", 0, row.lost == 0) for row in killed
    ]


def main() -> int:
    """Print a table, or with --json one object."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--rivals", type=Path, help="the environment with the other gateways")
    parser.add_argument("--only", default="", help="run these gateways alone")
    parser.add_argument("--streams", default=",".join(map(str, STREAMS)))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kill", action="store_true", help="also kill a server under 128 streams, once each")
    parser.add_argument("--quick", action="store_true", help="one short run of each case")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        bench = GatewaysBench(flags, Path(name))
        bench.run()
    found = goals(bench.rows)
    if flags.json:
        print(msgspec.json.encode(report("gateways", sys.argv[1:], found, bench.rows)).decode())
        return 0
    for goal in found:
        value = "no yardstick" if goal.value is None else f"{goal.value:.2f} {goal.unit}"
        print(f"{goal.name}: {value} (goal {goal.goal:g}){'' if goal.met else '  NOT MET'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
