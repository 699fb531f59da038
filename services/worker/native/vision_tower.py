"""The vision tower's arithmetic: the pixels of an image in, the embeddings of its tokens out.

    pixels → scale, norm → patches → embed + positions → for each layer: LayerNorm → attend to all → project
                                     (CLIP: class, norm)                 LayerNorm → MLP
                                                           states of some layers ─▶ projector ─▶ embeddings

All arithmetic is float32 on NumPy. An image is computed alone, so its embeddings do not depend on others.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from services.worker.native.config import ModelConfig
from services.worker.native.linear import Array, Linear
from services.worker.native.vision_config import TowerActivation, VisionConfig, vision_shapes
from services.worker.native.weights import Checkpoint

_ROOT_OF_HALF = np.float32(np.sqrt(0.5))
_GELU_SCALE, _GELU_CUBE = np.float32(np.sqrt(2 / np.pi)), np.float32(0.044715)
_ERF_ODD = (
    *(-2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05),
    *(-7.34990630326855e-04, -2.95459980854025e-03, -1.60960333262415e-02),
)
_ERF_EVEN = (
    *(-1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03, -7.37332916720468e-03),
    -1.42647390514189e-02,
)
"""The coefficients of a rational function that is erf to float32's precision, as Eigen and XLA have it; the highest
power comes first. NumPy has no erf."""


class VisionTower:
    """A model's vision tower and projector."""

    def __init__(self, config: VisionConfig, weights: Mapping[str, Array]) -> None:
        """`weights` has the tensors by the names that `vision_shapes` gives."""
        self._config = config
        self._weights = weights
        self._linear = Linear()

    @staticmethod
    def load(directory: Path, config: ModelConfig, file: Path | None) -> VisionTower | None:
        """Map a model's tower, from `file` if the weights are there. None if it has none. Raise ModelError."""
        if config.vision is None:
            return None
        checkpoint = Checkpoint(directory, config, file)
        return VisionTower(
            config.vision, {name: checkpoint.floats(name) for name in vision_shapes(config.vision, config.hidden)}
        )

    def encode(self, pixels: bytes) -> Array:
        """Return the embeddings (tokens, width of the decoder) of an image, whose pixels are RGB bytes, row by row."""
        config = self._config
        hidden = self._embed(pixels)
        states = {0: hidden}
        for number in range(config.layers):
            hidden = self._layer(f"vision_tower.encoder.layers.{number}.", hidden)
            states[number + 1] = hidden
        features = np.concatenate([states[number] for number in config.features], axis=1)
        if config.drops_first:
            features = features[1:]
        projected = _activated(self._project("multi_modal_projector.linear_1", features), config.projector_activation)
        return self._project("multi_modal_projector.linear_2", projected)

    def _embed(self, pixels: bytes) -> Array:
        config = self._config
        size, patch = config.image_size, config.patch_size
        image = np.frombuffer(pixels, np.uint8).reshape(size, size, 3).astype(np.float32)
        image *= np.float32(config.prepared.scale)
        image -= np.asarray(config.prepared.mean, np.float32)
        image /= np.asarray(config.prepared.std, np.float32)
        side = size // patch
        cut = image[: side * patch, : side * patch].reshape(side, patch, side, patch, 3)
        patches = cut.transpose(0, 2, 4, 1, 3).reshape(side * side, 3 * patch * patch)
        stem = "vision_tower.embeddings."
        hidden = self._linear(patches, self._weights[f"{stem}patch_embedding.weight"].reshape(config.hidden, -1))
        if config.has_class:
            hidden = np.concatenate([self._weights[f"{stem}class_embedding"][None], hidden])
        else:
            hidden += self._weights[f"{stem}patch_embedding.bias"]
        hidden += self._weights[f"{stem}position_embedding.weight"]
        return self._norm("vision_tower.pre_layrnorm", hidden) if config.has_class else hidden

    def _layer(self, stem: str, hidden: Array) -> Array:
        config = self._config
        hidden = hidden + self._attend(f"{stem}self_attn.", self._norm(f"{stem}layer_norm1", hidden))
        wide = self._project(f"{stem}mlp.fc1", self._norm(f"{stem}layer_norm2", hidden))
        hidden += self._project(f"{stem}mlp.fc2", _activated(wide, config.activation))
        return hidden

    def _attend(self, stem: str, x: Array) -> Array:
        """Attend from each position to all."""
        rows, heads = len(x), self._config.heads
        q, k, v = (self._project(f"{stem}{name}_proj", x).reshape(rows, heads, -1).transpose(1, 0, 2) for name in "qkv")
        scores = np.matmul(q, k.transpose(0, 2, 1))
        scores *= np.float32(q.shape[-1] ** -0.5)
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        mixed = np.matmul(scores, v).transpose(1, 0, 2).reshape(rows, -1)
        return self._project(f"{stem}out_proj", mixed)

    def _norm(self, name: str, x: Array) -> Array:
        """Apply LayerNorm to each row."""
        centred = x - x.mean(axis=-1, keepdims=True)
        variance = (centred * centred).mean(axis=-1, keepdims=True)
        centred /= np.sqrt(variance + np.float32(self._config.epsilon))
        centred *= self._weights[f"{name}.weight"]
        centred += self._weights[f"{name}.bias"]
        return centred

    def _project(self, name: str, x: Array) -> Array:
        y = self._linear(x, self._weights[f"{name}.weight"])
        bias = self._weights.get(f"{name}.bias")
        if bias is not None:
            y += bias
        return y


def erf(x: Array) -> Array:
    """Return the error function of float32 numbers."""
    x = np.clip(x, -4, 4)
    square = x * x
    above, below = (np.full_like(x, first) for first in (_ERF_ODD[0], _ERF_EVEN[0]))
    for coefficient in _ERF_ODD[1:]:
        above *= square
        above += np.float32(coefficient)
    for coefficient in _ERF_EVEN[1:]:
        below *= square
        below += np.float32(coefficient)
    above *= x
    above /= below
    return above


def _activated(x: Array, activation: TowerActivation) -> Array:
    match activation:
        case "quick_gelu":
            half = x * np.float32(0.851)  # x · sigmoid(1.702 x), by tanh, since exp overflows where the result is 0
            return x * (0.5 * np.tanh(half) + 0.5)
        case "gelu":
            return x * 0.5 * (1 + erf(x * _ROOT_OF_HALF))
        case "gelu_pytorch_tanh":
            return x * 0.5 * (1 + np.tanh(_GELU_SCALE * x * (1 + _GELU_CUBE * x * x)))
