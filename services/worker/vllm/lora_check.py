"""Checks the files of a LoRA against the model's before vLLM loads them.

vLLM itself refuses a LoRA of a higher rank than it was started for, and modules that no model of the kind has. It
leaves out layers that the model does not have, and fills up matrices that are too small: a LoRA of another model, or of
another rank than its config says, would be loaded, and change nothing or something else.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np

from services.worker.model.lora_files import TENSORS
from services.worker.model.tensor_header import Shape
from services.worker.native.tensor_file import TensorFile
from services.worker.native.weights import checkpoint_files
from shared.errors import ModelError

_TENSOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
"""A matrix as PEFT names it: the module, and which of the two it is. A is (rank, inputs), B is (outputs, rank)."""
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def model_shapes(directory: Path) -> dict[str, Shape]:
    """Return the shape of each tensor of a model's safetensors files; empty if it has none. Raise ModelError."""
    files = [file for file in checkpoint_files(directory) if file.suffix == ".safetensors" and file.is_file()]
    return {name: entry.shape for file in files for name, entry in TensorFile(file).entries.items()}


def lora_shapes(directory: Path) -> dict[str, Shape]:
    """Return the shape of each tensor of a LoRA. Raise ModelError if its file is missing or torn."""
    return {name: entry.shape for name, entry in TensorFile(directory / TENSORS).entries.items()}


def lora_fault(lora: Mapping[str, Shape], model: Mapping[str, Shape], layers: int, ranks: Collection[int]) -> str:
    """Return why the tensors of a LoRA do not fit the model, which has this many layers, or its config, which names
    these ranks. Empty if nothing speaks against it. Modules that the model's files name in another way are not compared
    with them. *Pure.*"""
    found: dict[str, dict[str, int]] = {}
    for name, shape in lora.items():
        parts = _TENSOR.fullmatch(name)
        if parts is None:
            continue
        module, matrix = parts[1], parts[2]
        if len(shape) == 2:
            found.setdefault(module, {})[matrix] = shape[0] if matrix == "A" else shape[1]
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
    for module, ranks_of in found.items():
        if len(ranks_of) < 2:
            return f"{module} has a matrix {next(iter(ranks_of))} only"
        if ranks_of["A"] != ranks_of["B"] or ranks_of["A"] not in ranks:
            said = " or ".join(map(str, sorted(ranks)))
            return f"{module} has rank {ranks_of['A']} in A and {ranks_of['B']} in B; the config says {said}"
    return "" if found else f"{TENSORS} has no matrices of a LoRA, such as …q_proj.lora_A.weight"


def check_lora(directory: Path, model: Path, layers: int, ranks: Collection[int]) -> str:
    """Return why the files in `directory` are no LoRA of the model. Empty if nothing speaks against it. Reads all of
    its tensors."""
    try:
        fault = lora_fault(lora_shapes(directory), model_shapes(model), layers, ranks)
        return fault or _not_finite(TensorFile(directory / TENSORS))
    except ModelError as wrong:
        return str(wrong)


def _not_finite(file: TensorFile) -> str:
    for name, entry in file.entries.items():
        if entry.dtype in ("F32", "F16", "BF16") and not np.isfinite(file.floats(name)).all():
            return f"{name} has numbers that are not finite"
    return ""
