"""The 8B shape on the device without any file: random weights, works, a runner. Needs CuPy and a GPU to be called."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from benchmarks.gpu.model import LLAMA_8B, random_tile
from services.worker.contracts.runner import Drawn, Work
from services.worker.native.config import ModelConfig
from services.worker.native.linear import Array
from shared.messages.generate import Sampling

if TYPE_CHECKING:
    from services.worker.native.cuda.runner import CudaRunner
    from services.worker.native.cuda.weights import CudaWeights
    from services.worker.transfer.device_memory import DeviceMemory

BLOCK_SIZE = 16
CONTEXT = 2048
GREEDY = Sampling(max_tokens=1 << 20, temperature=0.0)


def shape(*, quick: bool) -> ModelConfig:
    """Return the shape of Llama 8B; with `quick` it has a quarter of the layers."""
    return msgspec.structs.replace(LLAMA_8B, layers=8) if quick else LLAMA_8B


def block_bytes(config: ModelConfig) -> int:
    """Return the size of a block: keys and values of BLOCK_SIZE positions, 16 bits each."""
    return 2 * 2 * config.layers * config.keys * BLOCK_SIZE


def work(sequence: int, start: int, end: int, blocks: list[int]) -> Work:
    """Make a work of random tokens from `start` to `end` that draws a token."""
    tokens = np.random.default_rng(sequence).integers(0, LLAMA_8B.vocab, end).tolist()
    return Work(sequence, tokens, start, end, blocks, GREEDY, end)


def blocks(sequences: int) -> int:
    """Return the number of blocks of `sequences` sequences of CONTEXT positions."""
    return sequences * CONTEXT // BLOCK_SIZE


def go_on(works: list[Work], drawn: Sequence[Drawn | None]) -> None:
    """Advance each work by one position, with its drawn token."""
    for each, token in zip(works, drawn, strict=True):
        assert token is not None
        each.history = [*each.history, token.token]
        each.start, each.end = each.end, each.end + 1


def decoding(batch: int, sequences: int, *, end: int = CONTEXT) -> list[Work]:
    """Make decoding works on pages scattered over those of `sequences` sequences of CONTEXT."""
    each = CONTEXT // BLOCK_SIZE
    slots = np.random.default_rng(0).permutation(sequences * each).tolist()
    return [work(n, end - 1, end, slots[n * each : (n + 1) * each]) for n in range(batch)]


def decoding_lengths(lengths: Sequence[int], slots: int) -> list[Work]:
    """Make decoding works that attend to `lengths` positions, on pages scattered over `slots` slots."""
    each = [-(-length // BLOCK_SIZE) for length in lengths]
    assert sum(each) <= slots, f"{sum(each)} blocks of {slots}"
    free = np.random.default_rng(0).permutation(slots).tolist()
    return [
        work(n, length - 1, length, [free.pop() for _ in range(count)])
        for n, (length, count) in enumerate(zip(lengths, each, strict=True))
    ]


def step_ms(runner: CudaRunner, works: list[Work]) -> float:
    """Return the milliseconds of a whole step by a host clock."""
    begun_s = time.perf_counter()
    runner.step(works)
    return (time.perf_counter() - begun_s) * 1e3


def device_ms(runner: CudaRunner, works: list[Work]) -> float:
    """Return the milliseconds of a step without its draw, between events."""
    return timed_ms(runner.stream, lambda: runner.logits(works))


def timed_ms(stream: Any, enqueue: Callable[[], object]) -> float:
    """Return the milliseconds, between events, of the work that `enqueue` puts on a stream."""
    import cupy as cp  # pyright: ignore[reportMissingImports]

    begin, end = cp.cuda.Event(), cp.cuda.Event()
    begin.record(stream)
    enqueue()
    end.record(stream)
    end.synchronize()
    return float(cp.cuda.get_elapsed_time(begin, end))


def device_memory() -> DeviceMemory:
    """Make the first GPU's DeviceMemory, which CuPy's arrays of this process use from now on."""
    import cupy as cp  # pyright: ignore[reportMissingImports]

    from services.worker.transfer.device_memory import DeviceMemory

    memory = DeviceMemory(0, reserve_bytes=256 << 20)
    cp.cuda.set_allocator(memory.allocator())
    return memory


def random_weights(config: ModelConfig) -> CudaWeights:
    """Make bfloat16 weights; a product with a row of numbers near one is near one."""
    import cupy as cp  # pyright: ignore[reportMissingImports]

    from services.worker.native.cuda.weights import CudaLayer, CudaWeights

    random = Random(config.hidden**-0.5)
    ones = cp.ones(config.hidden, cp.float32)
    return CudaWeights(
        embedding=random.array(config.vocab, config.hidden),
        layers=tuple(
            CudaLayer(
                input_norm=ones,
                qkv=random.array(config.queries + 2 * config.keys, config.hidden),
                qkv_bias=None,
                output=random.array(config.hidden, config.queries),
                output_bias=None,
                output_norm=ones,
                gate_up=random.array(2 * config.intermediate, config.hidden),
                down=random.array(config.hidden, config.intermediate),
            )
            for _ in range(config.layers)
        ),
        norm=ones,
        head=random.array(config.vocab, config.hidden),
    )


class Random:
    """Makes random bfloat16 numbers on the device by going through one tile again and again; no two rows are alike.

    CuPy's own random numbers would need cuRAND, which the engine does not need.
    """

    def __init__(self, scale: float) -> None:
        import cupy as cp  # pyright: ignore[reportMissingImports]

        self._tile: Array = cp.asarray(random_tile(scale))
        self._at = 0

    def array(self, *shape: int) -> Array:
        """Return a new array of random numbers."""
        import cupy as cp  # pyright: ignore[reportMissingImports]

        made = cp.empty(shape, cp.uint16)
        self.fill(made)
        return made

    def fill(self, array: Array) -> None:
        """Fill a contiguous array of 16-bit numbers and wait until it is filled."""
        import cupy as cp  # pyright: ignore[reportMissingImports]

        flat, done = array.reshape(-1), 0
        while done < flat.size:
            count = min(flat.size - done, self._tile.size - self._at)
            flat[done : done + count] = self._tile[self._at : self._at + count]
            done, self._at = done + count, (self._at + count) % self._tile.size
        cp.cuda.get_current_stream().synchronize()
