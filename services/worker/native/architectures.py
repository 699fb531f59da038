"""Describes the served architectures: in what their decoders differ from Llama's.

Names of classes and of settings in config.json are those of transformers. config.py makes a ModelConfig of a
description and a config.json. Decoders and kernels follow from the ModelConfig and know no architecture. *Pure.*
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from msgspec import Struct, structs

Activation = Literal["silu", "gelu_tanh"]
NormPlaces = Literal["before", "around", "after"]
"""Where a layer has norms: before attention and the feed-forward part, after both, or at all four places."""
QueryNorm = Literal["none", "heads", "whole"]
"""Whether queries and keys are normed before the rotation, each head by itself or all heads as one vector."""
Sliding = Literal["none", "all", "upper", "pattern"]
"""Which layers have a sliding window if `layer_types` does not say: none, all, those from `max_window_layers` on, or
all but every `sliding_window_pattern`th."""

_SILU: Mapping[str, Activation] = MappingProxyType({"silu": "silu"})
_GELU: Mapping[str, Activation] = MappingProxyType({"gelu_pytorch_tanh": "gelu_tanh"})
_NONE: Mapping[str, Any] = MappingProxyType({})
_LAYERS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")


class Architecture(Struct, frozen=True):
    """One architecture; without arguments it is Llama's without biases."""

    reads: tuple[str, ...] = ()
    """The settings that only some architectures have. transformers ignores them in the others' files, and so do we."""
    defaults: Mapping[str, Any] = _NONE
    """transformers' values for settings that a file does not have."""
    activations: Mapping[str, Activation] = _SILU
    """The values of `hidden_act` or `hidden_activation` that are served."""
    qkv_bias: bool = False
    """Whether q, k and v always have biases."""
    norms: NormPlaces = "before"
    norm_offset: float = 0.0
    """The number that is added to the stored weights of norms."""
    query_norm: QueryNorm = "none"
    fused: bool = False
    """Whether q, k and v are stored as one tensor, and gate and up too."""
    nested: bool = False
    """Whether the settings are in `text_config`, because the model also takes images, which are not served."""
    scaled_embedding: bool = False
    """Whether embeddings are multiplied by the square root of their width."""
    sliding: Sliding = "none"
    gguf: str = ""
    """The architecture's name in GGUF files; empty if such files are refused."""


_GEMMA_3 = Architecture(
    reads=(
        *("attention_bias", "use_bidirectional_attention", "hidden_activation", "query_pre_attn_scalar"),
        *("sliding_window", "layer_types", "final_logit_softcapping", "attn_logit_softcapping"),
        *("sliding_window_pattern", "rope_local_base_freq"),
    ),
    defaults={
        **{"head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True},
        **{"query_pre_attn_scalar": 256.0, "sliding_window": 4096, "sliding_window_pattern": 6},
        **{"rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0},
    },
    activations=_GELU,
    norms="around",
    norm_offset=1.0,
    query_norm="heads",
    scaled_embedding=True,
    sliding="pattern",
)

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "LlamaForCausalLM": Architecture(reads=("attention_bias", "mlp_bias"), gguf="llama"),
        "MistralForCausalLM": Architecture(reads=("sliding_window",), defaults={"sliding_window": 4096}, sliding="all"),
        "Qwen2ForCausalLM": Architecture(
            reads=_LAYERS,
            defaults={"sliding_window": 4096, "max_window_layers": 28},
            qkv_bias=True,
            sliding="upper",
            gguf="qwen2",
        ),
        "Qwen3ForCausalLM": Architecture(
            reads=("attention_bias", *_LAYERS),
            defaults={"head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
            query_norm="heads",
            sliding="upper",
            gguf="qwen3",
        ),
        "GemmaForCausalLM": Architecture(
            reads=("attention_bias", "use_bidirectional_attention"),
            defaults={"head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
            activations={**_GELU, "gelu": "gelu_tanh"},  # the first releases say gelu and mean the approximation
            norm_offset=1.0,
            scaled_embedding=True,
        ),
        "Gemma2ForCausalLM": Architecture(
            reads=(
                *("attention_bias", "use_bidirectional_attention", "hidden_activation", "query_pre_attn_scalar"),
                *("sliding_window", "layer_types", "final_logit_softcapping", "attn_logit_softcapping"),
            ),
            defaults={
                **{"head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True},
                **{"query_pre_attn_scalar": 256.0, "sliding_window": 4096, "sliding_window_pattern": 2},
                **{"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
            },
            activations=_GELU,
            norms="around",
            norm_offset=1.0,
            scaled_embedding=True,
            sliding="pattern",
        ),
        "Gemma3ForCausalLM": _GEMMA_3,
        "Gemma3ForConditionalGeneration": structs.replace(
            _GEMMA_3,
            nested=True,
            defaults={
                **_GEMMA_3.defaults,
                **{"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262_208},
                **{"max_position_embeddings": 131_072, "rms_norm_eps": 1e-6},
            },
        ),
        "Phi3ForCausalLM": Architecture(
            reads=("sliding_window", "partial_rotary_factor"),
            defaults={"original_max_position_embeddings": 4096},
            fused=True,
            sliding="all",
        ),
        "GraniteForCausalLM": Architecture(
            reads=(
                *("attention_bias", "mlp_bias", "embedding_multiplier", "logits_scaling"),
                *("residual_multiplier", "attention_multiplier"),
            ),
            defaults={"attention_multiplier": 1.0},
        ),
        "SmolLM3ForCausalLM": Architecture(
            reads=("attention_bias", "mlp_bias", "no_rope_layers", "no_rope_layer_interval"),
            defaults={"tie_word_embeddings": True, "rope_theta": 2_000_000.0, "no_rope_layer_interval": 4},
        ),
        "Olmo2ForCausalLM": Architecture(
            reads=("attention_bias",), defaults={"rms_norm_eps": 1e-5}, norms="after", query_norm="whole"
        ),
    }
)
"""The architectures that the native engine serves, by their name in config.json; docs/models.md lists them."""
