"""Decode and prefill of an 8B Llama shape with random bfloat16 weights on one GPU, against what its memory allows.

    python -m benchmarks.gpu.decode [--json] [--quick]

What could mislead: a yardstick is measured in the same run. The memory's is the best of a kernel that only reads; the
bytes of a step are weights without the embedding plus all keys and values, so activations are not counted. Weights and
tokens are random and every sequence has pages of its own, scattered: nothing is read from a cache that would not be in
service. Device times are between CUDA events around whole steps without the draw; `step` is a host clock around the
Runner's whole step, drawing and waiting included, the median of steps one after another. Lengths stay at the context
stated. The matrix rate is of 8192³ on random numbers, which is slower than on zeros.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import cupy as cp  # pyright: ignore[reportMissingImports]
import msgspec
import numpy as np
from msgspec import Struct

from benchmarks.report import Goal, report
from services.worker.engine import Work
from services.worker.native.bfloat16 import narrowed
from services.worker.native.config import ModelConfig
from services.worker.native.cuda.blas import Blas
from services.worker.native.cuda.runner import CudaRunner
from services.worker.native.cuda.weights import CudaLayer, CudaWeights
from services.worker.native.linear import Array
from services.worker.native.rope import PlainRope
from shared.messages import Sampling

LLAMA_8B = ModelConfig(
    layers=32,
    hidden=4096,
    intermediate=14336,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocab=128256,
    context_length=131072,
    norm_epsilon=1e-5,
    rope=PlainRope(rope_theta=500_000.0),
    tied=False,
    qkv_bias=False,
    output_bias=False,
    eos_token_ids=(),
)
BLOCK_SIZE = 16
CONTEXT = 2048
GOALS = {1: 0.75, 32: 0.65, 128: 0.60}
PREFILL_TOKENS = 8192
PREFILL_GOAL = 0.50
GREEDY = Sampling(max_tokens=1 << 20, temperature=0.0)

_READ = r"""
extern "C" __global__ void read_all(const uint4* from, long long count, unsigned* sink) {
  unsigned sum = 0;
  const long long stride = (long long)gridDim.x * blockDim.x;
  long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  for (; at + 3 * stride < count; at += 4 * stride) {
    const uint4 a = from[at], b = from[at + stride], c = from[at + 2 * stride], d = from[at + 3 * stride];
    sum += a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w ^ c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^ d.w;
  }
  if (sum == 0x12345678u) *sink = sum;
}
"""


class Row(Struct, frozen=True):
    """One step, several times."""

    what: str
    batch: int
    context: int
    device_ms: float
    """Median between events."""
    step_ms: float
    """Median of the whole Runner step by a host clock."""
    floor_ms: float
    """What the yardstick allows."""
    share: float
    """floor ÷ device."""


def main() -> None:
    """Run all and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="a quarter of the layers and few rounds")
    parser.add_argument("--decode-only", action="store_true", help="no prefill and no eager steps")
    chosen = parser.parse_args()
    config = msgspec.structs.replace(LLAMA_8B, layers=8) if chosen.quick else LLAMA_8B
    rounds = 5 if chosen.quick else 20
    read_rate, matrix_rate = _read_rate(), _matrix_rate()
    weights = _random_weights(config)
    capacity = max(GOALS) * CONTEXT // BLOCK_SIZE + 2
    runner = CudaRunner(config, weights, capacity_blocks=capacity, block_size=BLOCK_SIZE, graph_rows=tuple(GOALS))
    _fill(runner.pages)
    rows: list[Row] = []
    for batch in GOALS:
        floor_s = (_weight_bytes(config) + batch * CONTEXT * _kv_bytes(config)) / read_rate
        for name in ("graph",) if chosen.decode_only else ("graph", "eager"):
            runner.use_graphs = name == "graph"
            rows.append(_measured(name, runner, _decoding(batch), rounds, floor_s))
    if not chosen.decode_only:
        # Products of all rows but the logits', of one, and the visible half of the scores.
        flops = 2.0 * PREFILL_TOKENS * (_weight_bytes(config) // 2 - config.vocab * config.hidden)
        flops += 2.0 * PREFILL_TOKENS**2 * config.queries * config.layers
        prompt = _work(0, 0, PREFILL_TOKENS, list(range(PREFILL_TOKENS // BLOCK_SIZE)))
        rows.append(_measured("prefill", runner, [prompt], max(3, rounds // 4), flops / matrix_rate))
    goals = [
        Goal(
            f"decode, batch {row.batch}, of the memory's rate",
            row.share,
            "of 1",
            GOALS[row.batch],
            row.share >= GOALS[row.batch],
        )
        for row in rows
        if row.what == "graph"
    ]
    for row in rows:
        if row.what == "prefill":
            name = f"prefill of {PREFILL_TOKENS}, of the matrix rate"
            goals.append(Goal(name, row.share, "of 1", PREFILL_GOAL, row.share >= PREFILL_GOAL))
    if chosen.json:
        result = report("gpu.decode", sys.argv[1:], goals, rows)
        result["yardsticks"] = {"read_tb_per_s": read_rate / 1e12, "matrix_tflops": matrix_rate / 1e12}
        result["gpu"] = cp.cuda.runtime.getDeviceProperties(0)["name"].decode()
        result["driver"] = cp.cuda.runtime.driverGetVersion()
        sys.stdout.write(json.dumps(msgspec.to_builtins(result)) + "\n")
        return
    sys.stdout.write(f"reads {read_rate / 1e12:.2f} TB/s, bf16 products {matrix_rate / 1e12:.0f} TFLOP/s\n")
    for row in rows:
        sys.stdout.write(
            f"{row.what:8} batch {row.batch:4} context {row.context:5}: device {row.device_ms:8.3f} ms, "
            f"step {row.step_ms:8.3f} ms, floor {row.floor_ms:7.3f} ms, {100 * row.share:5.1f} %\n"
        )


def _measured(what: str, runner: CudaRunner, works: list[Work], rounds: int, floor_s: float) -> Row:
    stream = runner.stream
    device_ms = median(_timed_ms(stream, lambda: runner.logits(works)) for _ in range(rounds + 2))
    steps: list[float] = []
    for _ in range(rounds + 2):
        start = time.perf_counter()
        runner.step(works)
        steps.append((time.perf_counter() - start) * 1e3)
    return Row(what, len(works), works[0].end, device_ms, median(steps), floor_s * 1e3, floor_s * 1e3 / device_ms)


def _timed_ms(stream: Any, enqueue: Callable[[], object]) -> float:
    begin, end = cp.cuda.Event(), cp.cuda.Event()
    begin.record(stream)
    enqueue()
    end.record(stream)
    end.synchronize()
    return float(cp.cuda.get_elapsed_time(begin, end))


def _work(sequence: int, start: int, end: int, blocks: list[int]) -> Work:
    tokens = np.random.default_rng(sequence).integers(0, LLAMA_8B.vocab, end).tolist()
    return Work(sequence, tokens, start, end, blocks, GREEDY, end)


def _decoding(batch: int) -> list[Work]:
    """Each at the last of CONTEXT positions, on pages scattered over all of them."""
    each = CONTEXT // BLOCK_SIZE
    slots = np.random.default_rng(0).permutation(max(GOALS) * each).tolist()
    return [_work(n, CONTEXT - 1, CONTEXT, slots[n * each : (n + 1) * each]) for n in range(batch)]


def _weight_bytes(config: ModelConfig) -> int:
    """Read by each step: all but the embedding."""
    attention = config.hidden * (2 * config.queries + 2 * config.keys)
    return 2 * (config.layers * (attention + 3 * config.hidden * config.intermediate) + config.vocab * config.hidden)


def _kv_bytes(config: ModelConfig) -> int:
    """Of one position."""
    return 2 * 2 * config.layers * config.keys


def _random(rows: int, columns: int) -> Array:
    """bfloat16 of a size that keeps activations near one."""
    return narrowed(cp, cp.random.standard_normal((rows, columns), cp.float32) / math.sqrt(columns))


def _random_weights(config: ModelConfig) -> CudaWeights:
    ones = cp.ones(config.hidden, cp.float32)
    return CudaWeights(
        embedding=_random(config.vocab, config.hidden),
        layers=tuple(
            CudaLayer(
                input_norm=ones,
                qkv=_random(config.queries + 2 * config.keys, config.hidden),
                qkv_bias=None,
                output=_random(config.hidden, config.queries),
                output_bias=None,
                output_norm=ones,
                gate_up=_random(2 * config.intermediate, config.hidden),
                down=_random(config.hidden, config.intermediate),
            )
            for _ in range(config.layers)
        ),
        norm=ones,
        head=_random(config.vocab, config.hidden),
    )


def _fill(pages: Array) -> None:
    """Random keys and values, slot by slot alike in size, not in content."""
    flat = pages.reshape(-1)
    piece = 1 << 26
    for first in range(0, flat.size, piece):
        count = min(piece, flat.size - first)
        flat[first : first + count] = narrowed(cp, cp.random.standard_normal(count, cp.float32))
    cp.cuda.Device().synchronize()


def _read_rate() -> float:
    """Bytes a second of reading 8 GiB, the best of several shapes of launch."""
    memory = cp.random.randint(0, 1 << 30, (8 << 30) // 4, dtype=cp.int32)
    kernel, sink = cp.RawKernel(_READ, "read_all"), cp.zeros(1, cp.uint32)
    stream = cp.cuda.get_current_stream()
    best_ms = math.inf
    arguments = (memory, np.int64(memory.nbytes // 16), sink)
    for blocks in (132 * 4, 132 * 8, 132 * 16):
        launch = partial(kernel, (blocks,), (512,), arguments)
        best_ms = min([best_ms, *(_timed_ms(stream, launch) for _ in range(6))])
    return float(memory.nbytes / best_ms * 1e3)


def _matrix_rate() -> float:
    """Operations a second of 8192³ bfloat16."""
    size = 8192
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        blas = Blas("bfloat16", stream)
        x, weight, out = _random(size, size), _random(size, size), cp.empty((size, size), cp.uint16)
        times = [_timed_ms(stream, lambda: blas.product(out, x, weight)) for _ in range(12)]
        blas.close()
    return 2.0 * size**3 / median(times[2:]) * 1e3


if __name__ == "__main__":
    main()
