"""The sizes of a decoder on which its times depend, from the settings of its config.json. Pure.

    embedding ─▶ layers x (attention ─▶ MLP, or `used_experts` of `experts` MLPs) ─▶ head

Weights are counted in parameters of matrices. Norms and biases are left out: they are below 0.1 % of a model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from shared.errors import ConfigError

_PLAIN_MLP = frozenset(("falcon", "gpt2", "gpt_neox", "nemotron", "opt", "phi", "starcoder2"))
"""The model types whose MLPs have two matrices; the others have a gate, the third one."""
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_OTHER_EXPERTS = re.compile(r"(moe_)?n(um)?_(?!shared)\w*experts")
"""The names of other settings that look like a number of experts."""
_BITS = {"fp8": 8.0, "modelopt": 8.0, "fbgemm_fp8": 8.0, "mxfp4": 4.25, "nvfp4": 4.5, "modelopt_fp4": 4.5}
"""Bits of a weight by `quant_method`, with those of its scales, where the method itself says them."""
LAYERS_LIMIT = 10_000
_ATTENDS = 1
"""The entry of MiniMax's `attn_type_list` that is a layer with keys and values of each token."""
_KEEP_TOKENS = ("full_attention", "sliding_attention", "chunked_attention", "attention")
"""The entries of `layer_types` that are layers with keys and values of each token."""
_OTHER_LAYERS = ("hidden_size_per_layer_input", "compress_ratios")
_UNLISTED_LAYERS = (
    *("mamba_d_conv", "mamba_num_heads", "conv_L_cache", "hybrid_override_pattern", "attn_type_list"),
    *("linear_attn_config", "block_types"),
)
"""Settings of models that have layers of kinds that are not known here; the second ones without `layer_types`."""


class ModelShape(Struct, frozen=True):
    """The sizes of one model."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    attention_weights: int
    """The parameters of all layers' attention."""
    mlp_weights: int
    """The parameters of the MLPs of all layers without routed experts, and of shared experts."""
    expert_weights: int
    """The parameters of one routed expert. 0 if there are none."""
    expert_layers: int
    """The number of layers with routed experts."""
    experts: int
    """The number of routed experts of a layer."""
    used_experts: int
    """The number of routed experts that a token goes through."""
    table_weights: int
    """The parameters of the embedding, and of the head."""
    tied: bool
    """True if embedding and head are one table."""
    kv_layers: int
    """The number of layers that keep keys and values of each token; the others are linear attention."""
    kv_values: int
    """The values that one of these layers keeps of a token."""
    state_values: int
    """The values that all other layers keep of a sequence, however long it is."""
    latent: bool
    """True if a layer keeps one latent vector for all heads (MLA), which every GPU of a tensor-parallel group has."""
    bits: float
    """The bits of a weight between the two tables, as the model is stored."""
    context: int
    """The longest context. 0 if config.json does not say it."""

    @property
    def decoder_weights(self) -> int:
        """The parameters between the two tables."""
        routed = self.expert_layers * self.experts * self.expert_weights
        return self.attention_weights + self.mlp_weights + routed

    @property
    def active_weights(self) -> int:
        """The parameters between the two tables that one token is multiplied with."""
        used = self.expert_layers * self.used_experts * self.expert_weights
        return self.attention_weights + self.mlp_weights + used

    @property
    def mlp_values(self) -> float:
        """The values that all layers' activations read and write for one token: one for each column of a matrix of the
        MLPs that it goes through."""
        used = self.expert_layers * self.used_experts * self.expert_weights
        return (self.mlp_weights + used) / self.hidden

    @property
    def attention_flops(self) -> int:
        """The arithmetic of all layers for one pair of a query and a key, each with all heads."""
        return 4 * self.heads * self.head_dim * self.kv_layers

    def touched_weights(self, tokens: float) -> float:
        """Return how many of the parameters between the tables a step of `tokens` tokens reads, if each token goes to
        experts at random."""
        routed = self.expert_layers * self.experts * self.expert_weights
        if not routed:
            return self.decoder_weights
        share: float = 1 - (1 - self.used_experts / self.experts) ** tokens
        return self.decoder_weights - routed + share * routed


