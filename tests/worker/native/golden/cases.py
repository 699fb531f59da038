"""The random models whose answers transformers computed, and the files of these answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.tiny_model import CLIP, IMAGE_TOKEN, SIGLIP

GOLDEN = Path(__file__).parent
CONTEXT_TOKENS = 200
CHECKED_POSITIONS = (0, 15, 29, 63, 64, 150, 199)
"""Positions whose logits are stored. The last ones are far enough to show every rope scaling."""

CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama with untied embeddings and bias": {"bias": True, "tied": False, "dtype": "bfloat16", "seed": 1},
    "llama with wide heads in float16, in shards": {"head_dim": 32, "dtype": "float16", "shards": 2, "seed": 2},
    "llama with as many key as query heads": {"kv_heads": 4, "seed": 3},
    "llama with linear scaling": {"rope_scaling": {"type": "linear", "factor": 4.0}, "seed": 4},
    "llama with dynamic scaling": {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "seed": 5},
    "llama with llama3 scaling": {
        "hidden": 128,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "seed": 6,
    },
    "llama with yarn scaling": {
        "hidden": 128,
        "rope_theta": 50_000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 16.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
            "original_max_position_embeddings": 64,
        },
        "seed": 7,
    },
    "qwen2": {"architecture": "Qwen2ForCausalLM", "kv_heads": 1, "tied": False, "seed": 8},
    "qwen2 with tied embeddings": {"architecture": "Qwen2ForCausalLM", "layers": 3, "dtype": "bfloat16", "seed": 9},
    "qwen2 with yarn scaling": {
        "architecture": "Qwen2ForCausalLM",
        "hidden": 128,
        "context_length": 256,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        "seed": 10,
    },
    "qwen2 with a window in the upper layers": {
        "architecture": "Qwen2ForCausalLM",
        "settings": {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
        "seed": 11,
    },
    "mistral": {"architecture": "MistralForCausalLM", "settings": {"sliding_window": None}, "seed": 12},
    "mistral with a window": {"architecture": "MistralForCausalLM", "settings": {"sliding_window": 40}, "seed": 13},
    "qwen3": {"architecture": "Qwen3ForCausalLM", "head_dim": 32, "seed": 14},
    "qwen3 with yarn scaling and bias": {
        "architecture": "Qwen3ForCausalLM",
        "head_dim": 32,
        "bias": True,
        "tied": False,
        "context_length": 256,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        "seed": 15,
    },
    "gemma": {"architecture": "GemmaForCausalLM", "head_dim": 32, "kv_heads": 1, "seed": 16},
    "gemma2": {
        "architecture": "Gemma2ForCausalLM",
        "head_dim": 32,
        "settings": {
            "query_pre_attn_scalar": 24,
            "sliding_window": 40,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 2.0,
        },
        "seed": 17,
    },
    "gemma3": {
        "architecture": "Gemma3ForCausalLM",
        "head_dim": 32,
        "layers": 3,
        "dtype": "float16",
        "rope_theta": 1e6,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "settings": {
            "query_pre_attn_scalar": 24,
            "rope_local_base_freq": 5000.0,
            "sliding_window": 40,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        "seed": 18,
    },
    "gemma3 with a window longer than the context": {
        "architecture": "Gemma3ForCausalLM",
        "layers": 3,
        "rope_theta": 1e6,
        "settings": {"sliding_window": 4096, "sliding_window_pattern": 2},
        "seed": 19,
    },
    "gemma3 that takes images": {
        "architecture": "Gemma3ForConditionalGeneration",
        "layers": 3,
        "rope_theta": 1e6,
        "dtype": "bfloat16",
        "settings": {"sliding_window": 40, "sliding_window_pattern": 2},
        "seed": 25,
    },
    "phi3": {
        "architecture": "Phi3ForCausalLM",
        "tied": False,
        "dtype": "bfloat16",
        "settings": {"sliding_window": 100, "original_max_position_embeddings": 2048},
        "seed": 20,
    },
    "phi3 with partial rotation and longrope": {
        "architecture": "Phi3ForCausalLM",
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 3.0],
            "long_factor": [1.0, 2.0, 3.0, 5.0, 8.0, 9.0],
        },
        "settings": {"partial_rotary_factor": 0.75, "original_max_position_embeddings": 256},
        "seed": 21,
    },
    "granite": {
        "architecture": "GraniteForCausalLM",
        "bias": True,
        "settings": {
            "attention_multiplier": 0.1,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.0,
        },
        "seed": 22,
    },
    "smollm3": {
        "architecture": "SmolLM3ForCausalLM",
        "layers": 4,
        "settings": {"no_rope_layers": [1, 0, 1, 0]},
        "seed": 23,
    },
    "olmo2": {"architecture": "Olmo2ForCausalLM", "tied": False, "seed": 24},
    "llava of CLIP and Llama": {"architecture": "LlavaForConditionalGeneration", "tied": False, "seed": 26},
    "llava of SigLIP and Qwen2": {
        "architecture": "LlavaForConditionalGeneration",
        "decoder": "Qwen2ForCausalLM",
        "tied": False,
        "dtype": "bfloat16",
        "llava": {
            "vision_config": {**SIGLIP, "hidden_act": "gelu_pytorch_tanh"},
            "vision_feature_select_strategy": "full",
            "vision_feature_layer": -1,
            "projector_hidden_act": "gelu_pytorch_tanh",
        },
        "seed": 27,
    },
    "llava of CLIP and Mistral with several layers' features": {
        "architecture": "LlavaForConditionalGeneration",
        "decoder": "MistralForCausalLM",
        "tied": False,
        "settings": {"sliding_window": 40},
        "llava": {
            "vision_config": {**CLIP, "hidden_act": "gelu"},
            "vision_feature_layer": [-2, 0, 3],
            "vision_feature_select_strategy": "full",
            "multimodal_projector_bias": False,
        },
        "seed": 28,
    },
}
"""The arguments of `write_tiny_model` for each model, by its name in the golden file."""

QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "List the first 12 prime numbers, then add 17 and 25.",
    "Explain in two sentences why the sky is blue. 日本語 and émojis 🌊 are welcome.",
)
"""The prompts that SmolLM2 answers."""


LLAVAS = [name for name, case in CASES.items() if case.get("architecture") == "LlavaForConditionalGeneration"]
"""The models that take images, of which `llava.npz` has answers too."""
IMAGE_STARTS = (5, 38)
"""Where the two images of `image_prompt` begin, each of at most 17 tokens."""
ANSWER_TOKENS = 24
"""How many tokens of an answer to `image_prompt`, or to CHAT, are stored."""
CHAT = ("look at ", 0, " and then at ", 1, ": how do they differ?")
"""A message of a user: texts, and the numbers of images."""


def image_pixels(side: int, number: int) -> NDArray[np.uint8]:
    """Return the pixels of an image, (side, side, 3)."""
    return np.random.default_rng(100 + number).integers(0, 256, (side, side, 3), np.uint8)


def image_prompt(tokens: int, starts: tuple[int, ...] = IMAGE_STARTS) -> list[int]:
    """Return a prompt of 60 tokens with images of this many tokens at these places."""
    prompt = [int(token) for token in np.random.default_rng(1).integers(3, 300, 60)]
    for start in starts:
        prompt[start : start + tokens] = [IMAGE_TOKEN] * tokens
    return prompt


def prompt_tokens() -> list[int]:
    """Return the prompt of every random model."""
    return [int(token) for token in np.random.default_rng(0).integers(0, 320, CONTEXT_TOKENS)]
