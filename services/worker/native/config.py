"""Makes the shape of the decoder of config.json, which shared/model_files reads.

The architectures are those of architectures.py. A setting that would change the arithmetic and is not implemented is
refused, never ignored.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, assert_never

import msgspec
from msgspec import Struct

from services.worker.model.architectures import (
    ARCHITECTURES,
    Activation,
    Architecture,
    NormPlaces,
    QueryNorm,
    architecture_of,
)
from services.worker.native.rope import LongRope, NoRope, Rope, parse_rope
from services.worker.native.vision_config import VisionConfig, read_vision
from shared.errors import ModelError
from shared.model_file import decode_model_json
from shared.model_files.config_json import FULL, SLIDING, ConfigJson, read_config_json, rope_parameters
from shared.model_files.special_tokens import read_end_tokens

_LAYERS_LIMIT = 1000
"""The most layers, far beyond any real model. A damaged file must not make us list a billion tensors."""


class _Named(Struct, frozen=True):
    """The part of config.json that is read first, because other architectures have other fields."""

    architectures: tuple[str, ...]


class _Json(Struct, frozen=True):
    """The keys of config.json that all architectures have."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    vocab_size: int
    rms_norm_eps: float
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    use_sliding_window: bool = False
    is_causal: bool = True
    """False for an embedding model in which a position attends to later positions too."""
    original_max_position_embeddings: int | None = None
    quantization_config: dict[str, Any] | None = None


class _AllJson(_Json, frozen=True):
    """All keys that are read; these count where the architecture reads them or has a default of its own."""

    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_activation: str | None = None
    use_bidirectional_attention: bool | None = None
    sliding_window: int | None = None
    sliding_window_pattern: int = 1
    max_window_layers: int = 0
    layer_types: list[str] | None = None
    partial_rotary_factor: float = 1.0
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: int = 0
    query_pre_attn_scalar: float | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    attention_multiplier: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0


_NULL_SAYS = frozenset(
    (
        *("num_key_value_heads", "head_dim", "sliding_window", "layer_types", "no_rope_layers"),
        *("attn_logit_softcapping", "final_logit_softcapping"),
    )
)
"""The settings in which null is a value. In others it means that the file does not say it."""


class ModelConfig(Struct, frozen=True):
    """A decoder's shape and arithmetic; lengths in elements. The fields with defaults are Llama's where they have
    these."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context_length: int
    norm_epsilon: float
    rope: Rope
    tied: bool
    """Whether the output projection is the embedding."""
    qkv_bias: bool
    output_bias: bool
    """Whether o_proj has a bias; Llama's attention_bias gives it one."""
    eos_token_ids: tuple[int, ...]
    activation: Activation = "silu"
    norms: NormPlaces = "before"
    norm_offset: float = 0.0
    """The number that is added to the stored weights of norms."""
    query_norm: QueryNorm = "none"
    fused: bool = False
    """Whether q, k and v are stored as one tensor, and gate and up too."""
    rotary_dim: int = 0
    """The first elements of each head that are rotated; 0 means all."""
    other_rope: Rope | None = None
    """The rotation of the layers of which `other_rope_layers` says so."""
    other_rope_layers: tuple[bool, ...] = ()
    windows: tuple[int, ...] = ()
    """Each layer's sliding window: to how many positions a position attends, itself included. 0 means to all; none at
    all means 0 for each layer."""
    query_scale: float = 0.0
    """The factor of products of queries and keys; 0 means 1 / √head_dim."""
    score_cap: float = 0.0
    """The bound to which tanh bends these scaled products; 0 means none. So with logits."""
    logit_cap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """The factor of what attention and the feed-forward part add to the residual stream."""
    logit_scale: float = 1.0
    vision: VisionConfig | None = None
    """How the model sees. None if it takes no images, or they are not served."""

    @property
    def queries(self) -> int:
        """The width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """The width of all key heads, or of all value heads, together."""
        return self.kv_heads * self.head_dim

    @property
    def rotated(self) -> int:
        """The number of elements of each head that are rotated."""
        return self.rotary_dim or self.head_dim

    @property
    def attention_scale(self) -> float:
        """The factor of products of queries and keys."""
        return self.query_scale or 1 / math.sqrt(self.head_dim)

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The rotations; `rope_of` says which of them a layer has."""
        return (self.rope,) if self.other_rope is None else (self.rope, self.other_rope)

    def rope_of(self, layer: int) -> int:
        """Return the index of the layer's rotation in `ropes`."""
        return int(bool(self.other_rope_layers) and self.other_rope_layers[layer])

    def window_of(self, layer: int) -> int:
        """Return the layer's sliding window; 0 if it has none."""
        return self.windows[layer] if self.windows else 0


