"""How soon does a prompt's first token come if kvbm has its blocks, in memory or on disk?

A worker with the native engine on one thread and a device pool that holds one prompt, a kvbm, and NATS, each a process
of its own; this one is the frontend. Two prompts are computed once, stored in kvbm's pool and written to its disk, and
then asked for in turn: each time the other one is on the device. In memory both stay. Before each round from disk kvbm
is restarted and has in memory only the device's blocks, which are the other prompt's.

`first` is the time from the request to the first token, less one step of the engine, which computes the prompt's last
token: the mean time between the tokens that follow. `alone` is the time of the same bytes by themselves, measured after
each request: from memory, at the rate at which a mover loads blocks of this size; from disk, at that of plain O_DIRECT
reads of this size, as many in flight as kvbm has. The ratio is that of the medians of both over the rounds; it includes
the trips over NATS, kvbm's answer and, from disk, the copies.

What could mislead: all is wall time, so other programs count. `first` goes through four processes and a thread of low
priority, so it suffers more than `alone`. After 4,096 tokens a step takes ten times as long as copying them, and its
time varies. So a single round says little about the difference. Virtual disks may cache recent writes, for both alike.

    python -m benchmarks.kvbm_first [--tokens 4096] [--rounds 8] [--memory TMPFS] [--directory DIR] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import mmap
import secrets
import select
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, closing, contextmanager
from itertools import cycle, islice
from pathlib import Path
from random import Random
from typing import Literal

import msgspec
import uvloop

from benchmarks.kvbm_disk import FILE_BYTES, Plain
from benchmarks.report import ROOT, Goal, report
from deploy.local.stack.model import fetch_default
from services.kvbm.config import DiskConfig
from services.kvbm.disk.format import disk_geometry
from services.worker.contracts.mover import Copy
from services.worker.transfer.host_copier import HostCopier
from services.worker.transfer.mover import TransferMover
from shared.messages.frames import Part
from shared.messages.generate import Sampling
from shared.messages.kvbm import LayoutState
from shared.pool.map import PoolMap, touch
from tests.integration.fleet import fleet
from tests.integration.machine import Machine, Wire, connected, eventually
from tests.servers import NatsServer
from tests.worker.pool_file import make_pool
from tests.worker.shell import request

MODELS = ROOT / ".headrace" / "models"
BLOCK_TOKENS = 16
SMOL_BLOCK_BYTES = 2 * 30 * 3 * 64 * BLOCK_TOKENS * 4
"""A block of SmolLM2-135M: keys and values of 30 layers, 3 heads of 64, in float32."""
VOCABULARY = 49_152
"""The size of SmolLM2's vocabulary."""
LIMIT_S = 600.0
"""The longest wait. Computing a prompt takes long if other programs use the cores."""
OUTPUT_TOKENS = 5
PROMPTS = 2
WORKER = "first"
PLAIN_S = 0.3

Tier = Literal["host", "disk"]
GOALS: dict[Tier, float] = {"host": 1.25, "disk": 1.5}


class Subject(msgspec.Struct, frozen=True):
    """The measured model and device, and a way to time plain copies."""

    model: Path
    block_bytes: int
    worker_flags: tuple[str, ...]
    tiers: tuple[Tier, ...]
    """The measured tiers; a disk is set up only if it is one of them."""
    alone: Callable[[Path, int, int], AbstractContextManager[Callable[[], float]]]
    """Make a function that returns the seconds to load blocks alone, for a tmpfs, a count and a block size."""


class KvbmFirstRow(msgspec.Struct, frozen=True):
    """The times of one request, in milliseconds."""

    tier: Tier
    first_ms: float
    step_ms: float
    alone_ms: float
    ratio: float


class Times(msgspec.Struct, frozen=True):
    """The times of one run."""

    rows: list[KvbmFirstRow]
    computed_ms: list[float]
    """The time to the first token of each prompt while no tier had its blocks."""


