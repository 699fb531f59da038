"""The memory of an engine on the device: taken at start, as computed beforehand, and never in a step."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from services.worker.config import CudaConfig, WorkerConfig
from services.worker.contracts.messages import Loading
from services.worker.contracts.mover import Copy
from services.worker.native.config import read_config
from services.worker.native.cuda.capacity import CudaSizes, step_bytes, weight_bytes
from services.worker.native.weights import tensor_shapes
from shared.errors import ConfigError, ModelError
from shared.messages.generate import Sampling
from shared.pool.map import PoolMap
from tests.gpu.device import cupy_on_a_device
from tests.tiny_model import write_tiny_model
from tests.worker.native.test_runner import ended
from tests.worker.native.works import GREEDY, work
from tests.worker.pool_file import make_pool

pytestmark = pytest.mark.gpu
cp = cupy_on_a_device()

from services.worker.native.cuda.load import load_cuda  # noqa: E402
from services.worker.native.cuda.runner import CudaRunner, step_limits  # noqa: E402
from services.worker.native.cuda.weights import load_cuda_weights  # noqa: E402
from services.worker.transfer.device_memory import DeviceMemory  # noqa: E402
from services.worker.transfer.errors import DeviceMemoryExhausted  # noqa: E402
from tests.gpu.models import cuda_runner  # noqa: E402

SHAPE: dict[str, Any] = {"hidden": 256, "heads": 8, "kv_heads": 2, "head_dim": 64, "intermediate": 512}


@contextmanager
def everything_from(memory: DeviceMemory) -> Iterator[None]:
    """Let all of CuPy's arrays come from `memory`, as in an engine process."""
    cp.cuda.set_allocator(memory.allocator())
    try:
        yield
    finally:
        cp.cuda.set_allocator(cp.get_default_memory_pool().malloc)


def settings(model: Path, cache: Path, **changes: Any) -> WorkerConfig:
    """Return the settings of an engine on a GPU."""
    cuda = CudaConfig(**changes.pop("cuda", {}))
    return WorkerConfig(model=str(model), cache=str(cache), device="cuda", cuda=cuda, **changes)


@contextmanager
def loaded(config: WorkerConfig) -> Iterator[tuple[CudaRunner, list[Loading]]]:
    """Load a runner as the engine process does."""
    told: list[Loading] = []
    try:
        runner = load_cuda(config, told.append)
        assert isinstance(runner, CudaRunner)
        yield runner, told
        runner.close()
    finally:
        cp.cuda.set_allocator(cp.get_default_memory_pool().malloc)


@pytest.mark.parametrize("element_type", ["float32", "bfloat16"])
def test_steps_of_any_kind_allocate_nothing(tmp_path: Path, element_type: Any) -> None:
    memory = DeviceMemory(0, keep_bytes=1 << 30)
    with everything_from(memory):
        directory = write_tiny_model(tmp_path, dtype=element_type, context_length=4096, **SHAPE)
        cuda = CudaConfig(dtype=element_type, graph_upper_bound=4)
        runner = cuda_runner(directory, cuda, memory=memory, capacity_blocks=400, max_running=8, max_rows=1024)
        random = np.random.default_rng(1)
        tokens = random.integers(0, 320, 3000).tolist()
        sampled = Sampling(max_tokens=9, temperature=0.8, seed=4)
        mean, last = Sampling(max_tokens=1, pooling="mean"), Sampling(max_tokens=1, pooling="last")
        before = memory.statistics().allocated
        for count in (1, 2, 3, 4, 5, 8):  # by graphs, and eagerly
            slots = [list(range(number * 50, number * 50 + 50)) for number in range(count)]
            runner.step(
                [work(tokens[:790], slots[0], sampling=mean), *(work([7], own, sampling=last) for own in slots[1:])]
            )
            runner.step([work(tokens[:600], slots[0], draws=False)])
            runner.step([work(tokens[:790], slots[0], start=600), *(work(tokens[:3], own) for own in slots[1:])])
            for length in range(700, 706):
                kinds = [GREEDY, sampled]
                works = [
                    work(tokens[:length], own, start=length - 1, sampling=kinds[number % 2])
                    for number, own in enumerate(slots)
                ]
                runner.step(works)
        [long] = [work(tokens, list(range(188)), start=2999)]
        runner.step([long])
        assert memory.statistics().allocated == before
        runner.close()


