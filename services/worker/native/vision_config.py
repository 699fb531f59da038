"""Reads how a LLaVA model sees: its vision tower and projector from config.json, and how images are prepared from the
file of its image processor.

What would change the arithmetic and is not built is refused by name, as in config.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar, get_args

import msgspec
from msgspec import Struct

from services.worker.model.tensor_header import Shape
from shared.errors import ModelError
from shared.messages.cards import ImageInput
from shared.model_file import CONFIG_LIMIT_BYTES, PREPROCESSOR, PROCESSOR, decode_model_json, read_model_file
from shared.model_files.config_json import ConfigJson

TowerActivation = Literal["quick_gelu", "gelu", "gelu_pytorch_tanh"]
_LIMIT = 1 << 16
"""The most of each number in `vision_config`, far beyond any real model."""
_LAYERS_LIMIT = 1000
_FILTERS = ("NEAREST", "LANCZOS", "BILINEAR", "BICUBIC", "BOX", "HAMMING")
"""Pillow's names of the filters, by the number that `resample` gives."""
_TOWERS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "clip_vision_model": {"patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
        "siglip_vision_model": {"patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
    }
)
"""The vision towers that are served, by `model_type`, with transformers' values for settings that a file lacks."""

_T = TypeVar("_T")


class _TowerJson(Struct, frozen=True):
    """The settings of `vision_config`, with the values that both towers' classes have."""

    patch_size: int
    hidden_act: str
    layer_norm_eps: float
    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_channels: int = 3
    image_size: int = 224


class _LlavaJson(Struct, frozen=True):
    """The settings of config.json that join tower and decoder."""

    vision_config: dict[str, Any]
    vision_feature_layer: int | list[int] = -2
    vision_feature_select_strategy: Literal["default", "full"] = "default"
    projector_hidden_act: str = "gelu"
    multimodal_projector_bias: bool = True
    image_token_index: int | None = None
    image_token_id: int | None = None


class _ProcessorJson(Struct, frozen=True):
    """The settings of an image processor."""

    size: int | dict[str, int | None]
    image_mean: tuple[float, float, float]
    image_std: tuple[float, float, float]
    crop_size: int | dict[str, int | None] | None = None
    do_resize: bool | None = True
    do_center_crop: bool | None = None
    do_rescale: bool | None = True
    do_normalize: bool | None = True
    do_pad: bool | None = False
    resample: int = 3
    rescale_factor: float = 1 / 255


class FixedSize(Struct, frozen=True):
    """How images are prepared that all have one size."""

    resize: int
    """Pixels of the shorter side, and the filter, as in `ImageInput`."""
    filter: str
    mean: tuple[float, float, float]
    """What is taken off each scaled colour."""
    std: tuple[float, float, float]
    """What each colour is divided by then."""
    scale: float
    """The factor of a pixel's bytes, which comes first."""


class VisionConfig(Struct, frozen=True):
    """The shape and arithmetic of a vision tower and its projector."""

    kind: str
    """`model_type` of the tower."""
    hidden: int
    intermediate: int
    heads: int
    image_size: int
    patch_size: int
    epsilon: float
    activation: TowerActivation
    features: tuple[int, ...]
    """The hidden states that the projector takes, one after the other: 0 are the embeddings, n what layer n gives."""
    drops_first: bool
    """Whether the first position, which is CLIP's class, is left out."""
    projector_activation: TowerActivation
    projector_bias: bool
    prepared: FixedSize
    """How images are prepared, and their bytes become numbers."""
    input: ImageInput
    """How images are prepared, and what stands for them in a prompt."""

    @property
    def has_class(self) -> bool:
        """Whether a class embedding comes first, and a norm follows the embeddings: CLIP's."""
        return self.kind == "clip_vision_model"

    @property
    def patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    @property
    def layers(self) -> int:
        """How many layers are computed: none after the last one that counts."""
        return max(self.features)


