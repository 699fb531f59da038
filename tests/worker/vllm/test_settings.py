"""Arguments of vLLM: those that are taken, and those that are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.tiny_model import write_tiny_model
from tests.worker.vllm.environment import needs_vllm, run_there

CODE = """
import json
from services.worker.config import WorkerConfig
from services.worker.vllm.settings import engine_args
from shared.errors import ConfigError
for table, more in {cases!r}:
    try:
        args = engine_args(WorkerConfig(model={model!r}, vllm=table, **more))
        said.append({{name: getattr(args, name) for name in {names!r}}})
    except ConfigError as wrong:
        said.append(str(wrong))
print(json.dumps(said))
"""
NAMES = ("max_num_seqs", "block_size", "dtype", "enforce_eager", "num_gpu_blocks_override", "scheduling_policy")


def results(model: Path, *cases: tuple[dict[str, Any], dict[str, Any]]) -> list[Any]:
    found = run_there("said = []" + CODE.format(cases=list(cases), model=str(model), names=NAMES))
    assert isinstance(found, list)
    return found


@needs_vllm
def test_settings_files_and_tables_become_arguments(tmp_path: Path) -> None:
    model, file = write_tiny_model(tmp_path / "tiny"), tmp_path / "args.yaml"
    file.write_text("max-num-seqs: 3\nenforce-eager: true\ndtype: bfloat16\n", encoding="utf-8")
    plain, tabled, overridden = results(
        model,
        ({}, {"max_running": 9, "capacity_blocks": 40}),
        ({"max_num_seqs": "7", "block_size": 64, "enforce_eager": "false", "dtype": "float32"}, {}),
        ({"dtype": "float32"}, {"vllm_args": str(file)}),
    )
    assert plain == {
        **{"max_num_seqs": 9, "block_size": 32, "dtype": "auto", "enforce_eager": False},
        **{"num_gpu_blocks_override": 40, "scheduling_policy": "priority"},
    }
    assert (tabled["max_num_seqs"], tabled["block_size"], tabled["enforce_eager"]) == (7, 64, False)
    assert (overridden["max_num_seqs"], overridden["enforce_eager"], overridden["dtype"]) == (3, True, "float32")


@needs_vllm
def test_bad_arguments_are_refused_by_name(tmp_path: Path) -> None:
    model, torn = write_tiny_model(tmp_path / "tiny"), tmp_path / "torn.yaml"
    torn.write_text("a: [", encoding="utf-8")
    said = results(
        model,
        ({"max_num_seq": 3}, {}),
        ({"max_num_seqs": "many"}, {}),
        ({"dtype": "float3"}, {}),
        ({"enable_prefix_caching": False}, {}),
        ({"kv_events_config": {"publisher": "zmq"}}, {}),
        ({"data_parallel_size": 2}, {}),
        ({"block_size": 64}, {"block_size": 32}),
        ({}, {"vllm_args": str(tmp_path / "none.yaml")}),
        ({}, {"vllm_args": str(torn)}),
    )
    assert said[0] == "vllm.max_num_seq: no such argument of vLLM; did you mean max_num_seqs?"
    assert "--max-num-seqs" in said[1]
    assert "--dtype" in said[2]
    assert said[3].startswith("vllm.enable_prefix_caching: ")
    assert said[4].startswith("vllm.kv_events_config: ")
    assert said[5].startswith("vllm.data_parallel_size: ")
    assert said[6] == "vllm.block_size: 64, but worker.block_size is 32"
    assert said[7].startswith("worker.vllm_args: ")
    assert said[8].startswith("worker.vllm_args: ")
    assert all("\n" not in one for one in said), json.dumps(said)
