"""services/worker/config.py: settings that contradict each other are refused before anything starts; so is a device
that the machine lacks, by its name."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from services.worker.config import AttachedConfig, EngineConfig, WorkerConfig
from shared.config import load
from shared.errors import ConfigError
from tests.worker.shell import LIMIT_S, write_model

WRONG = [
    ("--device cuda --engine echo", "device is cuda, but the echo engine computes nothing: set device = cpu"),
    ("--device cuda --engine simulated", "device is cuda, but the simulated engine computes nothing: set device = cpu"),
    ("--device cuda --kv-dtype float32", "kv_dtype is float32; on a GPU KV is kept in cuda.dtype, bfloat16"),
    (
        "--device cuda --cuda-dtype float16 --kv-dtype bfloat16",
        "kv_dtype is bfloat16; on a GPU KV is kept in cuda.dtype, float16",
    ),
    (
        "--engine echo --weights-memory /run/weights",
        "weights.memory is set, but engine is echo; only the native engine shares weights",
    ),
    ("--engine vllm --standby true", "standby is set, but engine is vllm; only native, simulated, echo can stand by"),
    (
        "--standby true --tensor-parallel 2",
        "standby is set, but tensor_parallel is 2; an engine of one rank can stand by",
    ),
    ("--standby true --turns d", "standby is set, but the model takes turns (turns = 'd'), and sleeps meanwhile"),
    (
        "--device cuda --checkpoint-directory d",
        "checkpoint.directory is set, but device is cuda; a worker can be frozen on a CPU alone",
    ),
    (
        "--engine vllm --checkpoint-directory /c",
        "checkpoint.directory is set, but engine is vllm; only native, simulated, echo can stand by",
    ),
    (
        "--checkpoint-directory /c --weights-memory /w",
        "checkpoint.directory is set, and so is weights.memory, to which an engine keeps a connection",
    ),
    ("--engine attached", "engine is attached, but attached.url is empty"),
    ("--attached-url http://localhost:1", "attached.url is set, but engine is native"),
    ("--attached-url ftp://localhost", "attached: url is no http or https URL"),
    (
        "--attached-url http://me:word@localhost",
        "attached: url has a user or a query; a key belongs in api_key_file",
    ),
    (
        "--attached-events localhost:5557",
        "attached: events is localhost:5557, no ZeroMQ endpoint, such as tcp://127.0.0.1:5557",
    ),
    (
        "--attached-address http://localhost:1",
        "attached: address is http://localhost:1, not HOST:PORT, such as 10.0.0.5:8001 or [fd00::5]:8001",
    ),
    ("--attached-address localhost:70000", "attached: Port out of range 0-65535"),
    ("--attached-client-key k", "attached: client_cert and client_key need each other"),
    ("--attached-ip vllm.svc", "attached: 'vllm.svc' does not appear to be an IPv4 or IPv6 address"),
    ("--attached-replay tcp://localhost:1", "attached: replay is set without events"),
    (
        "--attached-kind sglang --attached-grammars true",
        "attached: grammars is set, but kind is sglang, for which it is not built",
    ),
    (
        "--engine attached --attached-url http://localhost:1 --kvbm-pool p",
        "kvbm.pool is set, but the attached engine exchanges no blocks with a kvbm",
    ),
    (
        "--role prefill",
        "role is prefill, but kvbm.pool is empty: blocks are handed over through the machine's kvbm",
    ),
    (
        "--role decode --engine echo --kvbm-pool p",
        "role is decode, but engine is echo; only native, simulated, vllm have roles",
    ),
    (
        "--role prefill --kvbm-pool p --kvbm-offload evicted",
        "role is prefill, but kvbm.offload is evicted; what is handed over must be stored: filled",
    ),
    (
        "--role encode --kvbm-pool p",
        "role is encode, but kvbm.embeddings is false: embeddings are handed over through the kvbm",
    ),
    ("--role encode --kvbm-pool p --kvbm-embeddings true --most-images 0", "role is encode, but most_images is 0"),
    (
        "--role encode --kvbm-pool p --kvbm-embeddings true --engine simulated",
        "role is encode, but engine is simulated; only native, vllm encode images",
    ),
    (
        "--role encode --kvbm-pool p --kvbm-embeddings true --tensor-parallel 2",
        "role is encode, but tensor_parallel is 2; an engine of one rank encodes",
    ),
    ("--role both", "role: Invalid enum value 'both'; role is one of aggregated, prefill, decode, encode"),
    ("--turns a.b", "turns: 'a.b' must be 1 to 64 letters, digits, - and _"),
    (
        "--turns cpu --engine vllm",
        "turns is set, but engine is vllm; native, simulated, echo take turns",
    ),
    (
        "--turns cpu --role prefill --kvbm-pool p",
        "turns is set, but role is prefill; a model that takes turns has one worker, which does all",
    ),
    (
        "--turns cpu --tensor-parallel 2",
        "turns is set, but tensor_parallel is 2; an engine of one rank takes turns",
    ),
    ("--kv-dtype float16", "kv_dtype is float16; on a CPU there are float32 and bfloat16"),
    (
        "--cuda-copy-path teleport",
        "cuda.copy_path: Invalid enum value 'teleport'; cuda.copy_path is one of auto, rows, batch, staged, direct",
    ),
    (
        "--cuda-copy-path zero_copy",
        "cuda.copy_path: Invalid enum value 'zero_copy'; cuda.copy_path is one of auto, rows, batch, staged, direct",
    ),
    ("--cuda-memory-share 0", "cuda.memory_share: Expected `float` > 0.0"),
    ("--cuda-memory-share 1.5", "cuda.memory_share: Expected `float` <= 1.0"),
    ("--cuda-gpu -1", "cuda.gpu: Expected `int` >= 0"),
    (
        "--cuda-graph-lower-bound 9 --cuda-graph-upper-bound 8",
        "cuda: graph_lower_bound is 9, above graph_upper_bound, 8; to capture no graphs, set graphs = false",
    ),
]


@pytest.mark.parametrize(("flags", "said"), WRONG)
def test_what_contradicts_itself_is_refused_by_name(flags: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(WorkerConfig, environ={}, flags=["--model", "m", *flags.split()])
    assert str(refused.value) == f"WorkerConfig: {said}"


def test_kv_is_kept_as_the_device_computes_unless_it_is_said() -> None:
    def kept(*flags: str) -> str:
        return load(WorkerConfig, environ={}, flags=["--model", "m", *flags]).kept_dtype

    assert kept() == "float32"
    assert kept("--kv-dtype", "bfloat16") == "bfloat16"
    assert kept("--device", "cuda") == "bfloat16"
    assert kept("--device", "cuda", "--cuda-dtype", "float16") == "float16"
    assert kept("--device", "cuda", "--cuda-dtype", "float16", "--kv-dtype", "float16") == "float16"


def test_people_see_where_a_worker_computes_if_it_does() -> None:
    def shown(*flags: str) -> str:
        return load(WorkerConfig, environ={}, flags=["--model", "m", *flags]).shown_device

    assert shown() == "cpu"
    assert shown("--device", "cuda", "--cuda-gpu", "1") == "cuda:1"
    assert shown("--engine", "simulated") == shown("--engine", "echo") == ""


def started(*flags: str) -> tuple[int, str]:
    """Status and stderr of a worker that cannot work."""
    command = [sys.executable, "-m", "services.worker", *flags]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL)
    return ended.returncode, ended.stderr


def test_how_many_sequences_are_computed_at_once_is_known_unless_another_server_or_vllms_own_arguments_say_it() -> None:
    native, vllm = WorkerConfig(model="m", max_running=7), WorkerConfig(model="m", engine="vllm", max_running=7)
    attached = WorkerConfig(model="m", engine="attached", attached=AttachedConfig(url="http://h:1"))
    assert (native.places, vllm.places, attached.places) == (7, 7, 0)
    for own in ({"vllm_args": "vllm.yaml"}, {"vllm": {"max_num_seqs": 9}}, {"vllm": {"max-num-seqs": 9}}):
        assert msgspec.structs.replace(vllm, **own).places == 0


def test_a_worker_says_so_in_one_line_and_ends_with_status_2() -> None:
    refused = started("--model", "m", "--device", "cuda", "--engine", "echo")
    assert refused == (
        2,
        "headrace-worker: WorkerConfig: device is cuda, but the echo engine computes nothing: set device = cpu\n",
    )


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is installed")
def test_a_worker_for_a_gpu_without_cupy_says_how_to_get_it(nats_url: str, tmp_path: Path) -> None:
    discovery = ("--discovery-backend", "file", "--discovery-path", str(tmp_path / "discovery"))
    model = ("--model", str(write_model(tmp_path / "model")), "--cache", str(tmp_path / "cache"))
    status, said = started("--device", "cuda", *model, "--nats-url", nats_url, *discovery)
    last = said.splitlines()[-1]
    assert status == 2, said
    assert last.startswith("headrace-worker: ")
    assert "device is cuda, which needs CuPy: ./headrace install-gpu" in last


def test_the_engine_gets_no_address_or_password_of_other_services() -> None:
    flags = ["--model", "m", "--nats-url", "nats://worker:secret@host:4222", "--max-running", "7"]
    flags += ["--observe-log-format", "json", "--observe-host", "secret.example"]
    environ = {"HEADRACE_TRACE_TOKEN": "secret", "HEADRACE_TRACE_ENDPOINT": "http://collector"}
    config = EngineConfig.of(load(WorkerConfig, environ=environ, flags=flags), "m", "w1", parent_pid=1)
    assert config.worker.max_running == 7
    assert config.worker.trace.endpoint == "http://collector"
    assert config.worker.observe.log_format == "json"
    assert b"secret" not in msgspec.json.encode(config)