def main() -> int:
    """Print a table, or with --json one object."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--tokens", type=int, default=4096, help="of each prompt, and one more")
    parser.add_argument("--rounds", type=int, default=8, help="from disk; from memory three times as many")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="a tmpfs, for kvbm's pool")
    parser.add_argument("--directory", type=Path, help="where the disk tier writes; default: the temporary directory")
    parser.add_argument("--quick", action="store_true", help="prompts of 512 tokens, four rounds")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    tokens, rounds = (512, 4) if flags.quick else (flags.tokens, flags.rounds)
    rows = measure(smol(), flags.memory, flags.directory, tokens, rounds).rows
    if flags.json:
        print(msgspec.json.encode(report("kvbm_first", sys.argv[1:], goals(rows), rows)).decode())
        return 0
    for row in rows:
        print(
            f"{row.tier}   first token, less a step {row.first_ms:8.2f} ms   step {row.step_ms:7.2f} ms"
            f"   its bytes alone {row.alone_ms:7.2f} ms   ratio {row.ratio:.2f}"
        )
    for goal in goals(rows):
        print(f"{goal.name}: {goal.value:.2f}, goal {goal.goal}")
    return 0


def goals(rows: Sequence[KvbmFirstRow]) -> list[Goal]:
    """Compare the rows with the goals."""
    promised: list[Goal] = []
    for tier, goal in GOALS.items():
        own = [row for row in rows if row.tier == tier]
        if own:
            ratio = statistics.median(row.first_ms for row in own) / statistics.median(row.alone_ms for row in own)
            name = f"first token from {tier}, less a step"
            promised.append(Goal(name, ratio, "of its bytes alone", goal, ratio <= goal))
    return promised


def smol() -> Subject:
    """Return the model that `up` serves, on one thread of the CPU."""
    model = fetch_default(MODELS, lambda _what, _share: None)
    return Subject(model, SMOL_BLOCK_BYTES, ("--cache", str(MODELS)), ("host", "disk"), _copying)


def measure(subject: Subject, memory: Path, directory: Path | None, tokens: int, rounds: int) -> Times:
    """Measure a row for each request, from memory first. The disk's files lie below `directory`."""
    with (
        tempfile.TemporaryDirectory(prefix="kvbm-first-", dir=memory) as pool,
        tempfile.TemporaryDirectory(prefix="kvbm-first-", dir=directory) as disk,
    ):
        nats = NatsServer(Path(pool))
        nats.start()
        try:
            return uvloop.run(_measure(subject, Path(pool), Path(disk), nats.url, tokens // BLOCK_TOKENS, rounds))
        finally:
            nats.stop()


async def _measure(subject: Subject, memory: Path, disk: Path, nats_url: str, blocks: int, rounds: int) -> Times:
    draw = Random(1)
    prompts = [[draw.randrange(VOCABULARY) for _ in range(blocks * BLOCK_TOKENS + 1)] for _ in range(PROMPTS)]
    with subject.alone(memory, blocks, subject.block_bytes) as copying_s, ExitStack() as opened:
        async with _pair(subject, memory, disk, nats_url, blocks) as pair:
            computed_ms = [
                1e3 * await pair.compute(prompt, (number + 1) * blocks) for number, prompt in enumerate(prompts)
            ]
            turns = cycle(prompts)  # always the one that the device has not
            rows = [_row("host", await pair.ask(prompt, "host"), copying_s()) for prompt in islice(turns, 3 * rounds)]
            if "disk" in subject.tiers:
                shape = disk_geometry("0" * 16, subject.block_bytes, FILE_BYTES, FILE_BYTES)
                plain = opened.enter_context(Plain(disk / "plain", shape))
                for prompt in islice(turns, rounds):
                    await pair.restart(PROMPTS * blocks)
                    took = await pair.ask(prompt, "disk")
                    rate = await plain.rate("read", DiskConfig().threads, PLAIN_S)
                    rows.append(_row("disk", took, blocks * subject.block_bytes / rate))
    return Times(rows, computed_ms)


def _row(tier: Tier, took: tuple[float, float], alone_s: float) -> KvbmFirstRow:
    first_s, step_s = took
    return KvbmFirstRow(tier, 1e3 * (first_s - step_s), 1e3 * step_s, 1e3 * alone_s, (first_s - step_s) / alone_s)


class FirstTokenPair:
    """A worker and its kvbm."""

    def __init__(self, machine: Machine, wire: Wire, kvbm_flags: Sequence[str], tiers: Sequence[Tier]) -> None:
        self._machine = machine
        self._wire = wire
        self._kvbm_flags = kvbm_flags
        self._tiers = tiers

    async def start(self) -> None:
        self._start_kvbm()
        self._machine.start_worker(WORKER)
        await self._attached()

    async def compute(self, prompt: list[int], stored: int) -> float:
        """Compute a prompt; return its seconds to the first token once each tier has `stored` blocks."""
        first_s, _, _ = await self._ask(prompt, 1)
        await self._wire.until_state(lambda layout: min(_held(layout, self._tiers)) >= stored, "it is stored")
        return first_s

    async def restart(self, stored: int) -> None:
        """Restart kvbm with `stored` blocks on disk; in memory it gets only the device's blocks."""
        await asyncio.to_thread(self._machine.process("kvbm").stop)
        self._start_kvbm()
        await self._attached()
        await self._wire.until_state(
            lambda layout: _held(layout, ("disk",))[0] >= stored <= PROMPTS * layout.host.blocks,
            "it was scanned, and given",
        )

    async def ask(self, prompt: list[int], tier: Tier) -> tuple[float, float]:
        """Ask for a prompt of `tier`; return the seconds to the first token and between the others."""
        first_s, step_s, last = await self._ask(prompt, OUTPUT_TOKENS)
        came = {"host": last.cached_host_tokens, "disk": last.cached_disk_tokens}
        assert came[tier] == len(prompt) - 1, f"{last}, and all were to come from {tier}"
        return first_s, step_s

    async def _ask(self, prompt: list[int], most: int) -> tuple[float, float, Part]:
        peer = await self._wire.peer(WORKER)
        peer.frames.clear()
        name = secrets.token_hex(8)
        sampling = Sampling(max_tokens=most, temperature=0.0, ignore_eos=True)
        asked = request(name, prompt, sampling=sampling, time_left_s=LIMIT_S)
        began_s = time.perf_counter()
        await peer.generate(asked)
        await peer.until(lambda: bool(peer.parts(name)), limit_s=LIMIT_S)
        first_s = time.perf_counter() - began_s
        await peer.ended(name)
        rest_s = time.perf_counter() - began_s - first_s
        return first_s, rest_s / max(1, most - 1), peer.parts(name)[-1]

    def _start_kvbm(self) -> None:
        self._machine.fleet.start("kvbm", "kvbm", *self._kvbm_flags)

    async def _attached(self) -> None:
        """Wait until the worker is attached to the running kvbm."""
        await asyncio.to_thread(self._machine.fleet.wait_ready)
        await self._wire.until_state(lambda layout: layout.owners == 1 and layout.host.state == "on", "it has attached")
        worker = self._machine.process(WORKER)

        async def linked() -> bool:
            return await asyncio.to_thread(worker.metric, "headrace_kvbm_attached") == 1

        await eventually(linked, "the worker knows")


def _held(layout: LayoutState, tiers: Sequence[Tier]) -> list[int]:
    """Return the number of blocks in each of these tiers."""
    held = {"host": layout.host.blocks, "disk": 0 if layout.disk is None else layout.disk.blocks}
    return [held[tier] for tier in tiers]


@asynccontextmanager
async def _pair(
    subject: Subject, memory: Path, disk: Path, nats_url: str, blocks: int
) -> AsyncIterator[FirstTokenPair]:
    """Start a worker that holds one prompt of `blocks`, and a kvbm whose tiers hold both prompts."""
    pool_bytes = 2 * PROMPTS * blocks * subject.block_bytes + (64 << 20)
    kvbm_flags = ["--pool-directory", str(memory / "pool"), "--pool-size-bytes", str(pool_bytes)]
    if "disk" in subject.tiers:
        kvbm_flags += ["--disk-directory", str(disk / "blocks"), "--disk-limit-bytes", str(2 * pool_bytes)]
    with fleet(memory, nats_url, *Machine.where(memory)) as processes:
        worker_flags = (*subject.worker_flags, "--capacity-blocks", str(blocks + 1))
        machine = Machine(processes, memory, subject.model, pool_bytes, *worker_flags)
        async with connected(machine, nats_url) as wire:
            pair = FirstTokenPair(machine, wire, kvbm_flags, subject.tiers)
            await pair.start()
            yield pair


@contextmanager
def _copying(directory: Path, blocks: int, block_bytes: int) -> Iterator[Callable[[], float]]:
    """Yield a function that returns the seconds of a mover's load of `blocks` blocks, alone."""
    geometry = make_pool(directory / "yardstick", (blocks * block_bytes + (1 << 20)) >> 16 << 16)
    pool = PoolMap(directory / "yardstick")
    slots = pool.arena(geometry.arena(0, 1, block_bytes))
    touch(slots.bytes)
    device = mmap.mmap(-1, blocks * block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    device.madvise(mmap.MADV_HUGEPAGE)
    with (
        memoryview(device) as memory,
        closing(TransferMover(HostCopier.over(memory, block_bytes), time.monotonic)) as mover,
    ):
        touch(memory)
        mover.attach(slots)
        places = Random(1).sample(range(slots.arena.slots), blocks)
        copies = [Copy(place, number) for number, place in enumerate(places)]

        def seconds() -> float:
            began_s = time.perf_counter()
            mover.load(0, copies)
            select.select([mover], [], [])
            [copied] = mover.ended()
            assert all(copied.good)
            return time.perf_counter() - began_s

        yield seconds
    slots.close()
    pool.close()


if __name__ == "__main__":
    sys.exit(main())
