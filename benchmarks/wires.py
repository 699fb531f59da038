"""What do encrypted wires cost, and what does the end of a server of a cluster cost?

cpu     all processes of a stack, 128 streams paced at 20 ms a step: CPU a token with TLS on NATS and CURVE on KV
        events, divided by that without, in the same round. Both stacks are up at once and take turns
nats    one of three nats-servers, one that the frontend is connected to, is killed while 128 streams are read:
        streams that are not whole, and the longest time in which one was silent
etcd    the leader of three etcds is killed while eight clients ask on and on, and a worker of another model is started
        at that moment: failed requests, and the time until that model has answered

What could mislead: all processes share the machine's cores with the clients, and openssl's speed is that of its AES
instructions. The time of part `etcd` has the start of the worker in it.

    python -m benchmarks.wires [--part cpu|nats|etcd] [--rounds 6] [--streams 128] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import msgspec
from msgspec import Struct

from benchmarks.report import Goal, report
from benchmarks.serving import LIMITS, PACED
from benchmarks.serving_load import ENDLESS, OUTPUT_TOKENS, Generator
from benchmarks.serving_stacks import NAME, WORKERS, RunningStack, child_process, launched
from deploy.local.stack import servers
from deploy.local.stack.stack import UpOptions
from deploy.local.state import StateDirectory
from tests.authority import Authority
from tests.clusters import ServerTls, etcd_cluster, leader_of, nats_cluster, nats_tls, url_of
from tests.paced_streams import PacedStreams
from tests.servers import NatsServer, nats_server

STEP_S = 0.02
CASES = ("plain", "encrypted")
CPU_GOAL, GAP_GOAL_S, ROUTED_GOAL_S = 1.15, 3.0, 15.0
REQUESTS_A_STREAM = 3
KILL_AFTER_S = 1.0
ASKERS, ASKED_TOKENS = 8, 8
LIMIT_S = 120.0
PARTS = ("cpu", "nats", "etcd")


class WiresRow(Struct, frozen=True):
    """One round of one case of one part."""

    part: str
    case: str
    round: int
    us_a_token: float = 0.0
    lost: int = 0
    gap_s: float = 0.0
    routed_s: float = 0.0
    by_kind: dict[str, float] = {}


class Wires:
    """The files of TLS, and the settings that name them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        authority = Authority(folder)
        self.server = ServerTls(authority.pem, *authority.sign("127.0.0.1"), clients=True)
        cert, key = authority.sign("service", "service")
        self.credentials = grpc.ssl_channel_credentials(authority.pem.read_bytes(), key.read_bytes(), cert.read_bytes())
        self.settings = {"HEADRACE_OBSERVE_EVENTS": "", "HEADRACE_OBSERVE_EVENTS_CURVE": "true"}
        for table in ("NATS", "DISCOVERY"):
            files = {"CA": authority.pem, "CERT": cert, "KEY": key}
            self.settings |= {f"HEADRACE_{table}_TLS_{name}": str(path) for name, path in files.items()}

    def services(self, *, encrypted: bool) -> dict[str, dict[str, str]]:
        """Return the settings of each service."""
        common = self.settings if encrypted else {"HEADRACE_OBSERVE_EVENTS": ""}
        worker = ENDLESS | LIMITS | PACED | common
        return {"frontend": common, "router": {"HEADRACE_LOAD_RAMP_S": "0"} | common, "worker": worker}


def options(model: Path, nats: str, etcd: str = "") -> UpOptions:
    return UpOptions(
        model=str(model),
        model_name=NAME,
        port=servers.free_ports(1)[0],
        workers=WORKERS,
        engine="simulated",
        nats=nats,
        etcd=etcd,
        discovery="etcd" if etcd else "file",
    )


# --- CPU


@contextmanager
def cpu_stack(generator: Generator, wires: Wires, case: str) -> Iterator[RunningStack]:
    folder = wires.folder / case
    folder.mkdir()
    encrypted = case == "encrypted"
    with nats_server(folder, nats_tls(wires.server) if encrypted else "") as nats:
        settings = wires.services(encrypted=encrypted)
        with launched(options(generator.model, nats.url), folder / "stack", settings) as stack:
            stack.include(nats.pid, "nats")
            generator.run(stack, 16, 100)
            yield stack


def cpu(generator: Generator, wires: Wires, rounds: int, streams: int) -> Iterator[WiresRow]:
    with ExitStack() as started:
        stacks = {case: started.enter_context(cpu_stack(generator, wires, case)) for case in CASES}
        for number in range(rounds):
            for case in CASES if number % 2 else reversed(CASES):
                ramp = ("--ramp", str(OUTPUT_TOKENS * STEP_S))
                load, spent = generator.run(stacks[case], streams, streams * REQUESTS_A_STREAM, *ramp)
                tokens = load.n * OUTPUT_TOKENS
                kinds = {kind: 1e6 * cost.cpu_s / tokens for kind, cost in spent.items()}
                yield WiresRow("cpu", case, number, sum(kinds.values()), len(load.errors), by_kind=kinds)


# --- a server of NATS


def server_of(stack: Path, nats: list[NatsServer]) -> NatsServer:
    """Return the server that the frontend is connected to, by its log."""
    said = StateDirectory(stack).logs / "frontend.log"
    port = re.findall(r"connected to NATS at \w+://127\.0\.0\.1:(\d+)", said.read_text())[-1]
    return next(server for server in nats if server.port == int(port))


