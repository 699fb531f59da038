"""The asking end of `benchmarks/route.py`: a process that asks a router as frontends do, and times the answers.

    python -m benchmarks.route_load --nats-url URL --router-pid PID closed --in-flight 64 --seconds 5
    python -m benchmarks.route_load --nats-url URL --router-pid PID open --rate 2000 --seconds 10

An open loop asks at random times of the given rate, without waiting for answers, and times each from when it was due.
Prints one JSON object; `percentiles ms` has two a percent.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import selectors
import time
from array import array
from itertools import count
from random import Random
from typing import Any

from prometheus_client import CollectorRegistry

from benchmarks.process_costs import cpu_of
from shared import subjects
from shared.bus.nats_bus import NatsBus, connect
from shared.bus.outbox import Outbox
from shared.config import NatsConfig
from shared.errors import Unavailable
from shared.hashing import sequence_hashes
from shared.messages.select import SELECT, SELECT_REPLY, Finished, Prefilled, Select, Selected

NAMESPACE = "bench"
MODEL = "m"
BLOCK_SIZE = 16
DEPTH = 512
CHAINS = 273
WARM_UP_S = 1.0
PREFILL_S = 0.05
DECODE_S = 0.2
TIMEOUT_S = 5.0


def chains(count: int = CHAINS) -> list[bytes]:
    """Make prompts of DEPTH blocks as packed tokens, the same in every process."""
    draw = Random(7)
    return [array("I", array("H", draw.randbytes(2 * DEPTH * BLOCK_SIZE))).tobytes() for _ in range(count)]


class Asker:
    """Asks a router and keeps the times of the answers."""

    def __init__(self, bus: NatsBus, chains: int) -> None:
        self._bus = bus
        self._outbox = Outbox(bus, NAMESPACE, CollectorRegistry(), batch_s=0.001)
        self.told = asyncio.create_task(self._outbox.run())
        self._known = [sequence_hashes(packed, BLOCK_SIZE) for packed in _some(chains)]
        self._draw = Random(os.getpid())
        self._numbers = count()
        self._subject = subjects.select(NAMESPACE, MODEL)
        self._loop = asyncio.get_running_loop()
        self.took_s: list[float] = []
        self.overlaps: list[int] = []
        self.failed = 0

    def question(self) -> tuple[str, bytes]:
        """Return a request's id and question: the beginning of a known prompt, and new blocks up to DEPTH."""
        draw = self._draw
        common = draw.choice(self._known)[: draw.randrange(DEPTH // 2, DEPTH)]
        hashes = array("Q", common)
        hashes.frombytes(draw.randbytes(8 * (DEPTH - len(common))))
        request = f"{os.getpid():08x}{next(self._numbers):024x}"
        return request, SELECT.encode(Select(request, 1, "f", MODEL, hashes.tobytes(), DEPTH * BLOCK_SIZE + 1, 100))

    async def ask(self, request: str, question: bytes, due_s: float) -> None:
        """Ask, then report the first token and the end, as a frontend does."""
        try:
            answer = await self._bus.request(self._subject, question, timeout_s=TIMEOUT_S)
        except Unavailable:
            self.failed += 1
            return
        self.took_s.append(self._loop.time() - due_s)
        reply = SELECT_REPLY.decode(answer.payload)
        if not isinstance(reply, Selected):
            self.failed += 1
            return
        self.overlaps.append(reply.overlap.blocks)
        cached = reply.overlap.blocks * BLOCK_SIZE
        self._loop.call_later(PREFILL_S, self._outbox.publish_load, MODEL, Prefilled(request, 1, cached, PREFILL_S))
        self._loop.call_later(DECODE_S, self._outbox.publish_load, MODEL, Finished(request, 1))

    def forget(self) -> None:
        """Drop the measurements so far, which were a warm-up."""
        self.took_s.clear()
        self.overlaps.clear()
        self.failed = 0


def _some(number: int) -> list[bytes]:
    return chains()[:number]


async def _closed(asker: Asker, in_flight: int, until_s: float) -> None:
    loop = asyncio.get_running_loop()

    async def one_after_another() -> None:
        while loop.time() < until_s:
            await asker.ask(*asker.question(), loop.time())

    async with asyncio.TaskGroup() as askers:
        for _ in range(in_flight):
            askers.create_task(one_after_another())


async def _open(asker: Asker, rate: float, until_s: float) -> None:
    loop, draw = asyncio.get_running_loop(), Random(3)
    due_s = loop.time()
    async with asyncio.TaskGroup() as asked:
        while due_s < until_s:
            due_s += draw.expovariate(rate)
            question = asker.question()
            if due_s > loop.time():
                await asyncio.sleep(due_s - loop.time())
            asked.create_task(asker.ask(*question, due_s))


async def _run(flags: argparse.Namespace) -> dict[str, Any]:
    bus = await connect(NatsConfig(url=flags.nats_url), "asker")
    asker = Asker(bus, flags.chains)
    loop = asyncio.get_running_loop()
    began_s = spent_s = own_s = 0.0
    for seconds in (WARM_UP_S, flags.seconds):
        asker.forget()
        began_s, spent_s, own_s = loop.time(), cpu_of(flags.router_pid).sum_s, time.process_time()
        if flags.mode == "closed":
            await _closed(asker, flags.in_flight, began_s + seconds)
        else:
            await _open(asker, flags.rate, began_s + seconds)
    wall_s, spent_s = loop.time() - began_s, cpu_of(flags.router_pid).sum_s - spent_s
    own_s = time.process_time() - own_s
    asker.told.cancel()
    await bus.drain()
    took = sorted(asker.took_s)
    return {
        "asked": len(took) + asker.failed,
        "failed": asker.failed,
        "asked a second": len(took) / wall_s,
        "router CPU us a select": 1e6 * spent_s / max(len(took), 1),
        "asker CPU us a select": 1e6 * own_s / max(len(took), 1),
        "mean overlap, blocks": sum(asker.overlaps) / max(len(asker.overlaps), 1),
        **{f"p{share:g} ms": 1000 * took[int(len(took) * share / 100)] for share in (50, 90, 99, 99.9) if took},
        "worst ms": 1000 * took[-1] if took else 0.0,
        "percentiles ms": [round(1000 * took[(len(took) - 1) * share // 200], 3) for share in range(201) if took],
    }


def _timer_loop() -> asyncio.AbstractEventLoop:
    """Make a loop on select(2), which waits to the microsecond; epoll and uvloop wait to the millisecond."""
    return asyncio.SelectorEventLoop(selectors.SelectSelector())


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("mode", choices=["open", "closed"])
    parser.add_argument("--nats-url", required=True)
    parser.add_argument("--router-pid", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rate", type=float, default=1000.0)
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--chains", type=int, default=CHAINS)
    flags = parser.parse_args()
    with asyncio.Runner(loop_factory=_timer_loop) as runner:
        print(json.dumps(runner.run(_run(flags))))


if __name__ == "__main__":
    main()
