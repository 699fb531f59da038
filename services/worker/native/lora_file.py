"""Reads a LoRA as PEFT writes it, adapter_config.json and adapter_model.safetensors, and checks it against the model.

    base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight    (rank, inputs)
    base_model.model.model.layers.3.self_attn.q_proj.lora_B.weight    (outputs, rank)

    scale = lora_alpha / rank, or lora_alpha / √rank with use_rslora

Names and settings are those of PEFT's LoraConfig: https://huggingface.co/docs/peft/package_reference/lora. Everything
that would change an answer is computed or refused: nothing is left out in silence. `base_model_name_or_path` is not
compared, because it may be any path; shapes are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from msgspec import Struct

from services.worker.model.lora_files import CONFIG, TENSORS
from services.worker.model.tensor_header import Shape
from services.worker.native.config import ModelConfig
from services.worker.native.tensor_file import Floats, TensorFile
from services.worker.native.weights import tensor_shapes, text_name
from shared.errors import ModelError
from shared.model_file import CONFIG_LIMIT_BYTES, read_model_json

_PREFIX = "base_model.model."
_MATRIX = re.compile(r"(.+)\.lora_(A|B)\.weight")
_MODULE = re.compile(r"model\.layers\.([0-9]{1,6})\.(self_attn|mlp)\.([a-z_]+)")
_PATTERNS_LIMIT = 4096
"""Most entries of rank_pattern and of alpha_pattern."""
_PATTERN_LIMIT = 128
"""Most characters of a key of these."""
_REPEATS_LIMIT = 2
"""Most repeats (* + ? and counts) in such a key, so that no key takes long to match."""
T = TypeVar("T")
_SERVED_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the weights of the base model as they are."""


class _Json(Struct, frozen=True):
    """The settings of adapter_config.json that change a LoRA's answers."""

    r: int
    lora_alpha: float
    peft_type: str = "LORA"
    target_modules: list[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    use_rslora: bool = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    bias: str = "none"
    lora_bias: bool = False
    use_dora: bool = False
    use_qalora: bool = False
    fan_in_fan_out: bool = False
    init_lora_weights: bool | str | None = True
    modules_to_save: list[str] | None = None
    trainable_token_indices: Any = None
    target_parameters: list[str] | None = None
    layer_replication: Any = None
    alora_invocation_tokens: Any = None


@dataclass(frozen=True, slots=True)
class LoraPair:
    """What a LoRA adds to one product x · Wᵀ: (x · aᵀ) · bᵀ."""

    a: Floats
    """The matrix A, (rank, inputs)."""
    b: Floats
    """The matrix B, (outputs, rank), multiplied by the scale."""


LoraLayers = tuple[Mapping[str, LoraPair], ...]
"""For each layer of the model the name of a projection, such as q_proj → its pair."""


def read_lora(directory: Path, config: ModelConfig, *, most_rank: int, most_bytes: int) -> LoraLayers:
    """Read a LoRA of the model. The arrays are copies in float32, so the files may go. Raise ModelError that names the
    file and the field or tensor, also if it has a rank above `most_rank` or takes more than `most_bytes`."""
    if not (directory / TENSORS).exists() and (directory / "adapter_model.bin").exists():
        raise ModelError(f"{directory / 'adapter_model.bin'}: a pickle, which may run code; save it as {TENSORS}")
    path = directory / CONFIG
    settings = read_model_json(path, _Json, limit_bytes=CONFIG_LIMIT_BYTES)
    _check_settings(path, settings)
    file = TensorFile(directory / TENSORS)
    modules = _modules(file, config)
    layers: list[dict[str, LoraPair]] = [{} for _ in range(config.layers)]
    size_bytes = sum(math.prod(entry.shape) * 4 for entry in file.entries.values())
    if size_bytes > most_bytes:
        raise ModelError(
            f"{file.path}: {size_bytes} bytes as float32, and lora_bytes leaves {most_bytes}; unload another LoRA, or"
            " raise lora_bytes"
        )
    for module in modules:
        rank = _of_pattern(settings.rank_pattern, module.name, settings.r)
        if not 1 <= rank <= most_rank:
            raise ModelError(f"{path}: r is {rank} for {module.name}; it must be 1 to lora_rank, {most_rank}")
        _check_target(path, settings, module)
        alpha = _of_pattern(settings.alpha_pattern, module.name, settings.lora_alpha)
        outputs, inputs = module.shape
        a = _matrix(file, module.stored, "A", (rank, inputs), module.name)
        b = _matrix(file, module.stored, "B", (outputs, rank), module.name)
        with np.errstate(over="ignore", invalid="ignore"):  # found below
            pair = LoraPair(a, b * np.float32(alpha / math.sqrt(rank) if settings.use_rslora else alpha / rank))
        if not (np.isfinite(pair.a).all() and np.isfinite(pair.b).all()):
            raise ModelError(f"{file.path}: {module.name} has numbers that are not finite")
        layers[module.layer][module.projection] = pair
    return tuple(layers)


def _check_settings(path: Path, settings: _Json) -> None:
    if settings.peft_type != "LORA":
        raise ModelError(f"{path}: peft_type is {settings.peft_type!r}; only LORA is served")
    if settings.bias != "none":
        raise ModelError(f"{path}: bias is {settings.bias!r}; only none is served")
    if settings.init_lora_weights not in _SERVED_STARTS:
        raise ModelError(
            f"{path}: init_lora_weights is {settings.init_lora_weights!r}, which changes the base model's weights;"
            " convert it to a plain LoRA with PEFT"
        )
    others = ("lora_bias", "use_dora", "use_qalora", "fan_in_fan_out", "modules_to_save", "trainable_token_indices")
    for name in (*others, "target_parameters", "layer_replication", "alora_invocation_tokens"):
        if getattr(settings, name):
            raise ModelError(f"{path}: {name} is set, which the native engine does not serve")
    if not math.isfinite(settings.lora_alpha):
        raise ModelError(f"{path}: lora_alpha is {settings.lora_alpha}, which is not finite")
    for name in ("rank_pattern", "alpha_pattern"):
        patterns: dict[str, float] = getattr(settings, name) or {}
        if len(patterns) > _PATTERNS_LIMIT:
            raise ModelError(f"{path}: {name} has {len(patterns)} entries; at most {_PATTERNS_LIMIT} are read")
        for pattern, value in patterns.items():
            if not _is_cheap(pattern):
                raise ModelError(f"{path}: {name} has the key {pattern[:_PATTERN_LIMIT]!r}, which is not matched")
            if not math.isfinite(value):
                raise ModelError(f"{path}: {name} of {pattern!r} is {value}, which is not finite")


def _is_cheap(pattern: str) -> bool:
    """Whether a regular expression is one whose matching cannot take long: few repeats, and none of a group."""
    repeats = re.findall(r"[*+?{]", pattern)
    if len(pattern) > _PATTERN_LIMIT or len(repeats) > _REPEATS_LIMIT or re.search(r"\)[*+?{]|\\[1-9]", pattern):
        return False
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError):
        return False
    return True


