"""The arguments of vLLM's engine, from the worker's settings, `vllm_args` and the table `vllm`.

The table overrides the file, and both override what the worker's settings recommend. Every value goes through vLLM's
own parser, since a flag or an environment variable can only give text.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from services.worker.config import WorkerConfig
from services.worker.vllm.kv_transfer import by_params
from services.worker.vllm.sizes import sizes_fault
from shared.errors import ConfigError, ModelError
from shared.model_files.config_json import read_config_json
from shared.vllm_args import read_file

CPU_BLOCK = 32
"""Tokens of a block on a CPU where `block_size` is the worker's default: vLLM wants multiples of 32 there."""
COMPILING = {"enforce_eager", "compilation_config", "optimization_level"}
"""Arguments that say whether and how vLLM compiles a model. Without them it does not on a CPU."""
IN_CORE = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""The path of vLLM's executor whose one rank computes in the core's process. On a CPU vLLM replaces its short name
`uni` by `mp`, since only a process of its own can be bound to processors: the engine's threads are not bound."""
PACED = "services.worker.vllm.paced_scheduler.paced_scheduler"
"""The path of what makes vLLM's scheduler if the worker's `step_s` is set."""
SPREADING = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "prefill_context_parallel_size")
"""Arguments that give an engine more than one rank."""
OURS = {
    "kv_events_config": "the worker sets it",
    "model": "set the worker's model",
    "served_model_name": "set the worker's model_name",
    "skip_tokenizer_init": "grammars need the tokenizer",
    **dict.fromkeys(
        (
            "data_parallel_rank",
            "data_parallel_start_rank",
            "data_parallel_size_local",
            "data_parallel_external_lb",
            "data_parallel_hybrid_lb",
            "data_parallel_multi_port_external_lb",
        ),
        "all ranks of a worker run in it, and routers choose among them; set data_parallel_size alone",
    ),
}
"""Arguments that are refused, with the reason."""
NEEDED = {
    "enable_prefix_caching": (True, "routers choose workers by their cached prefixes"),
    "disable_log_stats": (False, "load reports are made of the statistics"),
    "scheduling_policy": ("priority", "requests have priorities"),
    "data_parallel_backend": ("mp", "all ranks of a worker are processes that end with it"),
    "nnodes": (1, "all ranks of a worker run on its machine"),
}
"""Arguments that may only have one value, with the reason."""
EXECUTORS_ELSEWHERE = ("ray", "external_launcher")
"""Executors whose ranks are processes that others start, and that do not end with the worker."""


def unknown(name: str, known: Collection[str], source: str) -> str:
    """Return the refusal of an argument. Empty if it is known. *Pure.*"""
    if name in known:
        return ""
    near = difflib.get_close_matches(name, sorted(known), n=1)
    return f"{source}.{name}: no such argument of vLLM" + (f"; did you mean {near[0]}?" if near else "")


def contradiction(given: Mapping[str, Any], config: WorkerConfig, source: Mapping[str, str]) -> str:
    """Return which parsed argument contradicts the worker's settings. Empty if there is none. `source` says where each
    is from.

    A worker's setting that has its default contradicts nothing. *Pure.*"""
    for name, value in given.items():
        where = f"{source[name]}.{name}"
        if name in OURS:
            return f"{where}: not allowed: {OURS[name]}"
        if name in NEEDED and value != NEEDED[name][0]:
            needed, why = NEEDED[name]
            return f"{where}: {value}; it must be {needed}: {why}"
    if (executor := given.get("distributed_executor_backend")) in EXECUTORS_ELSEWHERE:
        where = f"{source['distributed_executor_backend']}.distributed_executor_backend"
        return f"{where}: {executor}: not allowed: all ranks of a worker are processes that end with it"
    loras, kept = given.get("max_loras"), given.get("max_cpu_loras")
    if loras and kept and kept < loras:
        return f"{source['max_cpu_loras']}.max_cpu_loras: {kept}, but max_loras is {loras}; it must be at least as many"
    if "scheduler_cls" in given and config.step_s:
        return f"{source['scheduler_cls']}.scheduler_cls is set, and so is step_s; set one of them"
    if fault := _connector_fault(given, config, source):
        return fault
    defaults = WorkerConfig(model="")
    for name, setting in (("block_size", "block_size"), ("max_num_seqs", "max_running")):
        own = getattr(config, setting)
        if name in given and own != getattr(defaults, setting) and given[name] != own:
            return f"{source[name]}.{name}: {given[name]}, but the worker's {setting} is {own}"
    return ""


