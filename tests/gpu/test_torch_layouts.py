"""Blocks of tensors in vLLM's layouts are saved to a pool and loaded into other blocks: torch on a GPU, NumPy without.

`K` stands for keys and values, `B` blocks, `N` tokens, `H` heads, `D` their elements, `C` keys and values of a token.
"""

from __future__ import annotations

import importlib
import select
import time
from math import inf
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from services.worker.contracts.mover import Copied, Copy
from services.worker.transfer.copier import Copier
from services.worker.transfer.host_copier import HostCopier
from services.worker.transfer.mover import TransferMover
from services.worker.vllm.connector.kv_layout import TensorPlace, block_shape
from shared.pool.map import PoolMap
from tests.gpu.device import missing
from tests.worker.pool_file import make_pool

LAYERS, BLOCKS, HEADS, HEAD_DIM = 3, 24, 4, 64
POOL_BYTES = 64 << 20
LIMIT_S = 180.0
MEMORY_ORDERS = {"token-major": "KBNHD", "head-major": "KBHND", "0.32 token-major": "BNHC", "0.32 head-major": "BHNC"}
VIEWS = {5: "KBNHD", 4: "BHNC"}
"""The order of the axes that vLLM shows, by their number."""
ELEMENT_BYTES = {"bfloat16": 2, "float8_e4m3fn": 1}


class Layers:
    """The tensors of all layers, of random bytes."""

    def __init__(self, kind: str, order: str, tokens: int, dtype: str) -> None:
        sizes = {"K": 2, "B": BLOCKS, "N": tokens, "H": HEADS, "D": HEAD_DIM, "C": 2 * HEAD_DIM}
        self._in_memory = (LAYERS, *(sizes[axis] for axis in order))
        self._order = order
        view = VIEWS[len(order)]
        axes = [order.index(axis) for axis in view]
        self.block_axis = view.index("B")
        element_bytes = ELEMENT_BYTES[dtype]
        drawn = np.random.default_rng(tokens).integers(0, 256, (*self._in_memory, element_bytes), np.uint8)
        if kind == "cuda":
            torch: Any = pytest.importorskip("torch")
            self._whole: Any = torch.from_numpy(drawn).cuda().view(getattr(torch, dtype)).squeeze(-1)
            torch.cuda.synchronize()
            self._read: Any = lambda: self._whole.contiguous().view(torch.uint8).cpu().numpy()
            views = [layer.permute(axes) for layer in self._whole]
            self.places = {
                f"layers.{index}.attn": TensorPlace(
                    view.data_ptr(), tuple(view.shape), tuple(view.stride()), view.element_size()
                )
                for index, view in enumerate(views)
            }
        else:
            self._whole = drawn.view(np.dtype(f"u{element_bytes}")).squeeze(-1)
            self._read = lambda: self._whole.view(np.uint8)
            self.places = {
                f"layers.{index}.attn": TensorPlace(
                    view.ctypes.data, view.shape, tuple(each // element_bytes for each in view.strides), element_bytes
                )
                for index, view in enumerate(layer.transpose(axes) for layer in self._whole)
            }

    def blocks(self) -> list[bytes]:
        """Return each block's bytes."""
        in_memory = self._read().reshape(*self._in_memory, -1)
        axis = 1 + self._order.index("B")
        return [np.take(in_memory, block, axis).tobytes() for block in range(BLOCKS)]


@pytest.mark.parametrize("dtype", ELEMENT_BYTES)
@pytest.mark.parametrize("tokens", [16, 64])
@pytest.mark.parametrize("layout", MEMORY_ORDERS)
@pytest.mark.parametrize("kind", ["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_saved_blocks_are_loaded_into_other_blocks(
    kind: str, layout: str, tokens: int, dtype: str, tmp_path: Path
) -> None:
    if kind == "cuda" and (reason := missing()):
        pytest.skip(reason)
    layers = Layers(kind, MEMORY_ORDERS[layout], tokens, dtype)
    before = layers.blocks()
    shape = block_shape(layers.places, BLOCKS, block_axis=layers.block_axis)
    assert shape.block_bytes == len(before[0])
    memory: Any = None
    copier: Copier
    if kind == "cuda":
        copier_module = importlib.import_module("services.worker.transfer.cuda_copier")
        memory = importlib.import_module("services.worker.transfer.device_memory").DeviceMemory(0)
        copier = copier_module.CudaCopier(shape, memory, time.perf_counter)
    else:
        copier = HostCopier(shape, layers)
    # Linux pins no file of a disk's file system for as long as CUDA would.
    with TemporaryDirectory(dir="/dev/shm" if kind == "cuda" else tmp_path) as directory:
        path = Path(directory) / "pool"
        arena = make_pool(path, POOL_BYTES).arena(0, 1, shape.block_bytes)
        pool = PoolMap(path)
        slots = pool.arena(arena)
        mover = TransferMover(copier, time.perf_counter)
        mover.attach(slots)
        half = BLOCKS // 2
        there = Random(1).sample(range(arena.slots), half)
        mover.save(1, [Copy(slot, block) for block, slot in enumerate(there)], inf)
        saved = _ended(mover)
        in_pool = [bytes(slots.bytes[slot * arena.slot_bytes :][: shape.block_bytes]) for slot in there]
        mover.load(2, [Copy(slot, BLOCKS - 1 - block) for block, slot in enumerate(there)])
        loaded = _ended(mover)
        mover.detach()
        mover.close()
        slots.close()
        pool.close()
    assert (saved.good, loaded.good) == ([True] * half, [True] * half), (saved, loaded)
    assert not saved.fallbacks
    assert not loaded.fallbacks
    assert in_pool == before[:half]
    assert layers.blocks() == before[:half] + before[:half][::-1]
    if memory is not None:
        memory.close()


def _ended(mover: TransferMover) -> Copied:
    readable, _, _ = select.select([mover], [], [], LIMIT_S)
    assert readable, "nothing has ended"
    [copied] = mover.ended()
    return copied