def read_vision(directory: Path, file: ConfigJson, vocab: int) -> VisionConfig:
    """Read how a LLaVA model sees. Raise ModelError naming file and field."""
    path = file.path
    llava = _convert(path, "", file.outer, _LlavaJson)
    kind = str(llava.vision_config.get("model_type", "clip_vision_model"))
    if kind not in _TOWERS:
        raise ModelError(f"{path}: vision_config.model_type is {kind}; {' and '.join(_TOWERS)} are supported")
    tower = _convert(path, "vision_config: ", {**_TOWERS[kind], **llava.vision_config}, _TowerJson)
    _check(path, tower)
    token_id = llava.image_token_index if llava.image_token_id is None else llava.image_token_id
    token_id = 32_000 if token_id is None else token_id
    if not 0 <= token_id < vocab:
        raise ModelError(f"{path}: image_token_id is {token_id}; expected one of the {vocab} tokens of the vocabulary")
    features = _features(path, llava.vision_feature_layer, tower.num_hidden_layers)
    drops_first = llava.vision_feature_select_strategy == "default"
    tokens = (tower.image_size // tower.patch_size) ** 2 + (kind == "clip_vision_model") - drops_first
    if tokens < 1:
        raise ModelError(f"{path}: vision_config gives an image no position; expected at least one")
    activations = (
        _activation(path, "vision_config.hidden_act", tower.hidden_act),
        _activation(path, "projector_hidden_act", llava.projector_hidden_act),
    )
    prepared = read_fixed_size(directory, tower.image_size)
    return VisionConfig(
        kind=kind,
        hidden=tower.hidden_size,
        intermediate=tower.intermediate_size,
        heads=tower.num_attention_heads,
        image_size=tower.image_size,
        patch_size=tower.patch_size,
        epsilon=tower.layer_norm_eps,
        activation=activations[0],
        features=features,
        drops_first=drops_first,
        projector_activation=activations[1],
        projector_bias=llava.multimodal_projector_bias,
        prepared=prepared,
        input=ImageInput(token_id, tokens, tower.image_size, tower.image_size, prepared.resize, prepared.filter),
    )


def read_fixed_size(directory: Path, side: int) -> FixedSize:
    """Read how images are prepared for a tower that takes `side` by `side` pixels. Raise ModelError naming file and
    field."""
    path, settings = read_processor(directory, "size")
    processor = _convert(path, "", settings, _ProcessorJson)
    return FixedSize(
        resize=_resize(path, processor, side),
        filter=filter_name(path, processor.resample),
        mean=processor.image_mean if processor.do_normalize else (0.0, 0.0, 0.0),
        std=processor.image_std if processor.do_normalize else (1.0, 1.0, 1.0),
        scale=processor.rescale_factor if processor.do_rescale else 1.0,
    )


def vision_shapes(config: VisionConfig, decoder_hidden: int) -> dict[str, Shape]:
    """Return the shape of every tensor of tower and projector that is used, by the name that `text_name` gives."""
    hidden, wide = config.hidden, config.intermediate
    embeddings = "vision_tower.embeddings."
    shapes: dict[str, Shape] = {
        f"{embeddings}patch_embedding.weight": (hidden, 3, config.patch_size, config.patch_size),
        f"{embeddings}position_embedding.weight": (config.patches + config.has_class, hidden),
    }
    if config.has_class:
        shapes[f"{embeddings}class_embedding"] = (hidden,)
        shapes |= {f"vision_tower.pre_layrnorm.{part}": (hidden,) for part in ("weight", "bias")}  # sic
    else:
        shapes[f"{embeddings}patch_embedding.bias"] = (hidden,)
    layer: dict[str, Shape] = {f"layer_norm{n}.{part}": (hidden,) for n in (1, 2) for part in ("weight", "bias")}
    for name, rows, columns in (
        *((f"self_attn.{each}_proj", hidden, hidden) for each in ("q", "k", "v", "out")),
        *(("mlp.fc1", wide, hidden), ("mlp.fc2", hidden, wide)),
    ):
        layer |= {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}
    for number in range(config.layers):
        shapes |= {f"vision_tower.encoder.layers.{number}.{name}": shape for name, shape in layer.items()}
    for number, columns in ((1, hidden * len(config.features)), (2, decoder_hidden)):
        shapes[f"multi_modal_projector.linear_{number}.weight"] = (decoder_hidden, columns)
        if config.projector_bias:
            shapes[f"multi_modal_projector.linear_{number}.bias"] = (decoder_hidden,)
    return shapes


def _convert(path: Path, where: str, settings: Mapping[str, Any], kind: type[_T]) -> _T:
    said = {name: value for name, value in settings.items() if value is not None}
    try:
        return msgspec.convert(said, kind)
    except msgspec.ValidationError as wrong:
        raise ModelError(f"{path}: {where}{wrong}") from None


def _check(path: Path, tower: _TowerJson) -> None:
    for field in ("hidden_size", "intermediate_size", "num_attention_heads", "image_size", "patch_size"):
        if not 1 <= getattr(tower, field) <= _LIMIT:
            raise ModelError(f"{path}: vision_config.{field} is {getattr(tower, field)}; expected 1 to {_LIMIT}")
    if not 1 <= tower.num_hidden_layers <= _LAYERS_LIMIT:
        raise ModelError(
            f"{path}: vision_config.num_hidden_layers is {tower.num_hidden_layers}; expected 1 to {_LAYERS_LIMIT}"
        )
    if tower.num_channels != 3:
        raise ModelError(f"{path}: vision_config.num_channels is {tower.num_channels}; only 3 is supported")
    if tower.hidden_size % tower.num_attention_heads:
        raise ModelError(
            f"{path}: vision_config.hidden_size is {tower.hidden_size}, which {tower.num_attention_heads} heads"
            " cannot share"
        )
    if not 0 <= tower.layer_norm_eps < math.inf:
        raise ModelError(f"{path}: vision_config.layer_norm_eps is {tower.layer_norm_eps}; expected a positive number")


def _features(path: Path, said: int | Sequence[int], layers: int) -> tuple[int, ...]:
    """Return the hidden states that are used, each counted from the embeddings on."""
    named = [said] if isinstance(said, int) else said
    features = tuple(each + layers + 1 if each < 0 else each for each in named)
    if not features or len(features) > layers + 1 or not all(0 <= each <= layers for each in features):
        raise ModelError(f"{path}: vision_feature_layer is {said}; the tower has {layers} layers")
    return features


def _activation(path: Path, field: str, name: str) -> TowerActivation:
    for known in get_args(TowerActivation):
        if name == known:
            return known  # type: ignore[no-any-return]
    raise ModelError(f"{path}: {field} is {name}; {', '.join(get_args(TowerActivation))} are supported")


def read_processor(directory: Path, *named: str) -> tuple[Path, Mapping[str, Any]]:
    """Return the settings of the image processor, of which `named` are some that tell them from others, and the file
    that has them. Raise ModelError."""
    for name in (PREPROCESSOR, PROCESSOR):
        path = directory / name
        content = read_model_file(path, CONFIG_LIMIT_BYTES, missing=b"")
        settings = decode_model_json(path, content, dict[str, Any]) if content else {}
        nested = settings.get("image_processor")
        settings = nested if isinstance(nested, dict) else settings
        if any(name in settings for name in named):
            return path, settings
    raise ModelError(f"{directory / PREPROCESSOR}: missing; it says how images are prepared")


def _resize(path: Path, processor: _ProcessorJson, image_size: int) -> int:
    """Return `ImageInput.resize`, after checking that prepared images have the tower's size."""
    if not processor.do_resize or processor.do_pad:
        field, other = ("do_pad", "false") if processor.do_resize else ("do_resize", "true")
        raise ModelError(f"{path}: {field} is {getattr(processor, field)}; only {other} is supported")
    factors = (*processor.image_mean, *processor.image_std, processor.rescale_factor)
    if not all(map(math.isfinite, factors)) or min(processor.image_std) <= 0:
        raise ModelError(f"{path}: image_mean, image_std and rescale_factor must be finite, and image_std above 0")
    size, crop = processor.size, processor.crop_size
    crops = crop is not None if processor.do_center_crop is None else processor.do_center_crop
    square = {"height": image_size, "width": image_size}
    cut = crop if crops else size
    if cut not in (square, image_size) or (not crops and size != square):
        raise ModelError(
            f"{path}: {'crop_size' if crops else 'size'} is {cut}; the vision tower takes {image_size} by {image_size}"
        )
    if size == square:
        return 0  # a cut would change nothing
    shortest = size if isinstance(size, int) else size.get("shortest_edge")
    if shortest is None or not 1 <= shortest <= _LIMIT or (isinstance(size, dict) and len(size) > 1):
        raise ModelError(f"{path}: size is {size}; before a cut only a shortest_edge of 1 to {_LIMIT} is supported")
    return shortest


def filter_name(path: Path, number: int) -> str:
    """Return Pillow's name of the filter with a number that a file says. Raise ModelError."""
    if not 0 <= number < len(_FILTERS):
        raise ModelError(f"{path}: resample is {number}; expected one of Pillow's filters, 0 to {len(_FILTERS) - 1}")
    return _FILTERS[number]
