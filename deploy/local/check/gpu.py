"""Measures GPUs through CuPy: copies to and from pinned memory, links between GPUs, pinning of the pool's file."""

from __future__ import annotations

import importlib.util
import mmap
import os
from pathlib import Path
from typing import Any

from deploy.local.check.disk import unnamed
from deploy.local.check.measurements import GpuMeasured, GpusMeasured, Unmeasured
from deploy.local.check.memory import DRIVER, existing
from shared.installation import install_command

COPY_BYTES, COPIES = 256 << 20, 4
PINNED_BYTES = 16 << 20
"""The size of the file that is pinned as a test."""
MOST_GPUS = 16
TO_DEVICE, FROM_DEVICE, ANYWHERE = 1, 2, 4
"""Kinds of cudaMemcpy; the last one finds out by the addresses."""


def measure(pool: Path) -> GpusMeasured | Unmeasured:
    """Return what the visible GPUs do; `pool` is the pool's directory. Errors of CUDA are raised."""
    if not DRIVER.exists():
        return Unmeasured("There is no NVIDIA driver here")
    if importlib.util.find_spec("cupy") is None:
        return Unmeasured("CuPy is not installed", advice=f"{install_command('gpu')} (0.6 GB), then check again")
    import cupy  # pyright: ignore[reportMissingImports]
    from cupy.cuda import runtime  # pyright: ignore[reportMissingImports]

    try:
        count = min(runtime.getDeviceCount(), MOST_GPUS)
    except runtime.CUDARuntimeError as wrong:
        return Unmeasured(f"the NVIDIA driver shows no GPU: {wrong}", wanted=True, advice="driver release 580 or newer")
    gpus = tuple(_gpu(cupy, runtime, index, count) for index in range(count))
    refusal = _pin(runtime, existing(pool))
    return GpusMeasured(gpus, not refusal, refusal)


def _gpu(cupy: Any, runtime: Any, index: int, count: int) -> GpuMeasured:
    with cupy.cuda.Device(index):
        pinned = cupy.cuda.alloc_pinned_memory(COPY_BYTES)
        device = cupy.cuda.alloc(COPY_BYTES)
        to_s = _copies(cupy, runtime, device.ptr, pinned.ptr, TO_DEVICE)
        from_s = _copies(cupy, runtime, pinned.ptr, device.ptr, FROM_DEVICE)
        name = runtime.getDeviceProperties(index)["name"].decode(errors="replace")
    peers = tuple(each for each in range(count) if each != index and runtime.deviceCanAccessPeer(index, each))
    peer_s = _copies_from_peer(cupy, runtime, index, peers[0], device.ptr) if peers else 0.0
    return GpuMeasured(
        index, name, COPY_BYTES / to_s, COPY_BYTES / from_s, peers, COPY_BYTES / peer_s if peers else 0.0
    )


def _copies_from_peer(cupy: Any, runtime: Any, index: int, peer: int, to: int) -> float:
    """Return the seconds of the fastest of COPIES copies from another GPU's memory, as GPU `index` pulls them."""
    with cupy.cuda.Device(peer):
        source = cupy.cuda.alloc(COPY_BYTES)
    with cupy.cuda.Device(index):
        runtime.deviceEnablePeerAccess(peer)
        try:
            return _copies(cupy, runtime, to, source.ptr, ANYWHERE)
        finally:
            runtime.deviceDisablePeerAccess(peer)


def _copies(cupy: Any, runtime: Any, to: int, source: int, kind: int) -> float:
    """Return the seconds of the fastest of COPIES copies, by the GPU's own clock."""
    stream = cupy.cuda.Stream(non_blocking=True)
    taken = list[float]()
    for _ in range(COPIES):
        began, ended = cupy.cuda.Event(), cupy.cuda.Event()
        began.record(stream)
        runtime.memcpyAsync(to, source, COPY_BYTES, kind, stream.ptr)
        ended.record(stream)
        ended.synchronize()
        taken.append(cupy.cuda.get_elapsed_time(began, ended) / 1000)
    return min(taken)


def _pin(runtime: Any, directory: Path) -> str:
    """Pin a file of the directory, as workers pin the pool. Return why it was refused. Empty if it was not."""
    import ctypes

    file = unnamed(directory)
    try:
        os.ftruncate(file, PINNED_BYTES)
        memory = mmap.mmap(file, PINNED_BYTES)
    finally:
        os.close(file)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    try:
        runtime.hostRegister(address, PINNED_BYTES, 0)
    except runtime.CUDARuntimeError as wrong:
        return str(wrong)
    runtime.hostUnregister(address)
    return ""
