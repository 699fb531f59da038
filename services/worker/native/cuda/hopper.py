"""What only GPUs of NVIDIA's Hopper generation have: kernels with its instructions, and pages as its copy engine reads
them.

CuPy compiles for all of a GPU's successors too, which do not have these instructions, so NVRTC is called here.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import cupy as cp  # pyright: ignore[reportMissingImports]
import numpy as np
from cupy.cuda import driver, nvrtc  # pyright: ignore[reportMissingImports]

from services.worker.native.linear import Array
from shared.errors import ConfigError

HEAD_DIM = 128
"""The width of heads that attention_prefill_hopper.cu is written for."""
THREADS = 384
SHARED_BYTES = 6 * 128 * HEAD_DIM * 2 + 1024
"""Five slots of keys or values and one of queries, of 128 positions each; and what it takes to align them."""
_SOURCE = Path(__file__).parent / "kernels" / "attention_prefill_hopper.cu"
_BOX = (64, 1, 16, 1, 1)
"""Columns, heads, positions, layers' parts and slots that are copied together."""
_MAP_BYTES = 128
_UINT16, _NOT_INTERLEAVED, _SWIZZLE_OF_128_BYTES, _L2_OF_256_BYTES, _ZEROS_OUTSIDE = 1, 0, 3, 3, 0


def is_hopper() -> bool:
    """Whether the current device is of this generation."""
    return bool(cp.cuda.Device().compute_capability == "90")


def compile_prefill(block_size: int, *, windowed: bool) -> Any:
    """Compile attention_prefill_hopper.cu in about two seconds, or take what was compiled before; it is kept among
    CuPy's own kernels. Raise RuntimeError with the compiler's words."""
    source = _SOURCE.read_text(encoding="utf-8")
    words = ("-arch=sm_90a", "--std=c++17", f"-DBLOCK_SIZE={block_size}", f"-DWINDOWED={int(windowed)}")
    named = blake2b("\0".join((source, *words, str(nvrtc.getVersion()))).encode(), digest_size=16).hexdigest()
    kept = Path(os.environ.get("CUPY_CACHE_DIR", "~/.cupy/kernel_cache")).expanduser() / f"headrace-{named}.cubin"
    try:
        binary = kept.read_bytes()
    except OSError:
        binary = _compiled(source, words)
        with suppress(OSError):  # then it is compiled at each start
            kept.parent.mkdir(parents=True, exist_ok=True)
            part = kept.with_suffix(f".{os.getpid()}")
            part.write_bytes(binary)
            part.replace(kept)
    module = cp.cuda.function.Module()
    module.load(binary)
    kernel = module.get_function("attend_prefill")
    driver.funcSetAttribute(kernel.ptr, driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, SHARED_BYTES)
    return kernel


def _compiled(source: str, words: tuple[str, ...]) -> bytes:
    program = nvrtc.createProgram(source, _SOURCE.name, (), ())
    try:
        nvrtc.compileProgram(program, words)
        return bytes(nvrtc.getCUBIN(program))
    except nvrtc.NVRTCError as wrong:
        raise RuntimeError(f"{wrong}: {nvrtc.getProgramLog(program)}") from wrong
    finally:
        nvrtc.destroyProgram(program)


def page_map(pages: Array) -> Array:
    """Return a tensor map of pages (slots, layers, 2, positions, heads, HEAD_DIM) of 16-bit numbers, on the device.

    The map holds the pages' address. Raise ConfigError if the driver refuses it."""
    slots, layers, parts, positions, heads, columns = pages.shape
    sizes = (columns, heads, positions, layers * parts, slots)
    strides = np.cumprod(np.array(sizes[:-1], np.uint64)) * np.uint64(2)
    made = (ctypes.c_ubyte * (2 * _MAP_BYTES))()
    at = (ctypes.addressof(made) + _MAP_BYTES - 1) // _MAP_BYTES * _MAP_BYTES
    encode = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    failed = encode(
        *(ctypes.c_void_p(at), _UINT16, len(sizes), ctypes.c_void_p(pages.data.ptr)),
        (ctypes.c_uint64 * len(sizes))(*sizes),
        (ctypes.c_uint64 * len(strides))(*strides.tolist()),
        (ctypes.c_uint32 * len(_BOX))(*_BOX),
        (ctypes.c_uint32 * len(_BOX))(*(1 for _ in _BOX)),
        *(_NOT_INTERLEAVED, _SWIZZLE_OF_128_BYTES, _L2_OF_256_BYTES, _ZEROS_OUTSIDE),
    )
    if failed:
        raise ConfigError(
            f"the GPU's copy engine takes no pages of the shape {pages.shape}: CUDA's error {failed};"
            " cuda.hopper_kernels = false does without"
        )
    return cp.asarray(np.frombuffer(ctypes.string_at(at, _MAP_BYTES), np.uint8))
