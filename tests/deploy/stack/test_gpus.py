"""deploy/local/stack/gpus.py: how many GPUs there are, or in one sentence why none."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import pytest

from deploy.local.stack import gpus
from deploy.local.stack.gpus import assign_gpus, parallel_sizes, visible_gpus, vllm_arguments
from shared.errors import ConfigError


class Driver:
    """NVIDIA's, as far as it is asked; CI has none."""

    def __init__(self, number: int, *, version: int = 13000, status: int = 0) -> None:
        self._number = number
        self._version = version
        self._status = status

    def cuInit(self, flags: int) -> int:
        assert flags == 0
        return self._status

    def cuDeviceGetCount(self, number: Any) -> int:
        number._obj.value = self._number
        return 0

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = self._version
        return 0

    def cuGetErrorString(self, status: int, text: Any) -> int:
        text._obj.value = b"no CUDA-capable device is detected" if status == 100 else None
        return 0


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_it_counts_what_the_driver_shows() -> None:
    assert gpus.count_of_driver(Driver(3)) == 3
    assert gpus.count_of_driver(Driver(1, version=13050)) == 1


def test_without_a_gpu_the_error_has_the_drivers_message(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"shows no GPU: no CUDA-capable device is detected \(status 100\)$"):
        gpus.count_of_driver(Driver(0, status=100))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(ConfigError, match=r"\(status 100\); CUDA_VISIBLE_DEVICES is '7'$"):
        gpus.count_of_driver(Driver(0, status=100))
    with pytest.raises(ConfigError, match=r"shows no GPU; CUDA_VISIBLE_DEVICES is '7'$"):
        gpus.count_of_driver(Driver(0))


def test_a_status_without_a_message_is_shown_by_its_number() -> None:
    with pytest.raises(ConfigError, match=r"no further message \(status 999\)"):
        gpus.count_of_driver(Driver(1, status=999))


def test_a_driver_that_is_too_old_is_named_with_what_is_needed() -> None:
    with pytest.raises(ConfigError, match=r"supports CUDA 12\.8; CUDA 13\.0 is needed: driver release 580"):
        gpus.count_of_driver(Driver(1, version=12080))


def has_a_driver() -> bool:
    try:
        ctypes.CDLL(gpus.DRIVER)
    except OSError:
        return False
    return True


@pytest.mark.skipif(has_a_driver(), reason="this machine has an NVIDIA driver")
def test_without_a_driver_it_says_what_was_looked_for() -> None:
    with pytest.raises(ConfigError, match=r"--device cuda: there is no NVIDIA driver here \(libcuda\.so\.1: "):
        gpus.count_visible()


def test_without_cupy_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    with pytest.raises(ConfigError, match=r"needs CuPy, which is not installed: \./headrace install-gpu \(0\.6 GB\)"):
        gpus.require_cupy()
    (tmp_path / "cupy.py").touch()
    gpus.require_cupy()


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


@pytest.mark.parametrize(
    ("workers", "sizes", "expected"),
    [
        (2, {}, ("4", "5")),
        (5, {}, ("4", "5", "6", "4", "5")),
        (2, {"tensor_parallel_size": 2}, ("4,5", "4,5")),
    ],
)
def test_workers_whose_kv_is_fixed_share_gpus_if_these_are_too_few(
    workers: int, sizes: dict[str, int], expected: tuple[str, ...]
) -> None:
    assert assign_gpus(workers, sizes, tuple("456"), shared=True) == expected


def test_too_few_gpus_are_refused_with_what_needs_them() -> None:
    with pytest.raises(ConfigError) as refused:
        assign_gpus(2, {"tensor_parallel_size": 2, "data_parallel_size": 2}, ("0", "1", "2", "3"))
    assert str(refused.value) == (
        "--workers 2 needs 8 GPUs, 4 each (vllm.tensor_parallel_size 2 * vllm.data_parallel_size 2); CUDA shows 4"
        "; with worker.vllm.gpu_memory_utilization and worker.vllm.kv_cache_memory_bytes, each for one worker,"
        " they share GPUs"
    )
    with pytest.raises(ConfigError, match=r"^--workers 2 needs 2 GPUs; CUDA shows 1; with worker\.vllm\.gpu_memory"):
        assign_gpus(2, {}, ("0",))
    with pytest.raises(ConfigError, match=r"^--workers 1 needs 2 GPUs, 2 each .* CUDA shows 1$"):
        assign_gpus(1, {"tensor_parallel_size": 2}, ("0",), shared=True)
    with pytest.raises(
        ConfigError, match=r"^--workers 1 needs 8 GPUs, 8 each \(vllm\.data_parallel_size 8\); CUDA shows 7$"
    ):
        assign_gpus(None, {"data_parallel_size": 8}, tuple("1234567"))


def test_arguments_are_found_however_they_were_given_and_settings_override_the_file() -> None:
    settings = [("--max_running", "8"), ("--vllm.kv-cache-memory-bytes", "4")]
    found = vllm_arguments(settings, {"kv_cache_memory_bytes": 2, "max-model-len": 64})
    assert found == {
        "kv_cache_memory_bytes": ("--set worker.vllm.kv-cache-memory-bytes", "4"),
        "max_model_len": ("--vllm-args: max-model-len", 64),
    }


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
