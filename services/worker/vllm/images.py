"""Images for vLLM: which models of vLLM take them, and prompts with their pixels.

    Submit: tokens, prepared pixels ──▶ what the model's own image processor makes of them ──▶ MultiModalInput
            an image's key, in hex  ──▶ its hash, which vLLM's caches and KV events name it by

    LLaVA       pixel_values: scaled and normed
    Gemma 3     the same, and num_patches: one, since no crops are looked at by themselves
    Qwen2-VL    pixel_values: patches of bytes, which vLLM scales and norms; image_grid_thw: how many there are

The prompt has all tokens of its images already, and its images are prepared: so vLLM's processor has nothing to do, and
is not asked.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.config.model import ModelConfig
from vllm.inputs import MultiModalInput
from vllm.inputs.engine import mm_input
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
)

from services.worker.contracts.messages import Submit
from services.worker.native.vision_config import FixedSize, read_vision
from services.worker.vllm.gemma_images import read_gemma
from services.worker.vllm.qwen_images import PatchShape, grid_of, patches_of, read_input
from shared.errors import ModelError
from shared.hashing import token_array
from shared.image_size import count_tokens
from shared.messages.cards import ImageInput
from shared.messages.generate import Image
from shared.model_files.config_json import read_config_json

LLAVA = "LlavaForConditionalGeneration"
"""The architecture whose images all have one size and one number of tokens."""
GEMMA = "Gemma3ForConditionalGeneration"
"""The architecture whose images are the same in that, and stand between other tokens."""
QWEN = ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration")
"""The architectures whose images keep their shape, and have tokens by their size."""
_Elements = dict[str, MultiModalFieldElem]
"""What vLLM gets of an image, by the names of the model's arguments."""

_log = logging.getLogger(__name__)


def takes_images(model: Path) -> bool:
    """Return whether a model's files are those of the architecture whose images are served."""
    try:
        named = read_config_json(model).outer.get("architectures") or ()
    except ModelError:
        return False  # about which vLLM has words of its own
    return any(name in (LLAVA, GEMMA, *QWEN) for name in named)


class ImagePrompts:
    """Makes prompts with images for one model."""

    def __init__(self, images: ImageInput, most: int, elements: Callable[[Image], _Elements]) -> None:
        """`most` images of a prompt are served, prepared as `images` says; `elements` returns what vLLM gets of one."""
        self.input = images
        self.most = most
        self.elements = elements

    @staticmethod
    def read(model: ModelConfig, most: int) -> ImagePrompts | None:
        """Return how a model's images are passed on. None if it takes none, or others than are served, which the log
        says."""
        if not model.is_multimodal_model or model.runner_type == "pooling":
            return None
        most = min(most, model.get_multimodal_config().get_limit_per_prompt("image"))
        if not most:
            return None
        try:
            if model.architecture == LLAVA:
                return _llava(model, most)
            if model.architecture == GEMMA:
                return _gemma(model, most)
            if model.architecture in QWEN:
                return _qwen(model, most)
        except ModelError as wrong:
            _log.warning("images are refused: %s", wrong)
            return None
        _log.warning("images are refused: of vLLM's models only %s take them here", ", ".join((LLAVA, GEMMA, *QWEN)))
        return None

    def prompt(self, submit: Submit) -> MultiModalInput:
        """Return vLLM's input for a prompt with images."""
        images = submit.images
        items = [MultiModalKwargsItem(self.elements(image)) for image in images]
        return mm_input(
            token_array(submit.tokens).tolist(),
            MultiModalKwargsItems({"image": items}),
            {"image": [image.key.hex() for image in images]},
            {"image": [PlaceholderRange(offset=image.start, length=image.tokens) for image in images]},
            cache_salt=submit.salt or None,
        )

    def alone(self, pixels: bytes, name: str, width: int = 0, height: int = 0) -> MultiModalInput:
        """Return vLLM's input for one image without a text. vLLM's caches know it by this name. It has `width` and
        `height` if the images of the model differ in them."""
        size = (width, height) if self.input.unit else (self.input.width, self.input.height)
        image = Image(b"", 0, count_tokens(self.input, *size), pixels, *size)
        return mm_input(
            [self.input.token_id] * image.tokens,
            MultiModalKwargsItems({"image": [MultiModalKwargsItem(self.elements(image))]}),
            {"image": [name]},
            {"image": [PlaceholderRange(offset=0, length=image.tokens)]},
        )


def _llava(model: ModelConfig, most: int) -> ImagePrompts:
    """Return how images of a LLaVA are passed on. Raise ModelError."""
    vision = read_vision(Path(model.model), read_config_json(Path(model.model)), model.get_vocab_size())

    def elements(image: Image) -> _Elements:
        values = _normed(image.pixels, vision.input, vision.prepared).to(model.dtype)
        return {"pixel_values": MultiModalFieldElem(data=values, field=MultiModalBatchedField())}

    return ImagePrompts(vision.input, most, elements)


def _gemma(model: ModelConfig, most: int) -> ImagePrompts:
    """Return how images of a Gemma 3 are passed on. Raise ModelError."""
    arguments = model.get_multimodal_config().mm_processor_kwargs or {}
    images, prepared = read_gemma(Path(model.model), model.hf_config, arguments)

    def elements(image: Image) -> _Elements:
        values = _normed(image.pixels, images, prepared).to(model.dtype)[None]
        count = MultiModalBatchedField(keep_on_cpu=True)
        return {
            "pixel_values": MultiModalFieldElem(data=values, field=MultiModalFlatField(slices=[slice(0, 1)])),
            "num_patches": MultiModalFieldElem(data=torch.tensor(1), field=count),
        }

    return ImagePrompts(images, most, elements)


def _normed(pixels: bytes, images: ImageInput, prepared: FixedSize) -> torch.Tensor:
    """Return the values of one image, in the order of transformers' arithmetic on Pillow's pixels."""
    colours = np.frombuffer(pixels, np.uint8).reshape(images.height, images.width, 3)
    scaled = (colours.astype(np.float64) * prepared.scale).astype(np.float32)
    mean, std = (np.asarray(each, np.float32) for each in (prepared.mean, prepared.std))
    normal = (scaled - mean) / std
    return torch.from_numpy(np.ascontiguousarray(normal.transpose(2, 0, 1)))


def _qwen(model: ModelConfig, most: int) -> ImagePrompts:
    """Return how images of Qwen2-VL's family are passed on. Raise ModelError."""
    config, multimodal = model.hf_config, model.get_multimodal_config()
    vision: Any = config.vision_config
    patch = PatchShape(vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size)
    if not multimodal.mm_device_do_normalize:
        raise ModelError("vllm.mm_device_do_normalize is false; images are served if it is true, which is the default")
    arguments, vocab = multimodal.mm_processor_kwargs or {}, model.get_vocab_size()
    images = read_input(Path(model.model), config.image_token_id, vocab, patch, arguments)
    _log.info("images are resized to at most %d pixels (max_pixels in mm_processor_kwargs)", images.most_pixels)

    def elements(image: Image) -> _Elements:
        size = image.width, image.height
        patches = torch.from_numpy(patches_of(image.pixels, *size, patch))
        grid = torch.tensor(grid_of(*size, patch))
        every = [slice(0, len(patches))]
        return {
            "pixel_values": MultiModalFieldElem(data=patches, field=MultiModalFlatField(slices=every)),
            "image_grid_thw": MultiModalFieldElem(data=grid, field=MultiModalBatchedField(keep_on_cpu=True)),
        }

    return ImagePrompts(images, most, elements)
