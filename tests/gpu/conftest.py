"""Every test of tests/gpu gives its device memory back, for the processes that later tests start."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.gpu.device import missing


@pytest.fixture(autouse=True)
def device_memory_is_given_back() -> Iterator[None]:
    """Collect what the test made: runners, arrays and allocators refer to each other. Make the first GPU the thread's
    own again."""
    yield
    gc.collect()
    if not missing():
        import cupy  # pyright: ignore[reportMissingImports]

        cupy.cuda.Device(0).use()
