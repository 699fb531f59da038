"""Makes a CudaRunner from a worker's settings: selects the GPU, prepares the model, and starts the ranks, if there are
several."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import cupy as cp  # pyright: ignore[reportMissingImports]
import msgspec
from cupy.cuda import runtime  # pyright: ignore[reportMissingImports]

from services.worker.config import WorkerConfig
from services.worker.contracts.messages import Loading
from services.worker.native.config import read_config
from services.worker.native.cuda.faults import no_room_as_model_error
from services.worker.native.cuda.group import CudaRankGroup
from services.worker.native.cuda.runner import CudaRunner
from services.worker.native.cuda.start import start_runner
from services.worker.native.prepare import prepare
from services.worker.transfer.cuda import use_device
from shared.errors import ConfigError

_INSUFFICIENT_DRIVER = 35
"""The status code cudaErrorInsufficientDriver, which also means that there is no driver at all."""


def use_gpu(gpu: int) -> None:
    """Make `gpu` the calling thread's device. Raise ConfigError, which says what was found, and DeviceFailed."""
    try:
        count = int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as wrong:
        raise ConfigError(f"device is cuda, but CUDA finds no GPU: {_why(wrong)}") from None
    if gpu >= count:
        shown = "one GPU, number 0" if count == 1 else f"{count} GPUs, 0 to {count - 1}"
        raise ConfigError(f"cuda.gpu is {gpu}, but CUDA shows {shown}; CUDA_VISIBLE_DEVICES chooses which")
    use_device(gpu)


def _why(wrong: Exception) -> str:
    if getattr(wrong, "status", None) != _INSUFFICIENT_DRIVER:
        return str(wrong)
    driver, needed = _version(runtime.driverGetVersion()), _version(runtime.runtimeGetVersion())
    if driver == "0.0":
        return "no NVIDIA driver is installed, or libcuda.so.1 is not found"
    return f"the NVIDIA driver supports CUDA up to {driver}, but CuPy {cp.__version__} needs {needed}"


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def load_cuda(settings: WorkerConfig, progress: Callable[[Loading], None], *, stands_by: bool = False) -> CudaRunner:
    """Return a runner for a worker's settings. Raise ConfigError, ModelError, RankLost.

    With `stands_by` it has little KV until it has slept, and as much then as if the GPU were empty now. A model that
    takes turns with others also gets what an empty GPU has room for, once the others have given theirs back.

    It sets CuPy's allocator for the whole process, so a process can have only one such runner.
    """
    cuda, source = settings.cuda, Path(settings.model)
    with no_room_as_model_error(settings.model, "CUDA itself"):
        use_gpu(cuda.gpu)
    # float32 weights are prepared as for the CPU engine, so that both engines can exchange blocks.
    directory = prepare(source, Path(settings.cache), progress, as_stored=cuda.dtype != "float32")
    config = read_config(directory)
    if settings.tensor_parallel > 1 or not settings.most_images:
        config = msgspec.structs.replace(config, vision=None)  # its text part alone
    if settings.tensor_parallel == 1:
        return start_runner(settings, directory, config, progress, stands_by=stands_by)
    group = CudaRankGroup(settings, directory, config)
    try:
        with group.guard():
            return start_runner(settings, directory, config, progress, group.place, group)
    except BaseException:
        group.close()
        raise
