"""Do several routers spread a burst over the workers as well as one would?

    burst of N selects, all at once ──▶ nats-server ──▶ 1, 2 or 4 router processes, each with its own reservations,
                                                        sent to the others every millisecond

16 instances, no KV events, unique prompts of 100 to 20,000 tokens (log-normal), the default policy. After a burst the
prompt tokens reserved on each instance are summed from the answers: `max / mean` is 1 if all have the same. Then all
are finished, and the next burst waits until every router has no reservation left. The same bursts go to 1, 2 and 4
routers in turns. In `apart` they go to routers in this process that do not exchange reservations: the difference is
what the exchange is worth.

What could mislead: the largest prompt alone may exceed the mean, so `max / mean` of a small burst is above 1 for any
router, and only the ratio of two rows says something. On a machine with fewer cores than processes a router
answers several questions between two turns of the others, and learns of theirs later than on one with enough cores. The
workers here send no load reports; in service these correct the reservations four times a second.

    python -m benchmarks.replicas [--quick] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from statistics import median, quantiles
from typing import Any

import msgspec

from benchmarks.report import ROOT, Goal, report
from services.router.config import RouterConfig
from services.router.selection.model_router import ModelRouter
from services.router.selection.policies.kv import KvPolicy
from shared import subjects
from shared.bus.nats_bus import NatsBus, connect
from shared.config import NatsConfig, environment
from shared.discovery.file import FileDiscovery
from shared.errors import Unavailable
from shared.hashing import self_test
from shared.messages.cards import INSTANCE, MODEL_CARD, Instance, KvLayout, ModelCard
from shared.messages.codec import JSON_HEADER
from shared.messages.people import ROUTER_STATE, RouterState
from shared.messages.select import LOAD_EVENTS, SELECT, SELECT_REPLY, Finished, LoadEvents, Select, Selected
from tests.servers import NatsServer

INSTANCES = 16
BURSTS = (16, 64, 256)
ROUTERS = (1, 2, 4)
BLOCK_SIZE = 16
MODEL = "m"
LIMIT_S = 60.0
GOAL = 1.1
CARDS = {
    f"{number:016x}": ModelCard(
        *(MODEL, f"{number:016x}", "/m", "0" * 64, self_test(BLOCK_SIZE), 1 << 17, 1 << 17, BLOCK_SIZE, 20_000),
        kv_layout=KvLayout("bfloat16", 32, 8, 128, BLOCK_SIZE),
    )
    for number in range(INSTANCES)
}


def burst(seed: int, count: int) -> list[Select]:
    """Make new requests with new prompts, because routers remember earlier ones."""
    draw = Random(f"{seed} {count}")
    questions: list[Select] = []
    for number in range(count):
        tokens = int(min(max(draw.lognormvariate(7.0, 1.0), 100), 20_000))
        hashes = draw.randbytes(8 * (tokens // BLOCK_SIZE))
        questions.append(Select(f"{seed:08x}{count:08x}{number:016x}", 1, "f", MODEL, hashes, tokens, 100))
    return questions


def imbalance(chosen: Iterable[tuple[Select, Selected]]) -> float:
    """Return the largest number of prompt tokens on an instance over the mean."""
    tokens = Counter(dict.fromkeys(CARDS, 0))
    for question, reply in chosen:
        tokens[reply.instance] += question.prompt_tokens
    return max(tokens.values()) / (sum(tokens.values()) / INSTANCES)


def apart(routers: int, questions: list[Select]) -> float:
    """Return the imbalance by routers that do not exchange reservations and are asked in turns."""
    models = [ModelRouter(MODEL, str(each), RouterConfig(), KvPolicy(), Random(each)) for each in range(routers)]
    chosen: list[tuple[Select, Selected]] = []
    for model in models:
        for card in CARDS.values():
            model.add_card(card, 0.0)
    for number, question in enumerate(questions):
        reply = models[number % routers].select(question, 0.0).reply
        assert isinstance(reply, Selected)
        chosen.append((question, reply))
    return imbalance(chosen)


class Replicas:
    """Router processes in a namespace of their own."""

    def __init__(self, count: int, url: str, folder: Path, bus: NatsBus) -> None:
        self.namespace = f"bench{count}"
        self._count = count
        self._url = url
        self._folder = folder / self.namespace
        self._bus = bus
        self._names: list[str] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Replicas]:
        """Run the routers; yield once all of them know all instances."""
        self._folder.mkdir()
        discovery = FileDiscovery(self._folder)
        await discovery.register(self._entries)
        flags = [
            *(
                "--namespace",
                self.namespace,
                "--nats-url",
                self._url,
                "--observe-port",
                "0",
                "--observe-log-level",
                "warning",
            ),
            *("--discovery-backend", "file", "--discovery-path", str(self._folder)),
        ]
        processes = [
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "services.router", *flags), env=environment(), cwd=ROOT
            )
            for _ in range(self._count)
        ]
        try:
            await self._wait(lambda state: bool(state.models) and state.models[0].instances == INSTANCES)
            yield self
        finally:
            for process in processes:
                if process.returncode is None:
                    process.terminate()
                await process.wait()
            await discovery.close()

    def _entries(self, epoch: int) -> dict[str, bytes]:
        entries: dict[str, bytes] = {}
        for name, card in CARDS.items():
            address = Instance(self.namespace, "worker", name, epoch, "m", 1, 0.0, "0")
            entries[subjects.instance_key(self.namespace, "worker", name)] = INSTANCE.encode(address, JSON_HEADER)
            entries[subjects.model_key(self.namespace, MODEL, name)] = MODEL_CARD.encode(card, JSON_HEADER)
        return entries

    async def _wait(self, met: Any) -> None:
        """Wait until the states of all routers meet a condition."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                self._names = list(_router_names(self._folder, self.namespace))
                try:
                    answers = [
                        await self._bus.request(subjects.router_state(self.namespace, name), b"", timeout_s=5.0)
                        for name in self._names
                    ]
                except Unavailable:
                    answers = []
                states: list[RouterState] = [ROUTER_STATE.decode(answer.payload, JSON_HEADER) for answer in answers]
                if len(states) == self._count and all(map(met, states)):
                    return
                await asyncio.sleep(0.05)

    async def spread(self, questions: list[Select]) -> tuple[float, float]:
        """Send all questions at once; return the imbalance and the seconds. Nothing stays reserved."""
        subject = subjects.select(self.namespace, MODEL)
        payloads = [SELECT.encode(question) for question in questions]
        began = time.perf_counter()
        answers = await asyncio.gather(
            *(self._bus.request(subject, payload, timeout_s=LIMIT_S) for payload in payloads)
        )
        took_s = time.perf_counter() - began
        chosen: list[tuple[Select, Selected]] = []
        for question, answer in zip(questions, answers, strict=True):
            reply = SELECT_REPLY.decode(answer.payload)
            assert isinstance(reply, Selected), reply
            chosen.append((question, reply))
        ends = LoadEvents(MODEL, [Finished(question.request, 1) for question in questions])
        await self._bus.publish(subjects.router_load(self.namespace, MODEL), LOAD_EVENTS.encode(ends))
        await self._wait(lambda state: state.models[0].reservations == 0)
        return imbalance(chosen), took_s


