"""worker/engine/process.py: what an engine's process is started with; the rest is in test_engine_main.py."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from services.worker.config import WorkerConfig
from services.worker.contracts.messages import EngineReport, Failed
from services.worker.engine import process
from services.worker.engine.channel import ShellEnd
from services.worker.engine.process import EngineProcess, check_python, engine_environment, socket_directory
from shared.config import TraceConfig
from shared.errors import ModelError
from tests.worker.shell import LIMIT_S
from tests.worker.vllm.environment import PYTHON, needs_vllm, run_there

VLLM = WorkerConfig(model="m", engine="vllm")
OWNERS = {
    "VLLM_WORKER_MULTIPROC_METHOD": "vLLM",
    "VLLM_HOST_IP": "vLLM",
    "VLLM_NO_USAGE_STATS": "vLLM",
    "VLLM_RPC_BASE_PATH": "vLLM",
    "VLLM_CPU_OMP_THREADS_BIND": "vLLM",
    "VLLM_CPU_KVCACHE_SPACE": "vLLM",
    "HF_HUB_OFFLINE": "huggingface_hub",
    "CUPY_CACHE_DIR": "CuPy",
    "CUDA_VISIBLE_DEVICES": "CUDA",
    "PYTHONPATH": "Python",
    "OMP_NUM_THREADS": "OpenMP",
    "OPENBLAS_NUM_THREADS": "OpenBLAS",
    "MKL_NUM_THREADS": "MKL",
    "VECLIB_MAXIMUM_THREADS": "Accelerate",
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "OpenTelemetry",
    "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "OpenTelemetry",
    "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "OpenTelemetry",
    "OTEL_TRACES_SAMPLER": "OpenTelemetry",
    "OTEL_SERVICE_NAME": "OpenTelemetry",
    "OTEL_RESOURCE_ATTRIBUTES": "OpenTelemetry",
}
"""Variable that an engine gets → the program or library that reads it."""
TRACE = TraceConfig(endpoint="http://127.0.0.1:4318/v1/traces", token="a,b==")
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


def test_vllm_sends_its_spans_where_the_worker_does_and_none_of_requests_that_are_not_traced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = engine_environment(WorkerConfig(model="m", engine="vllm", namespace="n", trace=TRACE), "w1")
    assert told["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] == "http/protobuf"
    assert told["OTEL_EXPORTER_OTLP_TRACES_HEADERS"] == "authorization=Bearer%20a%2Cb%3D%3D"
    assert told["OTEL_TRACES_SAMPLER"] == "parentbased_always_off"
    assert told["OTEL_RESOURCE_ATTRIBUTES"] == "service.namespace=n,service.instance.id=w1"
    assert not any(name.startswith("OTEL_") for name in set_for(VLLM, monkeypatch))
    assert not any(name.startswith("OTEL_") for name in set_for(WorkerConfig(model="m", trace=TRACE), monkeypatch))


def set_for(config: WorkerConfig, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The variables that an engine gets in addition to those of its shell."""
    monkeypatch.setattr(process, "environment", dict)
    return engine_environment(config, sockets="/tmp/sockets")


def test_each_variable_that_an_engine_gets_has_a_program_that_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus = WorkerConfig(model="m", engine="vllm", vllm_gpus="0", threads=2, trace=TRACE)
    assert (set_for(CUDA, monkeypatch) | set_for(VLLM, monkeypatch) | set_for(with_gpus, monkeypatch)).keys() == (
        OWNERS.keys()
    )


@needs_vllm
def test_vllm_knows_each_of_its_variables() -> None:
    known = run_there("import json, vllm.envs; print(json.dumps(list(vllm.envs.environment_variables)))")
    assert {name for name, owner in OWNERS.items() if owner == "vLLM"} <= set(known)


