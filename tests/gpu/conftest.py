"""Every test of tests/gpu gives its device memory back, for the processes that later tests start."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def device_memory_is_given_back() -> Iterator[None]:
    """Collect what the test made: runners, arrays and allocators refer to each other."""
    yield
    gc.collect()
