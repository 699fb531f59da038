"""How fast does a kvbm read another kvbm's blocks over TCP, as a share of what iperf3 reaches with as many streams?

Two processes, each a whole kvbm with a pool of its own on a tmpfs: one lends, one reads. A read is what the product
does: blocks are asked for and pinned, slots are reserved, the bytes come over several connections straight into them,
each block is compared with its checksum and published. iperf3 (`apt-get install iperf3`) sends for about as long over
the same loopback with the same number of streams. Both take turns in one run; `share` is the median of the ratios of
neighbours. `cpu_s_a_gb` are the seconds of both kvbms for a GB, `iperf3_cpu_s_a_gb` those of iperf3's two sides.

What could mislead: on loopback there is no network, so all is a matter of CPU time, of which kvbm needs more: iperf3
sends one small piece of memory over and over and throws away what comes, which stays in the cores' caches. kvbm writes
each byte to memory that was not touched for long, and reads it once more for the checksum. With fewer cores than
threads, that lowers its rate; a real network is slower than either. `--known` gives all blocks a checksum at the
lender, as engines with `kvbm.checksums` do; without it the lender reads each block once more.

So there is a second yardstick, which takes its turns in the same run: a plain loop between two processes that moves the
same bytes from memory to memory, without a kvbm and without checksums; `plain_share` is the median of the ratios to it.
For sockets it is `plain_sockets.py`; for NIXL (`--backend nixl`) a loop over its API, tuned by hand (`plain_nixl.py`).

    python -m benchmarks.kvbm_peers [--backend nixl] [--directory /dev/shm] [--streams 2] [--rounds 9] [--known]
                                    [--quick] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple, get_args

import msgspec
import uvloop
from xxhash import xxh3_64_intdigest

from benchmarks import plain_nixl, plain_sockets
from benchmarks.report import Goal, report
from services.kvbm.config import KvbmConfig, PeerBackend, PeersConfig, PoolConfig
from services.kvbm.peers.messages import PeerAddress
from services.kvbm.service import KvbmService, kvbm
from services.kvbm.tickets.results import TicketLimits
from shared.blocks import Content
from shared.bus.memory_bus import MemoryBroker, MemoryBus
from shared.discovery.memory import MemoryStore
from shared.hashing import content_key, pack_tokens, root_key
from shared.messages.cards import KvLayout
from shared.messages.kvbm import StoreBlock, StoreLayout
from tests.fake_runtime import fake_runtime
from tests.servers import free_port

BLOCK_KIB = (256, 1024, 4096)
READ_BYTES = 256 << 20
"""The bytes of one read."""
POOL_BYTES = 400 << 20
TURN_S = 1
"""About the seconds of one turn of either."""
LIMIT_S = 60.0
IPERF3_TRIES = 50
GOAL = 0.8
PLAIN_GOAL = 0.9
OWNER = "engine"


class PeerRateRow(msgspec.Struct, frozen=True):
    """One size of blocks; medians over the rounds."""

    block_kib: int
    streams: int
    gb_s: float
    iperf3_gb_s: float | None
    share: float | None
    least: float | None
    most: float | None
    cpu_s_a_gb: float
    iperf3_cpu_s_a_gb: float | None
    tls: bool = False
    backend: str = "sockets"
    plain_gb_s: float = 0.0
    plain_share: float = 0.0
    plain_cpu_s_a_gb: float = 0.0


class _Turn(NamedTuple):
    gb_s: float
    cpu_s_a_gb: float


def main() -> int:
    """Print a table, or with --json one object."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--streams", type=int, default=2)
    parser.add_argument("--backend", choices=get_args(PeerBackend), default="sockets")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--known", action="store_true", help="the lender knows the blocks' checksums")
    parser.add_argument("--quick", action="store_true", help="3 rounds")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    iperf3 = shutil.which("iperf3")
    rounds = 3 if flags.quick else flags.rounds
    rows = [
        _measure(flags.directory, kib, flags.streams, rounds, iperf3, flags.backend, known=flags.known)
        for kib in BLOCK_KIB
    ]
    if flags.json:
        print(msgspec.json.encode(report("kvbm_peers", sys.argv[1:], _goals(rows), rows)).decode())
        return 0
    for row in rows:
        print("   ".join(f"{name} {_shown(getattr(row, name))}" for name in row.__struct_fields__))
    return 0


