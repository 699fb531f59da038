"""Starts a CudaRunner on a prepared model: shares out the GPU's memory and loads the weights, of one rank if there are
several."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import cupy as cp  # pyright: ignore[reportMissingImports]
import msgspec
from cupy.cuda import runtime  # pyright: ignore[reportMissingImports]

from services.worker.config import WorkerConfig
from services.worker.contracts.messages import Loading
from services.worker.limits import MAX_STEP_TOKENS
from services.worker.model.tensor_header import Shape
from services.worker.native.config import ModelConfig
from services.worker.native.cuda.capacity import CudaSizes, GpuRoom, capacity, step_bytes, weight_bytes
from services.worker.native.cuda.faults import no_room_as_model_error
from services.worker.native.cuda.group import CudaRankGroup
from services.worker.native.cuda.matrix_memory import cuda_weights_of
from services.worker.native.cuda.rank_place import RankPlace, RankRoom
from services.worker.native.cuda.runner import CudaRunner, step_limits
from services.worker.native.cuda.shared_weights import SharedCudaWeights
from services.worker.native.cuda.turn_room import turn_room
from services.worker.native.cuda.weights import CudaWeights, load_cuda_weights
from services.worker.native.grammars import GrammarCache
from services.worker.native.parallel.shares import Share, widest
from services.worker.native.weights import HEAD, Checkpoint, tensor_shapes, weights_digest
from services.worker.transfer.cuda import use_device
from services.worker.transfer.device_memory import DeviceMemory
from shared.messages.cards import KvLayout


def start_runner(
    settings: WorkerConfig,
    directory: Path,
    config: ModelConfig,
    progress: Callable[[Loading], None],
    place: RankPlace | None = None,
    group: CudaRankGroup | None = None,
    *,
    stands_by: bool = False,
) -> CudaRunner:
    """Return a runner of a prepared model, whose shape is `config`; or one rank's runner, which all ranks make at once.
    Rank 0 has the `group`. `stands_by` is that of `load_cuda`. Raise ConfigError, ModelError, RankLost."""
    share, planned = (None, None) if place is None else (place.share, widest(place.shares))
    settings = settings if place is None else place.settings(settings)
    own = config if share is None else share.of(config)
    cuda, model = settings.cuda, str(directory)
    use_device(cuda.gpu)
    shapes = _shapes(directory, config, planned)
    room = _room(model, place, alone=stands_by or bool(settings.turns))
    parts = _gpu_parts(settings, config if planned is None else planned.of(config), shapes, model, room, place)
    with ExitStack() as loading:
        if settings.turns:
            loading.enter_context(_turn(settings, parts.needed_bytes, progress))
        # Free memory stays in the pool: a step with LoRAs, which allocates, must not have to ask the driver.
        memory = DeviceMemory(cuda.gpu, keep_bytes=room.total_bytes)
        cp.cuda.set_allocator(memory.allocator())
        with no_room_as_model_error(model, "the weights"):
            weights, shared = _weights(
                *(settings, directory, config),
                lambda done: progress(Loading("copying weights to the GPU", done)),
                share,
            )
        digest = weights_digest(directory, config)
        progress(Loading("compiling kernels that are not on disk", 0.0))
        return CudaRunner(
            own,
            weights,
            memory,
            cuda,
            CudaSizes(
                capacity_blocks=parts.blocks,
                first_blocks=-(-(MAX_STEP_TOKENS + 1) // settings.block_size) if stands_by else 0,
                block_size=settings.block_size,
                max_running=settings.max_running,
                lora_rank=settings.lora_rank,
                lora_bytes=parts.lora_bytes,
                most_images=settings.most_images if config.vision is not None else 0,
                encoder_cache_bytes=settings.encoder_cache_bytes,
            ),
            verify=settings.kvbm.verify,
            shares_blocks=settings.shares_blocks,
            shared=shared,
            path=model,
            digest=digest,
            grammars=GrammarCache.from_directory(directory, config.vocab, config.eos_token_ids),
            progress=lambda done: progress(Loading("capturing graphs", done)),
            place=place,
            group=group,
            processors=room.processors,
        )


def _room(model: str, place: RankPlace | None, *, alone: bool) -> RankRoom:
    """Return what the GPU has, or the least that those of all ranks have. All of it counts as free if the engine will
    be `alone` there. Raise ModelError, RankLost."""
    with no_room_as_model_error(model, "CUDA itself"):
        free_bytes, total_bytes = runtime.memGetInfo()
    return RankRoom(total_bytes if alone else free_bytes, total_bytes) if place is None else place.room()


def _shapes(directory: Path, config: ModelConfig, share: Share | None) -> dict[str, Shape]:
    """Return the shapes of what is loaded, of a rank those of its part. Raise ModelError."""
    stored = Checkpoint(directory, config).shapes
    if share is None:
        return stored
    shapes = tensor_shapes(share.of(config))
    shapes.pop(HEAD, None)
    if HEAD in stored:
        shapes[HEAD] = (share.vocab.stop - share.vocab.start, config.hidden)
    return shapes


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
    settings: WorkerConfig,
    directory: Path,
    config: ModelConfig,
    progress: Callable[[float], None],
    share: Share | None,
) -> tuple[CudaWeights, SharedCudaWeights[CudaWeights] | None]:
    """Return the weights, and what keeps them if the memory service does. Raise ModelError, DeviceMemoryExhausted."""
    text = msgspec.structs.replace(config, vision=None)  # each engine has a vision tower of its own
    shared = cuda_weights_of(settings, directory, text, Checkpoint(directory, text).shapes)
    if shared is not None:
        return shared.load(progress), shared
    return load_cuda_weights(directory, config, settings.cuda.dtype, progress, share=share), None


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
    rank_room: RankRoom,
    place: RankPlace | None,
) -> _GpuParts:
    """Return the number of KV blocks, and the bytes that are left for LoRAs. Raise ModelError."""
    ranks, exchange_bytes = (1, 0) if place is None else (len(place.gpus), place.exchange_bytes)
    dtype, block_size = settings.cuda.dtype, settings.block_size
    layout = KvLayout(dtype, config.layers, config.kv_heads, config.head_dim, block_size)
    element_bytes = 4 if dtype == "float32" else 2
    asked_blocks = settings.capacity_blocks or settings.capacity_bytes // layout.block_bytes
    context_length = min(config.context_length, asked_blocks * block_size) or config.context_length
    limits = step_limits(
        context_length, block_size, max_running=settings.max_running, max_rows=MAX_STEP_TOKENS, ranks=ranks
    )
    room = GpuRoom(
        rank_room.total_bytes,
        rank_room.free_bytes,
        weight_bytes(shapes, element_bytes),
        step_bytes(config, limits, element_bytes) + exchange_bytes,
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