def test_vllm_on_a_cpu_leaves_one_processor_to_its_scheduler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(process, "_GPU_DRIVER", tmp_path / "none")
    assert set_for(WorkerConfig(model="m", engine="vllm", threads=4), monkeypatch)["OMP_NUM_THREADS"] == "3"
    assert set_for(WorkerConfig(model="m", engine="vllm", threads=1), monkeypatch)["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" in set_for(VLLM, monkeypatch)


def test_vllm_on_a_gpu_chooses_its_threads_itself_unless_they_are_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(process, "_GPU_DRIVER", tmp_path)
    assert "OMP_NUM_THREADS" not in set_for(VLLM, monkeypatch)
    assert set_for(WorkerConfig(model="m", engine="vllm", threads=4), monkeypatch)["OMP_NUM_THREADS"] == "4"
    monkeypatch.setattr(process, "_GPU_DRIVER", tmp_path / "none")
    assert "OMP_NUM_THREADS" not in set_for(WorkerConfig(model="m", engine="vllm", vllm_gpus="0"), monkeypatch)


def test_a_gpu_of_the_machine_changes_nothing_for_other_engines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(process, "_GPU_DRIVER", tmp_path)
    assert set_for(WorkerConfig(model="m", threads=3), monkeypatch)["OMP_NUM_THREADS"] == "3"


def refusal(setting: object) -> str:
    with pytest.raises(ModelError) as wrong:
        check_python("vllm", str(setting))
    text = str(wrong.value)
    assert text.startswith(f"worker.vllm_python is {setting}, ")
    assert "\n" not in text
    return text


def test_a_missing_one_names_the_remedy(tmp_path: Path) -> None:
    assert "which is not there: ./headrace install-vllm" in refusal(tmp_path / "python")
    assert "which is not there" in refusal(tmp_path)


def test_a_python_without_vllm_is_refused() -> None:
    assert ", which lacks vllm, torch: " in refusal(sys.executable)


@pytest.mark.parametrize(
    "text", ["#!/bin/sh\nexit 3\n", "#!/bin/sh\necho Python\n", "no program", "#!/bin/sh\necho [3]\n"]
)
def test_what_is_no_python_is_refused(tmp_path: Path, text: str) -> None:
    program = tmp_path / "python"
    program.write_text(text)
    program.chmod(0o755)
    assert "does not run as a Python" in refusal(program)


def test_an_old_python_is_refused(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho '[[3, 9], []]'\n")
    program.chmod(0o755)
    assert "which is Python 3.9; at least 3.11 works" in refusal(program)


@needs_vllm
def test_the_installed_one_is_taken() -> None:
    assert check_python("vllm", str(PYTHON)) == str(PYTHON)


TALKER = """
import socket, sys
from services.worker.contracts.messages import Failed
from services.worker.engine.channel import EngineEnd

end = EngineEnd(socket.socket(fileno=int(sys.argv[1])))
end.receive(None)
for number in range(50):
    end.send(Failed(str(number) + "x" * 50_000))
"""
"""An engine that has much to say when it hears Shutdown."""


def talker(connection: socket.socket) -> subprocess.Popen[bytes]:
    number = connection.fileno()
    return subprocess.Popen([sys.executable, "-c", TALKER, str(number)], pass_fds=(number,), process_group=0)


async def test_an_engine_that_ends_is_heard_to_its_end_whatever_it_still_says() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        started = talker(theirs)
    heard: list[EngineReport] = []
    assert await EngineProcess(started, await ShellEnd.open(ours)).end(LIMIT_S, heard.append) == 0
    assert heard == [Failed(str(number) + "x" * 50_000) for number in range(50)]


def test_what_a_killed_worker_left_of_sockets_is_removed_by_the_next_and_nothing_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with socket_directory() as used:
        left = tmp_path / "headrace-vllm-left"
        left.mkdir()
        (left / "socket").touch()
        (tmp_path / "headrace-vllm-file").touch()
        with socket_directory() as another:
            assert {each.name for each in tmp_path.iterdir()} == {
                "headrace-vllm-file",
                Path(used).name,
                Path(another).name,
            }
    assert [each.name for each in tmp_path.iterdir()] == ["headrace-vllm-file"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
def test_what_another_user_has_made_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    theirs = tmp_path / "headrace-vllm-theirs"
    theirs.mkdir()
    os.chown(theirs, 12345, 12345)
    with socket_directory():
        pass
    assert theirs.exists()


def test_without_a_place_for_sockets_the_line_names_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with (
        pytest.raises(ModelError, match=r"^no directory for vLLM's sockets \(TMPDIR\): No such file"),
        socket_directory(),
    ):
        pass
