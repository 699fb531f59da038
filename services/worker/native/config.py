"""Reads and checks config.json, which has the shape of the decoder.

It reads Hugging Face's files of the Llama and Qwen2 families, as written by transformers 4 (`rope_theta` and
`rope_scaling`) and by transformers 5 (`rope_parameters`). A setting that would change the arithmetic and is not
implemented is refused, never ignored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec import Struct

from services.worker.native.rope import Rope, parse_rope
from shared.errors import ModelError
from shared.model_file import CONFIG_LIMIT_BYTES, decode_model_json, read_model_file, read_model_json

_LAYERS_LIMIT = 1000
"""The most layers, far beyond any real model. A damaged file must not make us list a billion tensors."""
ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM")


class _Named(Struct, frozen=True):
    """The part of config.json that is read first, because other architectures have other fields."""

    architectures: tuple[str, ...]


class _Json(Struct, frozen=True):
    """The keys of config.json that are read; anything else in the file does not concern the arithmetic."""

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
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    is_causal: bool = True
    """False for an embedding model in which a position attends to later positions too."""
    rope_theta: float = 10_000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    original_max_position_embeddings: int | None = None
    eos_token_id: int | list[int] | None = None


class _Generation(Struct, frozen=True):
    eos_token_id: int | list[int] | None = None


class ModelConfig(Struct, frozen=True):
    """A decoder's shape; lengths in elements."""

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

    @property
    def queries(self) -> int:
        """The width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """The width of all key heads, or of all value heads, together."""
        return self.kv_heads * self.head_dim


def read_config(directory: Path) -> ModelConfig:
    """Read config.json and generation_config.json (may be missing). Raises ModelError naming file and field."""
    path = directory / "config.json"
    content = read_model_file(path, CONFIG_LIMIT_BYTES)
    architecture = ", ".join(decode_model_json(path, content, _Named).architectures) or "none"
    if architecture not in ARCHITECTURES:
        raise ModelError(f"{path}: architecture {architecture} is not supported; {' and '.join(ARCHITECTURES)} are")
    raw = decode_model_json(path, content, _Json)
    llama = architecture == "LlamaForCausalLM"
    _refuse_unknown_arithmetic(path, raw)
    kv_heads = raw.num_key_value_heads or raw.num_attention_heads
    head_dim = raw.head_dim or raw.hidden_size // max(raw.num_attention_heads, 1)
    generation = read_model_json(directory / "generation_config.json", _Generation, missing=b"{}")
    eos = raw.eos_token_id if generation.eos_token_id is None else generation.eos_token_id
    rope, context_length = parse_rope(
        str(path),
        raw.rope_parameters or {"rope_theta": raw.rope_theta, **(raw.rope_scaling or {})},
        raw.max_position_embeddings,
        raw.original_max_position_embeddings,
    )
    config = ModelConfig(
        layers=raw.num_hidden_layers,
        hidden=raw.hidden_size,
        intermediate=raw.intermediate_size,
        heads=raw.num_attention_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=raw.vocab_size,
        context_length=context_length,
        norm_epsilon=raw.rms_norm_eps,
        rope=rope,
        tied=raw.tie_word_embeddings,
        qkv_bias=raw.attention_bias if llama else True,
        output_bias=raw.attention_bias if llama else False,
        eos_token_ids=(eos,) if isinstance(eos, int) else tuple(eos or ()),
    )
    _check(path, config)
    return config


def _refuse_unknown_arithmetic(path: Path, raw: _Json) -> None:
    for field, value, expected in (
        ("hidden_act", raw.hidden_act, "silu"),
        ("mlp_bias", raw.mlp_bias, False),
        ("use_sliding_window", raw.use_sliding_window, False),
        ("is_causal", raw.is_causal, True),
    ):
        if value != expected:
            raise ModelError(f"{path}: {field} is {value}; only {expected} is supported")


def _check(path: Path, config: ModelConfig) -> None:
    for field in ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocab", "context_length"):
        if getattr(config, field) < 1:
            raise ModelError(f"{path}: {field} is {getattr(config, field)}; expected at least 1")
    if config.layers > _LAYERS_LIMIT:
        raise ModelError(f"{path}: layers is {config.layers}; expected at most {_LAYERS_LIMIT}")
    if config.heads % config.kv_heads:
        raise ModelError(f"{path}: {config.heads} attention heads cannot share {config.kv_heads} key-value heads")
    if config.head_dim % 2:
        raise ModelError(f"{path}: head_dim is {config.head_dim}; rotary embeddings need an even one")
    if not all(0 <= token < config.vocab for token in config.eos_token_ids):
        raise ModelError(f"{path}: eos_token_id {config.eos_token_ids} is outside the vocabulary of {config.vocab}")
