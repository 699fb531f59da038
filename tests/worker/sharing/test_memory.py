from __future__ import annotations

import gc
from contextlib import suppress
from pathlib import Path

import pytest

from services.worker.sharing.host_pages import HostPages
from services.worker.sharing.memory import pages_to_share
from services.worker.transfer.errors import DeviceFailed, DeviceMemoryExhausted
from tests.resource_limits import LIMIT_BYTES, small_files


def test_a_device_without_memory_for_others_shares_nothing_and_says_so_in_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails() -> HostPages:
        raise DeviceFailed("CUDA_ERROR_NOT_SUPPORTED: cuMemCreate failed with status 801")

    assert pages_to_share(fails) is None
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert "CUDA_ERROR_NOT_SUPPORTED" in record.getMessage()
    assert "kvbm.lending" in record.getMessage()


def test_a_full_device_is_no_reason_to_try_other_memory() -> None:
    def full() -> HostPages:
        raise DeviceMemoryExhausted(1, 0, 0, 0)

    with pytest.raises(DeviceMemoryExhausted):
        pages_to_share(full)


def memfds() -> int:
    """Return how many descriptors stand for memory of HostPages; one that is closed meanwhile stands for none."""
    targets: list[str] = []
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            targets.append(str(path.readlink()))
    return sum("memfd:headrace-peer" in target for target in targets)


def test_a_system_without_such_memory_shares_nothing_and_keeps_no_descriptor() -> None:
    gc.collect()
    before = memfds()
    with small_files():
        assert pages_to_share(lambda: HostPages(2 * LIMIT_BYTES)) is None
    assert memfds() == before
