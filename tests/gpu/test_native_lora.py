"""LoRAs on the device against models with the same weights merged, and against the steps of CUDA graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.worker.config import CudaConfig, Dtype
from services.worker.contracts.runner import Work
from tests.gpu.device import cupy_on_a_device
from tests.tiny_lora import write_lora
from tests.tiny_model import write_tiny_model
from tests.worker.native.golden.cases import CASES
from tests.worker.native.merged import write_merged
from tests.worker.native.works import work

pytestmark = pytest.mark.gpu
cp = cupy_on_a_device()

from tests.gpu.models import cuda_runner  # noqa: E402

PROMPT = [5 + number * 7 % 200 for number in range(37)]
ROOM: dict[str, Any] = {"capacity_blocks": 64, "block_size": 16, "max_running": 16, "max_rows": 256}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"heads": 8, "kv_heads": 2, "head_dim": 64, "hidden": 256, "intermediate": 512, "tied": False},
    "gemma2": {**CASES["gemma2"], "head_dim": 256, "hidden": 256, "intermediate": 512},
    "granite": {**CASES["granite"], "head_dim": 64, "hidden": 256, "intermediate": 512},
    "odd widths": {"heads": 2, "kv_heads": 1, "head_dim": 10, "hidden": 18, "intermediate": 30, "tied": False},
}


def of_lora(made: Work, lora: str) -> Work:
    made.lora = lora
    return made


def logits(runner: Any, works: list[Work]) -> Any:
    with runner.stream:
        return cp.asnumpy(runner.logits(works)).copy()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_lora_computes_as_a_model_with_its_weights_merged(shape: str, dtype: Dtype, tmp_path: Path) -> None:
    base = write_tiny_model(tmp_path / "base", **{**SHAPES[shape], "shards": 1})
    lora = write_lora(tmp_path / "lora", base, rank=5)
    settings = CudaConfig(dtype=dtype)
    merged = cuda_runner(write_merged(tmp_path / "merged", base, lora), settings, **ROOM)
    runner = cuda_runner(base, settings, **ROOM)
    assert runner.operate("load_lora", "poet", str(lora), 1) == ""
    for history, start in ((PROMPT, 0), ([*PROMPT, 9], len(PROMPT))):  # a prefill, then a decode
        expected = logits(merged, [work(history, [0, 1, 2], start=start)])
        got = logits(runner, [of_lora(work(history, [0, 1, 2], start=start), "poet")])
        bound = (1e-3 if dtype == "float32" else 0.1) * np.abs(expected).max()
        np.testing.assert_allclose(got, expected, rtol=0, atol=bound)
    base_logits = logits(runner, [work(PROMPT, [4, 5, 6])])
    changed = logits(runner, [of_lora(work(PROMPT, [7, 8, 9]), "poet")])
    assert np.abs(changed - base_logits).max() > 0.1 * np.abs(base_logits).max()
    assert runner.operate("unload_lora", "poet", "", 1) == ""
    merged.close()
    runner.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_without_a_lora_have_the_numbers_of_the_steps_graph(dtype: Dtype, tmp_path: Path) -> None:
    base = write_tiny_model(tmp_path / "base", **SHAPES["llama"])
    runner = cuda_runner(base, CudaConfig(dtype=dtype), **ROOM)
    for seed, name in enumerate(("poet", "clerk")):
        assert runner.operate("load_lora", name, str(write_lora(tmp_path / name, base, seed=seed)), 1) == ""
    loras = ["", "poet", "clerk", "", "poet"]

    def works(length: int, start: int, loras: list[str]) -> list[Work]:
        return [
            of_lora(work([7 + number, *PROMPT][:length], range(3 * number, 3 * number + 3), start=start), lora)
            for number, lora in enumerate(loras)
        ]

    for length, start in ((30, 0), (31, 30)):
        expected = logits(runner, works(length, start, [""] * 5))
        got = logits(runner, works(length, start, loras))
        for row, lora in enumerate(loras):
            if not lora:
                assert np.array_equal(got[row], expected[row])
            else:
                assert not np.array_equal(got[row], expected[row])
        assert np.array_equal(logits(runner, works(length, start, [""] * 5))[[0, 3]], expected[[0, 3]])
        alone = logits(runner, [works(length, start, loras)[2]])
        np.testing.assert_allclose(got[2], alone[0], rtol=0, atol=0.05 * np.abs(alone).max())
        logits(runner, works(length, start, loras))  # leaves the LoRAs' KV for the next step
    runner.close()
