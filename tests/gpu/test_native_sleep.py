"""A sleeping engine on the device: its memory goes back to the device, and its numbers are the same when it wakes."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.worker.config import CudaConfig, Dtype, WorkerConfig
from services.worker.contracts.runner import Work
from tests.gpu.device import cupy_on_a_device
from tests.tiny_lora import write_lora
from tests.tiny_model import write_tiny_model
from tests.worker.native.works import GREEDY, work

pytestmark = pytest.mark.gpu
cp = cupy_on_a_device()

from services.worker.native.cuda.load import load_cuda  # noqa: E402
from services.worker.native.cuda.runner import CudaRunner  # noqa: E402
from services.worker.transfer.device_memory import DeviceMemory  # noqa: E402
from tests.gpu.test_native_memory import all_of  # noqa: E402

SHAPE: dict[str, Any] = {
    **{"hidden": 1024, "heads": 8, "kv_heads": 2, "head_dim": 128, "intermediate": 4096, "layers": 4},
    **{"context_length": 4096, "tied": False},
}
PROMPT = [5 + number * 7 % 200 for number in range(37)]
KV_BYTES = 512 << 20
LEFT_BYTES = 16 << 20
"""Too few to map the file of the weights."""


def of_lora(made: Work, lora: str) -> Work:
    made.lora = lora
    return made


def answers(runner: CudaRunner, lora: str = "") -> list[Any]:
    """Return what a prefill and a decode draw, the latter by a graph and eagerly."""
    sampling = msgspec.structs.replace(GREEDY, logprobs=5)
    drawn = list(runner.step([of_lora(work(PROMPT, [3, 1, 2], sampling=sampling), lora)]))
    for graphs in (True, False):
        runner.use_graphs = graphs
        drawn += runner.step([of_lora(work([*PROMPT, 9], [3, 1, 2], start=len(PROMPT), sampling=sampling), lora)])
    runner.use_graphs = True
    return drawn


def free_bytes() -> int:
    cp.cuda.runtime.deviceSynchronize()
    return int(cp.cuda.runtime.memGetInfo()[0])


@contextmanager
def loaded(model: Path, cache: Path, dtype: Dtype) -> Iterator[CudaRunner]:
    """Load a runner as the engine process does."""
    config = WorkerConfig(
        model=str(model),
        cache=str(cache),
        device="cuda",
        cuda=CudaConfig(dtype=dtype, graph_upper_bound=4),
        capacity_bytes=KV_BYTES,
        max_running=8,
    )
    try:
        runner = load_cuda(config, lambda _loading: None)
        assert isinstance(runner, CudaRunner)
        yield runner
        runner.close()
        runner._memory.trim()  # tests of other processes need the memory
    finally:
        cp.cuda.set_allocator(cp.get_default_memory_pool().malloc)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_runner_that_slept_has_given_its_memory_back_and_computes_the_same(tmp_path: Path, dtype: Dtype) -> None:
    model = write_tiny_model(tmp_path / "model", dtype="bfloat16", **SHAPE)
    lora = write_lora(tmp_path / "lora", model)
    before = free_bytes()
    with loaded(model, tmp_path / "cache", dtype) as runner:
        assert runner.operate("load_lora", "poet", str(lora), 1) == ""
        plain, with_lora = answers(runner), answers(runner, "poet")
        assert plain != with_lora
        awake = free_bytes()
        assert before - awake > KV_BYTES
        for round_ in range(3):
            assert runner.operate("sleep", "", "", 1) == ""
            asleep = free_bytes()
            # What stays belongs to the process: CUDA's context, the modules of kernels, cuBLAS.
            assert runner._memory.statistics().reserved_bytes == 0
            assert asleep - awake > KV_BYTES, f"round {round_}"
            assert runner.operate("wake", "", "", 1) == ""
            assert answers(runner) == plain
            assert answers(runner, "poet") == with_lora
        assert runner.operate("unload_lora", "poet", "", 1) == ""
        assert runner.operate("sleep", "", "", 2) == ""
        assert runner._kept is None
        assert runner._memory.statistics().reserved_bytes == 0
        assert runner.operate("wake", "", "", 1) == ""
        assert answers(runner) == plain


@pytest.mark.parametrize("level", [1, 2])
def test_a_runner_that_finds_no_memory_stays_asleep_and_says_so(tmp_path: Path, level: int) -> None:
    model = write_tiny_model(tmp_path / "model", dtype="bfloat16", **SHAPE)
    with loaded(model, tmp_path / "cache", "bfloat16") as runner:
        expected = answers(runner)
        assert runner.operate("sleep", "", "", level) == ""
        other = DeviceMemory(0)
        taken = all_of(other, 28)
        try:
            for _ in range(2):
                failed = runner.operate("wake", "", "", 1)
                assert failed.startswith("wake: ")
                assert "the GPU has no room for" in failed
                assert "\n" not in failed
                assert runner._memory.statistics().reserved_bytes == 0
        finally:
            for address in taken:
                other.free(address)
            other.trim()
        assert runner.operate("wake", "", "", 1) == ""
        assert answers(runner) == expected


def test_a_runner_without_host_memory_stays_asleep_and_says_so(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", dtype="bfloat16", **SHAPE)
    with loaded(model, tmp_path / "cache", "bfloat16") as runner:
        expected = answers(runner)
        assert runner.operate("sleep", "", "", 2) == ""
        limits = resource.getrlimit(resource.RLIMIT_AS)
        used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used_bytes + LEFT_BYTES, limits[1]))
        try:
            failed = runner.operate("wake", "", "", 1)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)
        assert failed.startswith(f"wake: {runner.facts.path}")
        assert "memory" in failed
        assert "\n" not in failed
        assert runner.operate("wake", "", "", 1) == ""
        assert answers(runner) == expected


def test_a_runner_does_not_wake_with_other_weights(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", dtype="bfloat16", **SHAPE)
    with loaded(model, tmp_path / "cache", "bfloat16") as runner:
        expected = answers(runner)
        weights = Path(runner.facts.path) / "model.safetensors"
        stored = weights.read_bytes()
        assert runner.operate("sleep", "", "", 2) == ""
        weights.write_bytes(stored[:-400] + bytes(400))
        assert "the weights have changed since the worker started" in runner.operate("wake", "", "", 1)
        weights.write_bytes(stored)
        assert runner.operate("wake", "", "", 1) == ""
        assert answers(runner) == expected


def test_a_runner_that_sleeps_can_be_closed(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", dtype="bfloat16", **SHAPE)
    with loaded(model, tmp_path / "cache", "bfloat16") as runner:
        mover = runner.mover(lambda: 0.0)
        assert runner.operate("sleep", "", "", 1) == ""
        mover.close()
