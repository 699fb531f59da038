"""A tiny random Gemma 3 that sees, on vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.tiny_model import write_safetensors, write_tiny_model
from tests.worker.native.merged import read_tensors
from tests.worker.vllm.environment import run_there
from tests.worker.vllm.tiny_qwen import WRITE

NEWLINES = ("\n", "\n\n", "\n\n\n", "\n\n\n\n")
MARKS = ("<start_of_image>", "<end_of_image>", "<image_soft_token>")
BEGIN, END, IMAGE_TOKEN = 317, 318, 319
IMAGE_TOKENS = 16
SIDE = 56
"""Pixels of a prepared image's width and height."""

_TEXT: dict[str, Any] = {
    **{"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024, "vocab_size": 320},
    **{"rms_norm_eps": 1e-5, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0, "query_pre_attn_scalar": 32},
    **{"layer_types": ["full_attention"] * 2, "hidden_activation": "gelu_pytorch_tanh"},
}
_TOWER: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"image_size": SIDE, "patch_size": 7, "num_channels": 3, "vision_use_head": False},
}


def write_model(directory: Path) -> Path:
    """Write a model, whose weights transformers has named and shaped."""
    model = write_tiny_model(directory / "tiny", marks=(*NEWLINES, *MARKS))
    config = {
        **{"model_type": "gemma3", "text_config": _TEXT, "vision_config": _TOWER, "mm_tokens_per_image": IMAGE_TOKENS},
        **{"boi_token_index": BEGIN, "eoi_token_index": END, "image_token_index": IMAGE_TOKEN},
        **{"tie_word_embeddings": True, "eos_token_id": 2},
    }
    run_there(f"{WRITE}\nmain({str(model)!r}, {config!r})")
    file, published = model / "model.safetensors", ("vision_tower.", "vision_tower.vision_model.")
    weights = {name.replace(*published): tensor for name, tensor in read_tensors(file).items()}
    weights["language_model.model.embed_tokens.weight"] /= np.float32(128**0.5)  # the model multiplies them by as much
    write_safetensors(file, weights, "float32")
    processor: dict[str, Any] = {
        **{"image_processor_type": "Gemma3ImageProcessor", "processor_class": "Gemma3Processor"},
        **{"size": {"height": SIDE, "width": SIDE}, "resample": 2, "do_resize": True, "do_pan_and_scan": None},
        **{"do_rescale": True, "do_normalize": True, "rescale_factor": 1 / 255, "do_convert_rgb": True},
        **{"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "image_seq_length": IMAGE_TOKENS},
    }
    (model / "preprocessor_config.json").write_text(json.dumps(processor))
    sizes = {"processor_class": "Gemma3Processor", "image_seq_length": IMAGE_TOKENS}
    (model / "processor_config.json").write_text(json.dumps(sizes))
    tokenizer = model / "tokenizer_config.json"
    named = dict(zip(("boi_token", "eoi_token", "image_token"), MARKS, strict=True))
    said = {
        **json.loads(tokenizer.read_text()),
        **named,
        "extra_special_tokens": named,
        "processor_class": "Gemma3Processor",
    }
    tokenizer.write_text(json.dumps(said))
    return model
