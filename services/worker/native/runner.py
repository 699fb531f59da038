"""The native engine as a Runner: it computes steps on the CPU for a prepared model directory.

Only one thread may use it at a time. Set the number of BLAS threads before NumPy is imported (OPENBLAS_NUM_THREADS):
two engines with a thread for each core are many times slower than with half as many threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from services.worker.config import ENCODER_CACHE_BYTES, LORA_BYTES, LORA_RANK, MOST_IMAGES, Dtype, WorkerConfig
from services.worker.contracts.messages import EngineOperation, Loading, MemoryUse, Operate, Ready
from services.worker.contracts.runner import Drawn, EmbeddingLookups, Work
from services.worker.native.config import read_config
from services.worker.native.decoder import Decoder
from services.worker.native.facts import engine_facts
from services.worker.native.grammars import GrammarCache
from services.worker.native.image_encoder import ImageEncoder
from services.worker.native.kv_cache import KvCache
from services.worker.native.linear import Array, calibrate_linear
from services.worker.native.logprobs import score
from services.worker.native.lora import LoraStore, operate_loras, spans_by_lora
from services.worker.native.masks import MaskThread
from services.worker.native.parallel.group import (
    LEAST_LIMIT_S,
    STALL_SHARE,
    GroupTerms,
    RankGroup,
    check_processors,
)
from services.worker.native.parallel.rank import RankSizes
from services.worker.native.pooling import pooling_spans, step_results
from services.worker.native.prepare import prepare
from services.worker.native.prompt_logprobs import ScoredRows, score_rows, scored_rows, with_prompt_logprobs
from services.worker.native.sampler import sample
from services.worker.native.shared_weights import SharedWeights, shared_weights
from services.worker.native.tensor_file import no_memory_as_model_error
from services.worker.native.vision_tower import VisionTower
from services.worker.native.weights import check_digest, load_weights, weights_digest
from services.worker.scheduler.encoder_cache import EncoderCache
from services.worker.sharing.host_pages import HostMapper, SharedHostCopier
from services.worker.sharing.memory import SharableMemory
from services.worker.transfer.block_shape import BlockShape
from services.worker.transfer.host_copier import HostCopier
from services.worker.transfer.mover import TransferMover
from shared.errors import ModelError
from shared.freed_memory import give_memory_back
from shared.messages.cards import KvLayout
from shared.messages.frames import PromptLogprobs

_TURN_BYTES = 16 << 20
"""The most bytes of logits, from which log-probabilities of a prompt are computed, at a time; at least one row."""
CAPACITY_BYTES = 512 << 20
"""Bytes of KV where no setting says how many."""


class NativeRunner:
    """Computes steps with NumPy on the CPU in float32, also where keys and values are stored in another type."""

    def __init__(
        self,
        directory: Path,
        *,
        capacity_bytes: int = 0,
        capacity_blocks: int = 0,
        block_size: int = 16,
        kv_dtype: Dtype = "float32",
        verify: bool = False,
        lora_rank: int = LORA_RANK,
        lora_bytes: int = LORA_BYTES,
        shares_blocks: bool = False,
        weights: SharedWeights | None = None,
        group: GroupTerms | None = None,
        most_images: int = MOST_IMAGES,
        encoder_cache_bytes: int = ENCODER_CACHE_BYTES,
    ) -> None:
        """Load the model. Raise ModelError, also if the cache would hold no block, and RankLost.

        `directory` is the result of `prepare`, or that of `weights`, which are mapped. `capacity_blocks` 0 means as
        many as `capacity_bytes` hold. With `verify` every loaded block is compared with the pool's, with
        `shares_blocks` other engines can copy blocks. With `most_images` 0 the model takes no images. With `group`
        further processes compute a part of each layer, and the model takes no images.
        """
        config = read_config(directory)
        layout = KvLayout(kv_dtype, config.layers, config.kv_heads, config.head_dim, block_size)
        capacity_blocks = capacity_blocks or _blocks(directory, layout, capacity_bytes)
        context_length = min(config.context_length, capacity_blocks * block_size)
        self._config = config
        self._shared = weights
        sizes = RankSizes(capacity_blocks, context_length, lora_rank, lora_bytes)
        self._group = RankGroup(directory, config, layout, sizes, group) if group is not None else None
        self._cache = self._group.cache if self._group else KvCache(layout, capacity_blocks, shared=shares_blocks)
        vision = config.vision if most_images and group is None else None
        self.encoder_cache: EncoderCache[Array] | None = None if vision is None else EncoderCache(encoder_cache_bytes)
        self._images: ImageEncoder | None = None
        self._store: EmbeddingLookups | None = None
        self._decoder = self._load_decoder(directory, context_length)
        """Not there while a sleeping engine has no weights."""
        if self._group is not None:
            self._group.await_ranks()
            self._loras = self._group.loras
        else:
            self._loras = LoraStore(config, most_rank=lora_rank, most_bytes=lora_bytes)
        self._verify = verify
        grammars = GrammarCache.from_directory(directory, config.vocab, config.eos_token_ids)
        self._masks = MaskThread(grammars)
        self._facts = engine_facts(
            config,
            layout,
            capacity_blocks,
            most_images=0 if vision is None else most_images,
            lora_bytes=lora_bytes,
            path=str(directory),
            grammars=grammars is not None,
            weights=weights_digest(directory, config, self._file),
        )

    def _load_decoder(self, directory: Path, context_length: int) -> Decoder:
        weights = load_weights(directory, self._config, self._file)
        if self._group is not None:
            return self._group.decoder(weights)
        linear = calibrate_linear([layer.up for layer in weights.layers])
        decoder = Decoder(self._config, weights, self._cache, linear, context_length)
        if self.encoder_cache is not None:  # last: nothing is kept of a model that cannot be loaded
            tower = VisionTower.load(directory, self._config, self._file)
            self._images = None if tower is None else ImageEncoder(tower, self.encoder_cache, self._store)
        return decoder

    @property
    def _file(self) -> Path | None:
        """The file with the weights, if they are not in the directory's own."""
        return None if self._shared is None else self._shared.file

    @property
    def facts(self) -> Ready:
        """What the engine serves. The context is no longer than the cache."""
        return self._facts

    def step(self, works: Sequence[Work]) -> list[Drawn | None]:
        """Compute a step; return one entry for each work, None for those that do not end. Raise RankLost."""
        if self._group is None:
            return self._step(works)
        with self._group.step(works):
            return self._step(works)

    def _step(self, works: Sequence[Work]) -> list[Drawn | None]:
        drawing = [work for work in works if work.draws]
        self._masks.begin(works)
        with np.errstate(
            over="ignore", invalid="ignore"
        ):  # numbers that are not finite are found later, in the logits or the sums
            placed = [] if self._images is None else self._images.place(works)
            loras = self._loras.of(spans_by_lora(works))
            logits, sums, hidden = self._decoder.pool(works, pooling_spans(works), loras, placed)
            prompts = [self._score(rows, hidden) for rows in scored_rows(works)]
        results = step_results(works, sample(logits, drawing, self._masks.end()), sums)
        return with_prompt_logprobs(works, results, prompts) if prompts else results

    def _score(self, rows: ScoredRows, hidden: Array) -> PromptLogprobs | None:
        """Return log-probabilities of a prompt from the hidden states of the step's rows, as `score_rows` does."""

        def score_turn(first: int, tokens: Array, count: int) -> tuple[Array, Array, Array]:
            return score(self._decoder.logits(hidden[first : first + len(tokens)]), tokens, count)

        return score_rows(rows, max(1, _TURN_BYTES // (4 * self._config.vocab)), score_turn)

    def operate(self, operation: EngineOperation, name: str, path: str, level: int) -> str:
        """Do an operation that the facts name, between steps; return why it was not done, empty if it was.

        Sleep gives the memory of the KV pages back to the system, at level 2 also that of the weights. The mapped file
        of the weights is host memory already, so level 1 keeps it.
        """
        match operation:
            case "clear":
                self._forget_images()
                return ""
            case "sleep":
                self._cache.drop()
                self._forget_images()
                if level == 2:
                    self._in_all_ranks(Operate(0, operation, level=level), self._drop_weights, lambda: None)
                    self._release_weights()
                return ""
            case "wake":
                return self._wake()
            case "load_lora" | "unload_lora":
                if self._group is not None:
                    return self._group.operate_loras(Operate(0, operation, name, path))
                return operate_loras(self._loras, operation, name, path)

    def _in_all_ranks(self, order: Operate, do: Callable[[], str], undo: Callable[[], object]) -> str:
        """Do an operation, in all ranks if there are several; return why it was not done. Raise RankLost."""
        return do() if self._group is None else self._group.operate(order, do, undo)

    def _drop_weights(self) -> str:
        del self._decoder
        self._images = None
        give_memory_back()
        return ""

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
            with np.errstate(over="ignore", invalid="ignore"):
                self._images.encode_image(key, pixels)

    def _forget_images(self) -> None:
        if self.encoder_cache is not None:
            self.encoder_cache.clear()

    def _wake(self) -> str:
        if hasattr(self, "_decoder"):
            return ""
        directory = Path(self._facts.path)
        try:
            with no_memory_as_model_error(directory, "the weights"):
                if self._shared is not None:
                    self._shared.acquire()
                check_digest(directory, self._config, self._facts.weights, self._file)
        except ModelError as wrong:
            failed = f"wake: {wrong}"
        else:
            order = Operate(0, "wake", path=str((self._shared and self._shared.file_of_ranks) or ""))
            failed = self._in_all_ranks(order, self._load_again, self._drop_weights)
        if failed:
            self._release_weights()
        return failed

    def _load_again(self) -> str:
        directory = Path(self._facts.path)
        try:
            with no_memory_as_model_error(directory, "the weights"):
                self._decoder = self._load_decoder(directory, self._facts.context_length)
        except ModelError as wrong:
            return f"wake: {wrong}"
        return ""

    def _release_weights(self) -> None:
        if self._shared is not None:
            self._shared.release()

    def memory_use(self) -> MemoryUse | None:
        return None

    def mover(self, clock: Callable[[], float]) -> TransferMover:
        """Return a mover between the KV pages and a pool."""
        copier = HostCopier.over(self._cache.memory, self._cache.layout.block_bytes)
        return TransferMover(copier, clock, verify=self._verify)

    def sharable_memory(self) -> SharableMemory:
        cache = self._cache
        at = np.frombuffer(cache.memory, np.uint8).ctypes.data
        shape = BlockShape.contiguous(at, cache.layout.block_bytes, self._facts.capacity_blocks)
        return SharableMemory(
            "host", shape, cache.exported, HostMapper(), lambda theirs: SharedHostCopier(theirs, shape)
        )

    def close(self) -> None:
        """Let go of the KV pages. The weights stay mapped until the process ends, and so does their lock."""
        self._masks.close()
        if self._group is not None:
            self._group.close()
        self._cache.close()


def _blocks(directory: Path, layout: KvLayout, capacity_bytes: int) -> int:
    """Return how many blocks the KV cache holds, at least one. Raise ModelError."""
    blocks = capacity_bytes // layout.block_bytes
    if blocks < 1:
        raise ModelError(
            f"{directory}: a KV cache of {capacity_bytes} bytes holds no block of {layout.block_bytes} bytes;"
            " raise capacity_bytes"
        )
    return blocks


def load_native(settings: WorkerConfig, progress: Callable[[Loading], None]) -> NativeRunner:
    """Return a runner for a worker's model, a directory or a GGUF file. Raise ModelError."""
    weights = shared_weights(settings, progress)
    directory = prepare(Path(settings.model), Path(settings.cache), progress) if weights is None else weights.directory
    group = None
    if settings.tensor_parallel > 1:
        check_processors(settings.tensor_parallel)
        group = GroupTerms(
            settings.tensor_parallel,
            limit_s=max(LEAST_LIMIT_S, settings.stall_s / STALL_SHARE),
            weights_file=None if weights is None else weights.file_of_ranks,
        )
    progress(Loading("mapping weights", 1.0))
    return NativeRunner(
        directory,
        capacity_bytes=settings.capacity_bytes or CAPACITY_BYTES,
        capacity_blocks=settings.capacity_blocks,
        block_size=settings.block_size,
        kv_dtype=settings.kept_dtype,
        verify=settings.kvbm.verify,
        lora_rank=settings.lora_rank,
        lora_bytes=settings.lora_bytes,
        shares_blocks=settings.shares_blocks,
        weights=weights,
        group=group,
        most_images=settings.most_images,
        encoder_cache_bytes=settings.encoder_cache_bytes,
    )
