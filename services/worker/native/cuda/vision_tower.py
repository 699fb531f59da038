"""The vision tower on the device, as native/vision_tower.py computes it on a CPU: pixels in, embeddings out.

    pixels ─▶ patches ─▶ product, + positions ─▶ for each layer: LayerNorm → q, k, v in one product → attend to all
                                                                 → + product → LayerNorm → product → GELU → + product
              states of some layers, one next to the other ─▶ product → GELU → product ─▶ embeddings (float32)

Several images are computed at once, each as if it were alone. The residual stream is float32, and activations have the
element type, as in the decoder. Attention is that of prompts' kernels, compiled so that each row sees all positions: an
image has pages of keys and values of its own. A bias is added by the kernel that reads the product next.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cupy as cp  # pyright: ignore[reportMissingImports]
import numpy as np

from services.worker.config import Dtype
from services.worker.native.bfloat16 import to_bfloat16
from services.worker.native.config import ModelConfig
from services.worker.native.cuda.blas import Blas
from services.worker.native.cuda.buffers import pinned_array
from services.worker.native.cuda.kernels import PREFILL_ROWS, VisionKernels, compile_vision
from services.worker.native.cuda.weights import DTYPES
from services.worker.native.linear import Array
from services.worker.native.vision_config import VisionConfig, vision_shapes
from services.worker.native.weights import Checkpoint

BLOCK_SIZE = 16
"""Positions of a page."""
MOST_IMAGES = 16
"""Images that are computed at once; more take turns."""
_THREADS = 256
_NORM_WARPS = 4
"""Rows of a thread block of `layer_norm`."""
_KINDS = {"quick_gelu": 0, "gelu": 1, "gelu_pytorch_tanh": 2}
"""The numbers of the activations in vision.cu."""


@dataclass(frozen=True, slots=True)
class _Norm:
    weight: Array
    shift: Array


@dataclass(frozen=True, slots=True)
class _Product:
    weight: Array
    bias: Array | None


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: _Norm
    qkv: _Product
    output: _Product
    wide_norm: _Norm
    wide: _Product
    narrow: _Product


class CudaVisionTower:
    """A model's vision tower and projector. Only one thread may use it at a time, on one stream."""

    def __init__(
        self,
        config: VisionConfig,
        decoder_hidden: int,
        weights: Mapping[str, Any],
        element_type: Dtype,
        stream: Any,
        *,
        most_images: int = MOST_IMAGES,
    ) -> None:
        """Copy the weights to the current device; `weights` has the tensors, float32 in host memory, by the names that
        `vision_shapes` gives. Raise ConfigError, ModelError."""
        self._config = config
        self._width = decoder_hidden
        self._element_type: Dtype = element_type
        self._most_images = most_images
        self.stream = stream
        """The stream on which everything is computed."""
        with stream:
            self._load(weights)
            self._allocate()
            self._blas = Blas(element_type, stream)
            self._kernels: VisionKernels = compile_vision(config.hidden // config.heads, self._pack(), element_type)
            stream.synchronize()

    @staticmethod
    def load(
        directory: Path, config: ModelConfig, element_type: Dtype, stream: Any, *, most_images: int = MOST_IMAGES
    ) -> CudaVisionTower | None:
        """Load a model's tower. None if it has none. Raise ModelError, ConfigError."""
        if config.vision is None:
            return None
        checkpoint = Checkpoint(directory, config)
        weights = {name: checkpoint.floats(name) for name in vision_shapes(config.vision, config.hidden)}
        return CudaVisionTower(config.vision, config.hidden, weights, element_type, stream, most_images=most_images)

    def encode(self, images: Sequence[bytes]) -> Array:
        """Return the embeddings (images, tokens, width of the decoder), float32 on the device, of images whose pixels
        are RGB bytes, row by row. They are computed when the stream is done."""
        turns = [images[first : first + self._most_images] for first in range(0, len(images), self._most_images)]
        embeddings: list[Array] = []
        for turn in turns:
            self._put(turn)
            embeddings.append(self.compute(len(turn)))
        with self.stream:
            return cp.concatenate(embeddings)

    def close(self) -> None:
        """Wait for the device; nothing may follow."""
        self.stream.synchronize()
        self._blas.close()

    # --- what is made once

    def _pack(self) -> int:
        pack, config = 4 if self._element_type == "float32" else 8, self._config
        while any(width % pack for width in (config.hidden, config.intermediate, self._width)):
            pack //= 2
        return pack

    def _narrowed(self, floats: Any) -> Array:
        """Return numbers of host memory as elements on the device."""
        wide = cp.asarray(np.ascontiguousarray(floats, np.float32))
        if self._element_type == "bfloat16":
            return to_bfloat16(cp, wide)
        return wide.astype(DTYPES[self._element_type])

    def _load(self, weights: Mapping[str, Any]) -> None:
        config = self._config

        def floats(name: str) -> Array | None:
            return cp.asarray(np.ascontiguousarray(weights[name], np.float32)) if name in weights else None

        def norm(name: str) -> _Norm:
            weight, shift = floats(f"{name}.weight"), floats(f"{name}.bias")
            assert weight is not None
            assert shift is not None
            return _Norm(weight, shift)

        def product(*names: str) -> _Product:
            """Return the named products as one, whose results come one after the other."""
            weight = self._narrowed(np.concatenate([weights[f"{name}.weight"] for name in names]))
            biases = [weights[f"{name}.bias"] for name in names if f"{name}.bias" in weights]
            return _Product(weight, cp.asarray(np.concatenate(biases).astype(np.float32)) if biases else None)

        def layer(stem: str) -> _Layer:
            return _Layer(
                norm(f"{stem}layer_norm1"),
                product(*(f"{stem}self_attn.{name}_proj" for name in "qkv")),
                product(f"{stem}self_attn.out_proj"),
                norm(f"{stem}layer_norm2"),
                product(f"{stem}mlp.fc1"),
                product(f"{stem}mlp.fc2"),
            )

        stem = "vision_tower.embeddings."
        colours = np.asarray(weights[f"{stem}patch_embedding.weight"]).reshape(config.hidden, -1)
        self._patch_row = -(-colours.shape[1] // 8) * 8  # cuBLAS is slow where rows are not aligned
        self._patch_weight = self._narrowed(np.pad(colours, ((0, 0), (0, self._patch_row - colours.shape[1]))))
        self._patch_bias = floats(f"{stem}patch_embedding.bias")
        self._class = floats(f"{stem}class_embedding")
        self._position = floats(f"{stem}position_embedding.weight")
        self._first_norm = norm("vision_tower.pre_layrnorm") if config.has_class else None
        self._layers = [layer(f"vision_tower.encoder.layers.{number}.") for number in range(config.layers)]
        self._projector = product("multi_modal_projector.linear_1"), product("multi_modal_projector.linear_2")

    def _allocate(self) -> None:
        """Allocate what `most_images` need."""
        config, images, dtype = self._config, self._most_images, DTYPES[self._element_type]
        self._positions = config.patches + config.has_class
        self.tokens = self._positions - config.drops_first
        """How many embeddings an image has."""
        rows, hidden, patches = images * self._positions, config.hidden, images * config.patches
        self._slots = -(-self._positions // BLOCK_SIZE)
        self._pixels = cp.empty((images, config.image_size, config.image_size, 3), cp.uint8)
        self._staged = pinned_array(self._pixels.size, np.uint8)
        self._pixels_left = cp.cuda.Event(disable_timing=True)
        """Happens when the staged pixels can be overwritten."""
        self._patches = cp.empty((patches, self._patch_row), dtype)
        self._embedded = cp.empty((patches, hidden), cp.float32)
        self._hidden = cp.empty((rows, hidden), cp.float32)
        self._normed = cp.empty((rows, hidden), dtype)
        self._qkv = cp.empty((rows, 3 * hidden), dtype)
        self._q = cp.empty((rows, hidden), dtype)
        self._q_rest = cp.zeros((rows if self._element_type == "float16" else 1, hidden), dtype)
        """What attention in float16 takes for the rounding errors of `_q`: none."""
        self._pages = cp.empty((images * self._slots, 2, BLOCK_SIZE, hidden), dtype)
        self._attended = cp.empty((rows, hidden), dtype)
        self._wide = cp.empty((rows, config.intermediate), dtype)
        self._features = cp.empty((images * self.tokens, hidden * len(config.features)), dtype)
        self._projected = cp.empty((images * self.tokens, self._width), dtype)
        # Each row attends to all positions of its image; tiles do not go beyond one.
        image, place = np.divmod(np.arange(rows, dtype=np.int32), self._positions)
        tiles = [
            (number * self._positions + first, min(PREFILL_ROWS, self._positions - first))
            for number in range(images)
            for first in range(0, self._positions, PREFILL_ROWS)
        ]
        self._tiles_of_image = len(tiles) // images
        self._tiles = cp.asarray(np.array(tiles, np.int32))
        self._every_row = cp.asarray(np.arange(rows, dtype=np.int32))
        self._last = cp.asarray(np.full_like(place, self._positions - 1))
        self._table = cp.asarray(np.arange(images * self._slots, dtype=np.int32))
        self._starts = cp.asarray(image * np.int32(self._slots))

    # --- a turn

    def _put(self, images: Sequence[bytes]) -> None:
        """Copy the pixels of a turn to the device."""
        self._pixels_left.synchronize()
        size_bytes = self._pixels[0].size
        for number, pixels in enumerate(images):
            self._staged[number * size_bytes : (number + 1) * size_bytes] = np.frombuffer(pixels, np.uint8)
        count = len(images)
        with self.stream:
            self._pixels[:count].set(self._staged[: count * size_bytes].reshape(self._pixels[:count].shape))
            self._pixels_left.record(self.stream)

    def compute(self, count: int) -> Array:
        """Enqueue the embeddings of the `count` images whose pixels are on the device, at most `most_images`."""
        with self.stream:
            return self._computed(count)

    def _computed(self, count: int) -> Array:
        config, rows = self._config, count * self._positions
        self._embed(count)
        taken = count * self.tokens
        features, projected = self._features[:taken], self._projected[:taken]
        bias: Array | None = None
        self._take(0, count, bias)
        for number, layer in enumerate(self._layers):
            self._compute(layer, rows, count, bias)
            bias = layer.narrow.bias
            self._take(number + 1, count, bias)
        first, second = self._projector
        self._blas.product(projected, features, first.weight)
        self._activate(projected, first.bias, _KINDS[config.projector_activation])
        out = cp.empty((taken, self._width), cp.float32)
        self._blas.product(out, projected, second.weight)
        if second.bias is not None:
            self._kernels.add_bias((taken,), (_THREADS,), (out, second.bias, np.int32(self._width)))
        return out.reshape(count, self.tokens, self._width)

    def _embed(self, count: int) -> None:
        """Compute the first states."""
        config, rows, patches = self._config, count * self._positions, count * self._config.patches
        side = config.image_size // config.patch_size
        sizes = (np.int32(config.image_size), np.int32(config.patch_size), np.int32(side), np.int32(self._patch_row))
        colours = map(np.float32, (config.prepared.scale, *config.prepared.mean, *config.prepared.std))
        self._kernels.cut_patches((patches,), (_THREADS,), (self._patches, self._pixels, *sizes, *colours))
        embedded, hidden = self._embedded[:patches], self._hidden[:rows]
        self._blas.product(embedded, self._patches[:patches], self._patch_weight)
        placed = (hidden, embedded, _pointer(self._class), _pointer(self._patch_bias), self._position)
        counts = (np.int32(self._positions), np.int32(config.hidden))
        self._kernels.place_patches((rows,), (_THREADS,), (*placed, *counts))
        if self._first_norm is not None:
            self._norm(None, hidden, None, self._first_norm)

    def _compute(self, layer: _Layer, rows: int, count: int, bias: Array | None) -> None:
        """Compute a layer. `bias` is that of the layer before, which the states still lack."""
        config, hidden, normed, qkv = self._config, self._hidden[:rows], self._normed[:rows], self._qkv[:rows]
        attended, wide = self._attended[:rows], self._wide[:rows]
        self._norm(normed, hidden, bias, layer.attention_norm)
        self._blas.product(qkv, normed, layer.qkv.weight)
        sizes = (np.int32(self._positions), np.int32(self._slots), np.int32(config.hidden))
        stored = (self._q, self._pages, qkv, layer.qkv.bias, *sizes)
        self._kernels.store_heads((rows,), (_THREADS,), stored)
        self._attend(rows, count)
        self._blas.product(hidden, attended, layer.output.weight, add=True)
        self._norm(normed, hidden, layer.output.bias, layer.wide_norm)
        self._blas.product(wide, normed, layer.wide.weight)
        self._activate(wide, layer.wide.bias, _KINDS[config.activation])
        self._blas.product(hidden, wide, layer.narrow.weight, add=True)

    def _attend(self, rows: int, count: int) -> None:
        """Attend from each position to all of its image."""
        config, prefill = self._config, self._kernels.attend_prefill
        scale = (config.hidden // config.heads) ** -0.5
        stride, zero, heads = np.int64(2 * BLOCK_SIZE * config.hidden), np.int64(0), np.int32(config.heads)
        window = np.int32(1 << 30)
        paging = (self._last, self._table, self._starts, stride, zero, heads)
        if prefill is None:
            every = (self._attended, self._q, self._pages, self._every_row, *paging, np.float32(scale), window)
            self._kernels.attend_any((config.heads, rows), (128,), every)
            return
        tiled = (self._attended, self._q, self._q_rest, self._pages, self._tiles, *paging)
        prefill.kernel(
            (config.heads, count * self._tiles_of_image),
            (prefill.threads,),
            (*tiled, np.float32(scale * math.log2(math.e)), window),
            shared_mem=prefill.shared_bytes,
        )

    def _norm(self, normed: Array | None, hidden: Array, bias: Array | None, norm: _Norm) -> None:
        rows, width = hidden.shape
        arguments = (_pointer(normed), hidden, _pointer(bias), norm.weight, norm.shift, np.int32(rows), np.int32(width))
        blocks = -(-rows // _NORM_WARPS)
        self._kernels.layer_norm((blocks,), (32 * _NORM_WARPS,), (*arguments, np.float32(self._config.epsilon)))

    def _activate(self, x: Array, bias: Array | None, kind: int) -> None:
        rows, width = x.shape
        blocks = -(-width // (_THREADS * self._kernels.pack))
        arguments = (x, _pointer(bias), np.int32(width), np.int32(kind))
        self._kernels.activate_rows((rows, blocks), (_THREADS,), arguments)

    def _take(self, number: int, count: int, bias: Array | None) -> None:
        """Keep the states number `number` if the projector takes them. `bias` is what they still lack."""
        config = self._config
        for column, feature in enumerate(config.features):
            if feature == number:
                sizes = (self._positions, int(config.drops_first), config.hidden, self._features.shape[1])
                counts = (np.int32(each) for each in (*sizes, column * config.hidden))
                arguments = (self._features, self._hidden, _pointer(bias), *counts)
                self._kernels.take_features((count * self.tokens,), (_THREADS,), arguments)


class OneByOne:
    """A tower that is asked for one image at a time, and gives embeddings in host memory: an ImageEncoder's."""

    def __init__(self, tower: CudaVisionTower) -> None:
        self._tower = tower

    @property
    def tokens(self) -> int:
        """How many embeddings an image has."""
        return self._tower.tokens

    def encode(self, pixels: bytes) -> Array:
        """Return the embeddings (tokens, width of the decoder) of an image. The device is waited for."""
        with self._tower.stream:
            return cp.asnumpy(self._tower.encode([pixels])[0])


def _pointer(array: Array | None) -> Any:
    """Return a kernel's argument for `array`; None is a null pointer, which CuPy takes only as a number."""
    return np.intp(0) if array is None else array
