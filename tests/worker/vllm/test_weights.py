"""Weights that change while a vLLM engine sleeps without them."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec

from services.worker.config import WorkerConfig
from services.worker.vllm.weights import LoadedWeights
from shared.messages.generate import Sampling
from tests.tiny_model import write_tiny_model
from tests.worker.engine.driven_engine import DrivenEngine
from tests.worker.vllm.environment import PYTHON, needs_vllm

GREEDY = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)
PROMPT = list(range(5, 45))


def tiny(directory: Path, seed: int) -> Path:
    return write_tiny_model(directory, hidden=128, heads=2, context_length=1024, tied=False, seed=seed)


def test_weights_that_are_not_those_of_the_start_are_named_until_they_are_back(tmp_path: Path) -> None:
    model, kept = tiny(tmp_path / "tiny", 3), tmp_path / "kept"
    weights, file = LoadedWeights(model), model / "model.safetensors"
    assert weights.fault() == ""
    shutil.copy2(file, kept)
    shutil.copy(tiny(tmp_path / "other", 4) / file.name, file)
    assert weights.fault() == f"{model}: the weights have changed since the worker started; start it again"
    file.unlink()
    assert "have changed" in weights.fault()
    shutil.copy2(kept, file)
    assert weights.fault() == ""


def test_a_directory_without_weights_has_none_to_compare(tmp_path: Path) -> None:
    assert LoadedWeights(tmp_path).fault() == ""


@needs_vllm
async def test_an_engine_does_not_wake_with_other_weights_than_it_had(tmp_path: Path) -> None:
    model, kept = tiny(tmp_path / "tiny", 3), tmp_path / "kept"
    file = model / "model.safetensors"
    arguments = {"num_gpu_blocks_override": 64, "enforce_eager": True, "dtype": "float32"}
    fields = {"model": str(model), "engine": "vllm", "vllm": arguments, "vllm_python": str(PYTHON), "threads": 1}
    engine = await DrivenEngine.start(msgspec.convert(fields, WorkerConfig))
    try:
        whole = await engine.answer("before", PROMPT, GREEDY)
        shutil.copy2(file, kept)
        assert await engine.operate("sleep", level=2) == ""
        shutil.copy(tiny(tmp_path / "other", 4) / file.name, file)
        assert "the weights have changed since the worker started" in await engine.operate("wake")
        engine.submit("asleep", PROMPT, GREEDY)
        assert (await engine.ended("asleep")).error == "the engine is asleep"
        shutil.copy2(kept, file)
        assert await engine.operate("wake") == ""
        assert await engine.answer("after", PROMPT, GREEDY) == whole
    finally:
        await engine.close()