def test_what_takes_the_gpus_memory_adds_up_to_all_of_it(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "model", dtype="bfloat16", context_length=4096, **SHAPE)
    with loaded(settings(directory, tmp_path / "cache", capacity_blocks=400)) as (runner, _):
        use, (free, total) = runner.memory_use(), cp.cuda.runtime.memGetInfo()
        assert use.used > 0
        assert use.used + use.kept + use.others + use.free == pytest.approx(total, rel=0.01)
        assert use.free == pytest.approx(free, abs=64 << 20)
        taken = cp.empty(256 << 20, dtype=cp.uint8)
        more = runner.memory_use()
        assert more.used - use.used == pytest.approx(256 << 20, rel=0.05)
        del taken


def test_a_runner_takes_the_memory_that_was_computed_beforehand(tmp_path: Path) -> None:
    memory = DeviceMemory(0, keep_bytes=1 << 30)
    directory = write_tiny_model(tmp_path, dtype="bfloat16", context_length=4096, **SHAPE)
    config = read_config(directory)
    with everything_from(memory):
        runner = cuda_runner(directory, CudaConfig(), memory=memory, capacity_blocks=100)
        taken = memory.statistics().used_bytes
        limits = step_limits(1600, 16, max_running=64, max_rows=8192)
        expected = weight_bytes(tensor_shapes(config), 2) + step_bytes(config, limits, 2)
        expected += 100 * runner.facts.kv_layout.block_bytes
        assert expected <= taken < expected + (1 << 20)  # each array is rounded up to 512 bytes
        runner.close()