def _shown(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _goals(rows: Sequence[PeerRateRow]) -> list[Goal]:
    of_iperf3 = [
        Goal(
            f"{row.backend}: read of blocks of {row.block_kib} KiB, {row.streams} streams",
            row.share,
            "of iperf3",
            GOAL,
            met=row.share is not None and row.share >= GOAL,
        )
        for row in rows
    ]
    return of_iperf3 + [
        Goal(
            f"nixl: read of blocks of {row.block_kib} KiB",
            row.plain_share,
            "of a plain loop over NIXL",
            PLAIN_GOAL,
            met=row.plain_share >= PLAIN_GOAL,
        )
        for row in rows
        if row.backend == "nixl"
    ]


def _measure(
    directory: Path, block_kib: int, streams: int, rounds: int, iperf3: str | None, backend: PeerBackend, *, known: bool
) -> PeerRateRow:
    with tempfile.TemporaryDirectory(prefix="kvbm-peers-", dir=directory) as below:
        ends, theirs = multiprocessing.get_context("spawn").Pipe()
        arguments = (theirs, Path(below) / "lender", block_kib, streams, backend, known)
        lender = multiprocessing.get_context("spawn").Process(target=_lend, args=arguments)
        lender.start()
        try:
            port = int(ends.recv())
            with _plain(Path(below), block_kib, streams, backend) as plain:
                turns, yardsticks, plain_turns = uvloop.run(
                    _reading(Path(below) / "reader", block_kib, streams, backend, rounds, port, ends, iperf3, plain)
                )
            ends.send("end")
            lender.join()
        finally:
            lender.kill()
    plain_shares = [turn.gb_s / other.gb_s for turn, other in zip(turns, plain_turns, strict=True)]
    shares = [turn.gb_s / other.gb_s for turn, other in zip(turns, yardsticks, strict=False)]
    return PeerRateRow(
        block_kib=block_kib,
        streams=streams,
        gb_s=statistics.median(turn.gb_s for turn in turns),
        iperf3_gb_s=statistics.median(turn.gb_s for turn in yardsticks) if yardsticks else None,
        share=statistics.median(shares) if shares else None,
        least=min(shares, default=None),
        most=max(shares, default=None),
        cpu_s_a_gb=statistics.median(turn.cpu_s_a_gb for turn in turns),
        iperf3_cpu_s_a_gb=statistics.median(turn.cpu_s_a_gb for turn in yardsticks) if yardsticks else None,
        backend=backend,
        plain_gb_s=statistics.median(turn.gb_s for turn in plain_turns),
        plain_share=statistics.median(plain_shares),
        plain_cpu_s_a_gb=statistics.median(turn.cpu_s_a_gb for turn in plain_turns),
    )


# --- the yardsticks


def _plain(directory: Path, block_kib: int, streams: int, backend: PeerBackend) -> AbstractContextManager[Connection]:
    if backend == "nixl":
        return plain_nixl.running(directory, block_kib)
    return plain_sockets.running(directory, streams)


def _iperf3(program: str, streams: int) -> _Turn:
    """Run iperf3 once; return its rate and the CPU time of both sides."""
    port = free_port()
    received: dict[str, float] = {}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    asked = [program, "-c", "127.0.0.1", "-p", str(port), "-P", str(streams), "-t", str(TURN_S), "-J"]
    with subprocess.Popen(
        [program, "-s", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as server:
        try:
            for _ in range(IPERF3_TRIES):
                ran = subprocess.run(asked, capture_output=True, check=False)
                received = msgspec.json.decode(ran.stdout or b"{}").get("end", {}).get("sum_received", {})
                if received.get("bytes"):
                    break
                time.sleep(0.1)  # it does not listen yet
        finally:
            server.terminate()
    if not received:
        raise SystemExit(f"iperf3 does not run: {ran.stdout.decode()[-300:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return _Turn(received["bits_per_second"] / 8e9, cpu_s / (received["bytes"] / 1e9))


# --- both kvbms


def _layout(block_kib: int) -> StoreLayout:
    return StoreLayout("m", "w", KvLayout("uint8", 1, 1, 1, 16, form="bytes", form_bytes=block_kib << 10))


def _contents(block_kib: int) -> list[Content]:
    """Return as many blocks as a read has."""
    contents: list[Content] = []
    parent = None
    for number in range(READ_BYTES // (block_kib << 10)):
        tokens = pack_tokens([number] * 16)
        key = content_key(parent or root_key("m"), tokens)
        contents.append(Content(key, parent, tokens))
        parent = key
    return contents


@asynccontextmanager
async def _kvbm(
    directory: Path, instance: str, block_kib: int, streams: int, backend: PeerBackend
) -> AsyncIterator[KvbmService]:
    """Run a kvbm with one layout, without servers."""
    config = KvbmConfig(
        pool=PoolConfig(directory=str(directory), size_bytes=POOL_BYTES),
        tickets=TicketLimits(owner_share=1.0, fetch_time_s=LIMIT_S, store_time_s=LIMIT_S),
        peers=PeersConfig(listen="127.0.0.1:0", streams=streams, backend=backend),
    )
    config = msgspec.structs.replace(config, tiers=msgspec.structs.replace(config.tiers, held_share=1.0))
    broker = MemoryBroker()
    async with (
        fake_runtime("benchmark", "kvbm", instance, MemoryBus(broker), broker, MemoryStore()) as runtime,
        kvbm(runtime, config) as service,
    ):
        while not service.prefault.complete:  # noqa: ASYNC110 - a thread of its own
            await asyncio.sleep(0.01)
        assert service.peers is not None
        while service.peers.nixl is not None and service.peers.nixl.ready is None:  # noqa: ASYNC110 - a process
            await asyncio.sleep(0.01)
        service.layouts.get_or_open(_layout(block_kib), ()).attach(OWNER)
        yield service


def _cpu_s(*processes: int) -> float:
    """Return the CPU seconds of this process and of others."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    total = used.ru_utime + used.ru_stime
    for pid in processes:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def _lend(ends: Connection, directory: Path, block_kib: int, streams: int, backend: PeerBackend, known: bool) -> None:
    uvloop.run(_lending(ends, directory, block_kib, streams, backend, known))


async def _lending(
    ends: Connection, directory: Path, block_kib: int, streams: int, backend: PeerBackend, known: bool
) -> None:
    async with _kvbm(directory, "lender", block_kib, streams, backend) as service:
        layout = service.layouts.open[_layout(block_kib).digest]
        offered = [StoreBlock(each.key, each.parent, each.tokens) for each in _contents(block_kib)]
        granted = layout.reserve(OWNER, offered)
        assert len(granted.slots) == len(offered)
        checksums: dict[int, int] = {}
        for slot in granted.slots:
            with layout.slots.slot(slot) as memory:
                memory[:] = slot.to_bytes(4, "little") * (memory.nbytes // 4)
                checksums[slot] = xxh3_64_intdigest(memory) if known else 0
        layout.publish(OWNER, granted.ticket, checksums)
        assert service.peers is not None
        ends.send(service.peers.server.port)
        while await asyncio.to_thread(ends.recv) != "end":
            nixl = service.peers.nixl
            ends.send(_cpu_s(*([nixl.process.pid] if nixl is not None and nixl.process is not None else [])))


async def _reading(
    directory: Path,
    block_kib: int,
    streams: int,
    backend: PeerBackend,
    rounds: int,
    port: int,
    ends: Connection,
    iperf3: str | None,
    plain: Connection,
) -> tuple[list[_Turn], list[_Turn], list[_Turn]]:
    async with _kvbm(directory, "reader", block_kib, streams, backend) as service:
        turns: list[_Turn] = []
        plain_turns: list[_Turn] = []
        yardsticks: list[_Turn] = []
        await _turn(service, block_kib, port, ends)  # connects, and touches the pools
        for _ in range(rounds):
            turns.append(await _turn(service, block_kib, port, ends))
            if iperf3 is not None:
                yardsticks.append(await asyncio.to_thread(_iperf3, iperf3, streams))
            plain.send("turn")
            plain_turns.append(_Turn(*await asyncio.to_thread(plain.recv)))
        return turns, yardsticks, plain_turns


async def _turn(service: KvbmService, block_kib: int, port: int, ends: Connection) -> _Turn:
    """Read all blocks again and again for about TURN_S."""
    layout = service.layouts.open[_layout(block_kib).digest]
    keys = [each.key for each in _contents(block_kib)]
    assert service.peers is not None
    address = PeerAddress("lender", "127.0.0.1", port)
    ends.send("cpu")
    reader = service.peers.nixl_reader
    readers = [] if reader is None else [process.pid for process in reader.idle]
    before_s = _cpu_s(*readers) + await asyncio.to_thread(ends.recv)
    took_s, reads = 0.0, 0
    while took_s < TURN_S:
        began_s = time.perf_counter()
        done = await service.peers.imports.read(address, layout, keys, LIMIT_S)
        took_s += time.perf_counter() - began_s
        reads += 1
        assert done.fault is None, done.fault
        assert len(done.written) == len(keys), "blocks are missing"
        layout.tickets.discard(OWNER, keys)
    ends.send("cpu")
    cpu_s = _cpu_s(*readers) + await asyncio.to_thread(ends.recv) - before_s
    read_gb = reads * READ_BYTES / 1e9
    return _Turn(read_gb / took_s, cpu_s / read_gb)


if __name__ == "__main__":
    sys.exit(main())
