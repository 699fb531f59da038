"""Decode and prefill of the 8B Llama shape, of torch's best: a compiled model in one CUDA graph.

    python -m benchmarks.gpu.torch_llama [--quick] [--json]

torch's model has q, k and v in one product, gate and up in another, keys and values of a sequence in a row (a static
cache), and scaled_dot_product_attention, by cuDNN and by flash attention: the faster counts. All models take turns;
times are between events around steps without the draw, the median of some rounds.

What could mislead: a layer is compiled for all of them, which takes minutes. It gets the sum of the one before it in
two parts, so that the compiler fuses it with the norm. torch's sums between layers are bfloat16, ours float32. Ours
lays out and copies each step's tokens and pages; torch's graph has them.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from functools import partial
from math import prod
from statistics import median
from typing import Any

from benchmarks.gpu import llama, part
from services.worker.config import CudaConfig
from services.worker.native.config import ModelConfig

MOST = 128
STEPS = {f"decode, batch {batch}": (batch, 2048) for batch in (1, 32, MOST)} | {"prefill of 8,192 tokens": (0, 8192)}
"""Sequences that decode, or 0 for a prompt, and positions of each."""


def main() -> int:
    """Print a table, or with --json one object."""
    return part.main("torch_llama", __doc__, measure)


def measure(flags: argparse.Namespace) -> part.PartReport:
    """Measure each step of all models in turn."""
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError as wrong:
        print(f"nothing is compared: torch cannot be imported ({wrong})", file=sys.stderr)
        return part.PartReport({}, [])
    from services.worker.native.cuda.capacity import CudaSizes
    from services.worker.native.cuda.runner import CudaRunner

    config, memory = llama.shape(quick=flags.quick), llama.device_memory()
    sizes = CudaSizes(capacity_blocks=llama.blocks(MOST), max_running=MOST)
    runner = CudaRunner(config, llama.random_weights(config), memory, CudaConfig(graph_upper_bound=MOST), sizes)
    llama.Random(1.0).fill(runner.pages)
    model = TorchLlama(torch, config, MOST * llama.CONTEXT, "cuda")
    figures, shown = dict[str, float](), dict[str, Any](torch=torch.__version__)
    for step, (batch, positions) in STEPS.items():
        works = llama.decoding(batch, MOST) or [llama.work(0, 0, positions, list(range(512)))]
        ways: dict[str, Callable[[], float]] = {"ours": partial(llama.device_ms, runner, works)}
        for backend in ("CUDNN_ATTENTION", "FLASH_ATTENTION"):
            ways |= part.attempted(f"{step}, {backend}", partial(model.ways, batch, positions, backend))
        times = [{name: way() for name, way in ways.items()} for _ in range(7 if flags.quick else 22)][2:]
        ms = {name: median(each[name] for each in times) for name in ways}
        print(step, ms, file=sys.stderr, flush=True)
        shown |= {f"{step}, ms, {name}": value for name, value in ms.items()}
        if len(ms) > 1:
            figures[step] = ms.pop("ours") / min(ms.values())
    return part.PartReport(figures, [], shown)


class TorchLlama:
    """The shape in torch with random weights, in float32 on a CPU and in bfloat16 on a GPU. Norms have no weights."""

    def __init__(self, torch: Any, config: ModelConfig, room: int, device: str) -> None:
        """Make weights, and a cache for `room` positions of all sequences together."""
        self._torch, self._config, self._device = torch, config, device
        kind = {"dtype": torch.float32 if device == "cpu" else torch.bfloat16, "device": device}
        random = partial(torch.normal, 0.0, config.hidden**-0.5, **kind)
        hidden, inner, queries, keys = config.hidden, config.intermediate, config.queries, config.keys
        shapes = (queries + 2 * keys, hidden), (hidden, queries), (2 * inner, hidden), (hidden, inner)
        self.layers = [[random(shape) for shape in shapes] for _ in range(config.layers)]
        self.embedding, self.head = (random((config.vocab, hidden)) for _ in range(2))
        self._cache = [[random((room * keys,)) for _ in range(2)] for _ in range(config.layers)]
        speeds = 500_000.0 ** -(torch.arange(0, config.head_dim, 2, device=device) / config.head_dim)
        angles = torch.outer(torch.arange(room, device=device), speeds).repeat(1, 2)
        self._rotations = angles.cos().to(**kind), angles.sin().to(**kind)

    def logits(self, layer: Any, end: Any, tokens: Any, at: Any, positions: int) -> Any:
        """Return the logits of each last one of `tokens`, [sequences, count], which are at positions `at`. One token
        attends to all `positions`, a prompt to itself. `layer` and `end` are those of `layer_and_end`, or compiled."""
        shape = len(tokens), self._config.kv_heads, positions, self._config.head_dim
        rotations, x = [each[at] for each in self._rotations], self.embedding[tokens]
        residual = self._torch.zeros_like(x)
        for weights, cache in zip(self.layers, self._cache, strict=True):
            keys, values = (each[: prod(shape)].view(shape) for each in cache)
            residual, x = layer(residual, x, weights, keys, values, *rotations, at)
        return end(residual, x, self.head)

    def ways(self, batch: int, positions: int, backend: str) -> list[tuple[str, Callable[[], Any]]]:
        """Compile a step; return its name, and what runs it. On a GPU it is captured, and returns its milliseconds."""
        torch, attention = self._torch, importlib.import_module("torch.nn.attention")
        torch.compiler.reset()
        compiled = partial(torch.compile, mode="max-autotune-no-cudagraphs", dynamic=False)
        layer, end = (compiled(each) for each in layer_and_end(torch, self._config))
        count = 1 if batch else positions
        tokens = torch.randint(self._config.vocab, (max(1, batch), count), device=self._device)
        at = torch.arange(positions - count, positions, device=self._device)

        def step() -> None:
            with torch.no_grad(), attention.sdpa_kernel(getattr(attention.SDPBackend, backend)):
                self.logits(layer, end, tokens, at, positions)

        if self._device == "cpu":
            return [(backend, step)]
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(3):
                step()
        graph, null = torch.cuda.CUDAGraph(), importlib.import_module("cupy").cuda.Stream.null
        with torch.cuda.graph(graph):
            step()
        return [(backend, partial(llama.timed_ms, null, graph.replay))]


def layer_and_end(torch: Any, config: ModelConfig) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return what computes a layer, and what computes the logits."""
    heads, kv_heads, size = config.heads, config.kv_heads, config.head_dim
    ops, attend = torch.nn.functional, torch.nn.functional.scaled_dot_product_attention
    norm = partial(ops.rms_norm, normalized_shape=(config.hidden,), eps=config.norm_epsilon)

    def rotated(x: Any, cos: Any, sin: Any) -> Any:
        low, high = x.chunk(2, -1)
        return x * cos + torch.cat((-high, low), -1) * sin

    def layer(residual: Any, x: Any, weights: Any, keys: Any, values: Any, cos: Any, sin: Any, at: Any) -> Any:
        qkv, output, gate_up, down = weights
        residual, (sequences, count, _) = residual + x, x.shape
        heads_of = ops.linear(norm(residual), qkv).view(sequences, count, -1, size).transpose(1, 2)
        q, k, v = heads_of.split((heads, kv_heads, kv_heads), 1)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        keys[:, :, at], values[:, :, at] = k, v
        if count == 1:  # queries that share keys are rows
            attended = attend(q.reshape(sequences, kv_heads, -1, size), keys, values)
        else:
            attended = attend(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
        residual = residual + ops.linear(attended.reshape(sequences, count, -1), output)
        gate, up = ops.linear(norm(residual), gate_up).chunk(2, -1)
        return residual, ops.linear(ops.silu(gate) * up, down)

    return layer, lambda residual, x, head: ops.linear(norm((residual + x)[:, -1]), head)


if __name__ == "__main__":
    sys.exit(main())
