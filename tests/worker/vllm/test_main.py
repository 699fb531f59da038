"""What vLLM itself refuses, and what it has no memory for: one line each, from real starts."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from services.worker.config import WorkerConfig
from services.worker.contracts.messages import Failed, Loading
from services.worker.engine.process import EngineProcess
from tests.integration.stack import ROOT
from tests.nvml.driver import MISSING, Driver
from tests.tiny_model import write_tiny_model
from tests.worker.vllm.environment import LIMIT_S, PYTHON, needs_vllm

pytestmark = needs_vllm


async def start(directory: Path, **arguments: object) -> Failed:
    """Return how the start of an engine fails."""
    given = {"enforce_eager": True, "dtype": "float32", "num_gpu_blocks_override": 64} | arguments
    table = {"model": str(directory), "engine": "vllm", "vllm": given, "vllm_python": str(PYTHON), "threads": 1}
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


def tear_weights(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def rename_architecture(model: Path) -> None:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": ["NopeForCausalLM"]}))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (tear_weights, "SafetensorError: Error while deserializing header"),
        (rename_architecture, "ValidationError: Model architectures ['NopeForCausalLM'] are not supported for now"),
    ],
)
async def test_a_model_that_vllm_refuses_is_fatal(model: Path, spoil: Callable[[Path], None], reason: str) -> None:
    spoil(model)
    failed = await start(model)
    assert failed.reason.startswith(f"vLLM cannot start: {reason}")
    assert failed.model


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"max_model_lenn": 5}, "vllm.max_model_lenn: no such argument of vLLM; did you mean max_model_len?"),
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
    failed = await start(model, **arguments)
    assert reason in failed.reason
    assert failed.model


async def test_memory_that_is_not_there_now_is_not_fatal(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4000")
    failed = await start(model)
    assert "less than requested memory for kv (4000.0 GiB)" in failed.reason
    assert failed.reason.endswith("(lower worker.capacity_bytes)")
    assert not failed.model


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
@pytest.mark.parametrize(
    ("visible", "ranks", "size", "expected"),
    [
        ("", 1, 2, "GPU-0 GPU-1"),
        ("2", 1, 1, "GPU-2"),
        ("3,GPU-1,0", 1, 2, "GPU-3 GPU-1"),
        ("1,3,2,0", 2, 2, "GPU-1 GPU-3 GPU-2 GPU-0"),
    ],
)
def test_its_gpus_are_named_by_uuid_however_they_were_made_visible(
    tmp_path: Path, visible: str, ranks: int, size: int, expected: str
) -> None:
    driver = Driver(tmp_path, gpus=4)
    environment = os.environ | driver.environment | {"CUDA_VISIBLE_DEVICES": visible}
    command = [str(PYTHON), "-m", "tests.nvml.vllm_gpus", str(ranks), str(size)]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == expected
