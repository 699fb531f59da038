"""The arguments of vLLM's engine, with vLLM itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.worker.vllm.environment import needs_vllm, run_there

pytestmark = needs_vllm
SCRIPT = """
import json
from shared.errors import ConfigError
from services.worker.config import WorkerConfig
from services.worker.vllm.settings import engine_args
from services.worker.vllm.version import check
import vllm

def shown(vllm={}, ours={}, model="/", on_cpu=True, **fields):
    try:
        a = engine_args(WorkerConfig(model=model, engine="vllm", vllm=vllm, **fields), on_cpu=on_cpu, ours=ours)
    except ConfigError as wrong:
        return str(wrong)
    return {name: getattr(a, name) for name in ("model", "max_num_seqs", "block_size", "enable_prefix_caching",
        "scheduling_policy", "enforce_eager", "dtype", "gpu_memory_utilization", "max_model_len", "lora_target_modules")
        } | {"backend": a.structured_outputs_config.backend}

print(json.dumps({
    "version": check(vllm.__version__),
    "plain": shown(),
    "gpu": shown(on_cpu=False),
    "quantised": shown(model=QUANTISED),
    "text": shown({"max_num_seqs": "7", "enforce-eager": "true", "gpu_memory_utilization": "0.5",
                   "max_model_len": "4k", "block_size": 64}, ours={"max_model_len": 99}),
    "types": shown({"enforce_eager": False, "lora_target_modules": ["a", "b"], "gpu_memory_utilization": 0.25}),
    "file": shown({"max_num_seqs": 3}, vllm_args=FILE),
    "unknown": shown({"max_num_seq": 1}),
    "wrong": shown({"max_num_seqs": "many"}),
    "wrong bool": shown({"enforce_eager": 3}),
    "fraction": shown({"max_num_seqs": 1.5}),
    "choice": shown({"dtype": "float7"}),
    "nested": shown({"structured_outputs_config": {"no_such": 1}}),
    "backend": shown({"structured_outputs_config": {"backend": "xgrammar"}}),
    "caching": shown({"enable_prefix_caching": False}),
    "block": shown({"block_size": 64}, block_size=32),
    "running": shown({"max_num_seqs": 3}, max_running=4),
    "model": shown(model="/no_such_model"),
    "events": shown({"kv_events_config": {}}),
    "nixl": shown({"kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_both"}}),
}))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    file: Path = tmp_path_factory.mktemp("args") / "vllm.yaml"
    file.write_text("max-num-seqs: 5\nenforce-eager: true\nmax_model_len: 128\n")
    quantised = file.parent / "quantised"
    quantised.mkdir()
    (quantised / "config.json").write_text('{"quantization_config": {"quant_method": "awq"}}')
    names = f"FILE, QUANTISED = {str(file)!r}, {str(quantised)!r}"
    result: dict[str, object] = run_there(f"{names}\n{SCRIPT}")
    return result


def test_values_arrive_typed(found: dict[str, object]) -> None:
    assert found["version"] is None
    plain = {"model": "/", "max_num_seqs": 64, "block_size": 32, "enable_prefix_caching": True}
    plain |= {"scheduling_policy": "priority", "backend": "guidance", "dtype": "float32", "enforce_eager": True}
    gpu = {"block_size": 16, "dtype": "auto", "enforce_eager": False}
    quantised = {"dtype": "auto", "enforce_eager": True}
    text = {"max_num_seqs": 7, "enforce_eager": True, "gpu_memory_utilization": 0.5, "block_size": 64}
    text |= {"max_model_len": 99}
    types = {"enforce_eager": False, "lora_target_modules": ["a", "b"], "gpu_memory_utilization": 0.25}
    file = {"max_num_seqs": 3, "enforce_eager": True, "max_model_len": 128}
    for case, wanted in (
        *(("plain", plain), ("gpu", gpu), ("quantised", quantised)),
        *(("text", text), ("types", types), ("file", file)),
    ):
        shown = found[case]
        assert isinstance(shown, dict), shown
        assert {name: shown[name] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("case", "begin"),
    [
        ("unknown", "vllm.max_num_seq: no such argument of vLLM; did you mean max_num_seqs?"),
        ("wrong", "vllm.max_num_seqs: invalid "),
        ("wrong bool", "vllm.enforce_eager: "),
        ("fraction", "vllm.max_num_seqs: invalid "),
        ("choice", "vllm.dtype: invalid choice"),
        ("nested", "vllm.structured_outputs_config: "),
        ("backend", "vllm.structured_outputs_config.backend: xgrammar: only guidance"),
        ("caching", "vllm.enable_prefix_caching: False; it must be True"),
        ("block", "vllm.block_size: 64, but the worker's block_size is 32"),
        ("running", "vllm.max_num_seqs: 3, but the worker's max_running is 4"),
        ("model", "vllm: vLLM refuses its arguments: "),
        ("events", "vllm.kv_events_config: "),
        ("nixl", "vllm.kv_transfer_config: NixlConnector: not allowed: it needs kv_transfer_params"),
    ],
)
def test_faults_name_the_argument(found: dict[str, object], case: str, begin: str) -> None:
    said = found[case]
    assert isinstance(said, str)
    assert said.startswith(begin)
    assert "\n" not in said
