"""How fast do blocks go between torch tensors in vLLM's layouts and a kvbm's pool, and what does a decode step lose?

    python -m benchmarks.torch_layouts [--memory TMPFS] [--quick] [--json]

32 layers, 8 KV heads of 128, bfloat16; blocks of 16 and of 64 tokens, scattered on both sides, copied by a mover over
a CudaCopier on the path that it chooses.

    token-major    (2, blocks, tokens, heads, 128)      64 fragments a block
    head-major     (blocks, heads, tokens, 256)         32 fragments a block
    heads apart    (heads, blocks, tokens, 256)         256 fragments a block

`in a row` asks for all batches at once, `alone` for one batch and waits for its end. The pinned rate is that of plain
cudaMemcpyAsync calls of the same number of bytes, which take turns with the mover's; each figure is the median of its
tries. The decode step is a CUDA graph of products of 32 rows with
matrices of 117 MB, so it reads memory nearly all the time. Meanwhile the mover saves or loads blocks of 16 tokens
without a pause.

What could mislead: the pool is touched and pinned before. Plain copies are of up to 512 MiB each. The step has no
attention and no host work, so the mover's threads do not slow it down through the GIL.
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from msgspec import Struct

from benchmarks.gpu.moving import EndedBatch, arena, pool, scattered
from benchmarks.gpu.part import gpu_or_exit
from benchmarks.report import Goal, report
from services.worker.contracts.mover import Copy
from services.worker.engine_main import SWITCH_INTERVAL_S
from services.worker.vllm.connector.kv_layout import TensorPlace, block_shape

LAYERS, HEADS, HEAD_DIM = 32, 8, 128
DEVICE_BYTES = 2 << 30
POOL_BYTES = DEVICE_BYTES + (64 << 20)
PLAIN_BYTES = 512 << 20
SIZES = {"K": 2, "H": HEADS, "D": HEAD_DIM, "C": 2 * HEAD_DIM}
LAYOUTS = {"token-major": "KBNHD", "head-major": "BHNC", "heads apart": "HBNC"}
TOKENS = (16, 64)
BATCHES = (1, 16, 64, 256)
LARGE_BATCH = 64
"""From this batch on, in blocks, the rate has a goal."""
MOST_ASKED = 128
IN_LINE = 12
ROWS, WIDE, MATRICES, PRODUCTS = 32, 14336, 16, 192
LEAST_SHARE, MOST_TIMES = 0.9, 1.10


class LayoutCopyRow(Struct, frozen=True):
    """The rate of one direction, or of one kind of copies during a decode step."""

    layout: str
    tokens: int
    batch: int
    direction: str
    gb_per_s: float
    pinned_gb_per_s: float
    share: float
    alone_share: float
    path: str


class LayoutStepRow(Struct, frozen=True):
    """A decode step during one kind of copies."""

    layout: str
    beside: str
    step_ms: float
    times: float
    gb_per_s: float


class Tensors:
    """The tensors of all layers of one layout, and the mover of their blocks."""

    def __init__(self, layout: str, tokens: int, torch: Any) -> None:
        from services.worker.transfer.cuda_copier import CudaCopier
        from services.worker.transfer.device_memory import DeviceMemory
        from services.worker.transfer.mover import TransferMover

        order = LAYOUTS[layout]
        self.block_bytes = 2 * LAYERS * HEADS * HEAD_DIM * 2 * tokens
        self.blocks = DEVICE_BYTES // self.block_bytes
        sizes = [{"B": self.blocks, "N": tokens, **SIZES}[axis] for axis in order]
        self.layers = [torch.zeros(sizes, dtype=torch.bfloat16, device="cuda") for _ in range(LAYERS)]
        places = {
            f"layers.{index}.attn": TensorPlace(
                each.data_ptr(), tuple(each.shape), tuple(each.stride()), each.element_size()
            )
            for index, each in enumerate(self.layers)
        }
        shape = block_shape(places, self.blocks, block_axis=order.index("B"))
        self.memory = DeviceMemory(0)
        torch.cuda.synchronize()
        self.mover = TransferMover(CudaCopier(shape, self.memory, time.perf_counter), time.perf_counter)

    def close(self) -> None:
        self.mover.detach()
        self.mover.close()
        self.layers.clear()
        self.memory.close()


class Plain:
    """Plain copies of pinned memory."""

    def __init__(self) -> None:
        import cupy  # pyright: ignore[reportMissingImports]

        from services.worker.transfer.cuda import new_stream

        self._runtime = cupy.cuda.runtime
        self._host = cupy.cuda.alloc_pinned_memory(PLAIN_BYTES)
        self._device = cupy.zeros(PLAIN_BYTES, cupy.uint8)
        self._stream = new_stream()

    def gb_per_s(self, size_bytes: int, *, loads: bool) -> float:
        ends = (self._device.data.ptr, self._host.ptr)
        kind = self._runtime.memcpyHostToDevice if loads else self._runtime.memcpyDeviceToHost
        begun_s = time.perf_counter()
        for first in range(0, size_bytes, PLAIN_BYTES):
            to, source = ends if loads else ends[::-1]
            self._runtime.memcpyAsync(to, source, min(PLAIN_BYTES, size_bytes - first), kind, self._stream.ptr)
        self._stream.synchronize()
        return size_bytes / 1e9 / (time.perf_counter() - begun_s)


def main() -> int:
    """Print a table, or with --json one object."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="a tmpfs, for the pool")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    machine = gpu_or_exit()
    import torch  # type: ignore[import-not-found,unused-ignore]  # pyright: ignore[reportMissingImports]

    tries = 3 if flags.quick else 7
    plain, step = Plain(), _decode_step(torch)
    rows: list[LayoutCopyRow] = []
    steps: list[LayoutStepRow] = []
    with pool(flags.memory, POOL_BYTES) as (path, geometry):
        for layout in LAYOUTS:
            for tokens in TOKENS:
                tensors = Tensors(layout, tokens, torch)
                with arena(path, geometry, tensors.block_bytes) as slots:
                    tensors.mover.attach(slots)
                    asked = EndedBatch(tensors.mover)
                    copies = scattered(slots, range(tensors.blocks))
                    asked.move(copies, (), LARGE_BATCH)  # pins what is not pinned yet
                    for batch in BATCHES:
                        rows += [
                            _rate(layout, tokens, batch, asked, copies, plain, tries, loads=loads)
                            for loads in (False, True)
                        ]
                    if tokens == TOKENS[0]:
                        steps += _beside(layout, asked, copies, step, torch, 4 if flags.quick else 20)
                    tensors.close()
                del tensors
                torch.cuda.empty_cache()
    goals = _goals(rows, steps)
    if flags.json:
        whole = report("torch_layouts", sys.argv[1:], goals, [*rows, *steps])
        print(msgspec.json.encode(whole | {"gpu": machine | {"torch": str(torch.__version__)}}).decode())
        return 0
    for row in (*rows, *steps, *goals):
        print(
            "  ".join(
                f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
                for name, value in msgspec.to_builtins(row).items()
            )
        )
    return 0


