"""The random models whose answers transformers computed, and the files of these answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

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
}
"""The arguments of `write_tiny_model` for each model, by its name in the golden file."""

QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "List the first 12 prime numbers, then add 17 and 25.",
    "Explain in two sentences why the sky is blue. 日本語 and émojis 🌊 are welcome.",
)
"""The prompts that SmolLM2 answers."""


def prompt_tokens() -> list[int]:
    """Return the prompt of every random model."""
    return [int(token) for token in np.random.default_rng(0).integers(0, 320, CONTEXT_TOKENS)]
