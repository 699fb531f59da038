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
from tests.tiny_model import IMAGE_TOKEN, MODEL_TYPES, write_tiny_model
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


SETTINGS: dict[str, dict[str, Any]] = {
    "MistralForCausalLM": {"sliding_window": 150},
    "Gemma2ForCausalLM": {"sliding_window": 150, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    "Gemma3ForCausalLM": {"sliding_window": 150, "sliding_window_pattern": 2},
    "Gemma3ForConditionalGeneration": {"sliding_window": 150, "sliding_window_pattern": 2},
    "Phi3ForCausalLM": {"partial_rotary_factor": 0.75},
    "GraniteForCausalLM": {"attention_multiplier": 0.1, "residual_multiplier": 0.4, "logits_scaling": 2.0},
}


TYPES = {"LlamaForCausalLM": ("float32", "float16", "bfloat16"), "Qwen2ForCausalLM": ("float32", "float16", "bfloat16")}


@pytest.mark.parametrize(
    ("architecture", "element_type"),
    [(name, each) for name in MODEL_TYPES for each in TYPES.get(name, ("float32", "bfloat16"))],
)
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
    shape |= {"architecture": architecture, "settings": SETTINGS.get(architecture), "rope_scaling": scaling}
    write_tiny_model(tmp_path, dtype=element_type, **shape)
    # eager: the other implementations of attention have no bound by tanh
    sees = architecture == "LlavaForConditionalGeneration"
    load = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
    model = load.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    runner = cuda_runner(tmp_path, CudaConfig(dtype=element_type, graph_upper_bound=2), capacity_blocks=100)
    tokens = np.random.default_rng(1).integers(0, IMAGE_TOKEN, 500).tolist()
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