def _connector_fault(given: Mapping[str, Any], config: WorkerConfig, source: Mapping[str, str]) -> str:
    """Return why connectors that the user sets do not work here. Empty if they may. *Pure.*"""
    shares_images = config.kvbm.pool and config.kvbm.embeddings
    for name, setting, ours in (
        ("kv_transfer_config", "kvbm.pool", config.kvbm.pool),
        ("ec_transfer_config", "kvbm.embeddings", shares_images),
    ):
        if name in given and ours:
            return f"{source[name]}.{name} is set, and so is {setting}; set one of them"
    transfer = given.get("kv_transfer_config")
    if transfer and (name := by_params(transfer.kv_connector, transfer.kv_connector_extra_config)):
        where = f"{source['kv_transfer_config']}.kv_transfer_config"
        return f"{where}: {name}: not allowed: it needs kv_transfer_params, which no request has; set kvbm.pool instead"
    return ""


def pace_fault(given: Collection[str], config: WorkerConfig, model: Mapping[str, Any]) -> str:
    """Return why steps of a model with these settings cannot be bounded. Empty if they can, or need not. *Pure.*"""
    if not config.step_s or ("diffusion_config" not in given and model.get("canvas_length") is None):
        return ""
    return "step_s is set, but vLLM has a scheduler of its own for a diffusion language model; leave step_s out"


def recommended(config: WorkerConfig) -> dict[str, Any]:
    """Return the arguments that come from the worker's settings. *Pure.*"""
    needed: dict[str, Any] = {name: value for name, (value, _) in NEEDED.items()}
    if config.capacity_blocks:
        needed["num_gpu_blocks_override"] = config.capacity_blocks
    if config.step_s:
        needed["scheduler_cls"] = PACED
    if config.trace.endpoint:
        needed["otlp_traces_endpoint"] = config.trace.endpoint
    return {"model": config.model, "max_num_seqs": config.max_running, "block_size": config.block_size, **needed}


def recommended_on_cpu(config: WorkerConfig, given: Mapping[str, Any], *, quantised: bool) -> dict[str, Any]:
    """Return the arguments that differ on a CPU. `given` are those that the user sets; `quantised`: the model's weights
    are, whose kernels refuse float32. *Pure.*

    vLLM's own choice is bfloat16, in which a small model's greedy answer is another one than in float32. It also
    compiles the model, which takes longer than all the rest of its start. And it computes in a process next to its
    core, which imports all of vLLM once more, and which each step then waits for."""
    chosen: dict[str, Any] = {}
    if config.block_size == WorkerConfig(model="").block_size:
        chosen["block_size"] = CPU_BLOCK
    if not quantised and "quantization" not in given:
        chosen["dtype"] = "float32"
    if COMPILING.isdisjoint(given) and not _has_stages(given):
        chosen["enforce_eager"] = True
    if all(_size(given, name) == 1 for name in SPREADING):
        chosen["distributed_executor_backend"] = IN_CORE
    return chosen


def stages_fault(given: Mapping[str, Any], source: Mapping[str, str]) -> str:
    """Return why stages of a pipeline do not work on a CPU with these arguments. Empty if they do. *Pure.*"""
    if given.get("enforce_eager") and _has_stages(given):
        return f"{source['enforce_eager']}.enforce_eager: with pipeline_parallel_size vLLM must compile on a CPU"
    return ""


def _has_stages(given: Mapping[str, Any]) -> bool:
    """Return whether the model lies in stages: only the run that compiles it makes the buffers between them."""
    return _size(given, "pipeline_parallel_size") > 1


def _size(given: Mapping[str, Any], name: str) -> int:
    return int(given.get(name) or 1)


def spare_slot(given: Mapping[str, Any]) -> dict[str, int]:
    """Return the numbers of LoRAs that vLLM is started with on a CPU: one more than may be loaded. *Pure.*

    Its kernels on a CPU take the last slot for rows without a LoRA; so that one must stay empty."""
    if not given.get("enable_lora"):
        return {}
    slots = 1 + int(given.get("max_cpu_loras") or given.get("max_loras") or 1)
    return {"max_loras": slots, "max_cpu_loras": slots}