def test_without_a_setting_the_share_of_the_gpu_decides_how_many_blocks_there_are(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", layers=8, kv_heads=8, head_dim=128, hidden=1024, heads=8)
    _, total_bytes = cp.cuda.runtime.memGetInfo()
    with loaded(settings(model, tmp_path / "cache", cuda={"memory_share": 0.1, "dtype": "float16"})) as (runner, told):
        facts = runner.facts
        assert facts.kv_layout.dtype == "float16"
        assert facts.weights.endswith("-float16")
        kv_bytes = facts.capacity_blocks * facts.kv_layout.block_bytes
        assert 0.05 * total_bytes < kv_bytes < 0.1 * total_bytes
        assert [line.share for line in told if line.what == "copying weights to the GPU"][-1] == 1.0
        assert [line.share for line in told if line.what == "capturing graphs"][-1] == 1.0


def test_an_error_without_room_says_what_to_change(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    for changes, words in (
        (
            {"capacity_bytes": 1 << 50},
            "no room for .* blocks of KV .* lower capacity_blocks, capacity_bytes or lora_bytes",
        ),
        ({"cuda": {"memory_share": 0.005}}, "raise cuda.memory_share"),
        ({"capacity_bytes": 100}, "holds no block of KV"),
    ):
        with pytest.raises(ModelError, match=words), loaded(settings(model, tmp_path / "cache", **changes)):
            pass


def test_memory_that_others_take_meanwhile_is_a_model_error_and_nothing_hangs(tmp_path: Path) -> None:
    directory, memory = write_tiny_model(tmp_path), DeviceMemory(0)
    config = read_config(directory)
    with everything_from(memory):
        weights = load_cuda_weights(directory, config, "bfloat16")
        taken = all_of(memory)
        with pytest.raises(ModelError, match=r"the GPU has no room for .*memory_share"):
            CudaRunner(config, weights, memory, CudaConfig(), CudaSizes(capacity_blocks=100))
        for address in taken:
            memory.free(address)
        runner = CudaRunner(config, weights, memory, CudaConfig(), CudaSizes(capacity_blocks=100))
        assert runner.step([work([1, 2, 3], [0])])[0] is not None
        runner.close()


def test_tokens_are_drawn_and_rated_when_no_memory_is_left(tmp_path: Path) -> None:
    memory = DeviceMemory(0)
    with everything_from(memory):
        directory = write_tiny_model(tmp_path, vocab=32_000)
        runner = cuda_runner(directory, CudaConfig(), memory=memory, capacity_blocks=10)
        penalised = work([1, 2], [0], sampling=msgspec.structs.replace(GREEDY, repetition_penalty=1.5))
        expected = runner.step([penalised])
        taken = all_of(memory)
        assert runner.step([penalised] * 60) == expected * 60
        for address in taken:
            memory.free(address)
        runner.close()


def test_garbage_on_the_runners_stream_is_freed_after_a_capture_and_not_in_it(tmp_path: Path) -> None:
    memory = DeviceMemory(0, keep_bytes=1 << 30)
    rounds: list[float] = []

    def leave_garbage(share: float) -> None:
        rounds.append(share)
        for _ in range(50):
            cycle: list[Any] = [cp.zeros(1000)]
            cycle.append(cycle)

    with everything_from(memory):
        was = gc.get_threshold()
        gc.set_threshold(10)
        try:
            runner = cuda_runner(
                write_tiny_model(tmp_path),
                CudaConfig(dtype="float32", graph_upper_bound=8),
                memory=memory,
                capacity_blocks=40,
                progress=leave_garbage,
            )
        finally:
            gc.set_threshold(*was)
        gc.collect()
        in_use = memory.statistics().allocations
        assert len(rounds) > 1
        for rows in (1, 2, 3, 8) * 20:
            runner.step([work([5, 6 + row], [row]) for row in range(rows)])
            works = [work([5, 6 + row, 7], [row], start=2) for row in range(rows)]
            runner.use_graphs = True
            by_graphs = runner.step(works)
            runner.use_graphs = False
            assert runner.step(works) == by_graphs
        assert memory.statistics().allocations == in_use
        runner.close()
        del runner
        gc.collect()
        assert memory.statistics().allocations == 0


@pytest.mark.parametrize("blocks", [1 << 30, 100])
def test_a_start_that_fails_leaves_no_memory_in_use_and_the_next_one_serves(tmp_path: Path, blocks: int) -> None:
    directory, memory = write_tiny_model(tmp_path), DeviceMemory(0)
    config = read_config(directory)
    with everything_from(memory):
        weights = load_cuda_weights(directory, config, "bfloat16")
        of_weights = memory.statistics().allocations

        def fail(share: float) -> None:
            if share > 0.5:
                raise ModelError("in the middle of the graphs")

        with pytest.raises(ModelError, match=r"no room for|in the middle"):
            CudaRunner(config, weights, memory, CudaConfig(), CudaSizes(capacity_blocks=blocks), progress=fail)
        gc.collect()
        assert memory.statistics().allocations == of_weights
        runner = CudaRunner(config, weights, memory, CudaConfig(), CudaSizes(capacity_blocks=100))
        assert runner.step([work([1, 2, 3], [0])])[0] is not None
        runner.close()


def all_of(memory: DeviceMemory, least_power: int = 20) -> list[int]:
    """Allocate the device's free memory, and what other pools keep, in ever smaller pieces, the last ones of
    2 ** `least_power` bytes."""
    taken = []
    for power in range(36, least_power - 1, -1):
        while True:
            try:
                taken.append(memory.allocate(1 << power, cp.cuda.get_current_stream()))
            except DeviceMemoryExhausted:
                break
    return taken


def test_a_missing_gpu_is_a_config_error_that_lists_the_present_ones(tmp_path: Path) -> None:
    config = settings(write_tiny_model(tmp_path / "model"), tmp_path / "cache", cuda={"gpu": 99})
    with pytest.raises(ConfigError, match=r"cuda\.gpu is 99, but CUDA shows"):
        load_cuda(config, lambda _loading: None)


@pytest.mark.parametrize("element_type", ["float32", "float16", "bfloat16"])
def test_blocks_that_went_through_a_pool_give_another_runner_the_same_tokens(tmp_path: Path, element_type: Any) -> None:
    directory = write_tiny_model(tmp_path / "model", dtype=element_type, **SHAPE)
    geometry = make_pool(tmp_path / "pool", 8 << 20)
    cuda = CudaConfig(dtype=element_type)
    one, other = (cuda_runner(directory, cuda, capacity_blocks=40, verify=True) for _ in range(2))
    pool = PoolMap(tmp_path / "pool")
    slots = pool.arena(geometry.arena(0, 1, one.facts.kv_layout.block_bytes))
    tokens = list(range(40))
    own = one.step([work(tokens, [0, 1, 2])])
    saving, loading = one.mover(time.monotonic), other.mover(time.monotonic)
    saving.attach(slots)
    loading.attach(slots)
    saving.save(1, [Copy(3, 0), Copy(1, 1)], float("inf"))
    assert ended(saving).good == [True, True]
    loading.load(2, [Copy(3, 20), Copy(1, 30)])
    copied = ended(loading)
    assert (copied.good, copied.differing) == ([True, True], 0)
    assert sum(copied.paths.values()) == 2
    assert (one.pages[0].get() == other.pages[20].get()).all()
    given = other.step([work(tokens, [20, 30, 3], start=32)])
    assert given == own
    saving.close()
    loading.close()
    one.close()
    other.close()
