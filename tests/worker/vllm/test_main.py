"""What vLLM itself refuses, what it has no memory for, and what is no vLLM: one line each, from real starts."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from benchmarks.gpu.gptq_model import write_gptq_model
from services.worker.config import WorkerConfig
from services.worker.contracts.messages import Failed, Loading
from services.worker.engine.process import EngineProcess
from shared.messages.generate import Sampling
from tests.integration.stack import ROOT
from tests.nvml.driver import MISSING, Driver
from tests.tiny_model import write_tiny_model
from tests.worker.engine.driven_engine import DrivenEngine
from tests.worker.vllm.environment import LIMIT_S, ON_DEVICE, PYTHON, needs_vllm


async def start(
    directory: Path,
    python: Path = PYTHON,
    *,
    settings: Mapping[str, object] | None = None,
    arguments: Mapping[str, object] | None = None,
) -> Failed:
    """Return how the start of an engine fails. `settings` are the worker's, `arguments` vLLM's."""
    given: dict[str, object] = {"enforce_eager": True, "dtype": "float32", "num_gpu_blocks_override": 64}
    given |= arguments or {}
    table = {"model": str(directory), "engine": "vllm", "vllm": given, "vllm_python": str(python), "threads": 1}
    table |= settings or {}
    process = await EngineProcess.start(msgspec.convert(table, WorkerConfig), "tiny", "worker")
    try:
        async with asyncio.timeout(LIMIT_S):
            while isinstance(report := await process.receive(), Loading):
                pass
        assert isinstance(report, Failed), report
        assert "\n" not in report.reason
        return report
    finally:
        await process.end(0.0)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny", hidden=128, heads=2, context_length=1024, tied=False, seed=3)


@needs_vllm
async def test_a_model_that_vllm_refuses_is_fatal(model: Path) -> None:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": ["NopeForCausalLM"]}))
    failed = await start(model)
    reason = "ValidationError: Model architectures ['NopeForCausalLM'] are not supported for now"
    assert failed.reason.startswith(f"vLLM cannot start: {reason}")
    assert failed.model


@needs_vllm
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"max_model_len": 4096}, "User-specified max_model_len (4096) is greater than"),
        ({"num_gpu_blocks_override": 4}, "max seq len (1024)"),
        (
            {"block_size": 32, "tensor_parallel_size": 4},
            "tensor_parallel_size: 4 does not divide the model's 2 attention heads",
        ),
    ],
)
async def test_settings_that_vllm_refuses_are_fatal_and_named(
    model: Path, arguments: dict[str, object], reason: str
) -> None:
    failed = await start(model, arguments=arguments)
    assert reason in failed.reason
    assert failed.model


@needs_vllm
async def test_a_model_with_weights_of_4_bits_computes_its_first_tokens(tmp_path: Path) -> None:
    shape = {"hidden": 128, "heads": 2, "context_length": 1024}
    whole = write_tiny_model(tmp_path / "whole", dtype="bfloat16", tied=False, seed=3, **shape)  # type: ignore[arg-type]
    arguments = {"num_gpu_blocks_override": 64, **ON_DEVICE}
    table = {"model": str(write_gptq_model(tmp_path / "gptq", whole)), "engine": "vllm", "vllm": arguments}
    engine = await DrivenEngine.start(msgspec.convert(table | {"vllm_python": str(PYTHON), "threads": 1}, WorkerConfig))
    try:
        found = await engine.answer(
            "one", list(range(5, 105)), Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)
        )
        assert len(found) == 8
    finally:
        await engine.close()


@needs_vllm
async def test_a_role_of_embeddings_is_fatal_and_named(model: Path) -> None:
    failed = await start(model, settings={"role": "prefill", "kvbm": {"pool": "none"}}, arguments={"runner": "pooling"})
    assert failed.reason == "role is prefill, but vllm.runner is pooling: embeddings are not handed over"
    assert failed.model


@needs_vllm
@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_its_gpus_are_named_by_uuid_however_they_were_made_visible(tmp_path: Path) -> None:
    expected = {
        ("", 1, 2): "GPU-0 GPU-1",
        ("2", 1, 1): "GPU-2",
        ("3,GPU-1,0", 1, 2): "GPU-3 GPU-1",
        ("1,3,2,0", 2, 2): "GPU-1 GPU-3 GPU-2 GPU-0",
    }
    driver = Driver(tmp_path, gpus=4)
    words = [str(word) for case in expected for word in case]
    command = [str(PYTHON), "-m", "tests.nvml.vllm_gpus", *words]
    environment = os.environ | driver.environment
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-len(expected) :] == list(expected.values())


def half_environment(directory: Path, modules: Mapping[str, str]) -> Path:
    """Return a Python that has what our program needs, an empty torch, and these modules in place of vLLM's."""
    for name, text in {"torch": "", **modules}.items():
        file = Path(directory, *name.split("."), "__init__.py")
        file.parent.mkdir(parents=True)
        file.write_text(text)
    python = directory / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{directory}:$PYTHONPATH" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


REMEDY = "./headrace install-vllm"
NO_DEVICE = "class Nowhere:\n    def is_unspecified(self):\n        return True\ncurrent_platform = Nowhere()"


@pytest.mark.parametrize(
    ("modules", "reason"),
    [
        (
            {"vllm": "import none_such"},
            f"vLLM cannot be loaded (ModuleNotFoundError: No module named 'none_such'); {REMEDY} makes its environment",
        ),
        (
            {"vllm": "raise ImportError('libtorch.so: cannot open shared object file')"},
            f"vLLM cannot be loaded (ImportError: libtorch.so: cannot open shared object file); {REMEDY} makes its",
        ),
        (
            {"vllm": "__version__ = '0.31.0'"},
            "vLLM 0.31.0 is not supported: there is no module vllm.",
        ),
        (
            {"vllm": "__version__ = '0.34.0'"},
            "vLLM 0.34.0 is not supported: there is no module vllm.",
        ),
        (
            {"vllm": "__version__ = '0.32.0'", "vllm.platforms": NO_DEVICE},
            "vLLM 0.32.0 finds no device here that it was built for: without a GPU, remove ",
        ),
    ],
)
async def test_half_an_environment_and_another_version_are_fatal_and_say_how_to_get_a_whole_one(
    tmp_path: Path, modules: Mapping[str, str], reason: str
) -> None:
    failed = await start(tmp_path, half_environment(tmp_path, modules))
    assert failed.reason.startswith(reason)
    assert REMEDY in failed.reason
    assert failed.model
