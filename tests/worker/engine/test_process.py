"""worker/engine/process.py: what an engine's process is started with; the rest is in test_engine_main.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.worker.config import WorkerConfig
from services.worker.engine.process import engine_environment

CUDA = WorkerConfig(model="m", device="cuda", cache="/var/models")


def test_an_engines_environment_has_its_threads_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_NATS_PASSWORD", "secret")
    told = engine_environment(WorkerConfig(model="m", threads=3))
    assert told["OMP_NUM_THREADS"] == told["OPENBLAS_NUM_THREADS"] == "3"
    assert not any(name.startswith("HEADRACE_") for name in told)
    assert "CUPY_CACHE_DIR" not in told


def test_compiled_kernels_are_kept_next_to_the_weights_unless_set_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUPY_CACHE_DIR", raising=False)
    assert engine_environment(CUDA)["CUPY_CACHE_DIR"] == "/var/models/cupy"
    relative = WorkerConfig(model="m", device="cuda", cache="models")
    assert engine_environment(relative)["CUPY_CACHE_DIR"] == str(Path.cwd() / "models" / "cupy")
    monkeypatch.setenv("CUPY_CACHE_DIR", "/elsewhere")
    assert engine_environment(CUDA)["CUPY_CACHE_DIR"] == "/elsewhere"


def test_vllm_sees_the_gpus_that_were_chosen_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert engine_environment(WorkerConfig(model="m", engine="vllm", vllm_gpus="6,7"))["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert engine_environment(WorkerConfig(model="m", engine="vllm"))["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"


def test_a_directory_for_metrics_of_several_processes_is_not_passed_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "/shared")
    assert "PROMETHEUS_MULTIPROC_DIR" not in engine_environment(WorkerConfig(model="m", engine="vllm"))
