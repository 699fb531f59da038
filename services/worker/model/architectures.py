"""Describes the served architectures: in what their decoders differ from Llama's.

Names of classes and of settings in config.json are those of transformers. config.py makes a ModelConfig of a
description and a config.json. Decoders and kernels follow from the ModelConfig and know no architecture. *Pure.*

A class for each architecture, as vLLM has them, would repeat the decoder twelve times, on two devices: the
architectures differ from Llama in at most six details each.
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

_SILU: Mapping[str, Activation] = MappingProxyType({"swish": "silu", "silu": "silu"})
_GELU: Mapping[str, Activation] = MappingProxyType({"gelu_pytorch_tanh": "gelu_tanh"})
_NONE: Mapping[str, Any] = MappingProxyType({})
_SHAPE = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "max_position_embeddings"),
)
_LAYERS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")


class Architecture(Struct, frozen=True):
    """One architecture; without arguments it is Llama's without biases."""

    reads: tuple[str, ...] = ()
    """The settings that only some architectures have. transformers ignores them in the others' files, and so do we."""
    shape: tuple[int, ...] = (32_000, 4096, 11_008, 32, 32, 0, 2048)
    """transformers' values for the settings of _SHAPE that a file does not have. 0 key-value heads means as many as
    heads."""
    others: Mapping[str, Any] = _NONE
    """transformers' values for other settings that a file does not have."""
    rope_theta: float = 10_000.0
    """transformers' base of the rotation for a file that has none."""
    local_rope_theta: float | None = None
    """transformers' base for layers that slide. None if these have no rotation of their own."""
    eos_token_id: int | None = 2
    """transformers' end of an answer for a model none of whose files names one."""
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
    """Whether the settings are in `text_config`, because the model also takes images."""
    scaled_embedding: bool = False
    """Whether embeddings are multiplied by the square root of their width."""
    sliding: Sliding = "none"
    decoders: Mapping[str, str] = _NONE
    """`model_type` of the text part → the architecture that its decoder has, in a model that takes images as LLaVA
    does. Empty if images are not served."""
    gguf: str = ""
    """The architecture's name in GGUF files; empty if such files are refused."""

    @property
    def defaults(self) -> Mapping[str, Any]:
        """transformers' values for all settings that a file may lack."""
        return {"rms_norm_eps": 1e-6, **dict(zip(_SHAPE, self.shape, strict=True)), **self.others}


_LLAMA = Architecture(reads=("attention_bias", "mlp_bias"), gguf="llama")
_GEMMA_3 = Architecture(
    reads=(
        *("attention_bias", "use_bidirectional_attention", "hidden_activation", "query_pre_attn_scalar"),
        *("sliding_window", "layer_types", "final_logit_softcapping", "attn_logit_softcapping"),
        "sliding_window_pattern",
    ),
    others={
        **{"head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True},
        **{"query_pre_attn_scalar": 256.0, "sliding_window": 4096, "sliding_window_pattern": 6},
    },
    shape=(262_208, 2304, 9216, 26, 8, 4, 131_072),
    rope_theta=1_000_000.0,
    local_rope_theta=10_000.0,
    eos_token_id=1,
    activations=_GELU,
    norms="around",
    norm_offset=1.0,
    query_norm="heads",
    scaled_embedding=True,
    sliding="pattern",
)

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "LlamaForCausalLM": _LLAMA,
        "MistralForCausalLM": Architecture(
            reads=("sliding_window",),
            shape=(32_000, 4096, 14_336, 32, 32, 8, 131_072),
            others={"sliding_window": 4096},
            sliding="all",
        ),
        "Qwen2ForCausalLM": Architecture(
            reads=_LAYERS,
            shape=(151_936, 4096, 22_016, 32, 32, 32, 32_768),
            eos_token_id=None,
            others={"sliding_window": 4096, "max_window_layers": 28},
            qkv_bias=True,
            sliding="upper",
            gguf="qwen2",
        ),
        "Qwen3ForCausalLM": Architecture(
            reads=("attention_bias", *_LAYERS),
            shape=(151_936, 4096, 22_016, 32, 32, 32, 32_768),
            eos_token_id=None,
            others={"head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
            query_norm="heads",
            sliding="upper",
            gguf="qwen3",
        ),
        "GemmaForCausalLM": Architecture(
            reads=("attention_bias", "use_bidirectional_attention"),
            shape=(256_000, 3072, 24_576, 28, 16, 16, 8192),
            eos_token_id=1,
            others={"head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
            activations={**_GELU, "gelu": "gelu_tanh"},  # the first releases say gelu and mean the approximation
            norm_offset=1.0,
            scaled_embedding=True,
        ),
        "Gemma2ForCausalLM": Architecture(
            reads=(
                *("attention_bias", "use_bidirectional_attention", "hidden_activation", "query_pre_attn_scalar"),
                *("sliding_window", "layer_types", "final_logit_softcapping", "attn_logit_softcapping"),
            ),
            shape=(256_000, 2304, 9216, 26, 8, 4, 8192),
            eos_token_id=1,
            others={
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
        "Gemma3ForConditionalGeneration": structs.replace(_GEMMA_3, nested=True),
        "LlavaForConditionalGeneration": structs.replace(
            _LLAMA,
            gguf="",
            nested=True,
            decoders={"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"},
        ),
        "Phi3ForCausalLM": Architecture(
            reads=("sliding_window", "partial_rotary_factor"),
            shape=(32_064, 3072, 8192, 32, 32, 0, 4096),
            eos_token_id=32_000,
            others={"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
            fused=True,
            sliding="all",
        ),
        "GraniteForCausalLM": Architecture(
            reads=(
                *("attention_bias", "mlp_bias", "embedding_multiplier", "logits_scaling"),
                *("residual_multiplier", "attention_multiplier"),
            ),
            others={"attention_multiplier": 1.0},
        ),
        "SmolLM3ForCausalLM": Architecture(
            reads=("attention_bias", "mlp_bias", "no_rope_layers", "no_rope_layer_interval"),
            shape=(128_256, 2048, 11_008, 36, 16, 4, 32_768),
            rope_theta=2_000_000.0,
            eos_token_id=128_001,
            others={"tie_word_embeddings": True, "no_rope_layer_interval": 4},
        ),
        "Olmo2ForCausalLM": Architecture(
            reads=("attention_bias",),
            shape=(50_304, 4096, 11_008, 32, 32, 0, 2048),
            eos_token_id=50_279,
            others={"rms_norm_eps": 1e-5},
            norms="after",
            query_norm="whole",
        ),
    }
)
"""The architectures that the native engine serves, by their name in config.json; docs/models.md lists them."""


def architecture_of(name: str, text: Mapping[str, Any] | None) -> Architecture | None:
    """Return the architecture that a config.json names; None if it is not served. `text` is its `text_config`, which
    says which decoder a LLaVA has. Raise ValueError if that is none of those that are served."""
    described = ARCHITECTURES.get(name)
    if described is None or not described.decoders or text is None:
        return described
    kind = text.get("model_type", "llama")
    decoder = described.decoders.get(kind) if isinstance(kind, str) else None
    if decoder is None:
        raise ValueError(f"model_type is {kind}; {', '.join(described.decoders)} are supported in a {name}")
    return structs.replace(ARCHITECTURES[decoder], gguf="", nested=True, decoders=described.decoders)
