"""deploy/local/stack/gpus.py: how many GPUs there are, or in one sentence why none."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import pytest

from deploy.local.stack import gpus
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
