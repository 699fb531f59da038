"""The native engine on one NVIDIA GPU as a Runner.

    step ─▶ all works compute few tokens and draw, and a graph fits? ─▶ launch that graph, rows padded
       └─▶ otherwise, and with LoRAs                                ─▶ the same kernels one by one

All device memory comes from one DeviceMemory, and the memory of the largest step is allocated at start. `step` returns
when the device has done the step. Only one thread may use it at a time.

A sleeping engine frees everything and is built again by the code of its start, so there is one way to take memory. Its
further ranks end, and are started again.

Each rank of a tensor-parallel group has a runner of its part. That of rank 0 is the engine's; the others `obey` it.
docs/decisions/0030 says why the engine is its own.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod
from pathlib import Path
from typing import Any

import cupy as cp  # pyright: ignore[reportMissingImports]
import numpy as np
from numpy.typing import NDArray

from services.worker.config import CudaConfig
from services.worker.contracts.messages import EngineOperation, MemoryUse, Operate, Ready
from services.worker.contracts.runner import AttachedPool, Drawn, EmbeddingLookups, Work
from services.worker.native.config import ModelConfig
from services.worker.native.cuda.blas import Blas
from services.worker.native.cuda.buffers import Buffers, kernel_address, pinned_array
from services.worker.native.cuda.capacity import CudaSizes, StepLimits, graph_rows, split_parts
from services.worker.native.cuda.decoder import CudaDecoder
from services.worker.native.cuda.exchange import DeviceExchange
from services.worker.native.cuda.faults import device_errors_as_model_error, no_room_as_model_error
from services.worker.native.cuda.graphs import DecodeGraphs
from services.worker.native.cuda.group import CudaRankGroup
from services.worker.native.cuda.kernels import PREFILL_ROWS, Kernels, compile_kernels
from services.worker.native.cuda.layout import CudaStep, StepLayout, most_ints
from services.worker.native.cuda.lora import place_lora
from services.worker.native.cuda.orders import LogitsOrder, RankDuty, StepOrder
from services.worker.native.cuda.pooling import Pooling
from services.worker.native.cuda.rank_place import RankPlace
from services.worker.native.cuda.sampler import CudaSampler
from services.worker.native.cuda.shared_weights import SharedCudaWeights
from services.worker.native.cuda.splits import SplitPlanner
from services.worker.native.cuda.vision_tower import CudaVisionTower, OneByOne
from services.worker.native.cuda.weights import (
    DTYPES,
    CudaWeights,
    load_cuda_weights,
    weights_on_device,
    weights_on_host,
)
from services.worker.native.facts import engine_facts
from services.worker.native.grammars import GrammarCache
from services.worker.native.image_encoder import ImageEncoder
from services.worker.native.linear import Array
from services.worker.native.lora import LORA_OPERATIONS, LoraRows, LoraStore, operate_loras, spans_by_lora
from services.worker.native.lora_file import LoraLayers
from services.worker.native.masks import MaskThread
from services.worker.native.parallel.operations import operate_loras_together
from services.worker.native.parallel.peers import RankLost
from services.worker.native.parallel.weights import rank_lora
from services.worker.native.pooling import pooling_spans, step_results
from services.worker.native.prompt_logprobs import ScoredRows, score_rows, scored_rows, with_prompt_logprobs
from services.worker.native.tensor_file import no_memory_as_model_error
from services.worker.native.weights import check_digest
from services.worker.scheduler.encoder_cache import EncoderCache
from services.worker.sharing.device_copier import SharedDeviceCopier
from services.worker.sharing.device_pages import DeviceMapper, DevicePages
from services.worker.sharing.memory import SharableMemory, pages_to_share
from services.worker.transfer.block_shape import BlockShape
from services.worker.transfer.copier import Copier
from services.worker.transfer.cuda import ERRORS
from services.worker.transfer.cuda_copier import CudaCopier
from services.worker.transfer.device_memory import DeviceMemory
from services.worker.transfer.mover import TransferMover
from shared.errors import ConfigError, ModelError
from shared.messages.cards import KvLayout
from shared.messages.frames import PromptLogprobs

_FETCH_BLOCKS, _FETCH_THREADS = 64, 256

_log = logging.getLogger(__name__)


class CudaRunner:
    """Computes steps on the current device: it stores and multiplies in `settings.dtype` and sums in float32."""

    use_graphs = True
    """Whether graphs are used; otherwise every step runs eagerly."""
    meanwhile: Callable[[Callable[[], bool]], None] | None = None
    """What is called while a step is computed, as `Overlaps` says."""
    pool_place: Callable[[], AttachedPool] | None = None
    """What the engine is attached to, as `CopiesInRanks` says."""
    _exchange: DeviceExchange | None = None
    """What this rank exchanges with the others within a step; None if there is one rank."""
    _exported: DevicePages | None = None
    """The memory of the KV pages, if other processes can map it."""
    _mover: TransferMover | None = None
    _kept: CudaWeights | None = None
    """The weights during a sleep of level 1: in host memory, or mapped."""
    _tower: CudaVisionTower | None = None
    _images: ImageEncoder | None = None
    """Not there while the engine sleeps, or if the model takes no images."""
    _store: EmbeddingLookups | None = None

    def __init__(
        self,
        config: ModelConfig,
        weights: CudaWeights,
        memory: DeviceMemory,
        settings: CudaConfig,
        sizes: CudaSizes,
        *,
        verify: bool = False,
        path: str = "",
        digest: str = "",
        shares_blocks: bool = False,
        shared: SharedCudaWeights[CudaWeights] | None = None,
        grammars: GrammarCache | None = None,
        progress: Callable[[float], None] = lambda _share: None,
        place: RankPlace | None = None,
        group: CudaRankGroup | None = None,
        processors: int = 0,
    ) -> None:
        """Allocate all memory and capture the graphs. Raise ModelError if the device has no room.

        `verify` is for the mover. With `shares_blocks` other engines can copy blocks, if the GPU has memory that they
        can map. `shared` has loaded the weights, if the memory service keeps them. `progress` is called with the share
        of the graphs that are captured. With `place` config, weights and KV are a rank's part; rank 0 has the `group`,
        and all plan for as many `processors`. Raise RankLost then, too."""
        whole, gpus = (config, {memory.device}) if place is None else (place.config, set(place.gpus))
        self._facts = engine_facts(
            config,
            KvLayout(settings.dtype, config.layers, whole.kv_heads, config.head_dim, sizes.block_size),
            sizes.capacity_blocks,
            most_images=sizes.most_images,
            lora_bytes=sizes.lora_bytes,
            path=path,
            grammars=grammars is not None,
            # 16-bit arithmetic gives other numbers than a CPU that stores KV in the same type.
            weights=digest if settings.dtype == "float32" else f"{digest}-{settings.dtype}",
            gpus=tuple(cp.cuda.runtime.deviceGetPCIBusId(gpu) for gpu in sorted(gpus)),
        )
        self._config, self._settings, self._memory, self._sizes = config, settings, memory, sizes
        self._place, self._group, self._shared = place, group, shared
        self._digest, self._verify, self._shares_blocks = digest, verify, shares_blocks
        self._blocks = min(sizes.first_blocks or sizes.capacity_blocks, sizes.capacity_blocks)
        """How many blocks of KV there are at present."""
        self._clock: Callable[[], float] = time.monotonic
        """The clock of the mover, and so of each of its copiers."""
        self._plan_steps(processors or int(cp.cuda.Device().attributes["MultiProcessorCount"]))
        self._make_stores(whole, grammars)
        self.stream.wait_event(cp.cuda.get_current_stream().record())  # wait for the weights
        self._take_memory(weights, progress)

    def _plan_steps(self, processors: int) -> None:
        """Say how large steps are, how they are laid out, which have graphs, and which kernels they run on which
        stream. Raise ConfigError, and ModelError if the device has no room."""
        sizes, ranks = self._sizes, 1 if self._place is None else len(self._place.gpus)
        running, block_size = sizes.max_running, sizes.block_size
        self._limits = step_limits(
            self._facts.context_length, block_size, max_running=running, max_rows=sizes.max_rows, ranks=ranks
        )
        self._graph_rows = graph_rows(self._settings, running)
        self._layout = StepLayout(block_size, PREFILL_ROWS, SplitPlanner.of(self._config, processors, running))
        with no_room_as_model_error(self._facts.path or "the model", "kernels"):
            hopper, element_type = self._settings.hopper_kernels, self._settings.dtype
            self._kernels = compile_kernels(self._config, element_type, block_size, hopper=hopper)
        self.stream = cp.cuda.Stream(non_blocking=True)
        """The stream of all steps."""
        self._launched = cp.cuda.Event(disable_timing=True)
        """Happens when the logits of the last step are computed, and mostly when its tokens are drawn."""

    def _make_stores(self, whole: ModelConfig, grammars: GrammarCache | None) -> None:
        """Make what keeps LoRAs of the `whole` model, masks of grammars, and embeddings of images."""
        sizes = self._sizes
        self._loras = LoraStore(whole, most_rank=sizes.lora_rank, most_bytes=sizes.lora_bytes, place=self._place_lora)
        self._masks = MaskThread(grammars)
        images = self._facts.images is not None
        self.encoder_cache: EncoderCache[Array] | None = EncoderCache(sizes.encoder_cache_bytes) if images else None

    def _take_memory(self, weights: CudaWeights, progress: Callable[[float], None] | None) -> None:
        """Allocate everything but the weights, and capture the graphs. Raise ModelError if the device has no room.
        Without `progress` each graph is captured before the first step that needs it, so that a wake does not wait for
        all of them."""
        facts, config, settings, limits = self._facts, self._config, self._settings, self._limits
        element_type, layout = settings.dtype, facts.kv_layout
        model, blocks = facts.path or "the model", self._blocks
        self._weights = weights
        with self.stream, cp.cuda.using_allocator(self._memory.allocator()):
            with no_room_as_model_error(model, f"{blocks} blocks of KV of {layout.block_bytes} bytes"):
                shape = (blocks, config.layers, 2, layout.block_size, config.kv_heads, config.head_dim)
                self.pages: Array = self._new_pages(shape, DTYPES[element_type])
            with no_room_as_model_error(model, f"steps of {limits.rows} tokens"):
                self._buffers = Buffers.allocate(config, limits, element_type)
                self._staged_ints = pinned_array(limits.ints, np.int32)
                self._staged_at = kernel_address(self._staged_ints)
                self._ints_left = cp.cuda.Event(disable_timing=True)
                """Happens when the staged integers can be overwritten."""
                self._blas = Blas(element_type, self.stream)
                if self._place is not None:
                    self._exchange = self._place.exchange()
                    self._exchange.limit(self._place.start_limit_s)
                self._decoder = self._new_decoder(weights, self._kernels)
                self._pooling = Pooling(self._decoder, limits.drawing, config.hidden)
                room, counts = self._buffers.changed_logits, self._buffers.token_counts
                self._drawing = CudaSampler(self._kernels, self.stream, room, counts, settings)
                self._take_tower()
            with no_room_as_model_error(model, "graphs"):
                early = self._kernels.beginning_early()
                self._graphs = DecodeGraphs(
                    self._new_decoder(weights, early),
                    self._buffers,
                    self.stream,
                    self._layout,
                    self._graph_rows,
                    lower_bound=settings.graph_lower_bound,
                )
                if progress is not None:
                    self._graphs.capture_all(progress)
                self.stream.synchronize()
            if self._place is not None and self._exchange is not None:
                self._exchange.check()
                self._exchange.limit(self._place.limit_s)
                self.stream.synchronize()
                self._place.peers.meet()
                self._place.peers.limit(self._place.limit_s)

    def _place_lora(self, layers: LoraLayers) -> LoraLayers:
        """Copy a LoRA, or this rank's part of it, to the device. Raise ModelError if there is no room."""
        if self._place is not None:
            layers = rank_lora(layers, self._place.config, self._place.share)
        return place_lora(layers, self._settings.dtype)

    def _new_decoder(self, weights: CudaWeights, kernels: Kernels) -> CudaDecoder:
        parts = (self.pages, kernels, self._blas, self._buffers, self._exchange)
        return CudaDecoder(self._config, weights, *parts)

    def _take_tower(self) -> None:
        """Load the vision tower, if the model takes images."""
        if self.encoder_cache is None:
            return
        directory, element_type = Path(self._facts.path), self._settings.dtype
        self._tower = CudaVisionTower.load(directory, self._config, element_type, self.stream, most_images=1)
        assert self._tower is not None
        self._images = ImageEncoder(OneByOne(self._tower), self.encoder_cache, self._store)

    def use_lookups(self, lookups: EmbeddingLookups) -> None:
        """Have these share embeddings of images with other engines."""
        self._store = lookups
        if self._images is not None:
            self._images.store = lookups

    def take_embeddings(self, key: bytes, embeddings: bytes) -> bool:
        """Put an image's embeddings from the store into the cache. Return whether they are of use."""
        return self._images is not None and self._images.take(key, embeddings, self._facts.embedding_size)

    def encode_image(self, key: bytes, pixels: bytes) -> None:
        """Encode an image for the store alone. Nothing is done while the runner sleeps."""
        if self._images is not None:
            with device_errors_as_model_error(), self.stream:
                self._images.encode_image(key, pixels)

    def _new_pages(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return uninitialised KV pages on the device."""
        if not self._shares_blocks:
            return cp.empty(shape, dtype)
        self._memory.trim()  # what the pool keeps is not there for others
        size_bytes = prod(shape) * cp.dtype(dtype).itemsize
        self._exported = pages_to_share(lambda: DevicePages(size_bytes, self._memory.device))
        if self._exported is None:
            return cp.empty(shape, dtype)
        return self._exported.array()[:size_bytes].view(dtype).reshape(shape)

    def _free_memory(self) -> None:
        """Free what `_take_memory` has allocated, as far as it came, and the weights on the device."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.close()
        if self._tower is not None:
            self._tower.close()
        self._tower = self._images = None
        if self.encoder_cache is not None:
            self.encoder_cache.clear()
        blas = self.__dict__.pop("_blas", None)
        if blas is not None:
            blas.close()
        for name in ("_graphs", "_drawing", "_pooling", "_decoder", "_buffers", "_weights", "pages"):
            self.__dict__.pop(name, None)
        if self._exported is not None:
            self._exported.close()
            self._exported = None

    @property
    def facts(self) -> Ready:
        """What the engine serves. The context is no longer than the cache."""
        return self._facts

    def step(self, works: Sequence[Work]) -> list[Drawn | None]:
        """Compute a step; return one entry for each work, None for those that do not end.

        The device has then done the step, so that the blocks that it filled can be copied on any stream. Raises
        ModelError if the device fails, and RankLost if another rank is.
        """
        with self._guard():
            return self._step(works)

    def _guard(self) -> AbstractContextManager[None]:
        """Return what ends the group, if there is one, where a rank is lost in what all do together."""
        return nullcontext() if self._group is None else self._group.guard()

    def _step(self, works: Sequence[Work]) -> list[Drawn | None]:
        drawing = [work for work in works if work.draws]
        self._masks.begin(works)
        spans = pooling_spans(works)
        with device_errors_as_model_error(), self.stream:
            logits = self.logits(works)
            self._pooling.begin(spans)
            if drawing:
                self._drawing.begin(logits, drawing)
            self._launched.record(self.stream)
        if self.meanwhile is not None:
            self.meanwhile(self._computes)
        with device_errors_as_model_error(), self.stream:
            masks = self._masks.end()  # they were computed while the device computes
            if drawing:
                drawn = self._drawing.end(masks)
            else:
                drawn = []
                self._drawing.wait()
            self._check_ranks()
            prompts = [self._score(rows) for rows in scored_rows(works)]
            self._check_ranks()  # scores are exchanged too
        results = step_results(works, drawn, self._pooling.sums(spans))
        return with_prompt_logprobs(works, results, prompts) if prompts else results

    def _check_ranks(self) -> None:
        """Raise RankLost if another rank was lost in the work that has ended."""
        if self._exchange is not None:
            self._exchange.check()

    def _score(self, rows: ScoredRows) -> PromptLogprobs | None:
        """Return log-probabilities of a prompt from the hidden states of the step, as `score_rows` does."""

        def score_turn(first: int, tokens: NDArray[np.int32], count: int) -> tuple[Array, Array, Array]:
            if self._group is not None:
                self._group.tell(LogitsOrder(first, len(tokens)))
            return self._drawing.score(self._decoder.logits(first, len(tokens)), tokens, count)

        return score_rows(rows, self._limits.drawing, score_turn)

    def _computes(self) -> bool:
        """Whether the device still computes the logits of the step."""
        with device_errors_as_model_error():
            return not self._launched.done

    def logits(self, works: Sequence[Work]) -> Array:
        """Enqueue a step on the runner's stream.

        Return logits (drawing works, vocab), float32 on the device, which are valid until the next step.
        """
        placed = [] if self._images is None else self._images.place(works)
        padded_rows = self._graphs.rows_for(works) if self.use_graphs and not placed else 0
        step = self._layout.lay_out(works, padded_rows=padded_rows)
        loras = spans_by_lora(works)
        if self._group is not None:
            self._group.tell(StepOrder(step, padded_rows, loras))
        return self._enqueue(step, padded_rows, self._loras.of(loras), placed)[: len(works)]

    def obey(self, order: RankDuty) -> None:
        """Do this rank's part of what rank 0 does, and wait for it. Raise RankLost."""
        if isinstance(order, Operate):
            self._operate(order)
            return
        assert self._exchange is not None
        with self.stream:
            if isinstance(order, StepOrder):
                self._enqueue(order.step, order.padded_rows, self._loras.of(order.loras))
            else:
                self._decoder.logits(order.first, order.rows)
            self._drawing.wait()
        self._exchange.check()

    def _enqueue(
        self,
        step: CudaStep,
        padded_rows: int,
        loras: Sequence[LoraRows] = (),
        placed: Sequence[tuple[int, Array]] = (),
    ) -> Array:
        """Enqueue a step as it is laid out, on a graph of `padded_rows` unless that is 0; return its logits."""
        ints = step.ints
        if padded_rows and not loras:
            with self.stream, no_room_as_model_error(self._facts.path or "the model", "graphs"):
                self._graphs.capture(padded_rows)
        self._ints_left.synchronize()
        self._staged_ints[: len(ints)] = ints
        with self.stream:
            # A kernel reads them, because a copy would wait for the copies of blocks from the pool.
            fours = -(-len(ints) // 4)
            blocks = min(_FETCH_BLOCKS, -(-fours // _FETCH_THREADS))
            arguments = (self._buffers.ints, self._staged_at, np.int32(fours))
            self._kernels.fetch((blocks,), (_FETCH_THREADS,), arguments)
            self._ints_left.record(self.stream)
            if padded_rows and not loras:
                return self._graphs.launch(padded_rows)
            return self._decoder.step(step.counts, loras, placed)  # with LoRAs also a graph's kernels, one by one

    def operate(self, operation: EngineOperation, name: str, path: str, level: int) -> str:
        """Do an operation that the facts name, between steps; return why it was not done, empty if it was.

        Sleep gives all memory back to the device. At level 1 weights and LoRAs are kept in host memory, or weights in
        that of the memory service; at level 2 the weights are read again at `wake`, unless the service still has them.
        Several ranks have level 2 alone, at which no LoRA is loaded.
        """
        order = Operate(0, operation, name, path, level)
        if self._group is None or operation not in LORA_OPERATIONS:
            return self._operate(order)
        with self._group.guard():
            self._group.tell(order)
            return self._operate(order)

    def _operate(self, order: Operate) -> str:
        """Do an operation in this process; return why it was not done. All ranks load and unload LoRAs at once."""
        with device_errors_as_model_error(), self.stream, cp.cuda.using_allocator(self._memory.allocator()):
            match order.operation:
                case "clear":
                    if self.encoder_cache is not None:
                        self.encoder_cache.clear()
                    return ""
                case "sleep":
                    return self._sleep(order.level)
                case "wake":
                    return self._wake()
                case "load_lora" | "unload_lora":
                    if self._place is None:
                        failed = operate_loras(self._loras, order.operation, order.name, order.path)
                    else:
                        failed = operate_loras_together(self._loras, order, self._place.peers, self._place.limits)
                    self.stream.synchronize()
                    return failed

    def _sleep(self, level: int) -> str:
        if self._group is not None:
            if level == 1:
                return "sleep: level 1 is not built for ranks on GPUs: use level 2, or set tensor_parallel = 1"
            assert not self._loras.size_bytes, "the other ranks lose theirs"
        self.stream.synchronize()
        if level == 1:
            try:
                # What the memory service has takes no memory of this engine, so it stays mapped.
                stays = () if self._shared is None else (self._shared.maps,)
                kept = weights_on_host(self._weights, *stays)
                self._loras.move(cp.asnumpy)
            except MemoryError:
                return "sleep: no host memory is left for the weights; sleep at level 2"
            self._kept = kept
        if self._mover is not None:
            self._mover.release()
        self._give_back()
        return ""

    def _give_back(self) -> None:
        """Free everything on the device, and give it back to the device. All other ranks end."""
        self._free_memory()
        if self._group is not None:
            self._group.close()
        gc.collect()  # an error's traceback may hold arrays in a cycle
        if self._shared is not None and self._kept is None:
            self._shared.release()
        self._memory.trim()

    def _wake(self) -> str:
        failed, copier = "", None
        self._blocks = self._facts.capacity_blocks
        try:
            with no_memory_as_model_error(Path(self._facts.path), "the weights"):
                copier = self._take_again()
        except (ModelError, ConfigError, RankLost) as wrong:
            failed = f"wake: {wrong}"
        if failed:
            self._give_back()
            return failed
        self._kept = None
        if self._mover is not None and copier is not None:
            self._mover.renew(copier)
        return ""

    def _take_again(self) -> Copier | None:
        """Take the memory that sleep gave back, and start the other ranks; return the mover's new copier, if there is a
        mover. Raise ModelError, ConfigError, RankLost."""
        if self._group is not None:
            self._group = self._group.started_again(self._blocks)
            self._place = self._group.place
        with self._guard(), no_room_as_model_error(self._facts.path, "the weights"):
            if self._place is not None:
                self._place.room()  # which all ranks hear when they start
            all_graphs = None if self._place is None else lambda _share: None  # ranks capture at the same time
            self._take_memory(self._weights_again(), all_graphs)
            self._loras.move(cp.asarray)
            return None if self._mover is None else self._block_copier()

    def _weights_again(self) -> CudaWeights:
        """Return the weights on the device. Raise ModelError if they are not the same any longer."""
        if self._kept is not None:
            return weights_on_device(self._kept)
        directory, config, share = Path(self._facts.path), self._config, None
        if self._place is not None:
            config, share = self._place.config, self._place.share
        check_digest(directory, config, self._digest)
        if self._shared is not None:
            return self._shared.load()
        return load_cuda_weights(directory, config, self._settings.dtype, share=share)

    def memory_use(self) -> MemoryUse:
        with device_errors_as_model_error(), cp.cuda.Device(self._memory.device):
            free, total = cp.cuda.runtime.memGetInfo()
            pool = self._memory.statistics()
        exported = 0 if self._exported is None else self._exported.size_bytes
        kept = max(0, pool.reserved_bytes - pool.used_bytes)
        others = max(0, total - free - pool.reserved_bytes - exported)
        return MemoryUse(used=pool.used_bytes + exported, kept=kept, others=others, free=free)

    def mover(self, clock: Callable[[], float]) -> TransferMover:
        """Return a mover between the KV pages and a pool, on streams of its own.

        These streams and the runner's need not wait for each other. A block is offered only after the step that filled
        it has returned. A loaded block enters the cache only after the mover has reported its copy, and is first read
        by a step that is scheduled after that.
        """
        self._clock = clock
        with device_errors_as_model_error():
            self._mover = TransferMover(self._block_copier(), clock, verify=self._verify)
        return self._mover

    def _block_copier(self) -> Copier:
        """Return a copier of whole blocks, of which each rank copies its part."""
        copier = self.copier()
        if self._group is None:
            return copier
        assert self.pool_place is not None
        return self._group.copier(copier, self._facts.kv_layout.block_bytes, self.pool_place)

    def copier(self) -> CudaCopier:
        """Return a copier between the KV pages and a pool; of a rank, for its part of blocks."""
        self.stream.synchronize()
        part, layout = None, self._facts.kv_layout
        if self._place is not None:
            part = self._place.slot_part(self.pages.itemsize, layout.block_size)
        return CudaCopier(self._block_shape(), self._memory, self._clock, path=self._settings.copy_path, part=part)

    def _block_shape(self) -> BlockShape:
        facts, at = self._facts, self.pages.data.ptr
        if self._place is None:
            return BlockShape.contiguous(at, facts.kv_layout.block_bytes, facts.capacity_blocks)
        row_bytes = self._config.keys * self.pages.itemsize
        rows = self._config.layers * 2 * facts.kv_layout.block_size
        return BlockShape.of_heads(at, rows, row_bytes, facts.capacity_blocks)

    def sharable_memory(self) -> SharableMemory:
        shape, device = self._block_shape(), self._memory.device
        return SharableMemory(
            *("cuda", shape, self._exported, DeviceMapper(device)),
            lambda theirs: SharedDeviceCopier(theirs, shape, device),
        )

    def close(self) -> None:
        """Wait for the device and free its memory. On a lost device there is nothing to free."""
        self._masks.close()
        if self._group is not None:
            self._group.close()  # a step that waits for a rank ends now
        try:
            self.stream.synchronize()
        except ERRORS as wrong:
            _log.warning("the GPU is lost, so its memory is not freed: %s", wrong)
            return
        # Free everything now: at the interpreter's end CUDA may be gone.
        self._free_memory()
        del self._loras


def step_limits(context_length: int, block_size: int, *, max_running: int, max_rows: int, ranks: int = 1) -> StepLimits:
    """Return the size of the largest step.

    It has `max_rows` rows, or, if more sequences run, a row for each and a block's worth in addition.
    """
    rows, blocks = max(max_rows, max_running + block_size), -(-context_length // block_size)
    ints = most_ints(rows, max_running, blocks, PREFILL_ROWS, split_parts(max_running))
    return StepLimits(rows=rows, drawing=max_running, ints=-(-ints // 4) * 4, positions=context_length, ranks=ranks)
