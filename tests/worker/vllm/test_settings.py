"""What needs no vLLM of the arguments of its engine."""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import pytest

from services.worker.config import KVConnectorConfig, WorkerConfig
from services.worker.vllm.kv_transfer import BY_PARAMS
from services.worker.vllm.settings import (
    IN_CORE,
    PACED,
    SPREADING,
    contradiction,
    pace_fault,
    parsed,
    recommended,
    recommended_on_cpu,
    spare_slot,
    stages_fault,
    unknown,
    words,
)
from shared.config import TraceConfig


def on_cpu(given: dict[str, Any] | None = None, *, quantised: bool = False) -> dict[str, Any]:
    return recommended_on_cpu(WorkerConfig(model="m"), given or {}, quantised=quantised)


def test_block_size_of_a_cpu() -> None:
    assert recommended(WorkerConfig(model="m"))["block_size"] == 16
    assert on_cpu()["block_size"] == 32
    assert "block_size" not in recommended_on_cpu(WorkerConfig(model="m", block_size=64), {}, quantised=False)


def test_on_a_cpu_the_first_answer_is_right_and_soon() -> None:
    chosen = {"dtype": "float32", "enforce_eager": True, "distributed_executor_backend": IN_CORE}
    assert on_cpu() == {"block_size": 32} | chosen
    assert not chosen.keys() & recommended(WorkerConfig(model="m")).keys()


def test_a_worker_that_traces_has_vllm_trace() -> None:
    endpoint = "http://127.0.0.1:4318/v1/traces"
    assert recommended(WorkerConfig(model="m", trace=TraceConfig(endpoint)))["otlp_traces_endpoint"] == endpoint
    assert "otlp_traces_endpoint" not in recommended(WorkerConfig(model="m"))


def test_only_a_worker_with_bounded_steps_has_a_scheduler_of_its_own() -> None:
    assert recommended(WorkerConfig(model="m", step_s=0.05))["scheduler_cls"] == PACED
    assert "scheduler_cls" not in recommended(WorkerConfig(model="m"))


def test_a_scheduler_of_the_user_bounds_its_steps_itself() -> None:
    given, source = {"scheduler_cls": "their.Scheduler"}, {"scheduler_cls": "vllm"}
    refused = contradiction(given, WorkerConfig(model="m", step_s=0.05), source)
    assert refused == "vllm.scheduler_cls is set, and so is step_s; set one of them"
    assert contradiction(given, WorkerConfig(model="m"), source) == ""


def test_steps_of_a_diffusion_language_model_are_not_bounded() -> None:
    bounded = WorkerConfig(model="m", step_s=0.05)
    refused = "step_s is set, but vLLM has a scheduler of its own for a diffusion language model; leave step_s out"
    assert pace_fault({}, bounded, {"canvas_length": 32}) == pace_fault({"diffusion_config": 1}, bounded, {}) == refused
    assert pace_fault({}, WorkerConfig(model="m"), {"canvas_length": 32}) == pace_fault({}, bounded, {}) == ""


@pytest.mark.parametrize("asked", ["enforce_eager", "compilation_config", "optimization_level"])
def test_who_says_how_to_compile_gets_that_on_a_cpu_too(asked: str) -> None:
    assert "enforce_eager" not in on_cpu({asked: 1})


def test_on_a_cpu_stages_of_a_pipeline_are_compiled() -> None:
    assert "enforce_eager" not in on_cpu({"pipeline_parallel_size": 2})
    assert on_cpu({"pipeline_parallel_size": 1, "tensor_parallel_size": 2})["enforce_eager"]
    given = {"enforce_eager": True, "pipeline_parallel_size": 2}
    source = {"enforce_eager": "vllm"}
    assert stages_fault(given, source) == ("vllm.enforce_eager: with pipeline_parallel_size vLLM must compile on a CPU")
    assert stages_fault(given | {"pipeline_parallel_size": 1}, source) == ""
    assert stages_fault({"pipeline_parallel_size": 2}, {}) == ""


@pytest.mark.parametrize("size", SPREADING)
def test_one_rank_computes_in_the_core_and_several_as_vllm_chooses(size: str) -> None:
    assert "distributed_executor_backend" not in on_cpu({size: 2})
    assert on_cpu({size: 1, "enforce_eager": False})["distributed_executor_backend"] == IN_CORE


def test_kernels_of_quantised_weights_keep_their_own_type() -> None:
    assert "dtype" not in on_cpu(quantised=True)
    assert "dtype" not in on_cpu({"quantization": "awq"})


def test_unknown_arguments_are_refused() -> None:
    known = {"max_num_seqs", "block_size"}
    assert unknown("max_num_seqs", known, "vllm") == ""
    assert unknown("max_num_seq", known, "vllm") == (
        "vllm.max_num_seq: no such argument of vLLM; did you mean max_num_seqs?"
    )
    assert unknown("zzz", known, "vllm_args") == "vllm_args.zzz: no such argument of vLLM"


