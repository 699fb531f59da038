"""A worker whose vLLM cannot start, as processes: it ends with one line, or tries again and says why at /health."""

from __future__ import annotations

import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.integration.fleet import Service, fleet
from tests.integration.stack import eventually
from tests.tiny_model import write_tiny_model
from tests.worker.vllm.environment import LIMIT_S, PYTHON, needs_vllm

pytestmark = needs_vllm
REASON = ("less than requested memory for kv (4000.0 GiB)", "(lower worker.capacity_bytes)")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny", hidden=128, heads=2, context_length=1024, tied=False, seed=3)


def worker_flags(model: Path, python: Path = PYTHON) -> list[str]:
    vllm = ("--vllm.enforce_eager", "true", "--vllm.dtype", "float32")
    return ["--model", str(model), "--engine", "vllm", "--vllm-python", str(python), "--threads", "1", *vllm]


def health(service: Service) -> str:
    """Return the text of /health, whatever its status; empty while nothing listens."""
    service.ready()
    if not service.url:
        return ""
    try:
        with urllib.request.urlopen(f"{service.url}/health", timeout=60) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as wrong:
        return wrong.read().decode()
    except OSError:
        return ""


def cards(where: Path) -> list[Path]:
    """Return the files of discovery that have a model's card."""
    return [file for file in where.rglob("*") if file.is_file() and b"tokenizer_digest" in file.read_bytes()]


@pytest.mark.parametrize("fault", ["weights", "python"])
def test_what_a_new_start_cannot_change_ends_the_worker_with_one_line(
    tmp_path: Path, nats_url: str, model: Path, fault: str
) -> None:
    python, said = PYTHON, "vLLM cannot start: SafetensorError: Error while deserializing header"
    if fault == "weights":
        weights = model / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:5000])
    else:
        python, said = tmp_path / "python", f"worker.vllm_python is {tmp_path}/python, which is not there"
    where = tmp_path / "where"
    with fleet(
        tmp_path, nats_url, "--namespace", fault, "--discovery-backend", "file", "--discovery-path", str(where)
    ) as one:
        worker = one.start("worker", "worker", *worker_flags(model, python))
        assert worker.process.wait(LIMIT_S) != 0
        assert said in worker.log.read_text().strip().rpartition("\n")[2]
        assert not cards(where)


def test_memory_that_others_use_is_waited_for(
    tmp_path: Path, nats_url: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4000")
    where = tmp_path / "where"
    with fleet(
        tmp_path, nats_url, "--namespace", "memory", "--discovery-backend", "file", "--discovery-path", str(where)
    ) as one:
        worker = one.start("worker", "worker", *worker_flags(model))
        eventually(
            lambda: "starting vLLM" in (text := health(worker)) and all(part in text for part in REASON),
            limit_s=LIMIT_S,
            what="/health of the second start names why the first one failed",
        )
        assert not cards(where)
        assert worker.stop()[0] == 0
