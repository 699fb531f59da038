"""The native engine on one NVIDIA GPU as a Runner: a prepared directory in, tokens out.

    step ─▶ all works compute one token and draw, and as many were captured? ─▶ replay that graph, rows padded
       └─▶ else                                                            ─▶ the same launches one by one

A graph is captured for each of `graph_rows`, at start. A step of fewer works than `graph_lower_bound` is not padded.
Not for two threads at once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cupy as cp  # pyright: ignore[reportMissingImports]
import numpy as np

from services.worker.config import EngineConfig
from services.worker.copies import Mover
from services.worker.engine import Drawn, Loading, LoadRunner, Ready, Work
from services.worker.native.config import ModelConfig, read_config
from services.worker.native.cuda.blas import Blas
from services.worker.native.cuda.decoder import Buffers, CudaDecoder
from services.worker.native.cuda.drawing import draw
from services.worker.native.cuda.kernels import PREFILL_ROWS, ElementType, compile_kernels
from services.worker.native.cuda.layout import Counts, CudaStep, lay_out
from services.worker.native.cuda.weights import DTYPES, CudaWeights, load_cuda_weights
from services.worker.native.linear import Array
from services.worker.native.prepare import prepare
from services.worker.native.weights_digest import weights_digest
from shared.errors import ConfigError, ModelError
from shared.messages import KvLayout

GRAPH_ROWS = (1, 2, 4, *range(8, 257, 8))
_INTS_LIMIT = 4 << 20
"""Of a step that can be replayed; 256 sequences of 16,000 blocks each. A larger one runs eagerly."""

_TYPICAL_CONTEXT = 4096
"""What a graph's attention is cut for; it serves any."""


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: Any
    logits: Array
    kept: tuple[Array, Buffers]
    """Memory that the graph writes to: a longer prefill may have the decoder go on in other buffers."""