def test_contradictions() -> None:
    config = WorkerConfig(model="m", max_running=8)
    assert (
        contradiction({"block_size": 64, "max_num_seqs": 8}, config, {"block_size": "vllm", "max_num_seqs": "f"}) == ""
    )
    assert contradiction({"max_num_seqs": 9}, config, {"max_num_seqs": "vllm"}).startswith("vllm.max_num_seqs: 9")
    assert contradiction({"model": "x"}, config, {"model": "vllm_args"}).startswith("vllm_args.model: ")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("nnodes", 2, "2; it must be 1: all ranks of a worker run on its machine"),
        ("distributed_executor_backend", "ray", "ray: not allowed: all ranks of a worker are processes that end"),
        ("distributed_executor_backend", "external_launcher", "external_launcher: not allowed: all ranks of a worker"),
    ],
)
def test_ranks_that_others_start_are_refused(name: str, value: object, said: str) -> None:
    refused = contradiction({name: value}, WorkerConfig(model="m"), {name: "vllm_args"})
    assert refused.startswith(f"vllm_args.{name}: {said}")


@pytest.mark.parametrize("value", ["mp", "uni", IN_CORE])
def test_an_executor_whose_ranks_end_with_the_worker_can_be_chosen(value: str) -> None:
    given, source = {"distributed_executor_backend": value}, {"distributed_executor_backend": "vllm"}
    assert contradiction(given, WorkerConfig(model="m"), source) == ""


class Transfer(NamedTuple):
    """What is read of vLLM's KVTransferConfig."""

    kv_connector: str
    kv_connector_extra_config: dict[str, Any]


@pytest.mark.parametrize(("name", "setting"), [("kv_transfer_config", "pool"), ("ec_transfer_config", "embeddings")])
def test_connectors_in_the_file_next_to_a_kvbm_are_refused(name: str, setting: str) -> None:
    kvbm = KVConnectorConfig(pool="/dev/shm/p", embeddings=setting == "embeddings")
    given, source = {name: Transfer("OffloadingConnector", {})}, {name: "vllm_args"}
    refused = contradiction(given, WorkerConfig(model="m", engine="vllm", kvbm=kvbm), source)
    assert refused == f"vllm_args.{name} is set, and so is kvbm.{setting}; set one of them"
    assert contradiction(given, WorkerConfig(model="m", engine="vllm"), source) == ""


@pytest.mark.parametrize("name", BY_PARAMS)
def test_connectors_that_would_never_move_a_block_are_refused_alone_and_in_a_chain(name: str) -> None:
    config, source = WorkerConfig(model="m", engine="vllm"), {"kv_transfer_config": "vllm"}
    chain = [{"kv_connector": "OffloadingConnector"}, {"kv_connector": name}, "nonsense"]
    for transfer in (Transfer(name, {}), Transfer("MultiConnector", {"connectors": chain})):
        refused = contradiction({"kv_transfer_config": transfer}, config, source)
        assert refused.startswith(f"vllm.kv_transfer_config: {name}: not allowed: it needs kv_transfer_params, which")
    others = Transfer("MultiConnector", {"connectors": chain[:1]})
    assert contradiction({"kv_transfer_config": others}, config, source) == ""


def test_fewer_loras_in_memory_than_in_a_batch_are_refused() -> None:
    given, source = {"max_loras": 4, "max_cpu_loras": 2}, {"max_loras": "vllm", "max_cpu_loras": "vllm_args"}
    assert contradiction(given, WorkerConfig(model="m"), source).startswith("vllm_args.max_cpu_loras: 2, but max_loras")
    assert contradiction(given | {"max_cpu_loras": 4}, WorkerConfig(model="m"), source) == ""


def test_words() -> None:
    assert words("--x", "True", takes_flag=True, needs_word=False) == ["--x"]
    assert words("--x", False, takes_flag=True, needs_word=False) == ["--no-x"]
    assert words("--x", True, takes_flag=False, needs_word=True) == ["--x=true"]
    assert words("--x", ["a", 1], takes_flag=False, needs_word=True) == ["--x", "a", "1"]
    assert words("--x", {"a": 1}, takes_flag=False, needs_word=True) == ['--x={"a": 1}']


def test_on_a_cpu_a_slot_for_loras_stays_empty() -> None:
    assert spare_slot({}) == spare_slot({"enable_lora": False, "max_loras": 2}) == {}
    assert spare_slot({"enable_lora": True}) == {"max_loras": 2, "max_cpu_loras": 2}
    assert spare_slot({"enable_lora": True, "max_loras": 2}) == {"max_loras": 3, "max_cpu_loras": 3}
    assert spare_slot({"enable_lora": True, "max_loras": 2, "max_cpu_loras": 4})["max_loras"] == 5


class HiddenNo(argparse.BooleanOptionalAction):
    """vLLM 0.33's action of a switch --enable-…: its --no- form is parsed, but not listed."""

    def __call__(self, _parser: Any, namespace: Any, _values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, option_string == self.option_strings[0])


@pytest.mark.parametrize("action", [argparse.BooleanOptionalAction, HiddenNo], ids=["0.32", "0.33"])
@pytest.mark.parametrize(("given", "value"), [(True, True), ("true", True), (False, False), ("false", False)])
def test_a_switch_takes_both_values_although_its_no_form_is_not_listed(
    action: type[argparse.BooleanOptionalAction], given: object, value: bool
) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    switch = parser.add_argument("--enable-x", action=action, default=not value)
    if action is HiddenNo:
        switch.option_strings = ["--enable-x", "--disable-x"]
    assert parsed(parser, switch, given, "vllm.enable_x") is value