def engine_args(config: WorkerConfig, *, on_cpu: bool, ours: Mapping[str, Any]) -> Any:
    """Return vLLM's AsyncEngineArgs. `ours` are arguments of the program itself, which win over all others.

    Raise ConfigError, naming the argument, if one is unknown, of a wrong type or contradicts the worker."""
    from vllm.config import StructuredOutputsConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(
        FlexibleArgumentParser(exit_on_error=False, add_help=False, allow_abbrev=False)
    )
    fields = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    actions = {action.dest: action for action in parser._actions if action.dest in fields}
    given: dict[str, Any] = {}
    source: dict[str, str] = {}
    for where, table in (("vllm_args", read_file(config.vllm_args)), ("vllm", config.vllm)):
        for written, value in table.items():
            name = str(written).replace("-", "_")
            if fault := unknown(name, actions, where):
                raise ConfigError(fault)
            if source.get(name) == where:
                raise ConfigError(f"{where}.{written}: given twice, also as {name}")
            given[name] = parsed(parser, actions[name], value, f"{where}.{name}")
            source[name] = where
    model = _model_settings(Path(config.model))
    sizes = {name: (f"{source[name]}.{name}", value) for name, value in given.items()}
    if fault := contradiction(given, config, source) or pace_fault(given, config, model) or sizes_fault(model, sizes):
        raise ConfigError(fault)
    structured = given.setdefault("structured_outputs_config", StructuredOutputsConfig())
    if structured.backend not in ("auto", "guidance"):
        where = f"{source['structured_outputs_config']}.structured_outputs_config.backend"
        raise ConfigError(f"{where}: {structured.backend}: only guidance is supported: frontends write its grammars")
    given["structured_outputs_config"] = dataclasses.replace(structured, backend="guidance")
    defaults, last = recommended(config), {}
    if on_cpu:
        if fault := stages_fault(given, source):
            raise ConfigError(fault)
        defaults |= recommended_on_cpu(config, given, quantised=bool(model.get("quantization_config")))
        last = spare_slot(given)
    try:
        return AsyncEngineArgs(**{**defaults, **given, **last, **ours})
    except (ValueError, OSError) as wrong:  # also a model that is no directory, offline
        raise ConfigError(f"vllm: vLLM refuses its arguments: {' '.join(str(wrong).split())}") from None


def _model_settings(model: Path) -> Mapping[str, Any]:
    """Return the settings of a model's config.json. Empty if it cannot be read, about which vLLM has words of its
    own."""
    try:
        return read_config_json(model).settings
    except ModelError:
        return {}


def words(option: str, value: Any, *, takes_flag: bool, needs_word: bool) -> list[str]:
    """Return the words of one argument as a command line has them. *Pure.*

    `takes_flag`: it may stand alone; `needs_word`: it has no --no- form."""
    if takes_flag and isinstance(value, str) and value.lower() in ("true", "false") and not needs_word:
        value = value.lower() == "true"
    if takes_flag and value is True:
        return [option]
    if takes_flag and value is False and not needs_word:
        return ["--no-" + option.removeprefix("--")]
    if isinstance(value, list):
        return [option, *(item if isinstance(item, str) else json.dumps(item) for item in value)]
    return [f"{option}={value if isinstance(value, str) else json.dumps(value)}"]


def parsed(parser: Any, action: argparse.Action, value: Any, where: str) -> Any:
    """Return a value as vLLM's parser reads it. Raise ConfigError."""
    if value is None:
        raise ConfigError(f"{where}: has no value")
    no_form = isinstance(action, argparse.BooleanOptionalAction)  # vLLM 0.33 does not list the --no- form of all
    option = next(option for option in action.option_strings if option.startswith("--"))
    try:
        line = words(option, value, takes_flag=no_form or action.nargs in (0, "?"), needs_word=not no_form)
        return getattr(parser.parse_args(line), action.dest)
    except argparse.ArgumentError as wrong:
        raise ConfigError(f"{where}: {' '.join(wrong.message.split())}") from None
    except (ValueError, TypeError, SystemExit) as wrong:
        raise ConfigError(f"{where}: {value!r} is of a wrong type ({' '.join(str(wrong).split())})") from None
