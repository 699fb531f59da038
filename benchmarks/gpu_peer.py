"""How fast do blocks go from another process's GPU memory into one's own, against one plain copy between the two GPUs?

    python -m benchmarks.gpu_peer [--device cpu] [--quick] [--json]

A second process shares its blocks (`services.worker.sharing`), and this one maps and copies them, as two engines
of one machine would: 64 and 512 blocks of 2 MiB, in one piece and in 32 layers of keys and values, from and to
scattered slots. Every path, spread over 1 and 2 streams, or on 32 to 132 multiprocessors. With two GPUs the sharer uses
the first and the reader the second; with one both use it, and nothing is said about a link.

    once          one share's blocks at a time, from handing them over to knowing of their end; the median
    in a row      the same blocks again and again, groups handed over without a pause

The yardstick is one cudaMemcpyPeer of 1 GiB between the two GPUs (on one GPU a copy on it) within this process,
measured before and after, of which the better counts. `plain` is one such copy of as many bytes as the blocks of a row
have, by itself: what remains of the yardstick for so few bytes. All bytes are compared after each row.

What could mislead: nothing else computes on either GPU. A copy by a kernel takes multiprocessors from whatever does,
which this does not show. With --device cpu it is memmove between two processes' host memories, to try the benchmark.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from benchmarks.gpu.part import gpu_or_exit
from benchmarks.report import ROOT, Goal, report
from services.worker.contracts.mover import Copy
from services.worker.sharing.host_pages import HostMapper, HostPages, SharedHostCopier
from services.worker.sharing.memory import PageMapper
from services.worker.sharing.messages import SharingIdentity, SlotsShared
from services.worker.sharing.page_reader import PageReader
from services.worker.sharing.page_sharer import PageSharer
from services.worker.transfer.block_shape import BlockShape
from services.worker.transfer.copier import Copier
from services.worker.transfer.lane import DEPTH
from shared.pool.lock import hold_owner
from tests.worker.transfer.layer_major import layer_major

GIB = 1 << 30
LAYERS = 32
BLOCKS = (64, 512)
GOAL = 0.9
ROUNDS, ROW_BYTES = 20, 16 * GIB
LIMIT_S = 120
WARM_UP_S = 0.3
SHAPES = {"2 MiB x 1": 1, "32 KiB x 64": 2 * LAYERS}
"""Fragments of a block."""


class Setup(Struct, frozen=True):
    """What both processes agree on."""

    directory: str
    kind: str
    device: int
    fragments: int
    block_bytes: int
    slots: int

    def shape(self, at: int) -> BlockShape:
        return layer_major(at, self.fragments, self.block_bytes // self.fragments, self.slots)

    @property
    def identity(self) -> SharingIdentity:
        return SharingIdentity("benchmark", "0", "bytes", kind="cuda" if self.kind == "cuda" else "host")


class PeerRow(Struct, frozen=True):
    """One way to copy."""

    fragments: str
    blocks: int
    path: str
    """The path, and over how many streams or on how many multiprocessors at most."""
    how: str
    gb_per_s: float
    share: float
    """The rate as a share of the yardstick."""
    default: bool
    """Whether this is what a reader takes by itself."""


def main() -> int:
    """Print a table, or with --json one object. The exit status is 2 without a GPU."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--share", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.share:
        _share(msgspec.json.decode(flags.share, type=Setup))
        return 0
    cuda = flags.device == "cuda"
    machine: dict[str, Any] = gpu_or_exit() | _link() if cuda else {"name": "no GPU: host memory"}
    rows: list[PeerRow] = []
    rates: list[float] = []
    rates.append(_yardstick(cuda))
    for name, fragments in SHAPES.items():
        rows += _shape(name, fragments, rates[0], flags)
    rates.append(_yardstick(cuda))
    best = max(rates)
    plain = {blocks: _yardstick(cuda, blocks << 21) for blocks in BLOCKS}
    rows = [msgspec.structs.replace(row, share=row.gb_per_s / best) for row in rows]
    goals = []
    for name in SHAPES:
        worst = min(row.share for row in rows if row.fragments == name and row.default and row.how == "in a row")
        goals.append(Goal(f"{name}, in a row, at worst", worst, "of one large copy", GOAL, worst >= GOAL))
    if flags.json:
        told = report("gpu_peer", sys.argv[1:], goals, rows) | {"gpu": machine, "yardsticks_gb_per_s": rates}
        told |= {"plain_gb_per_s": plain}
        print(msgspec.json.encode(told).decode())
        return 0
    print("  ".join(f"{key}: {value}" for key, value in machine.items()))
    print(f"one large copy: {', '.join(f'{rate:.1f}' for rate in rates)} GB/s")
    print("  ".join(f"plain copy of {blocks} blocks: {rate:.1f} GB/s" for blocks, rate in plain.items()))
    for row in rows:
        mark = "  ◀ default" if row.default else ""
        print(
            f"{row.fragments:12} {row.blocks:4} blocks  {row.path:12} {row.how:9} {row.gb_per_s:7.1f} GB/s"
            f"  {row.share:.3f}{mark}"
        )
    for goal in goals:
        print(f"{goal.name}: {goal.value:.3f} (goal {goal.goal}) {'met' if goal.met else 'NOT MET'}")
    return 0


