"""The GPU tests' one gate: CuPy and a device, or a reason why not."""

from __future__ import annotations

from typing import Any

import pytest


def cupy_on_a_device() -> Any:
    """The module cupy; skips the calling module where there is no CuPy or no GPU."""
    cp = pytest.importorskip("cupy", reason="CuPy is not installed")
    try:
        count = cp.cuda.runtime.getDeviceCount()
    except cp.cuda.runtime.CUDARuntimeError as wrong:
        pytest.skip(f"no GPU: {wrong}", allow_module_level=True)
    if count < 1:
        pytest.skip("no GPU", allow_module_level=True)
    return cp
