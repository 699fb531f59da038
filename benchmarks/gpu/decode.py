"""Decode, prefill, both in one step, and embeddings: an 8B Llama shape with random bfloat16 weights on one GPU.

    python -m benchmarks.gpu.decode [--quick] [--json]

What could mislead: a yardstick is measured in the same run. The memory's is the best of a kernel that only reads; the
bytes of a step are weights without the embedding plus all keys and values, so activations are not counted. Weights and
tokens are random and every sequence has pages of its own, scattered: nothing is read from a cache that would not be in
service. Device times are between CUDA events around whole steps without the draw; `step` is a host clock around the
Runner's whole step, drawing and waiting included, the median of steps one after another; each setting's runner has one
in turn. Lengths stay at the context stated, or are those of a mix; each mix has a step in turn. The matrix rate is of
8192³ on random numbers, which is slower than on zeros. --quick has a quarter of the layers, so that launches and the
logits weigh more. Where a prompt has positions before the part that is computed, those hold random keys and values. In
a mixed step 2,048 tokens of a prompt come next to 64 decodes; the step, the prompt and the decodes take turns.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from benchmarks.gpu import llama, part
from benchmarks.gpu.llama import CONTEXT
from services.worker.config import CudaConfig
from services.worker.contracts.runner import Work
from services.worker.native.config import ModelConfig
from services.worker.native.cuda.capacity import CudaSizes
from shared.messages.cards import Pooling
from shared.messages.generate import Sampling

if TYPE_CHECKING:
    from services.worker.native.cuda.runner import CudaRunner

BATCHES = (1, 32, 128)
MIXES = {
    "8 of 300": [300] * 8,
    "8 of 300 and 1 of 8,192": [300] * 8 + [8192],
    "15 of 512 and 1 of 8,192": [512] * 15 + [8192],
    "31 of 1,024 and 1 of 32,768": [1024] * 31 + [32768],
    "64 of 64 to 4,096": [64 * (number + 1) for number in range(64)],
    "1 of 131,072": [131_072],
}
"""How many positions each row of a decode step attends to: rows of one step differ in service. The first is for
comparison with the second."""
PREFILLS = {
    "prefill of 2,048 tokens": (0, 2048),
    "prefill of 8,192 tokens": (0, 8192),
    "prefill of the fourth 8,192 of 32,768": (24_576, 8192),
    "prefill of the last 8,192 of 131,072": (122_880, 8192),
}
"""Positions that were computed before, and tokens of the prompt's part."""
MIXED_TOKENS, MIXED_BATCH = 2048, 64
SCORED_TOKENS = 8192
"""Tokens of the prompt that has a log-probability for each."""
PROMPTS, PROMPT_TOKENS = 16, 512
"""The prompts of one step, which are embedded, or for which a token is drawn."""
SETTINGS = {
    "default": CudaConfig(),
    "busy_wait_events off": CudaConfig(busy_wait_events=False),
    "output_copy_stream on": CudaConfig(output_copy_stream=True),
}
"""Runner settings that are compared by their whole step."""
SETTINGS_BATCH = 32
"""The batch of those steps."""

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


class DecodeRow(Struct, frozen=True):
    """The times of one kind of step."""

    what: str
    batch: int
    context: int
    device_ms: float
    """The median time between CUDA events."""
    step_ms: float
    """The median time of the Runner's whole step by a host clock."""
    floor_ms: float
    """The least time that the yardstick allows."""
    share: float
    """The quotient floor ÷ device."""


class MixRow(Struct, frozen=True):
    """The times of a decode step whose rows have different lengths."""

    mix: str
    """The mix, as in MIXES."""
    how: str
    """Whether the step is a graph or eager."""
    positions: int
    """The positions of all rows together."""
    device_ms: float
    step_ms: float
    floor_ms: float
    """The least time in which the yardstick reads weights, keys and values."""
    share: float
    """The quotient floor ÷ device."""