class CudaRunner:
    """Computes steps on the current device, stored and multiplied in one element type, added up in float32."""

    def __init__(
        self,
        config: ModelConfig,
        weights: CudaWeights,
        *,
        capacity_blocks: int,
        element_type: ElementType = "bfloat16",
        block_size: int = 16,
        graph_rows: Sequence[int] = GRAPH_ROWS,
        graph_lower_bound: int = 1,
        path: str = "",
        digest: str = "",
    ) -> None:
        """`graph_rows` ascend; none: every step runs eagerly. Raises ModelError where the device has no room."""
        assert list(graph_rows) == sorted(set(graph_rows))
        layout = KvLayout(element_type, config.layers, config.kv_heads, config.head_dim, block_size)
        if capacity_blocks < 1:
            raise ModelError(f"a KV cache of {capacity_blocks} blocks holds nothing")
        self.stream = cp.cuda.Stream(non_blocking=True)
        """On which everything runs."""
        self.stream.wait_event(cp.cuda.get_current_stream().record())  # by then the weights are there
        self.use_graphs = True
        """Off: every step runs eagerly."""
        self._graph_rows = tuple(graph_rows)
        self._graph_lower_bound = graph_lower_bound
        context_length = min(config.context_length, capacity_blocks * block_size)
        try:
            with self.stream:
                shape = (capacity_blocks, config.layers, 2, block_size, config.kv_heads, config.head_dim)
                self.pages: Array = cp.empty(shape, DTYPES[element_type])
                self._kernels = compile_kernels(config, element_type, block_size)
                self._blas = Blas(element_type, self.stream)
                self._decoder = CudaDecoder(config, weights, self.pages, self._kernels, self._blas, context_length)
                self._decoder.reserve(max(graph_rows, default=1))
                self._ints = cp.empty(_INTS_LIMIT, cp.int32)
        except cp.cuda.memory.OutOfMemoryError as wrong:
            room = f"{capacity_blocks} blocks of {layout.block_bytes} bytes"
            raise ModelError(f"the GPU has no room for {room} beside the weights: {wrong}") from None
        self._facts = Ready(
            context_length=context_length,
            vocab_size=config.vocab,
            eos_token_ids=config.eos_token_ids,
            block_size=block_size,
            capacity_blocks=capacity_blocks,
            kv_layout=layout,
            path=path,
            weights=digest,
        )
        self._graphs = {rows: self._captured(rows) for rows in self._graph_rows}

    @property
    def facts(self) -> Ready:
        """What is served. The context is no longer than the cache."""
        return self._facts

    def step(self, works: Sequence[Work]) -> list[Drawn | None]:
        """One entry a work, None where nothing is drawn. Raises ModelError if the device fails."""
        drawing = [work for work in works if work.draws]
        try:
            with self.stream:
                logits = self.logits(works)
                drawn = iter(draw(self._kernels, logits, drawing) if drawing else [])
                if not drawing:
                    self.stream.synchronize()
        except cp.cuda.runtime.CUDARuntimeError as wrong:
            raise ModelError(f"the GPU failed: {wrong}") from wrong
        return [next(drawn) if work.draws else None for work in works]

    def logits(self, works: Sequence[Work]) -> Array:
        """Enqueue a step on the runner's stream; (drawing works, vocab) float32 on the device, until the next step."""
        with self.stream:
            padded_rows = self._padded_rows(works)
            step = lay_out(works, self._facts.block_size, PREFILL_ROWS, padded_rows=padded_rows)
            if len(step.ints) > _INTS_LIMIT:
                return self._eagerly(cp.asarray(step.ints), step)
            ints = self._ints[: len(step.ints)]
            ints.set(step.ints)
            if padded_rows == 0:
                return self._eagerly(ints, step)
            captured = self._graphs[padded_rows]
            captured.graph.launch(self.stream)
            return captured.logits[: len(works)]

    def mover(self, clock: Callable[[], float]) -> Mover:  # noqa: ARG002 (the Runner's interface)
        """Blocks are not exchanged: what copies between a device and a pool is not joined to this runner."""
        raise ConfigError("the CUDA runner exchanges no blocks with a kvbm")

    def close(self) -> None:
        """Wait for the device and let go of its memory."""
        self.stream.synchronize()
        self._graphs.clear()
        self._blas.close()
        self.pages = None

    def _padded_rows(self, works: Sequence[Work]) -> int:
        """Of the graph that takes these works; 0: none."""
        if not self.use_graphs or not self._graph_rows:
            return 0
        if not self._graph_lower_bound <= len(works) <= self._graph_rows[-1]:
            return 0
        if any(work.end - work.start > 1 or not work.draws for work in works):
            return 0
        return self._graph_rows[bisect_left(self._graph_rows, len(works))]

    def _eagerly(self, ints: Array, step: CudaStep) -> Array:
        counts = step.counts
        logits = cp.empty((counts.drawing, self._facts.vocab_size), cp.float32)
        split_room = cp.empty(self._decoder.split_floats(counts.singles, counts.longest), cp.float32)
        self._decoder.step(ints, counts, logits, split_room, longest=counts.longest)
        return logits

    def _captured(self, rows: int) -> _Graph:
        """The graph of a decode step of so many rows, of any lengths."""
        longest = min(self._facts.context_length, _TYPICAL_CONTEXT)
        counts = Counts(rows, rows, rows, 0, longest)
        with self.stream:
            # All padding: the kernels are loaded and cuBLAS has chosen, which a capture must not have to do.
            padding = np.zeros(6 * rows, np.int32)
            padding[rows : 3 * rows] = -1
            padding[4 * rows :] = np.tile(np.arange(rows), 2)
            self._ints[: len(padding)].set(padding)
            logits = cp.empty((rows, self._facts.vocab_size), cp.float32)
            split_room = cp.empty(self._decoder.split_floats(rows, longest), cp.float32)
            self._decoder.step(self._ints, counts, logits, split_room, longest=longest)
            self.stream.begin_capture()
            self._decoder.step(self._ints, counts, logits, split_room, longest=longest)
            graph = self.stream.end_capture()
        return _Graph(graph, logits, (split_room, self._decoder.buffers))


def load_cuda(settings: EngineConfig) -> LoadRunner:
    """A LoadRunner of a worker's settings."""

    def load(progress: Callable[[Loading], None]) -> CudaRunner:
        directory = prepare(Path(settings.model), Path(settings.cache), progress)
        config = read_config(directory)
        cuda = settings.cuda
        layout = KvLayout(cuda.dtype, config.layers, config.kv_heads, config.head_dim, settings.block_size)
        progress(Loading("copying weights to the GPU", 0.0))
        weights = load_cuda_weights(directory, config, cuda.dtype)
        progress(Loading("capturing graphs", 0.0))
        return CudaRunner(
            config,
            weights,
            capacity_blocks=settings.capacity_blocks or settings.capacity_bytes // layout.block_bytes,
            element_type=cuda.dtype,
            block_size=settings.block_size,
            graph_lower_bound=cuda.graph_lower_bound,
            path=str(directory),
            digest=weights_digest(directory, config),
        )

    return load