def read_config(directory: Path) -> ModelConfig:
    """Read config.json, and what counts of the files next to it. Raise ModelError naming file and field."""
    file = read_config_json(directory)
    path = file.path
    architecture = _architecture(file)
    raw = _settings(file, architecture)
    _refuse_unknown_arithmetic(path, raw, architecture)
    _check_numbers(path, raw)
    head_dim = raw.head_dim or raw.hidden_size // max(raw.num_attention_heads, 1)
    sliding = _sliding_layers(path, raw, architecture)
    parameters, local = rope_parameters(
        file.settings if architecture.nested else file.outer,
        str(path),
        default_theta=architecture.rope_theta,
        default_local_theta=architecture.local_rope_theta,
    )
    rotary_dim = _rotary_dim(path, raw, architecture, parameters, head_dim)
    rope, context_length = parse_rope(
        str(path),
        parameters,
        raw.max_position_embeddings,
        raw.original_max_position_embeddings,
        outer_first="original_max_position_embeddings" in architecture.others,
    )
    other_rope, other_rope_layers = _other_rope(path, raw, local, sliding)
    window = raw.sliding_window or 0
    config = ModelConfig(
        layers=raw.num_hidden_layers,
        hidden=raw.hidden_size,
        intermediate=raw.intermediate_size,
        heads=raw.num_attention_heads,
        kv_heads=raw.num_key_value_heads or raw.num_attention_heads,
        head_dim=head_dim,
        vocab=raw.vocab_size,
        context_length=context_length,
        norm_epsilon=raw.rms_norm_eps,
        rope=rope,
        tied=raw.tie_word_embeddings,
        qkv_bias=architecture.qkv_bias or raw.attention_bias,
        output_bias=raw.attention_bias,
        eos_token_ids=read_end_tokens(directory, file, raw.vocab_size, architecture.eos_token_id),
        activation=architecture.activations[raw.hidden_activation or raw.hidden_act],
        norms=architecture.norms,
        norm_offset=architecture.norm_offset,
        query_norm=architecture.query_norm,
        fused=architecture.fused,
        rotary_dim=0 if rotary_dim == head_dim else rotary_dim,
        other_rope=other_rope,
        other_rope_layers=other_rope_layers,
        windows=tuple(window * slides for slides in sliding) if any(sliding) and window < context_length else (),
        query_scale=_query_scale(raw),
        score_cap=raw.attn_logit_softcapping or 0.0,
        logit_cap=raw.final_logit_softcapping or 0.0,
        embedding_scale=raw.hidden_size**0.5 if architecture.scaled_embedding else raw.embedding_multiplier,
        residual_scale=raw.residual_multiplier,
        logit_scale=1 / raw.logits_scaling,
        vision=read_vision(directory, file, raw.vocab_size) if architecture.decoders else None,
    )
    _check(path, config)
    return config


def _query_scale(raw: _AllJson) -> float:
    scalar = raw.query_pre_attn_scalar
    return raw.attention_multiplier or 0.0 if scalar is None else scalar**-0.5


def _rotary_dim(
    path: Path, raw: _AllJson, architecture: Architecture, parameters: dict[str, Any], head_dim: int
) -> int:
    """Return how many dimensions of a head are rotated, and take them out of the rope's parameters."""
    if "partial_rotary_factor" not in architecture.reads:
        return head_dim
    share = _positive(path, "partial_rotary_factor", parameters.pop("partial_rotary_factor", None))
    return int(head_dim * (share or raw.partial_rotary_factor))


def _architecture(file: ConfigJson) -> Architecture:
    """Return the architecture that config.json names. Raise ModelError if it is not supported."""
    path = file.path
    name = ", ".join(decode_model_json(path, file.content, _Named).architectures) or "none"
    try:
        architecture = architecture_of(name, file.text)
    except ValueError as wrong:
        raise ModelError(f"{path}: text_config.{wrong}") from None
    if architecture is None:
        raise ModelError(
            f"{path}: architecture {name} is not supported; {', '.join(ARCHITECTURES)} are. docs/models.md lists them;"
            " others, such as mixtures of experts, need another engine, such as vLLM"
        )
    return architecture


def _settings(file: ConfigJson, architecture: Architecture) -> _AllJson:
    """Decode the settings that the architecture reads, with transformers' defaults for those that are missing."""
    read = {*_Json.__struct_fields__, *architecture.reads}
    if architecture.nested and file.text is None:
        raise ModelError(f"{file.path}: text_config is missing; it has the settings of the model's text part")
    stored = {**(file.settings if architecture.nested else file.outer)}
    if architecture.nested:
        text_tied = file.settings.get("tie_word_embeddings") if architecture.decoders else None
        stored["tie_word_embeddings"] = file.tied or text_tied  # LLaVA's classes let either say so
    said = {name: value for name, value in stored.items() if name in read and (value is not None or name in _NULL_SAYS)}
    try:
        return msgspec.convert({**architecture.defaults, **said}, _AllJson)
    except msgspec.ValidationError as wrong:
        raise ModelError(f"{file.path}: {wrong}") from None


