"""Writes a small random LoRA as PEFT does: adapter_config.json and adapter_model.safetensors.

It follows from its arguments alone. With the default strength its answers differ from those of the base model.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.tiny_model import DType, write_safetensors

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model.model.layers."


def write_lora(
    directory: Path,
    model: Path,
    *,
    rank: int = 8,
    alpha: float = 16,
    seed: int = 0,
    strength: float = 0.5,
    targets: Sequence[str] = TARGETS,
    layers: Sequence[int] | None = None,
    ranks: dict[str, int] | None = None,
    dtype: DType = "float32",
    settings: dict[str, Any] | None = None,
) -> Path:
    """Write a LoRA of the tiny model in `model` into `directory` (made if missing) and return it.

    `strength` is about the size of what the LoRA adds to a product, as a share of that product, where `alpha` is twice
    the rank. `layers` None: all layers. `ranks` gives a module, `model.layers.0.self_attn.q_proj`, another rank;
    `settings` are added to adapter_config.json, or replace what is there.
    """
    directory.mkdir(parents=True, exist_ok=True)
    shapes = module_shapes(model)
    if layers is None:
        layers = range(len(shapes))
    config: dict[str, Any] = {
        "base_model_name_or_path": str(model),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_pattern": None,
        "layers_to_transform": None if len(layers) == len(shapes) else list(layers),
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": list(targets),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    (directory / "adapter_config.json").write_text(json.dumps(config | (settings or {}), indent=2) + "\n")
    random = np.random.default_rng(seed)
    tensors: dict[str, NDArray[np.float32]] = {}
    for number in layers:
        for target in targets:
            part = "self_attn" if target in TARGETS[:4] else "mlp"
            outputs, inputs = shapes[number][target]
            own = (ranks or {}).get(f"model.layers.{number}.{part}.{target}", rank)
            stem = f"{PREFIX}{number}.{part}.{target}."
            tensors[stem + "lora_A.weight"] = random.normal(0, 1 / math.sqrt(inputs), (own, inputs)).astype(np.float32)
            tensors[stem + "lora_B.weight"] = random.normal(0, strength / 2 / math.sqrt(own), (outputs, own)).astype(
                np.float32
            )
    write_safetensors(directory / "adapter_model.safetensors", tensors, dtype)
    return directory


def module_shapes(model: Path) -> list[dict[str, tuple[int, int]]]:
    """Return, for each layer of a tiny model, the shape (outputs, inputs) of each module that a LoRA may have."""
    config = json.loads((model / "config.json").read_text())
    config = config.get("text_config", config)
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes = {
        **{"q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden)},
        **{"o_proj": (hidden, queries), "gate_proj": (intermediate, hidden), "up_proj": (intermediate, hidden)},
        "down_proj": (hidden, intermediate),
    }
    return [shapes] * config["num_hidden_layers"]


def main() -> None:
    """Write a random LoRA of a model, to try LoRAs with."""
    parser = argparse.ArgumentParser(prog="python -m tests.tiny_lora", description=main.__doc__, allow_abbrev=False)
    parser.add_argument("model", type=Path, help="the model's directory, with a config.json as Llama has it")
    parser.add_argument("directory", type=Path, help="where the LoRA is written")
    given = parser.parse_args()
    write_lora(given.directory, given.model)


if __name__ == "__main__":
    main()
