"""The config.json of known models, as far as their decoders' shapes need it."""

from __future__ import annotations

from typing import Any


def _shape(
    name: str, sizes: tuple[int, int, int, int, int, int, int], context_length: int, tied: bool, **more: Any
) -> dict[str, Any]:
    hidden, intermediate, layers, heads, kv_heads, head_dim, vocab = sizes
    return {
        "architectures": [f"{name}ForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": context_length,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied,
        **more,
    }


_LONGROPE: dict[str, Any] = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}

REAL_CONFIGS: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": _shape("Llama", (576, 1536, 30, 9, 3, 64, 49152), 8192, True),
    "Llama-3.2-1B": _shape("Llama", (2048, 8192, 16, 32, 8, 64, 128256), 131072, True),
    "Llama-3.1-8B": _shape("Llama", (4096, 14336, 32, 32, 8, 128, 128256), 131072, False),
    "Mistral-7B-v0.3": _shape(
        "Mistral", (4096, 14336, 32, 32, 8, 128, 32768), 32768, False, sliding_window=None, rope_theta=1e6
    ),
    "Qwen3-0.6B": _shape("Qwen3", (1024, 3072, 28, 16, 8, 128, 151936), 40960, True),
    "Qwen3-4B": _shape("Qwen3", (2560, 9728, 36, 32, 8, 128, 151936), 40960, True),
    "Qwen3-8B": _shape("Qwen3", (4096, 12288, 36, 32, 8, 128, 151936), 40960, False),
    "Qwen3-32B": _shape("Qwen3", (5120, 25600, 64, 64, 8, 128, 151936), 40960, False),
    "Gemma-3-1B": _shape(
        "Gemma3", (1152, 6912, 26, 4, 1, 256, 262144), 32768, True, sliding_window=512, sliding_window_pattern=6
    ),
    "Gemma-3-4B": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {
            **{"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024},
            **{"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
        },
    },
    "Gemma-2-9B": _shape("Gemma2", (3584, 14336, 42, 16, 8, 256, 256000), 8192, True, sliding_window=4096),
    "Phi-4-mini": _shape(
        "Phi3",
        (3072, 8192, 32, 24, 8, 128, 200064),
        131072,
        True,
        rope_scaling=_LONGROPE,
        partial_rotary_factor=0.75,
        sliding_window=262144,
    ),
    "Phi-4": _shape("Phi3", (5120, 17920, 40, 40, 10, 128, 100352), 16384, False, sliding_window=None),
}
"""By the model's name in docs/models.md. Token ids and rope bases that change no size are left out."""