def _goals(rows: list[LayoutCopyRow], steps: list[LayoutStepRow]) -> list[Goal]:
    share = min(row.share for row in rows if row.batch >= LARGE_BATCH)
    alone = min(row.alone_share for row in rows if row.batch >= LARGE_BATCH)
    times = max(row.times for row in steps)
    pinned = "of the pinned rate"
    return [
        Goal("64 blocks or more, in a row, at worst", share, pinned, LEAST_SHARE, share >= LEAST_SHARE),
        Goal("64 blocks or more, one batch alone, at worst", alone, pinned, LEAST_SHARE, alone >= LEAST_SHARE),
        Goal("a decode graph during copies, at worst", times, "of the graph alone", MOST_TIMES, times <= MOST_TIMES),
    ]


def _rate(
    layout: str,
    tokens: int,
    batch: int,
    asked: EndedBatch,
    copies: list[Copy],
    plain: Plain,
    tries: int,
    *,
    loads: bool,
) -> LayoutCopyRow:
    """Measure one direction; each try takes turns with plain copies of as many bytes."""
    count = min(len(copies), batch * MOST_ASKED)
    block_bytes = 2 * LAYERS * HEADS * HEAD_DIM * 2 * tokens
    rates: list[tuple[float, float, float, float]] = []
    asked.paths.clear()
    for _ in range(tries):
        pinned = plain.gb_per_s(count * block_bytes, loads=loads)
        row = _moved(asked, copies[:count], batch, block_bytes, loads=loads)
        small = plain.gb_per_s(min(batch, count) * block_bytes, loads=loads)
        one = _moved(asked, copies[:batch], batch, block_bytes, loads=loads)
        rates.append((row, pinned, row / pinned, one / small))
    rate, pinned, share, alone = (median(each) for each in zip(*rates, strict=True))
    path = "+".join(asked.paths)
    return LayoutCopyRow(layout, tokens, batch, "load" if loads else "save", rate, pinned, share, alone, path)


