"""Makes a CudaRunner from a worker's settings: selects the GPU, shares out its memory and loads the weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import cupy as cp  # pyright: ignore[reportMissingImports]
import msgspec
from cupy.cuda import runtime  # pyright: ignore[reportMissingImports]

from services.worker.config import Dtype, WorkerConfig
from services.worker.contracts.messages import Loading
from services.worker.limits import MAX_STEP_TOKENS
from services.worker.model.tensor_header import Shape
from services.worker.native.config import ModelConfig, read_config
from services.worker.native.cuda.capacity import GpuRoom, capacity, step_bytes, weight_bytes
from services.worker.native.cuda.faults import no_room_as_model_error
from services.worker.native.cuda.matrix_memory import cuda_weights_of
from services.worker.native.cuda.runner import CudaRunner, step_limits
from services.worker.native.cuda.shared_weights import SharedCudaWeights
from services.worker.native.cuda.turn_room import turn_room
from services.worker.native.cuda.weights import CudaWeights, load_cuda_weights
from services.worker.native.grammars import GrammarCache
from services.worker.native.prepare import prepare
from services.worker.native.weights import Checkpoint, weights_digest
from services.worker.transfer.cuda import use_device
from services.worker.transfer.device_memory import DeviceMemory
from shared.errors import ConfigError
from shared.messages.cards import KvLayout

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
    """Return a runner for a worker's settings. Raise ConfigError and ModelError.

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
    if not settings.most_images:
        config = msgspec.structs.replace(config, vision=None)
    with no_room_as_model_error(str(directory), "CUDA itself"):
        free_bytes, total_bytes = runtime.memGetInfo()
    shapes = Checkpoint(directory, config).shapes
    alone = stands_by or bool(settings.turns)
    usable_bytes = total_bytes if alone else free_bytes
    parts = _gpu_parts(settings, config, shapes, str(directory), usable_bytes, total_bytes)
    with ExitStack() as loading:
        if settings.turns:
            loading.enter_context(_turn(settings, parts.needed_bytes, progress))
        # Free memory stays in the pool: a step with LoRAs, which allocates, must not have to ask the driver.
        memory = DeviceMemory(cuda.gpu, keep_bytes=total_bytes)
        cp.cuda.set_allocator(memory.allocator())
        with no_room_as_model_error(str(directory), "the weights"):
            text = msgspec.structs.replace(config, vision=None)  # each engine has a vision tower of its own
            shared = cuda_weights_of(settings, directory, text, Checkpoint(directory, text).shapes)
            weights = _weights(
                *(directory, config, cuda.dtype, shared),
                lambda share: progress(Loading("copying weights to the GPU", share)),
            )
        digest = weights_digest(directory, config)
        progress(Loading("compiling kernels that are not on disk", 0.0))
        return CudaRunner(
            config,
            weights,
            memory,
            cuda,
            capacity_blocks=parts.blocks,
            first_blocks=-(-(MAX_STEP_TOKENS + 1) // settings.block_size) if stands_by else 0,
            block_size=settings.block_size,
            max_running=settings.max_running,
            verify=settings.kvbm.verify,
            lora_rank=settings.lora_rank,
            lora_bytes=parts.lora_bytes,
            shares_blocks=settings.shares_blocks,
            shared=shared,
            path=str(directory),
            digest=digest,
            grammars=GrammarCache.from_directory(directory, config.vocab, config.eos_token_ids),
            most_images=settings.most_images if config.vision is not None else 0,
            encoder_cache_bytes=settings.encoder_cache_bytes,
            progress=lambda share: progress(Loading("capturing graphs", share)),
        )


def _turn(
    settings: WorkerConfig, needed_bytes: int, progress: Callable[[Loading], None]
) -> AbstractContextManager[None]:
    """Wait until the other models of the GPU leave room. Raise ModelError."""
    return turn_room(
        Path(settings.cache) / f"turns-gpu-{settings.cuda.gpu}.lock",
        needed_bytes,
        lambda: int(runtime.memGetInfo()[0]),
        lambda: progress(Loading("waiting for other models to leave the GPU", 0.0)),
    )


def _weights(
    directory: Path,
    config: ModelConfig,
    element_type: Dtype,
    shared: SharedCudaWeights[CudaWeights] | None,
    progress: Callable[[float], None],
) -> CudaWeights:
    if shared is not None:
        return shared.load(progress)
    return load_cuda_weights(directory, config, element_type, progress)


class _GpuParts(msgspec.Struct, frozen=True):
    """How an engine shares out its part of a GPU."""

    blocks: int
    lora_bytes: int
    needed_bytes: int
    """What must be free before anything is loaded. Weights that a memory service keeps may be there already."""


def _gpu_parts(
    settings: WorkerConfig,
    config: ModelConfig,
    shapes: dict[str, Shape],
    model: str,
    free_bytes: int,
    total_bytes: int,
) -> _GpuParts:
    """Return the number of KV blocks, and the bytes that are left for LoRAs. Raise ModelError."""
    dtype, block_size = settings.cuda.dtype, settings.block_size
    layout = KvLayout(dtype, config.layers, config.kv_heads, config.head_dim, block_size)
    element_bytes = 4 if dtype == "float32" else 2
    asked_blocks = settings.capacity_blocks or settings.capacity_bytes // layout.block_bytes
    context_length = min(config.context_length, asked_blocks * block_size) or config.context_length
    limits = step_limits(context_length, block_size, max_running=settings.max_running, max_rows=MAX_STEP_TOKENS)
    room = GpuRoom(
        total_bytes,
        free_bytes,
        weight_bytes(shapes, element_bytes),
        step_bytes(config, limits, element_bytes),
    )
    lora_bytes = room.lora_bytes_of(settings.lora_bytes, settings.cuda.memory_share)
    blocks = capacity(
        msgspec.structs.replace(room, lora_bytes=lora_bytes),
        blocks=settings.capacity_blocks,
        kv_bytes=settings.capacity_bytes,
        share=settings.cuda.memory_share,
        block_bytes=layout.block_bytes,
        model=model,
    )
    own_bytes = 0 if settings.weights.memory else room.weight_bytes
    needed_bytes = own_bytes + room.step_bytes + lora_bytes + blocks * layout.block_bytes
    return _GpuParts(blocks, lora_bytes, needed_bytes)
