"""Computes matrix products with cuBLAS, on a handle of its own.

CuPy refuses its own cuBLAS calls while a stream captures a CUDA graph. cuBLAS itself can be captured once it has a
fixed workspace, so `cublasGemmEx` is called through ctypes, in the library that CuPy has loaded.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import cupy as cp  # pyright: ignore[reportMissingImports]

from services.worker.config import Dtype
from services.worker.native.cuda.capacity import BLAS_BYTES
from services.worker.native.linear import Array
from shared.errors import ModelError

_TRANSPOSED, _PLAIN = 1, 0
_FLOAT32 = 0  # cudaDataType_t
_DATA_TYPES: dict[Dtype, int] = {"float32": _FLOAT32, "float16": 2, "bfloat16": 14}
_COMPUTE_32F = 68
_DEFAULT_ALGORITHM = -1


class Blas:
    """Matrix products of one element type, accumulated in float32. Only one thread may use it at a time."""

    def __init__(self, element_type: Dtype, stream: Any) -> None:
        """Make a cuBLAS handle whose products run on `stream`. Raise ModelError."""
        self._library = _loaded_cublas()
        self._type = _DATA_TYPES[element_type]
        self._workspace = cp.empty(BLAS_BYTES, cp.uint8)
        self._handle = ctypes.c_void_p()
        self._call("cublasCreate_v2", ctypes.byref(self._handle))
        self._call("cublasSetStream_v2", self._handle, ctypes.c_void_p(stream.ptr))
        workspace = ctypes.c_void_p(self._workspace.data.ptr)
        self._call("cublasSetWorkspace_v2", self._handle, workspace, ctypes.c_size_t(BLAS_BYTES))
        self._one, self._zero = ctypes.c_float(1), ctypes.c_float(0)

    def product(self, out: Array, x: Array, weight: Array, *, add: bool = False, factor: float = 1.0) -> None:
        """Compute factor · x (rows, inputs) · weight (outputs, inputs)ᵀ into `out` (rows, outputs).

        With `add`, add it to what is there.

        All are row-major, x and weight contiguous; rows of `out` may be further apart than they are long. x and weight
        both have the element type, or are float32; out has their type, or is float32.
        """
        rows, inputs = x.shape
        outputs = weight.shape[0]
        assert out.shape == (rows, outputs), (out.shape, x.shape, weight.shape)
        assert x.dtype == weight.dtype, (x.dtype, weight.dtype)
        kind = _FLOAT32 if x.dtype == cp.float32 else self._type
        # cuBLAS reads arrays as column-major, so it sees their transposes: outᵀ = weight · xᵀ.
        self._call(
            "cublasGemmEx",
            self._handle,
            _TRANSPOSED,
            _PLAIN,
            outputs,
            rows,
            inputs,
            ctypes.byref(self._one if factor == 1 else ctypes.c_float(factor)),
            ctypes.c_void_p(weight.data.ptr),
            kind,
            inputs,
            ctypes.c_void_p(x.data.ptr),
            kind,
            inputs,
            ctypes.byref(self._one if add else self._zero),
            ctypes.c_void_p(out.data.ptr),
            _FLOAT32 if out.dtype == cp.float32 else self._type,
            out.strides[0] // out.itemsize if rows > 1 else outputs,
            _COMPUTE_32F,
            _DEFAULT_ALGORITHM,
        )

    def close(self) -> None:
        """Destroy the handle; no product may follow."""
        self._call("cublasDestroy_v2", self._handle)

    def _call(self, function: str, *arguments: Any) -> None:
        status = getattr(self._library, function)(*arguments)
        if status:
            raise ModelError(f"{function} failed with cuBLAS status {status}")


def _loaded_cublas() -> ctypes.CDLL:
    """Return the library that CuPy has loaded: a second copy would take memory on the device too."""
    cp.cuda.device.get_cublas_handle()  # loads it
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        path = line.split(maxsplit=5)[-1]
        if Path(path).name.startswith("libcublas.so"):
            return ctypes.CDLL(path)
    raise ModelError("CuPy has loaded no libcublas.so")
