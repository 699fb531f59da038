"""Merges a LoRA into the weights of a tiny model: an independent reference for what it computes.

It reads both files by itself and follows PEFT: W + scale · B · A, with the first pattern whose expression matches the
end of the module's name.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.tiny_model import write_safetensors

Tensors = dict[str, NDArray[np.float32]]


def write_merged(directory: Path, model: Path, lora: Path) -> Path:
    """Write a copy of the model, which is one file, with the LoRA merged; return its directory."""
    shutil.copytree(model, directory)
    weights = read_tensors(model / "model.safetensors")
    settings = json.loads((lora / "adapter_config.json").read_text())
    matrices = read_tensors(lora / "adapter_model.safetensors")
    for name, a in matrices.items():
        if not name.endswith(".lora_A.weight"):
            continue
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        b = matrices[name.replace("lora_A", "lora_B")]
        alpha = settings["lora_alpha"]
        for pattern, value in (settings.get("alpha_pattern") or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                alpha = value
                break
        rank = a.shape[0]
        scale = alpha / (math.sqrt(rank) if settings["use_rslora"] else rank)
        (stored,) = (each for each in weights if each.endswith(f"{module}.weight"))
        delta = scale * (b.astype(np.float64) @ a.astype(np.float64))
        weights[stored] = (weights[stored] + delta).astype(np.float32)
    write_safetensors(directory / "model.safetensors", weights, "float32")
    return directory


def read_tensors(path: Path) -> Tensors:
    """Return all tensors of a safetensors file as float32."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    tensors: Tensors = {}
    for name, entry in json.loads(content[8:end]).items():
        if name == "__metadata__":
            continue
        first, stop = (end + offset for offset in entry["data_offsets"])
        stored = content[first:stop]
        if entry["dtype"] == "BF16":
            numbers = (np.frombuffer(stored, np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            numbers = np.frombuffer(stored, {"F32": np.float32, "F16": np.float16}[entry["dtype"]]).astype(np.float32)
        tensors[name] = numbers.reshape(entry["shape"])
    return tensors