class BesideRow(Struct, frozen=True):
    """The time of a whole step that does more than another, and of what it does alone."""

    step: str
    step_ms: float
    alone_ms: tuple[float, ...]
    times: float
    """The quotient step ÷ sum of what it does alone."""


class Setting(Struct, frozen=True):
    """The time of a whole step with one of the runner's settings."""

    setting: str
    batch: int
    step_ms: float


class DecodePrompts(Struct, frozen=True):
    """The time of a whole step of PROMPTS prompts."""

    pooling: Pooling
    """The pooling; empty if a token is drawn for each prompt."""
    tokens: int
    """The tokens of all prompts together."""
    step_ms: float
    tokens_per_s: float


def main() -> int:
    """Print a table, or with --json one object."""
    return part.main("decode", __doc__, measure)


def measure(flags: argparse.Namespace) -> part.PartReport:
    """Measure steps, then settings."""
    from services.worker.native.cuda.runner import CudaRunner

    config = llama.shape(quick=flags.quick)
    rounds = 5 if flags.quick else 20
    memory = llama.device_memory()
    read_rate, matrix_rate = reading_rate(), _matrix_rate()
    weights = llama.random_weights(config)
    most = max(BATCHES)
    # With room for the prompt's own pages, and no more graphs than are asked for.
    runner = CudaRunner(
        config,
        weights,
        memory,
        CudaConfig(graph_upper_bound=most),
        CudaSizes(capacity_blocks=llama.blocks(most), max_running=most),
    )
    llama.Random(1.0).fill(runner.pages)
    rows: list[DecodeRow] = []
    for batch in BATCHES:
        floor_s = (weight_bytes(config) + batch * CONTEXT * kv_bytes(config)) / read_rate
        for how in ("graph", "eager"):
            runner.use_graphs = how == "graph"
            rows.append(_measured(how, runner, llama.decoding(batch, most), rounds, floor_s))
    mixed = _mixed(runner, config, rounds, read_rate)
    for what, (before, tokens) in PREFILLS.items():
        prompt, floor_s = _prompt(before, tokens), _flops(config, before, tokens) / matrix_rate
        rows += part.attempted(what, partial(_one, what, runner, [prompt], max(3, rounds // 4), floor_s))
    beside = part.attempted("mixed step", lambda: [_mixed_step(runner, rounds)])
    beside += part.attempted("log-probabilities of a prompt", lambda: [_scored(runner, max(3, rounds // 4))])
    prompts = part.attempted("embeddings", lambda: _prompts(runner, rounds))
    runner.close()
    runners = {
        name: CudaRunner(
            config,
            weights,
            memory,
            setting,
            CudaSizes(
                capacity_blocks=llama.blocks(SETTINGS_BATCH), max_running=SETTINGS_BATCH, max_rows=SETTINGS_BATCH
            ),
        )
        for name, setting in SETTINGS.items()
    }
    settings = part.attempted("settings", lambda: _settings(runners, 10 * rounds))
    yardsticks = {"read_tb_per_s": read_rate / 1e12, "matrix_tflops": matrix_rate / 1e12}
    figures = _figures(rows, mixed, prompts, settings) | {row.step: row.times for row in beside}
    return part.PartReport(figures, [*rows, *mixed, *beside, *prompts, *settings], yardsticks)


def _figures(
    rows: Sequence[DecodeRow],
    mixed: Sequence[MixRow],
    prompts: Sequence[DecodePrompts],
    settings: Sequence[Setting],
) -> dict[str, float]:
    figures = {
        row.what if row.what in PREFILLS else f"decode, batch {row.batch}, {row.what}": row.share for row in rows
    }
    figures |= {f"decode, {row.mix}, {row.how}": row.share for row in mixed}
    if prompts:
        drawn, *embedded = prompts
        figures["16 prompts of 512 embedded"] = max(row.step_ms for row in embedded) / drawn.step_ms
        figures["the same, the slower pooling"] = min(row.tokens_per_s for row in embedded)
    for row in settings[1:]:
        figures[f"whole step of batch {row.batch}, {row.setting}"] = row.step_ms / settings[0].step_ms
    return figures


def _prompt(before: int, tokens: int) -> Work:
    """Make a work of a prompt's part, on pages in order."""
    return llama.work(0, before, before + tokens, list(range((before + tokens) // llama.BLOCK_SIZE)))


def _in_turn(runner: CudaRunner, ways: Sequence[list[Work]], rounds: int) -> list[float]:
    """Return the median milliseconds of each way's whole step; they take turns."""
    took: list[list[float]] = [[] for _ in ways]
    for number in range(rounds + 2):
        for times, works in zip(took, ways, strict=True):
            ms = llama.step_ms(runner, works)
            if number >= 2:  # warm
                times.append(ms)
    return [median(times) for times in took]


def _mixed_step(runner: CudaRunner, rounds: int) -> BesideRow:
    """Measure a step with a prompt and decodes, and steps of each alone."""
    runner.use_graphs = True
    prompt = [replace(_prompt(0, MIXED_TOKENS), sequence=MIXED_BATCH)]
    decodes = llama.decoding(MIXED_BATCH, max(BATCHES))
    both_ms, *alone_ms = _in_turn(runner, ([*decodes, *prompt], decodes, prompt), rounds)
    what = "step of 2,048 of a prompt beside 64 decodes"
    return BesideRow(what, both_ms, tuple(alone_ms), both_ms / sum(alone_ms))


def _scored(runner: CudaRunner, rounds: int) -> BesideRow:
    """Measure a prompt with a log-probability for each position, and without."""
    plain = _prompt(0, SCORED_TOKENS)
    scored = replace(plain, sequence=1, sampling=Sampling(max_tokens=1, temperature=0.0, prompt_logprobs=1))
    scored_ms, plain_ms = _in_turn(runner, ([scored], [plain]), rounds)
    what = "prefill of 8,192 with log-probabilities of all positions"
    return BesideRow(what, scored_ms, (plain_ms,), scored_ms / plain_ms)


def _measured(what: str, runner: CudaRunner, works: list[Work], rounds: int, floor_s: float) -> DecodeRow:
    device_ms = median([llama.device_ms(runner, works) for _ in range(rounds + 2)][2:])
    step_ms = median([llama.step_ms(runner, works) for _ in range(rounds + 2)][2:])
    return DecodeRow(what, len(works), works[0].end, device_ms, step_ms, floor_s * 1e3, floor_s * 1e3 / device_ms)


def _one(what: str, runner: CudaRunner, works: list[Work], rounds: int, floor_s: float) -> list[DecodeRow]:
    return [_measured(what, runner, works, rounds, floor_s)]


def _mixed(runner: CudaRunner, config: ModelConfig, rounds: int, read_rate: float) -> list[MixRow]:
    """Measure all mixes in turn, so that the GPU is in the same state for all."""
    works = {mix: llama.decoding_lengths(lengths, llama.blocks(max(BATCHES))) for mix, lengths in MIXES.items()}
    ways = [(mix, how) for mix in MIXES for how in ("graph", "eager")]
    device_ms: dict[tuple[str, str], list[float]] = {way: [] for way in ways}
    step_ms: dict[tuple[str, str], list[float]] = {way: [] for way in ways}
    for number in range(rounds + 2):
        for mix, how in ways:
            runner.use_graphs = how == "graph"
            times = llama.device_ms(runner, works[mix]), llama.step_ms(runner, works[mix])
            if number >= 2:  # warm
                device_ms[mix, how].append(times[0])
                step_ms[mix, how].append(times[1])
    made: list[MixRow] = []
    for mix, how in ways:
        positions = sum(MIXES[mix])
        floor_ms = (weight_bytes(config) + positions * kv_bytes(config)) / read_rate * 1e3
        took_ms = median(device_ms[mix, how])
        made.append(MixRow(mix, how, positions, took_ms, median(step_ms[mix, how]), floor_ms, floor_ms / took_ms))
    return made


def _prompts(runner: CudaRunner, rounds: int) -> list[DecodePrompts]:
    """Measure drawing and each pooling in turn, so that the GPU is in the same state for all."""
    each = PROMPT_TOKENS // llama.BLOCK_SIZE
    slots = [list(range(number * each, (number + 1) * each)) for number in range(PROMPTS)]
    plain = [llama.work(number, 0, PROMPT_TOKENS, own) for number, own in enumerate(slots)]
    ways: dict[Pooling, list[Work]] = {"": plain}
    poolings: tuple[Pooling, ...] = ("mean", "last")
    for pooling in poolings:
        ways[pooling] = [replace(work, sampling=Sampling(max_tokens=1, pooling=pooling)) for work in plain]
    took: dict[Pooling, list[float]] = {pooling: [] for pooling in ways}
    for _ in range(rounds):
        for pooling, works in ways.items():
            took[pooling].append(llama.step_ms(runner, works))
    tokens = PROMPTS * PROMPT_TOKENS
    return [DecodePrompts(way, tokens, median(times), tokens / median(times) * 1e3) for way, times in took.items()]


def _settings(runners: dict[str, CudaRunner], rounds: int) -> list[Setting]:
    """Measure a step of each setting in turn, so that the GPU is in the same state for all."""
    works = llama.decoding(SETTINGS_BATCH, SETTINGS_BATCH)
    took: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(rounds):
        for name, runner in runners.items():
            took[name].append(llama.step_ms(runner, works))
    return [Setting(name, SETTINGS_BATCH, median(each)) for name, each in took.items()]


def weight_bytes(config: ModelConfig) -> int:
    """Return the bytes of weights that each step reads: all but the embedding."""
    attention = config.hidden * (2 * config.queries + 2 * config.keys)
    return 2 * (config.layers * (attention + 3 * config.hidden * config.intermediate) + config.vocab * config.hidden)


def kv_bytes(config: ModelConfig) -> int:
    """Return the bytes of keys and values of one position."""
    return 2 * 2 * config.layers * config.keys


def _flops(config: ModelConfig, before: int, tokens: int) -> float:
    """Count the operations of a prompt's part: all products, one row of logits, and the scores that rows see."""
    products = 2.0 * tokens * (weight_bytes(config) // 2 - config.vocab * config.hidden)
    return products + 4.0 * (tokens * before + tokens**2 / 2) * config.queries * config.layers


def reading_rate() -> float:
    """Return the bytes a second of reading 8 GiB, the best of several launch shapes."""
    import cupy as cp  # pyright: ignore[reportMissingImports]

    memory = llama.Random(1.0).array(1 << 32)
    kernel, sink = cp.RawKernel(_READ, "read_all"), cp.zeros(1, cp.uint32)
    stream = cp.cuda.get_current_stream()
    best_ms = math.inf
    arguments = (memory, np.int64(memory.nbytes // 16), sink)
    for blocks in (132 * 4, 132 * 8, 132 * 16):
        launch = partial(kernel, (blocks,), (512,), arguments)
        best_ms = min([best_ms, *(llama.timed_ms(stream, launch) for _ in range(6))])
    return float(memory.nbytes / best_ms * 1e3)


def _matrix_rate() -> float:
    """Return the operations a second of an 8192³ product in bfloat16."""
    import cupy as cp  # pyright: ignore[reportMissingImports]

    from services.worker.native.cuda.blas import Blas

    size = 8192
    stream = cp.cuda.Stream(non_blocking=True)
    random = llama.Random(size**-0.5)
    x, weight, out = random.array(size, size), random.array(size, size), cp.empty((size, size), cp.uint16)
    cp.cuda.Device().synchronize()
    with stream:
        blas = Blas("bfloat16", stream)
        times = [llama.timed_ms(stream, lambda: blas.product(out, x, weight)) for _ in range(12)]
        blas.close()
    return 2.0 * size**3 / median(times[2:]) * 1e3


if __name__ == "__main__":
    sys.exit(main())
