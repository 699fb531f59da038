"""services/worker/vllm/sizes.py: which parallel sizes divide a model."""

from __future__ import annotations

from typing import Any

import pytest

from services.worker.vllm.sizes import sizes_fault, written

DENSE = {"num_attention_heads": 12, "num_key_value_heads": 4, "num_hidden_layers": 3}
EXPERTS = DENSE | {"num_local_experts": 8}


def fault(settings: dict[str, Any], **arguments: Any) -> str:
    return sizes_fault(settings, written({"vllm": arguments}))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"tensor_parallel_size": 5}, "vllm.tensor_parallel_size: 5 does not divide the model's 12 attention heads"),
        (
            {"tensor_parallel_size": "6"},
            "vllm.tensor_parallel_size: 6 neither divides the model's 4 KV heads nor is a multiple of them",
        ),
        ({"pipeline_parallel_size": 4}, "vllm.pipeline_parallel_size: 4 is more than the model's 3 layers"),
        ({"enable_expert_parallel": "true"}, "vllm.enable_expert_parallel: the model has no experts"),
    ],
)
def test_a_size_that_does_not_divide_is_named(arguments: dict[str, Any], said: str) -> None:
    assert fault(DENSE, **arguments) == said


@pytest.mark.parametrize(
    ("settings", "arguments"),
    [
        (DENSE, {}),
        (DENSE, {"tensor_parallel_size": 2, "pipeline_parallel_size": 3}),
        (DENSE, {"tensor_parallel_size": 12}),  # each KV head is three times there
        (EXPERTS, {"enable_expert_parallel": True}),
        (DENSE, {"enable_expert_parallel": False}),
        (DENSE, {"tensor_parallel_size": "many"}),  # vLLM's parser refuses it
        (DENSE, {"tensor_parallel_size": 5, "hf_overrides": {"num_attention_heads": 10}}),
        ({}, {"tensor_parallel_size": 5, "pipeline_parallel_size": 4, "enable_expert_parallel": True}),
        ({"num_attention_heads": 8}, {"tensor_parallel_size": 8}),  # as many KV heads
    ],
)
def test_what_may_divide_is_left_to_vllm(settings: dict[str, Any], arguments: dict[str, Any]) -> None:
    assert fault(settings, **arguments) == ""


def test_the_table_overrides_the_file() -> None:
    tables = {"vllm_args": {"tensor-parallel-size": 5}, "vllm": {"tensor_parallel_size": 2}}
    assert written(tables) == {"tensor_parallel_size": ("vllm.tensor_parallel_size", 2)}
    assert sizes_fault(DENSE, written({"vllm_args": tables["vllm_args"]})).startswith("vllm_args.tensor-parallel-size")
