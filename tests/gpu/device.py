"""Finds CuPy and a device for the GPU tests, or a reason to skip them."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import pytest


@functools.cache
def missing() -> str:
    """Return why this machine cannot compute on a GPU; empty if it can."""
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
    """Return the module cupy; skip the calling module if there is no CuPy or no GPU."""
    if reason := missing():
        pytest.skip(reason, allow_module_level=True)
    return importlib.import_module("cupy")