# --- the sharer's process


def _share(setup: Setup) -> None:
    """Share until standard input ends."""
    import select

    held = hold_owner(Path(setup.directory), "sharer")
    size_bytes = setup.slots * setup.block_bytes
    words = np.arange(size_bytes // 8, dtype=np.uint64)
    pages: Any
    if setup.kind == "cuda":
        from services.worker.sharing.device_pages import DevicePages

        pages = DevicePages(size_bytes, setup.device)
        pages.array()[:size_bytes].set(words.view(np.uint8))
        pages.array().device.synchronize()
    else:
        pages = HostPages(size_bytes)
        pages.array[:] = words.view(np.uint8)
    sharer = PageSharer(
        Path(setup.directory),
        "sharer",
        pages,
        setup.shape(pages.address),
        setup.identity,
        1,
        _AllBlocks(),
    )
    print("ready", flush=True)
    while True:
        readable, _, _ = select.select([0, sharer.fileno()], [], [], 0.1)
        if 0 in readable and not os.read(0, 1024):
            break
        sharer.turn(time.monotonic())
        sharer.watch()
    sharer.close()
    held.close(delete=True)


class _AllBlocks:
    """Shares the slot that a key is the number of."""

    def share(self, keys: Sequence[bytes]) -> list[int]:
        return [int.from_bytes(key, "little") for key in keys]

    def take_back(self, slots: Sequence[int]) -> None: ...


# --- the reader, this process


def _shape(name: str, fragments: int, rate: float, flags: argparse.Namespace) -> list[PeerRow]:
    """Measure all ways for one shape of blocks."""
    cuda = flags.device == "cuda"
    block_bytes = 2 << 20 if cuda else 64 << 10
    with TemporaryDirectory() as directory:
        (Path(directory) / "owners").mkdir(mode=0o700)
        held = hold_owner(Path(directory), "reader")
        setup = Setup(directory, "cuda" if cuda else "host", 0, fragments, block_bytes, max(BLOCKS))
        own_device = _second() if cuda else 0
        mapper, own, check = _own_memory(setup, own_device)
        words = [sys.executable, "-m", "benchmarks.gpu_peer", "--share", msgspec.json.encode(setup).decode()]
        with subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as sharer:
            assert sharer.stdout is not None
            assert sharer.stdin is not None
            assert sharer.stdout.readline() == b"ready\n", "the sharer did not start"
            reader = PageReader(Path(directory), "sharer", "reader", setup.identity, own, mapper)
            begun_s = time.perf_counter()
            _until(reader, lambda: reader.theirs is not None)
            print(f"{name}: mapped in {(time.perf_counter() - begun_s) * 1e3:.1f} ms", file=sys.stderr, flush=True)
            rows: list[PeerRow] = []
            share = 0
            for label, copier, default in _copiers(setup, reader, own, own_device, quick=flags.quick):
                for blocks in BLOCKS:
                    share += 1
                    copies = _shared(reader, share, blocks)
                    rows += _rows(name, label, copier, copies, block_bytes, rate, default, flags)
                    check(copies)
                    reader.release(share)
                copier.close()
            reader.leave()
            sharer.stdin.close()
        held.close(delete=True)
    return rows


def _own_memory(setup: Setup, device: int) -> tuple[PageMapper, BlockShape, Callable[[Sequence[Copy]], None]]:
    """Return the mapper, the shape of this process's blocks, and a check of what was copied, which also clears it."""
    places = (setup.fragments, setup.slots, setup.block_bytes // setup.fragments // 8)
    mapper: PageMapper
    arrays: Any
    if setup.kind == "cuda":
        import cupy as arrays  # type: ignore[no-redef]  # pyright: ignore[reportMissingImports]

        from services.worker.sharing.device_pages import DeviceMapper
        from services.worker.transfer.cuda import use_device

        use_device(device)
        mapper = DeviceMapper(device)
    else:
        arrays = np
        mapper = HostMapper()
    array, sent = arrays.zeros(places, np.uint64), arrays.arange(prod(places), dtype=np.uint64).reshape(places)
    at = array.data.ptr if setup.kind == "cuda" else array.ctypes.data

    def settle() -> None:
        if setup.kind == "cuda":
            arrays.cuda.get_current_stream().synchronize()

    def check(copies: Sequence[Copy]) -> None:
        sources, targets = ([getattr(copy, name) for copy in copies] for name in ("pool_slot", "device_slot"))
        assert bool((array[:, targets] == sent[:, sources]).all()), "WRONG BYTES"
        array[:] = 0
        settle()

    settle()
    return mapper, setup.shape(at), check


def _copiers(
    setup: Setup, reader: PageReader, own: BlockShape, device: int, *, quick: bool
) -> list[tuple[str, Copier, bool]]:
    theirs = reader.theirs
    assert theirs is not None
    if setup.kind != "cuda":
        return [("memmove", SharedHostCopier(theirs, own), True)]
    from services.worker.sharing.device_copier import SharedDeviceCopier

    default = SharedDeviceCopier(theirs, own, device)
    made: list[tuple[str, Copier, bool]] = [(f"{default.path}, as is", default, True)]
    for path in ("rows", "batch"):
        made += [
            (f"{path} / {streams}", SharedDeviceCopier(theirs, own, device, path=path, streams=streams), False)
            for streams in ((1,) if quick else (1, 2))
        ]
    made += [
        (f"kernel / {count}", SharedDeviceCopier(theirs, own, device, path="kernel", multiprocessors=count), False)
        for count in ((64,) if quick else (32, 64, 132))
    ]
    return made


def _shared(reader: PageReader, share: int, blocks: int) -> list[Copy]:
    """Read blocks, from and to slots in a random order."""
    draw = np.random.default_rng(blocks)
    slots = draw.permutation(max(BLOCKS))[:blocks].tolist()
    reader.read(share, [slot.to_bytes(16, "little") for slot in slots])
    answers: list[Any] = []
    _until(reader, lambda: bool(answers), answers)
    assert isinstance(answers[0], SlotsShared), answers
    return [Copy(slot, to) for slot, to in zip(answers[0].slots, draw.permutation(max(BLOCKS)).tolist(), strict=False)]


def _until(reader: PageReader, done: Callable[[], bool], answers: list[Any] | None = None) -> None:
    import select

    until_s = time.perf_counter() + LIMIT_S
    while not done():
        assert not reader.ended, reader.ended
        assert time.perf_counter() < until_s, "no answer"
        select.select([reader], [], [], 1)
        came = reader.turn()
        if answers is not None:
            answers += came


def _rows(
    name: str,
    label: str,
    copier: Copier,
    copies: Sequence[Copy],
    block_bytes: int,
    rate: float,
    default: bool,
    flags: argparse.Namespace,
) -> list[PeerRow]:
    """Measure one way, one share at a time and in a row."""

    def once() -> float:
        begun_s = time.perf_counter()
        _copy(copier, copies, 1)
        return time.perf_counter() - begun_s

    size_bytes = len(copies) * block_bytes
    _warm_up(copier, copies)
    rounds = 5 if flags.quick else ROUNDS
    times = max(2, (ROW_BYTES // (4 if flags.quick else 1)) // size_bytes) if flags.device == "cuda" else 2
    taken_s = median(once() for _ in range(rounds))
    begun_s = time.perf_counter()
    _copy(copier, copies, times)
    row_s = time.perf_counter() - begun_s
    rates = {"once": size_bytes / taken_s / 1e9, "in a row": times * size_bytes / row_s / 1e9}
    return [PeerRow(name, len(copies), label, how, each, each / rate, default) for how, each in rates.items()]


def _warm_up(copier: Copier, copies: Sequence[Copy]) -> None:
    """Copy for a while: after a pause, an idle GPU's first copies are slower."""
    until_s = time.perf_counter() + WARM_UP_S
    while time.perf_counter() < until_s:
        _copy(copier, copies, 1)


def _copy(copier: Copier, copies: Sequence[Copy], times: int) -> None:
    """Copy in groups, DEPTH at a time, as a mover does."""
    under_way: deque[Any] = deque()
    for _ in range(times):
        for first in range(0, len(copies), copier.group_blocks):
            if len(under_way) == DEPTH:
                under_way.popleft().wait()
            under_way.append(copier.begin(copies[first : first + copier.group_blocks], loads=True))
    for pending in under_way:
        pending.wait()


# --- the machine


def _second() -> int:
    """Return the second GPU, or the only one."""
    import cupy  # pyright: ignore[reportMissingImports]

    return min(1, int(cupy.cuda.runtime.getDeviceCount()) - 1)


def _link() -> dict[str, Any]:
    """Return what connects the two GPUs, as nvidia-smi names it."""
    import cupy  # pyright: ignore[reportMissingImports]

    runtime = cupy.cuda.runtime
    count = int(runtime.getDeviceCount())
    if count < 2:
        return {"gpus": 1, "link": "none: both processes on one GPU"}
    try:
        asked = subprocess.run(
            ["nvidia-smi", "nvlink", "--status", "-i", "0"], capture_output=True, text=True, check=False
        )
        lanes = sum("GB/s" in line for line in asked.stdout.splitlines())
    except OSError:
        lanes = -1
    reach = bool(runtime.deviceCanAccessPeer(1, 0))
    return {"gpus": count, "link": f"{lanes} NVLinks" if lanes > 0 else "unknown or PCIe", "peer access": reach}


def _yardstick(cuda: bool, size_bytes: int = GIB) -> float:
    """Return the rate of one plain copy between the two memories, in GB/s: the best of some."""
    if not cuda:
        one, other = np.ones(size_bytes >> 4, np.uint8), np.zeros(size_bytes >> 4, np.uint8)

        def copy() -> None:
            other[:] = one

        size_bytes = one.nbytes
    else:
        import cupy  # pyright: ignore[reportMissingImports]
        from cupy.cuda import runtime  # pyright: ignore[reportMissingImports]

        from services.worker.transfer.cuda import new_stream, use_device

        second = _second()
        use_device(0)
        origin = cupy.ones(size_bytes, cupy.uint8)
        cupy.cuda.get_current_stream().synchronize()
        use_device(second)
        if second and not _enabled:
            runtime.deviceEnablePeerAccess(0)
            _enabled.append(True)
        to = cupy.zeros(size_bytes, cupy.uint8)
        cupy.cuda.get_current_stream().synchronize()
        on = new_stream()

        def copy() -> None:
            runtime.memcpyPeerAsync(to.data.ptr, second, origin.data.ptr, 0, size_bytes, on.ptr)
            on.synchronize()

    best_s = float("inf")
    for _ in range(8):
        begun_s = time.perf_counter()
        copy()
        best_s = min(best_s, time.perf_counter() - begun_s)
    if cuda:
        del origin, to
        cupy.get_default_memory_pool().free_all_blocks()
    return size_bytes / best_s / 1e9


_enabled: list[bool] = []
"""Not empty: peer access is enabled, which CUDA refuses to do twice."""


if __name__ == "__main__":
    sys.exit(main())
