"""The attention of prompts alone, 8B Llama shape in bfloat16: the kernel of Hopper GPUs, ours for all GPUs, cuDNN's.

    python -m benchmarks.gpu.attention [--quick] [--json]

Rows attend to the positions before them: the whole prompt, or its last part after what was computed before. Pages are
scattered. Rates count two products of each pair of a row and a position it sees, without the half that no row sees.
Times are between CUDA events, the median of some in a row. cuDNN's is torch's scaled_dot_product_attention with keys
and values in a row, one for each head of queries; it is left out if torch is not there.
"""

from __future__ import annotations

import argparse
import importlib
import math
import sys
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from benchmarks.gpu import llama, part
from services.worker.native.config import ModelConfig

if TYPE_CHECKING:
    from services.worker.native.cuda.kernels import Prefill

PROMPTS = ((0, 2048), (0, 8192), (24_576, 8192), (122_880, 8192))
"""Positions that were computed before, and tokens of the prompt's part."""


class AttentionRow(Struct, frozen=True):
    """The time of one layer's attention."""

    kernel: str
    before: int
    tokens: int
    ms: float
    tflops: float


def main() -> int:
    """Print a table, or with --json one object."""
    return part.main("attention", __doc__, measure)


def measure(flags: argparse.Namespace) -> part.PartReport:
    """Measure all kernels for each prompt."""
    config = llama.shape(quick=True)
    llama.device_memory()
    rounds = 4 if flags.quick else 12
    rows: list[AttentionRow] = []
    for before, tokens in PROMPTS:
        rows += part.attempted(f"{tokens} after {before}", partial(_rows, config, before, tokens, rounds))
    rates = {(row.kernel, row.before, row.tokens): row.tflops for row in rows}
    figures: dict[str, float] = {}
    for before, tokens in PROMPTS:
        ours = rates.get(("hopper", before, tokens))
        if ours is not None:
            name = f"{tokens:,} tokens after {before:,}"
            figures[f"{name}, of the kernel for all GPUs"] = ours / rates["all GPUs", before, tokens]
            if ("cudnn", before, tokens) in rates:
                figures[f"{name}, of cuDNN"] = ours / rates["cudnn", before, tokens]
    return part.PartReport(figures, rows)


def _rows(config: ModelConfig, before: int, tokens: int, rounds: int) -> list[AttentionRow]:
    """Measure one prompt."""
    import cupy as cp  # pyright: ignore[reportMissingImports]

    from services.worker.native.cuda.hopper import is_hopper, page_map
    from services.worker.native.cuda.kernels import PREFILL_ROWS, compile_kernels

    end, size = before + tokens, llama.BLOCK_SIZE
    slots = -(-end // size)
    random = llama.Random(1.0)
    queries = random.array(tokens, config.heads, config.head_dim)
    attended = cp.empty(tokens * config.queries, cp.uint16)
    pages = random.array(slots, 1, 2, size, config.kv_heads, config.head_dim)
    table = np.random.default_rng(end).permutation(slots).astype(np.int32)
    tiles = [(first, min(PREFILL_ROWS, tokens - first)) for first in range(0, tokens, PREFILL_ROWS)]
    layout = (np.array(tiles, np.int32), np.arange(before, end, dtype=np.int32), table, np.zeros(tokens, np.int32))
    scale = np.float32(math.log2(math.e) / math.sqrt(config.head_dim))
    offsets = (np.int64(pages.size // slots), np.int64(0), np.int32(config.kv_heads), scale, np.int32(1 << 30))
    paging = (*(cp.asarray(one) for one in layout), *offsets)
    ways: dict[str, Callable[[], object]] = {}
    for name, hopper in (("hopper", True), ("all GPUs", False)):
        if hopper and not is_hopper():
            continue
        prefill = compile_kernels(config, "bfloat16", size, hopper=hopper).attend_prefill
        assert prefill is not None
        arguments = (attended, queries, queries, page_map(pages) if hopper else pages, *paging)
        ways[name] = _launch(prefill, (config.heads, len(tiles)), arguments)
    cudnn = _cudnn(config, before, tokens)
    if cudnn is not None:
        ways["cudnn"] = cudnn
    pairs = tokens * before + tokens * (tokens + 1) / 2
    stream = cp.cuda.get_current_stream()
    rows: list[AttentionRow] = []
    for name, way in ways.items():
        ms = median([llama.timed_ms(stream, way) for _ in range(rounds + 2)][2:])
        rows.append(AttentionRow(name, before, tokens, ms, 4 * config.queries * pairs / ms / 1e9))
    return rows


def _launch(prefill: Prefill, grid: tuple[int, int], arguments: tuple[Any, ...]) -> Callable[[], object]:
    return lambda: prefill.kernel(grid, (prefill.threads,), arguments, shared_mem=prefill.shared_bytes)


def _cudnn(config: ModelConfig, before: int, tokens: int) -> Callable[[], object] | None:
    """Return a launch of cuDNN's kernel on CuPy's stream; None without torch, or with a part of a prompt, for which
    torch has no causal mask."""
    try:
        torch: Any = importlib.import_module("torch")
        attention: Any = importlib.import_module("torch.nn.attention")
    except ImportError:
        return None
    if before:
        return None
    shape = (1, config.heads, tokens, config.head_dim)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    dot = torch.nn.functional.scaled_dot_product_attention

    def run() -> None:
        with attention.sdpa_kernel(attention.SDPBackend.CUDNN_ATTENTION):
            dot(q, k, v, is_causal=True)

    return run


if __name__ == "__main__":
    sys.exit(main())