def _refuse_unknown_arithmetic(path: Path, raw: _AllJson, architecture: Architecture) -> None:
    if raw.quantization_config:
        method = raw.quantization_config.get("quant_method")
        raise ModelError(
            f"{path}: quantization_config says that the weights are quantised ({method}); only GGUF files may be."
            " Take the model's original weights"
        )
    named = "hidden_activation" if raw.hidden_activation else "hidden_act"
    for field, value, served in (
        (named, raw.hidden_activation or raw.hidden_act, tuple(architecture.activations)),
        ("mlp_bias", raw.mlp_bias, (False,)),
        ("use_sliding_window", raw.use_sliding_window, (False, True) if architecture.sliding != "none" else (False,)),
        ("is_causal", raw.is_causal, (True,)),
        ("use_bidirectional_attention", raw.use_bidirectional_attention, (None, False)),
    ):
        if value not in served:
            raise ModelError(f"{path}: {field} is {value}; only {served[-1]} is supported")


def _check_numbers(path: Path, raw: _AllJson) -> None:
    """Check what lists are made of and what numbers are divided by."""
    if not 1 <= raw.num_hidden_layers <= _LAYERS_LIMIT:
        bound = "at least 1" if raw.num_hidden_layers < 1 else f"at most {_LAYERS_LIMIT}"
        raise ModelError(f"{path}: layers is {raw.num_hidden_layers}; expected {bound}")
    if raw.vocab_size < 1:
        raise ModelError(f"{path}: vocab is {raw.vocab_size}; expected at least 1")
    for field in (
        *("sliding_window", "sliding_window_pattern", "partial_rotary_factor", "query_pre_attn_scalar"),
        *("attn_logit_softcapping", "final_logit_softcapping", "attention_multiplier", "embedding_multiplier"),
        *("residual_multiplier", "logits_scaling"),
    ):
        _positive(path, field, getattr(raw, field))


def _positive(path: Path, field: str, value: Any) -> Any:
    if value is not None and not (isinstance(value, (int, float)) and 0 < value < math.inf):
        raise ModelError(f"{path}: {field} is {value!r}; expected a positive number")
    return value


def _sliding_layers(path: Path, raw: _AllJson, architecture: Architecture) -> tuple[bool, ...]:
    """Say of each layer whether its attention slides."""
    layers = range(raw.num_hidden_layers)
    if raw.sliding_window is None:
        return (False,) * len(layers)
    match architecture.sliding:
        case "none":
            return (False,) * len(layers)
        case "all":
            return (True,) * len(layers)
        case "upper":
            if not raw.use_sliding_window:
                return (False,) * len(layers)
            slides = tuple(layer >= raw.max_window_layers for layer in layers)
        case "pattern":
            slides = tuple((layer + 1) % raw.sliding_window_pattern != 0 for layer in layers)
        case _:
            assert_never(architecture.sliding)
    if raw.layer_types is None:
        return slides
    if len(raw.layer_types) != len(layers) or not {FULL, SLIDING}.issuperset(raw.layer_types):
        raise ModelError(f"{path}: layer_types must say {FULL} or {SLIDING} of each of {len(layers)} layers")
    return tuple(kind == SLIDING for kind in raw.layer_types)


def _other_rope(
    path: Path, raw: _AllJson, local: dict[str, Any] | None, sliding: tuple[bool, ...]
) -> tuple[Rope | None, tuple[bool, ...]]:
    """Return the second rotation and the layers that have it."""
    if local is not None and any(sliding):
        return parse_rope(str(path), local, raw.max_position_embeddings, None)[0], sliding
    if raw.no_rope_layer_interval:
        rotates = raw.no_rope_layers or [
            int((layer + 1) % raw.no_rope_layer_interval != 0) for layer in range(raw.num_hidden_layers)
        ]
        if len(rotates) < raw.num_hidden_layers:
            raise ModelError(f"{path}: no_rope_layers must have a number for each of {raw.num_hidden_layers} layers")
        return NoRope(), tuple(not each for each in rotates[: raw.num_hidden_layers])
    return None, ()


def _check(path: Path, config: ModelConfig) -> None:
    for field in ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "context_length"):
        if getattr(config, field) < 1:
            raise ModelError(f"{path}: {field} is {getattr(config, field)}; expected at least 1")
    if config.heads % config.kv_heads:
        raise ModelError(f"{path}: {config.heads} attention heads cannot share {config.kv_heads} key-value heads")
    if config.head_dim % 2:
        raise ModelError(f"{path}: head_dim is {config.head_dim}; rotary embeddings need an even one")
    if not 2 <= config.rotated <= config.head_dim or config.rotated % 2:
        raise ModelError(
            f"{path}: partial_rotary_factor rotates {config.rotated} of {config.head_dim} elements of a head;"
            " expected an even number of them"
        )
    if isinstance(config.rope, LongRope) and len(config.rope.short_factor) != config.rotated // 2:
        raise ModelError(
            f"{path}: short_factor has {len(config.rope.short_factor)} numbers; expected {config.rotated // 2}"
        )
