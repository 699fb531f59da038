"""Matrices in the memory service as engines on a GPU have them, on host memory in place of CUDA's: what is not CUDA's
own call is the same."""

from __future__ import annotations

import ctypes
import os
from contextlib import ExitStack
from math import prod
from pathlib import Path

import numpy as np
import pytest

from services.worker.config import WeightsConfig, WorkerConfig
from services.worker.memory.ledger import LedgerLimits
from services.worker.native.cuda.shared_weights import Place, Progress, SharedCudaWeights
from services.worker.native.cuda.weights_layout import WeightsLayout
from services.worker.native.linear import Array
from services.worker.sharing.host_pages import HostMapper, HostMapping, HostPages
from services.worker.transfer.errors import DeviceMemoryExhausted
from tests.tiny_model import write_tiny_model
from tests.worker.memory.test_service import serving, shown

SHAPES = {"a": (8, 24), "b": (4, 24), "norm": (24,)}
LIMITS = LedgerLimits(size_bytes=1 << 20)


class TwinPages(HostPages):
    """Host memory as it is filled."""

    protected = False

    def protect(self) -> None:
        self.protected = True


class HostMatrices:
    """A MatrixMemory of host memory."""

    device, page_bytes = "twin", 4096

    def __init__(self, *, full: bool = False) -> None:
        self.full = full
        self.filled: list[bool] = []

    def allocate(self, size_bytes: int) -> TwinPages:
        if self.full:
            raise DeviceMemoryExhausted(size_bytes, 0, 0, 0)
        return TwinPages(size_bytes)

    def map(self, descriptors: list[int], size_bytes: int) -> HostMapping:
        return HostMapper().map(descriptors, size_bytes, "")

    def array(self, address: int, shape: tuple[int, ...], dtype: type) -> Array:
        room = (ctypes.c_ubyte * (prod(shape) * self.item_bytes(dtype))).from_address(address)
        return np.frombuffer(memoryview(room), dtype).reshape(shape)

    def item_bytes(self, dtype: type) -> int:
        return np.dtype(dtype).itemsize

    def load(self, progress: Progress, place: Place | None, *, fills: bool) -> list[Array]:
        """Return two matrices, the first one of 1, the second one of 2."""
        self.filled.append(fills)
        matrices = [(place or np.empty)(SHAPES[name], np.float32) for name in "ab"]
        for number, matrix in enumerate(matrices, start=1):
            if fills:
                matrix[...] = number
            progress(number / 2)
        return matrices


class Engine:
    """One engine's weights."""

    def __init__(self, tmp_path: Path, ends: ExitStack, *, full: bool = False, timeout_s: float = 20.0) -> None:
        model = tmp_path / "model"
        if not model.exists():
            write_tiny_model(model)
        weights = WeightsConfig(memory=str(tmp_path / "memory"), timeout_s=timeout_s)
        self.memory = HostMatrices(full=full)
        settings = WorkerConfig(model=str(model), weights=weights)
        self.weights = SharedCudaWeights(settings, WeightsLayout(SHAPES, "float32", 4), self.memory)
        ends.callback(self.weights.release)

    def loads(self) -> list[float]:
        return [float(matrix.sum()) for matrix in self.weights.load()]


RIGHT = [8.0 * 24, 2.0 * 4 * 24]


def test_the_second_engine_maps_and_fills_nothing(tmp_path: Path) -> None:
    with ExitStack() as ends, serving(tmp_path / "memory", LIMITS):
        one, other = Engine(tmp_path, ends), Engine(tmp_path, ends)
        assert one.loads() == other.loads() == RIGHT
        assert (one.memory.filled, other.memory.filled) == ([True], [False])
        assert isinstance(one.weights._mapped, TwinPages)
        assert one.weights._mapped.protected, "it is read-only before others see it"
        [row] = shown(tmp_path / "memory").rows
        assert row.readers == (os.getpid(),) * 2
        assert row.size_bytes % HostMatrices.page_bytes == 0


def test_weights_outlive_the_engine_that_made_them(tmp_path: Path) -> None:
    with ExitStack() as ends, serving(tmp_path / "memory", LIMITS):
        first = Engine(tmp_path, ends)
        assert first.loads() == RIGHT
        first.weights.release()
        second = Engine(tmp_path, ends)
        assert second.loads() == RIGHT
        assert second.memory.filled == [False]


def test_only_what_is_mapped_counts_as_mapped(tmp_path: Path) -> None:
    with ExitStack() as ends, serving(tmp_path / "memory", LIMITS):
        engine = Engine(tmp_path, ends)
        assert not engine.weights.maps(4096)
        first, second = engine.weights.load()
        begin, own = first.ctypes.data, np.ones(4)
        assert engine.weights.maps(begin)
        assert engine.weights.maps(second.ctypes.data)
        assert not engine.weights.maps(begin - 1)
        assert not engine.weights.maps(own.ctypes.data)
        engine.weights.release()
        assert not engine.weights.maps(begin)


def test_without_a_service_an_engine_has_weights_of_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ExitStack() as ends:
        assert Engine(tmp_path, ends, timeout_s=0.01).loads() == RIGHT
    [record] = caplog.records
    assert "weights.memory" in record.getMessage()
    assert "\n" not in record.getMessage()


def test_a_device_that_is_full_commits_nothing_and_the_next_engine_makes_them(tmp_path: Path) -> None:
    with ExitStack() as ends, serving(tmp_path / "memory", LIMITS):
        with pytest.raises(DeviceMemoryExhausted):
            Engine(tmp_path, ends, full=True).loads()
        assert shown(tmp_path / "memory").rows == ()
        assert Engine(tmp_path, ends).loads() == RIGHT
        assert len(shown(tmp_path / "memory").rows) == 1
