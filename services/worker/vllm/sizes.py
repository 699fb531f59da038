"""Whether a model can be divided as vLLM's parallel sizes say, by its config.json, before anything is started. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TENSOR, PIPELINE, EXPERT = "tensor_parallel_size", "pipeline_parallel_size", "enable_expert_parallel"
HEADS = ("num_attention_heads", "n_head")
KV_HEADS = ("n_head_kv", "num_kv_heads", "num_key_value_heads")
LAYERS = ("num_hidden_layers", "n_layer")
"""The names that architectures give their sizes."""
OTHER_SIZES = frozenset(("hf_overrides", "hf_config_path"))
"""Arguments with which the model's sizes are not those of its config.json."""


def written(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[str, Any]]:
    """Return vLLM's arguments by their names with underscores: where each is written, such as `vllm.block_size`, and
    its value. `tables` are those of the arguments by their names, of which a later one overrides."""
    return {
        str(name).replace("-", "_"): (f"{table}.{name}", value)
        for table, entries in tables.items()
        for name, value in entries.items()
    }


def sizes_fault(settings: Mapping[str, Any], arguments: Mapping[str, tuple[str, Any]]) -> str:
    """Return which size does not divide a model. Empty if all do, as far as its config.json says.

    `settings` are those of config.json, `arguments` what `written` returns. A value that is no number is refused
    elsewhere.

        tensor_parallel_size      divides the attention heads, and the KV heads or is a multiple of them
        pipeline_parallel_size    at most the layers
        enable_expert_parallel    the model has experts
    """
    if not OTHER_SIZES.isdisjoint(arguments):
        return ""
    (where, tensor), (its_place, pipeline) = (_size(arguments, name) for name in (TENSOR, PIPELINE))
    heads, kv_heads, layers = (_first(settings, names) for names in (HEADS, KV_HEADS, LAYERS))
    if tensor and heads % tensor:
        return f"{where}: {tensor} does not divide the model's {heads} attention heads"
    if tensor and kv_heads % tensor and tensor % kv_heads:
        return f"{where}: {tensor} neither divides the model's {kv_heads} KV heads nor is a multiple of them"
    if layers and pipeline > layers:
        return f"{its_place}: {pipeline} is more than the model's {layers} layers"
    where, spread = arguments.get(EXPERT, ("", False))
    experts = any("expert" in name or name == "block_configs" for name in settings)
    if settings and str(spread).lower() == "true" and not experts:
        return f"{where}: the model has no experts"
    return ""


def _size(arguments: Mapping[str, tuple[str, Any]], name: str) -> tuple[str, int]:
    where, value = arguments.get(name, ("", 0))
    return where, _number(value)


def _first(settings: Mapping[str, Any], names: tuple[str, ...]) -> int:
    """Return the first of these settings that is a number. 0 if there is none."""
    return next((value for name in names if (value := _number(settings.get(name)))), 0)


def _number(value: Any) -> int:
    """Return a whole number above 0 that is given as a number or as text. 0 if it is none."""
    try:
        return max(0, int(str(value)))
    except ValueError:
        return 0
