"""`--check` of a worker: what its engine's start would find wrong, and nothing is started or converted."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from services.worker.config import Dtype, SimulatedConfig, WorkerConfig
from services.worker.model_check import check_files
from shared.errors import ConfigError, ModelError
from tests.tiny_model import write_tiny_model
from tests.worker.native.gguf_model import write_gguf


def config(model: Path, engine: str = "native", **settings: object) -> WorkerConfig:
    return WorkerConfig(model=str(model), engine=engine, cache=str(model.parent / "cache"), **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("engine", ["native", "simulated", "echo"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_can_be_served_passes_and_is_not_converted(tmp_path: Path, engine: str, dtype: Dtype) -> None:
    model = write_tiny_model(tmp_path / "model", dtype=dtype)
    check_files(config(model, engine))
    check_files(config(write_gguf(tmp_path / "sha256-0a1b", model), engine))
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("engine", ["native", "simulated"])
@pytest.mark.parametrize(
    ("file", "content", "complaint"),
    [
        ("config.json", "{", "config.json: "),
        ("tokenizer.json", "{}", "tokenizer.json: "),
        ("tokenizer.json", None, "tokenizer.json: "),
        ("modules.json", "{", "modules.json: "),
    ],
)
def test_a_file_that_would_not_do_is_named(
    tmp_path: Path, engine: str, file: str, content: str | None, complaint: str
) -> None:
    model = write_tiny_model(tmp_path / "model")
    (model / file).unlink(missing_ok=True)
    if content is not None:
        (model / file).write_text(content)
    with pytest.raises(ModelError, match=complaint):
        check_files(config(model, engine))


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def replace(file: Path) -> None:
    file.write_bytes(b"none")


@pytest.mark.parametrize("damage", [cut, replace])
def test_torn_weights_are_named(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    model = write_tiny_model(tmp_path / "model")
    gguf = write_gguf(tmp_path / "x.gguf", model)
    damage(gguf)
    with pytest.raises(ModelError, match=r"x\.gguf: torn or not a GGUF file"):
        check_files(config(gguf))
    damage(model / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.safetensors: torn"):
        check_files(config(model))


def test_a_table_of_times_is_read(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"none\.toml: No such file"):
        check_files(config(model, "simulated", simulated=SimulatedConfig(table=str(tmp_path / "none.toml"))))


def test_a_worker_that_is_asked_to_check_ends_with_a_status_and_needs_no_nats(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    ask = (sys.executable, "-m", "services.worker", "--nats-url", "nats://127.0.0.1:1", "--model", str(model))
    assert subprocess.run((*ask, "--check"), check=False, capture_output=True).returncode == 0
    (model / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    asked = subprocess.run((*ask, "--check"), check=False, capture_output=True, text=True)
    assert asked.returncode == 2
    assert asked.stderr.startswith(f"headrace-worker: {model}/config.json: architecture GPT2LMHeadModel is not supp")
    assert asked.stderr.count("\n") == 1
    assert subprocess.run((*ask, "--check-settings"), check=False, capture_output=True).returncode == 0