def _moved(asked: EndedBatch, copies: list[Copy], batch: int, block_bytes: int, *, loads: bool) -> float:
    begun_s = time.perf_counter()
    asked.move(() if loads else copies, copies if loads else (), batch)
    return len(copies) * block_bytes / 1e9 / (time.perf_counter() - begun_s)


# --- a decode step


def _decode_step(torch: Any) -> Any:
    """Return a CUDA graph that takes some milliseconds, nearly all of them for reading memory."""
    down = [torch.randn(WIDE, 4096, dtype=torch.bfloat16, device="cuda") / WIDE for _ in range(MATRICES // 2)]
    up = [torch.randn(4096, WIDE, dtype=torch.bfloat16, device="cuda") / 64 for _ in range(MATRICES // 2)]
    kept = torch.randn(ROWS, 4096, dtype=torch.bfloat16, device="cuda")

    def work() -> Any:
        x = kept
        for index in range(PRODUCTS // 2):
            x = (x @ up[index % len(up)]) @ down[index % len(down)]
        return x

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        work()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()
    return graph, result, (down, up, kept)


def _beside(
    layout: str, asked: EndedBatch, copies: list[Copy], step: Any, torch: Any, rounds: int
) -> list[LayoutStepRow]:
    """Measure the step alone and during saves and loads, which take turns, ten steps of each."""
    graph = step[0]
    batches = [copies[first : first + LARGE_BATCH] for first in range(0, len(copies), LARGE_BATCH)]
    endless = cycle(batches)
    took_ms: dict[str, list[float]] = {"alone": [], "save": [], "load": []}
    rates: dict[str, list[float]] = {way: [] for way in took_ms}
    for _ in range(rounds):
        for way, steps_ms in took_ms.items():
            loads = way == "load"
            before, begun_s = asked.moved_bytes[loads], time.perf_counter()
            for turn in range(11):
                asked.hear()
                for _ in range(asked.under_way(loads=loads), IN_LINE if way != "alone" else 0):
                    asked.ask(next(endless), loads=loads)
                begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begun.record()
                graph.replay()
                ended.record()
                ended.synchronize()
                if turn:  # the first one warms up
                    steps_ms.append(begun.elapsed_time(ended))
            asked.hear()
            rates[way].append((asked.moved_bytes[loads] - before) / 1e9 / (time.perf_counter() - begun_s))
            asked.wait()
    alone = median(took_ms["alone"])
    return [
        LayoutStepRow(layout, way, median(each), median(each) / alone, median(rates[way]))
        for way, each in took_ms.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
