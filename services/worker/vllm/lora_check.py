"""Checks the files of a LoRA against the model's before vLLM loads them.

vLLM itself refuses a LoRA of a higher rank than it was started for, and modules that no model of the kind has. It
leaves out layers that the model does not have, and fills up matrices that are too small: a LoRA of another model would
be loaded, and change nothing or something else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from services.worker.lora_files import TENSORS
from services.worker.native.tensor_file import Shape, TensorFile
from services.worker.native.weights import checkpoint_files
from shared.errors import ModelError

_TENSOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
"""A matrix as PEFT names it: the module, and which of the two it is. A is (rank, inputs), B is (outputs, rank)."""
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def model_shapes(directory: Path) -> dict[str, Shape]:
    """Return the shape of each tensor of a model's safetensors files; empty where it has none. Raise ModelError."""
    files = [file for file in checkpoint_files(directory) if file.suffix == ".safetensors" and file.is_file()]
    return {name: entry.shape for file in files for name, entry in TensorFile(file).entries.items()}


def lora_shapes(directory: Path) -> dict[str, Shape]:
    """Return the shape of each tensor of a LoRA. Raise ModelError where its file is missing or torn."""
    return {name: entry.shape for name, entry in TensorFile(directory / TENSORS).entries.items()}


def lora_fault(lora: Mapping[str, Shape], model: Mapping[str, Shape], layers: int) -> str:
    """Return why the tensors of a LoRA do not fit the model, which has this many layers; empty: nothing speaks against
    it. Modules that the model's files name in another way are not compared. *Pure.*"""
    found = 0
    for name, shape in lora.items():
        parts = _TENSOR.fullmatch(name)
        if parts is None:
            continue
        found += 1
        module, matrix = parts[1], parts[2]
        layer = _LAYER.search(module)
        if layer is not None and int(layer[1]) >= layers:
            return f"it is of another model: it has {module}, and this model has {layers} layers"
        weight = model.get(f"{module}.weight")
        if weight is None or len(weight) != 2 or len(shape) != 2:
            continue
        size, own = (shape[1], weight[1]) if matrix == "A" else (shape[0], weight[0])
        if size != own:
            side = "inputs" if matrix == "A" else "outputs"
            return f"it is of another model: {module} has {own} {side} here, and {size} in the LoRA"
    return "" if found else f"{TENSORS} has no matrices of a LoRA, such as …q_proj.lora_A.weight"


def check_lora(directory: Path, model: Path, layers: int) -> str:
    """Return why the files in `directory` are no LoRA of the model; empty: nothing speaks against it."""
    try:
        return lora_fault(lora_shapes(directory), model_shapes(model), layers)
    except ModelError as wrong:
        return str(wrong)
