"""deploy/local/stack/vllm_gpus.py: GPUs of its own for each worker with vLLM."""

from __future__ import annotations

import pytest

from deploy.local.stack.vllm_gpus import assign_gpus, parallel_sizes, visible_gpus
from shared.errors import ConfigError


def test_the_users_choice_is_what_is_shared_out() -> None:
    assert visible_gpus(3, None) == ("0", "1", "2")
    assert visible_gpus(2, "5, 3") == ("5", "3")
    assert visible_gpus(1, "GPU-abc,9,2") == ("GPU-abc",), "CUDA ignores all from the first wrong name on"


@pytest.mark.parametrize(
    ("workers", "sizes", "expected"),
    [
        (2, {}, ("4", "5")),
        (2, {"tensor_parallel_size": 2}, ("4,5", "6,7")),
        (1, {"pipeline_parallel_size": 2, "data_parallel_size": 2}, ("4,5,6,7",)),
        (3, {"tensor_parallel_size": 2}, ("4,5", "6,7", "8,9")),
        (None, {}, ("4", "5")),
        (None, {"tensor_parallel_size": 4}, ("4,5,6,7",)),
    ],
)
def test_each_worker_gets_gpus_of_its_own(
    workers: int | None, sizes: dict[str, int], expected: tuple[str, ...]
) -> None:
    assert assign_gpus(workers, sizes, tuple("456789")) == expected


def test_too_few_gpus_are_refused_with_what_needs_them() -> None:
    with pytest.raises(ConfigError) as refused:
        assign_gpus(2, {"tensor_parallel_size": 2, "data_parallel_size": 2}, ("0", "1", "2", "3"))
    assert str(refused.value) == (
        "--workers 2 needs 8 GPUs, 4 each (vllm.tensor_parallel_size 2 * vllm.data_parallel_size 2); CUDA shows 4"
    )
    with pytest.raises(ConfigError, match=r"^--workers 2 needs 2 GPUs; CUDA shows 1$"):
        assign_gpus(2, {}, ("0",))
    with pytest.raises(
        ConfigError, match=r"^--workers 1 needs 8 GPUs, 8 each \(vllm\.data_parallel_size 8\); CUDA shows 7$"
    ):
        assign_gpus(None, {"data_parallel_size": 8}, tuple("1234567"))


def test_sizes_come_from_the_file_and_then_from_the_settings() -> None:
    file = {"tensor-parallel-size": 4, "pipeline_parallel_size": 2, "enable_expert_parallel": True}
    assert parallel_sizes([], file) == {"tensor_parallel_size": 4, "pipeline_parallel_size": 2}
    settings = [("--max_running", "8"), ("--vllm.tensor_parallel_size", "8"), ("--vllm.tensor-parallel-size", "2")]
    assert parallel_sizes(settings, file) == {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    assert parallel_sizes([("--vllm.data_parallel_size", "1")], {}) == {}


@pytest.mark.parametrize("value", ["two", "0", "-1", "1.5"])
def test_a_size_that_is_no_number_is_named(value: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^--set worker\.vllm\.data_parallel_size: '.*' is not a whole number above 0"
    ):
        parallel_sizes([("--vllm.data_parallel_size", value)], {})
    with pytest.raises(ConfigError, match=r"^--vllm-args: tensor_parallel_size: "):
        parallel_sizes([], {"tensor_parallel_size": value})