def shape_of(settings: Mapping[str, Any], where: str) -> ModelShape:
    """Return the shape that the settings of a config.json describe. Raise ConfigError, which begins with `where`."""
    reader = _Reader(settings, where)
    hidden, layers, heads = (reader.size(name) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    kv_heads = reader.size("num_key_value_heads", heads)
    head_dim = reader.size("head_dim", hidden // heads)
    intermediate = reader.size("intermediate_size", reader.size("moe_intermediate_size", 0) or None)
    matrices = 2 if settings.get("model_type") in _PLAIN_MLP else 3
    first, experts = reader.size("first_k_dense_replace", 0), _experts(reader, settings, where)
    used = reader.size("num_experts_per_tok") if experts else 0
    for name, value, fits in (
        ("num_hidden_layers", layers, layers <= LAYERS_LIMIT),
        ("head_dim", head_dim, head_dim > 0),
        ("num_key_value_heads", kv_heads, 0 < kv_heads <= heads),
        ("first_k_dense_replace", first, first <= layers),
        ("num_experts_per_tok", used, used <= experts),
    ):
        if not fits:
            raise ConfigError(f"{where}: {name} is {value}, which does not fit the other sizes")
    expert_layers = _expert_layers(reader, settings, layers, first) if experts else 0
    each = matrices * hidden * reader.size("moe_intermediate_size", intermediate) if experts else 0
    shared = reader.size("n_shared_experts", 0) * each if experts else 0
    shared += matrices * hidden * reader.size("shared_expert_intermediate_size", 0) if experts else 0
    shared += each if experts and settings.get("interleave_moe_layer_step") else 0  # Llama 4 does not say it
    dense = reader.size("intermediate_size_mlp", intermediate)
    latent, attention, kv_values = _attention(reader, hidden, heads, kv_heads, head_dim)
    linear = _linear_layers(settings, layers, where)
    linear_weights, state = _linear_attention(reader, hidden) if linear else (0, 0)
    attention += hidden * heads * head_dim if linear else 0  # the gate of the others' answers
    return ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=intermediate,
        attention_weights=(layers - linear) * attention + linear * linear_weights,
        mlp_weights=(layers - expert_layers) * matrices * hidden * dense + expert_layers * shared,
        expert_weights=each,
        expert_layers=expert_layers,
        experts=experts,
        used_experts=used,
        table_weights=hidden * reader.size("vocab_size"),
        tied=bool(settings.get("tie_word_embeddings", False)),
        kv_layers=layers - linear,
        kv_values=kv_values,
        state_values=linear * state,
        latent=latent,
        bits=_stored_bits(settings, where),
        context=reader.size("max_position_embeddings", 0),
    )


def _experts(reader: _Reader, settings: Mapping[str, Any], where: str) -> int:
    """Return the number of routed experts of a layer. Raise ConfigError if it has a name that is not known."""
    known = next((reader.size(name) for name in _EXPERTS if settings.get(name)), 0)
    other = next((name for name in settings if _OTHER_EXPERTS.fullmatch(name) and name not in _EXPERTS), None)
    if not known and other is not None and settings[other]:
        raise ConfigError(f"{where}: {other}: mixtures of experts of this kind are not known here")
    return known


def _expert_layers(reader: _Reader, settings: Mapping[str, Any], layers: int, first: int) -> int:
    """Return how many layers have routed experts: all from the first one on, every `step` of them, or those listed."""
    step = reader.size("decoder_sparse_step", reader.size("interleave_moe_layer_step", 1))
    plain, listed = settings.get("mlp_only_layers"), settings.get("moe_layer_freq")
    without = plain if isinstance(plain, list) else []
    sparse = listed if isinstance(listed, list) and len(listed) == layers else [1] * layers
    return sum(
        bool(sparse[layer]) and layer not in without and (layer + 1) % max(1, step) == 0
        for layer in range(first, layers)
    )


def _all_attend(name: str, kinds: object) -> bool:
    return name == "attn_type_list" and isinstance(kinds, list) and all(kind == _ATTENDS for kind in kinds)


def _linear_layers(settings: Mapping[str, Any], layers: int, where: str) -> int:
    """Return how many layers are linear attention, as in Qwen3-Next. Raise ConfigError for layers of other kinds."""
    kinds, every = settings.get("layer_types"), settings.get("full_attention_interval")
    listed = kinds if isinstance(kinds, list) and len(kinds) == layers else []
    names = _OTHER_LAYERS if listed else (*_OTHER_LAYERS, *_UNLISTED_LAYERS)
    other = next((name for name in names if settings.get(name) and not _all_attend(name, settings[name])), None)
    if other is not None:
        raise ConfigError(f"{where}: {other}: layers of this kind are not known here")
    unknown = next((kind for kind in listed if kind not in (*_KEEP_TOKENS, "linear_attention")), None)
    if unknown is not None:
        raise ConfigError(f"{where}: layer_types has {unknown!r}: layers of this kind are not known here")
    if listed:
        return listed.count("linear_attention")
    return layers - layers // every if type(every) is int and every > 0 else 0


def _linear_attention(reader: _Reader, hidden: int) -> tuple[int, int]:
    """Return the parameters of a layer of linear attention (a gated delta net), and the values it keeps of a
    sequence."""
    key_heads, heads = reader.size("linear_num_key_heads"), reader.size("linear_num_value_heads")
    key, value = reader.size("linear_key_head_dim"), reader.size("linear_value_head_dim")
    rows = 2 * key_heads * key + 2 * heads * value + 2 * heads  # q, k, v, their gate, and two numbers a head
    return hidden * (rows + heads * value), heads * key * value


def _attention(reader: _Reader, hidden: int, heads: int, kv_heads: int, head_dim: int) -> tuple[bool, int, int]:
    """Return whether a layer keeps a latent vector, the parameters of its attention, and the values it keeps."""
    rank = reader.size("kv_lora_rank", 0)
    if not rank:
        kv = kv_heads * head_dim
        return False, 2 * hidden * heads * head_dim + 2 * hidden * kv, 2 * kv
    turned, plain = reader.size("qk_rope_head_dim"), reader.size("qk_nope_head_dim")
    value, low = reader.size("v_head_dim"), reader.size("q_lora_rank", 0)
    queries = low * (hidden + heads * (plain + turned)) if low else hidden * heads * (plain + turned)
    keys = hidden * (rank + turned) + rank * heads * (plain + value)
    return True, queries + keys + heads * value * hidden, rank + turned


def _stored_bits(settings: Mapping[str, Any], where: str) -> float:
    """Return the bits of a weight. Raise ConfigError for a way of quantisation that is not known here."""
    quantized = settings.get("quantization_config")
    if not isinstance(quantized, dict):
        kept = settings.get("dtype") or settings.get("torch_dtype")
        return 32.0 if kept == "float32" else 16.0
    method = str(quantized.get("quant_method", ""))
    if method == "modelopt":
        method += "_fp4" if "FP4" in str(quantized.get("quant_algo", "")).upper() else ""
    if method in _BITS:
        return _BITS[method]
    if quantized.get("load_in_8bit") or quantized.get("load_in_4bit"):
        return 8.0 if quantized.get("load_in_8bit") else 4.5
    groups = quantized.get("config_groups")
    first = next(iter(groups.values())) if isinstance(groups, dict) and groups else {"weights": quantized}
    weights = first.get("weights") if isinstance(first, dict) else None
    bits = weights.get("num_bits", weights.get("bits")) if isinstance(weights, dict) else None
    if not isinstance(bits, int) or not 1 <= bits <= 16:
        raise ConfigError(f"{where}: quantization {method or 'without a name'} is not known here: give --dtype")
    return bits + (0.5 if bits < 8 else 0.0)


class _Reader:
    """Reads sizes of a config.json."""

    def __init__(self, settings: Mapping[str, Any], where: str) -> None:
        self._settings = settings
        self._where = where

    def size(self, name: str, default: int | None = None) -> int:
        """Return a size, or the default if it is missing or null. Raise ConfigError."""
        value = self._settings.get(name)
        if value is None:
            if default is None:
                raise ConfigError(f"{self._where}: {name} is missing: is it the config.json of a language model?")
            return default
        if type(value) is not int or value < 0 or (value == 0 and default is None):
            raise ConfigError(f"{self._where}: {name} is {value!r}; expected a size")
        return value