def _router_names(folder: Path, namespace: str) -> set[str]:
    found: set[str] = set()
    for file in folder.glob("*.json"):
        for key in msgspec.json.decode(file.read_bytes(), type=dict[str, Any]):
            if key.startswith(f"/headrace/{namespace}/instances/router/"):
                found.add(str(key.rpartition("/")[2]))
    return found


async def _measure(rounds: int) -> list[dict[str, Any]]:
    told: dict[tuple[int, int], list[tuple[float, float]]] = {(n, r): [] for n in BURSTS for r in ROUTERS}
    alone: dict[tuple[int, int], list[float]] = {(n, r): [] for n in BURSTS for r in ROUTERS}
    with tempfile.TemporaryDirectory() as folder:
        server = NatsServer(Path(folder))
        server.start()
        try:
            bus = await connect(NatsConfig(url=server.url), "asker")
            async with AsyncExitStack() as opened:
                fleets = {
                    count: await opened.enter_async_context(Replicas(count, server.url, Path(folder), bus).running())
                    for count in ROUTERS
                }
                for seed in range(rounds):
                    for count in BURSTS:
                        questions = burst(seed, count)
                        for routers, fleet in fleets.items():
                            told[count, routers].append(await fleet.spread(questions))
                            alone[count, routers].append(apart(routers, questions))
            await bus.drain()
        finally:
            server.stop()
    rows: list[dict[str, Any]] = []
    for count in BURSTS:
        for routers in ROUTERS:
            one = [each for each, _ in told[count, 1]]
            here = [each for each, _ in told[count, routers]]
            rows.append(
                {
                    "burst": count,
                    "routers": routers,
                    "rounds": rounds,
                    "max / mean": round(median(here), 3),
                    "max / mean, p90": round(quantiles(here, n=10)[-1], 3),
                    "over one router": round(median(a / b for a, b in zip(here, one, strict=True)), 3),
                    "apart, max / mean": round(median(alone[count, routers]), 3),
                    "answered in ms": round(1000 * median(took_s for _, took_s in told[count, routers]), 1),
                }
            )
    return rows


def main() -> int:
    """Print a table, or with --json one object."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="10 rounds instead of 100")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    rows = asyncio.run(_measure(10 if flags.quick else 100))
    if flags.json:
        print(msgspec.json.encode(_report(rows)).decode())
        return 0
    print("  ".join(f"{name:>17}" for name in rows[0]))
    for row in rows:
        print("  ".join(f"{value:>17}" for value in row.values()))
    for goal in _goals(rows):
        print(f"{'met' if goal.met else 'NOT met':<8} {goal.name}: {goal.value}")
    return 0


def _goals(rows: list[dict[str, Any]]) -> list[Goal]:
    return [
        Goal(
            f"a burst of {row['burst']} over two routers: max / mean, as a multiple of one router's",
            row["over one router"],
            "ratio",
            GOAL,
            met=row["over one router"] <= GOAL,
        )
        for row in rows
        if row["routers"] == 2
    ]


def _report(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return report("replicas", sys.argv[1:], _goals(rows), rows)


if __name__ == "__main__":
    raise SystemExit(main())
