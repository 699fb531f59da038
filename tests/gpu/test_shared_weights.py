"""Engines on a GPU whose matrices lie in the memory service: one copy, the same answers, and it outlives them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from services.worker.config import CudaConfig, WeightsConfig, WorkerConfig
from services.worker.memory.ledger import LedgerLimits
from tests.gpu.device import cupy_on_a_device
from tests.tiny_model import write_tiny_model
from tests.worker.memory.test_service import serving, shown

pytestmark = pytest.mark.gpu
cp = cupy_on_a_device()

from services.worker.native.cuda.load import load_cuda  # noqa: E402
from services.worker.native.cuda.runner import CudaRunner  # noqa: E402
from tests.gpu.test_native_sleep import KV_BYTES, SHAPE, answers, free_bytes  # noqa: E402

LIMITS = LedgerLimits(size_bytes=8 << 30)


@contextmanager
def engine(model: Path, tmp_path: Path, *, shared: bool = True) -> Iterator[CudaRunner]:
    """Load a runner as the engine process does; at the end its lock ends too."""
    config = WorkerConfig(
        model=str(model),
        cache=str(tmp_path / "cache"),
        device="cuda",
        cuda=CudaConfig(graph_upper_bound=4),
        weights=WeightsConfig(memory=str(tmp_path / "memory")) if shared else WeightsConfig(),
        capacity_bytes=KV_BYTES,
        max_running=8,
    )
    try:
        runner = load_cuda(config, lambda _loading: None)
        yield runner
        runner.close()
        if runner._shared is not None:
            runner._shared.release()
        runner._memory.trim()
    finally:
        cp.cuda.set_allocator(cp.get_default_memory_pool().malloc)


def test_an_engine_that_starts_again_maps_what_the_first_has_made_and_answers_the_same(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", **SHAPE)
    with engine(model, tmp_path, shared=False) as alone:
        right = answers(alone)
    with serving(tmp_path / "memory", LIMITS):
        with engine(model, tmp_path) as first:
            assert answers(first) == right
        [row] = shown(tmp_path / "memory").rows
        assert (row.state, row.readers) == ("committed", ())
        with engine(model, tmp_path) as second:
            assert answers(second) == right
            assert len(shown(tmp_path / "memory").rows[0].readers) == 1
            assert second.facts.weights == alone.facts.weights


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_engine_leaves_its_matrices_to_the_service_and_finds_them_again(tmp_path: Path, level: int) -> None:
    model = write_tiny_model(tmp_path / "model", **SHAPE)
    with serving(tmp_path / "memory", LIMITS), engine(model, tmp_path) as runner:
        right = answers(runner)
        before = free_bytes()
        assert runner.operate("sleep", "", "", level) == ""
        assert free_bytes() - before > KV_BYTES
        assert runner._memory.statistics().reserved_bytes == 0
        assert runner._shared is not None
        assert (runner._shared._mapped is None) == (level == 2)
        assert len(shown(tmp_path / "memory").rows[0].readers) == (1 if level == 1 else 0)
        assert runner.operate("wake", "", "", 0) == ""
        assert answers(runner) == right


def test_the_last_engine_and_the_service_give_all_memory_back(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", **SHAPE)
    with engine(model, tmp_path, shared=False) as first:  # what CUDA and CuPy keep for the process is there after it
        answers(first)
    before = free_bytes()
    with serving(tmp_path / "memory", LIMITS):
        with engine(model, tmp_path) as runner:
            answers(runner)
        [row] = shown(tmp_path / "memory").rows
        held = before - free_bytes()
        assert held >= row.size_bytes, "the service alone keeps them"
    assert before - free_bytes() <= held - row.size_bytes
