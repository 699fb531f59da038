"""The GPU tests' one gate: CuPy and a device, or a reason why not."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import pytest


@functools.cache
def missing() -> str:
    """Why nothing can be computed on a GPU here; empty: it can."""
    try:
        cp = importlib.import_module("cupy")
    except ImportError:
        return "CuPy is not installed"
    try:
        count = cp.cuda.runtime.getDeviceCount()
    except cp.cuda.runtime.CUDARuntimeError as wrong:
        return f"no GPU: {wrong}"
    return "" if count else "no GPU"


def cupy_on_a_device() -> Any:
    """The module cupy; skips the calling module where there is no CuPy or no GPU."""
    if reason := missing():
        pytest.skip(reason, allow_module_level=True)
    return importlib.import_module("cupy")
