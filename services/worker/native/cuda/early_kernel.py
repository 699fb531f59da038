"""Launches kernels that begin while the one before them on their stream still ends.

CUDA calls this programmatic dependent launch. Such a kernel waits by itself for the one before (`after_others` of
elements.cuh), so that its thread blocks are in place and its first weights on their way when that one ends. CuPy has no
way to launch kernels so; it is the driver's cuLaunchKernelEx. A captured launch stays such a launch in its graph.
"""

from __future__ import annotations

import ctypes
from typing import Any

import cupy as cp  # pyright: ignore[reportMissingImports]
import numpy as np

from shared.errors import ModelError

_SERIALIZED = 6
"""The number of CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION in cuda.h."""


class _Attribute(ctypes.Structure):
    """A CUlaunchAttribute whose value is an int."""

    _fields_ = (("name", ctypes.c_int), ("_", ctypes.c_int), ("value", ctypes.c_int), ("_rest", ctypes.c_int * 15))


class _Launch(ctypes.Structure):
    """A CUlaunchConfig of cuda.h: how a kernel is launched."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


class EarlyKernel:
    """A kernel that is called as a cupy.RawKernel is, and begins early."""

    def __init__(self, kernel: Any) -> None:
        """Launch the function of a cupy.RawKernel, which this keeps loaded."""
        self._kernel = kernel
        self._launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        """Launch it on the current stream. Raise ModelError if the driver refuses."""
        values = [np.array(one.data.ptr if isinstance(one, cp.ndarray) else one) for one in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(value.ctypes.data for value in values))
        attribute = _Attribute(_SERIALIZED, 0, 1)
        stream = cp.cuda.get_current_stream().ptr
        launch = _Launch(_three(grid), _three(block), 0, stream, ctypes.pointer(attribute), 1)
        function = ctypes.c_void_p(self._kernel.kernel.ptr)
        failed = self._launch(ctypes.byref(launch), function, pointers, None)
        if failed:
            raise ModelError(
                f"the GPU's kernels cannot begin early: CUDA's error {failed}; cuda.hopper_kernels = false does without"
            )


def _three(sizes: tuple[int, ...]) -> ctypes.Array[ctypes.c_uint]:
    return (ctypes.c_uint * 3)(*sizes, *(1 for _ in range(3 - len(sizes))))
