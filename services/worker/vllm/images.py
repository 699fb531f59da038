"""Images for vLLM: which models of vLLM take them, and prompts with their pixels.

    Submit: tokens, prepared pixels ──▶ pixel_values, as the model's own image processor makes them ──▶ MultiModalInput
            an image's key, in hex  ──▶ its hash, which vLLM's caches and KV events name it by

The prompt has all tokens of its images already, and its images are prepared: so vLLM's processor has nothing to do, and
is not asked.
"""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import torch
from vllm.config.model import ModelConfig
from vllm.inputs import MultiModalInput
from vllm.inputs.engine import mm_input
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
)

from services.worker.contracts.messages import Submit
from services.worker.native.vision_config import VisionConfig, read_vision
from shared.errors import ModelError
from shared.hashing import token_array
from shared.model_files.config_json import read_config_json

LLAVA = "LlavaForConditionalGeneration"
"""The architecture whose images are served: each takes the same number of tokens."""

_log = logging.getLogger(__name__)


def takes_images(model: Path) -> bool:
    """Return whether a model's files are those of the architecture whose images are served."""
    try:
        return LLAVA in (read_config_json(model).outer.get("architectures") or ())
    except ModelError:
        return False  # about which vLLM has words of its own


class ImagePrompts:
    """Makes prompts with images for one model."""

    def __init__(self, vision: VisionConfig, most: int, dtype: torch.dtype) -> None:
        """`most` images of a prompt are served; `dtype` is the model's."""
        self.input = vision.input
        self.most = most
        self._vision = vision
        self._dtype = dtype

    @staticmethod
    def read(model: ModelConfig, most: int) -> ImagePrompts | None:
        """Return how a model's images are passed on. None if it takes none, or others than are served, which the log
        says."""
        if not model.is_multimodal_model or model.runner_type == "pooling":
            return None
        most = min(most, model.get_multimodal_config().get_limit_per_prompt("image"))
        if not most:
            return None
        if model.architecture != LLAVA:
            _log.warning("images are refused: of vLLM's models only %s takes them here", LLAVA)
            return None
        try:
            vision = read_vision(Path(model.model), read_config_json(Path(model.model)), model.get_vocab_size())
        except ModelError as wrong:
            _log.warning("images are refused: %s", wrong)
            return None
        return ImagePrompts(vision, most, model.dtype)

    def prompt(self, submit: Submit) -> MultiModalInput:
        """Return vLLM's input for a prompt with images."""
        images = submit.images
        items = [MultiModalKwargsItem({"pixel_values": _element(self._values(image.pixels))}) for image in images]
        return mm_input(
            token_array(submit.tokens).tolist(),
            MultiModalKwargsItems({"image": items}),
            {"image": [image.key.hex() for image in images]},
            {"image": [PlaceholderRange(offset=image.start, length=image.tokens) for image in images]},
            cache_salt=submit.salt or None,
        )

    def _values(self, pixels: bytes) -> torch.Tensor:
        """Return the values of one image, in the order of transformers' arithmetic on Pillow's pixels."""
        vision, size = self._vision, self.input
        colours = np.frombuffer(pixels, np.uint8).reshape(size.height, size.width, 3)
        scaled = (colours.astype(np.float64) * vision.scale).astype(np.float32)
        mean, std = (np.asarray(each, np.float32) for each in (vision.mean, vision.std))
        normal = (scaled - mean) / std
        return torch.from_numpy(np.ascontiguousarray(normal.transpose(2, 0, 1))).to(self._dtype)


def _element(data: torch.Tensor) -> MultiModalFieldElem:
    return MultiModalFieldElem(data=data, field=MultiModalBatchedField())
