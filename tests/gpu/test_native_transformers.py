"""Compares logits on the device with transformers in float32 on the same stored weights.

16-bit types may differ about as much as transformers in that type does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.worker.config import CudaConfig
from tests.gpu.device import cupy_on_a_device
from tests.tiny_model import write_tiny_model
from tests.worker.native.works import work

pytestmark = pytest.mark.gpu
cupy_on_a_device()
torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from tests.gpu.models import cuda_runner  # noqa: E402

LLAMA3_ROPE = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 256,
}


@pytest.mark.parametrize("element_type", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM"])
def test_logits_of_prefill_and_decode_are_those_of_transformers(
    tmp_path: Path, architecture: Any, element_type: Any
) -> None:
    scaling = LLAMA3_ROPE if architecture == "LlamaForCausalLM" else None
    shape: dict[str, Any] = {
        "hidden": 512,
        "heads": 8,
        "kv_heads": 2,
        "head_dim": 64,
        "intermediate": 1024,
        "layers": 4,
    }
    write_tiny_model(tmp_path, architecture=architecture, dtype=element_type, rope_scaling=scaling, **shape)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    runner = cuda_runner(tmp_path, CudaConfig(dtype=element_type, graph_upper_bound=2), capacity_blocks=100)
    tokens = np.random.default_rng(1).integers(0, 320, 500).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0].numpy()
        model.to("cuda", getattr(torch, element_type))
        theirs = model(torch.tensor([tokens], device="cuda")).logits[0].float().cpu().numpy()
    # This model's attention is sharp: the same type costs transformers itself so much. float32 has no such yardstick.
    bound = 2e-5 if element_type == "float32" else _error(theirs, expected)
    slots = np.random.default_rng(2).permutation(100)[:32].tolist()
    errors: list[float] = []
    for start, end in ((0, 200), (200, 499), (499, 500)):  # two chunks, and a decode by a graph
        with runner.stream:
            logits = runner.logits([work(tokens[:end], slots, start=start)]).get()[0]
        errors.append(_error(logits, expected[end - 1]))
    runner.close()
    print(f"{architecture} {element_type}: {errors}; bound {bound}")
    assert max(errors) < 1.5 * bound, (errors, bound)


def _error(logits: Any, expected: Any) -> float:
    return float(np.linalg.norm(logits - expected) / np.linalg.norm(expected))