async def kill_under(load: PacedStreams, url: str, streams: int, victim: NatsServer) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(load.run(url, NAME, streams, LIMIT_S))
        while not load.came:  # noqa: ASYNC110 - pieces come in many tasks
            await asyncio.sleep(0.01)
        await asyncio.sleep(KILL_AFTER_S)
        victim.kill()


def nats_killed(generator: Generator, wires: Wires, rounds: int, streams: int) -> Iterator[WiresRow]:
    folder = wires.folder / "nats"
    folder.mkdir()
    with nats_cluster(folder, nats_tls(wires.server)) as nats:
        asked = options(generator.model, url_of(nats))
        with launched(asked, folder / "stack", wires.services(encrypted=True)):
            for number in range(rounds):
                for case in ("no fault", "killed"):
                    load = PacedStreams(int(6 / STEP_S))
                    url = f"http://127.0.0.1:{asked.port}"
                    if case == "killed":
                        victim = server_of(folder / "stack", nats)
                        asyncio.run(kill_under(load, url, streams, victim))
                        victim.start()
                    else:
                        asyncio.run(load.run(url, NAME, streams, LIMIT_S))
                    yield WiresRow("nats", case, number, lost=len(load.lost), gap_s=load.gap_s)


# --- the leader of etcd


async def routed(url: str, load: PacedStreams, killed_s: float) -> float:
    """Ask on and on until the late model answers. Return the seconds since the leader was killed."""
    answered_s = 0.0

    async def ask() -> None:
        while not answered_s:
            await load.run(url, NAME, 1, LIMIT_S)

    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
        for _ in range(ASKERS):
            tasks.create_task(ask())
        while True:
            late = PacedStreams(ASKED_TOKENS)
            await late.run(url, "late", 1, LIMIT_S)
            if not late.lost:
                answered_s = time.monotonic() - killed_s
                return answered_s
            await asyncio.sleep(0.05)


def etcd_killed(generator: Generator, wires: Wires, rounds: int) -> Iterator[WiresRow]:
    for number in range(rounds):
        folder = wires.folder / f"etcd-{number}"
        folder.mkdir()
        with nats_server(folder, nats_tls(wires.server)) as nats, etcd_cluster(folder, wires.server) as etcd:
            asked = options(generator.model, nats.url, ",".join(server.endpoint for server in etcd))
            settings = wires.services(encrypted=True)
            with launched(asked, folder / "stack", settings):
                state = StateDirectory(folder / "stack")
                command = [sys.executable, "-m", "services.worker", "--config", str(state.run / "worker-0.toml")]
                late = {**settings["worker"], "HEADRACE_MODEL_NAME": "late", "HEADRACE_OBSERVE_PORT": "0"}
                leader = leader_of(etcd, wires.credentials)
                load = PacedStreams(ASKED_TOKENS)
                killed_s = time.monotonic()
                leader.kill()
                with child_process("late", command, state, late):
                    took_s = asyncio.run(routed(f"http://127.0.0.1:{asked.port}", load, killed_s))
                yield WiresRow("etcd", "killed", number, lost=len(load.lost), routed_s=took_s)


# --- results


def goals(rows: list[WiresRow]) -> list[Goal]:
    found = list[Goal]()
    cost = {(row.case, row.round): row.us_a_token for row in rows if row.part == "cpu"}
    if ratios := [cost["encrypted", number] / cost["plain", number] for case, number in cost if case == "plain"]:
        ratio = statistics.median(ratios)
        found.append(Goal("CPU a token, TLS and CURVE, of without", ratio, "times", CPU_GOAL, ratio <= CPU_GOAL))
    ends: Mapping[str, tuple[str, float]] = {"nats": ("gap_s", GAP_GOAL_S), "etcd": ("routed_s", ROUTED_GOAL_S)}
    for part, (name, most) in ends.items():
        mine = [row for row in rows if (row.part, row.case) == (part, "killed")]
        if mine:
            lost, longest = sum(row.lost for row in mine), max(getattr(row, name) for row in mine)
            found.append(Goal(f"{part}: lost", lost, "streams", 0, lost == 0))
            found.append(Goal(f"{part}: longest {name}", longest, "s", most, longest <= most))
    return found


def main() -> int:
    """Print a table, or with --json one object."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--part", choices=PARTS, help="only this one")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    rows = list[WiresRow]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        generator, wires = Generator(None, folder), Wires(folder)
        for part in PARTS if flags.part is None else (flags.part,):
            match part:
                case "cpu":
                    turns = cpu(generator, wires, flags.rounds, flags.streams)
                case "nats":
                    turns = nats_killed(generator, wires, flags.rounds, flags.streams)
                case _:
                    turns = etcd_killed(generator, wires, flags.rounds)
            for row in turns:
                rows.append(row)
                if not flags.json:
                    print(msgspec.json.encode(row).decode(), flush=True)
    found = goals(rows)
    if flags.json:
        print(msgspec.json.format(msgspec.json.encode(report("wires", sys.argv[1:], found, rows))).decode())
    else:
        for goal in found:
            print(f"{goal.name}: {goal.value:.3f} {goal.unit}, goal {goal.goal}: {'met' if goal.met else 'MISSED'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