def _of_pattern(patterns: Mapping[str, T] | None, module: str, default: T) -> T:
    """Return the value of the first key that matches the end of a module's name, from a dot on, as PEFT does."""
    for pattern, value in (patterns or {}).items():
        if pattern == module or re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


@dataclass(frozen=True, slots=True)
class _Module:
    """A projection that the LoRA has matrices for."""

    stored: str
    """Its tensors' name in the file, before .lora_A."""
    name: str
    """Its name in the model, as PEFT's patterns see it."""
    layer: int
    projection: str
    shape: Shape
    """The shape of the model's weight, (outputs, inputs)."""


def _modules(file: TensorFile, config: ModelConfig) -> list[_Module]:
    """Return the modules of all tensors of a file, in its order, or raise ModelError."""
    shapes = tensor_shapes(config)
    found: dict[str, set[str]] = {}
    for stored in file.entries:
        match = _MATRIX.fullmatch(stored)
        if match is None or not stored.startswith(_PREFIX):
            raise ModelError(
                f"{file.path}: tensor {stored} is no matrix of a LoRA; expected {_PREFIX}MODULE.lora_A.weight or lora_B"
            )
        found.setdefault(match[1], set()).add(match[2])
    if not found:
        raise ModelError(f"{file.path}: no tensor is here")
    modules: dict[str, _Module] = {}
    for stored, halves in found.items():
        name = text_name(stored.removeprefix(_PREFIX))
        if name in modules:
            raise ModelError(f"{file.path}: {name} has two LoRAs: {stored}, {modules[name].stored}")
        if len(halves) != 2:
            other = "B" if "A" in halves else "A"
            raise ModelError(f"{file.path}: tensor {stored}.lora_{other}.weight is missing; its partner is here")
        match = _MODULE.fullmatch(name)
        if match is None:
            raise ModelError(f"{file.path}: {name} has a LoRA; only projections of layers are served")
        layer, projection = int(match[1]), match[3]
        if layer >= config.layers:
            raise ModelError(f"{file.path}: {name} is of another base model; this one has {config.layers} layers")
        if projection in ("qkv_proj", "gate_up_proj"):
            raise ModelError(f"{file.path}: {name} has a LoRA; the native engine serves none of fused projections")
        shape = shapes.get(f"{name}.weight")
        if shape is None or len(shape) != 2:
            raise ModelError(f"{file.path}: {name} has a LoRA, and the model has no such projection")
        modules[name] = _Module(stored, name, layer, projection, shape)
    return list(modules.values())


def _check_target(path: Path, settings: _Json, module: _Module) -> None:
    """Raise ModelError if the settings contradict that the module has a LoRA."""
    targets, layers = settings.target_modules, settings.layers_to_transform
    if isinstance(targets, list) and not any(f".{module.name}".endswith(f".{target}") for target in targets):
        raise ModelError(f"{path}: target_modules does not name {module.name}, which has tensors")
    if layers is not None and module.layer not in ([layers] if isinstance(layers, int) else layers):
        raise ModelError(f"{path}: layers_to_transform does not name layer {module.layer}, which has tensors")


def _matrix(file: TensorFile, stored: str, half: str, shape: Shape, module: str) -> Floats:
    """Return a copy of one matrix as float32."""
    name = f"{stored}.lora_{half}.weight"
    found = file.entries[name].shape
    if found != shape:
        raise ModelError(f"{file.path}: lora_{half} of {module} has shape {found}; this model and r need {shape}")
    return np.array(file.floats(name), np.float32)
