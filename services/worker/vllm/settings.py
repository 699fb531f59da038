"""Settings: makes vLLM's AsyncEngineArgs from the worker's settings, a YAML file, and the table `vllm`.

    the worker's settings < worker.vllm_args, a file as `vllm serve --config` takes it < the table [vllm]

Names are AsyncEngineArgs's own, and values are read as vLLM's command line reads them.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import yaml
from vllm import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser

from services.worker.config import WorkerConfig
from services.worker.model_facts import read_pooling
from shared.errors import ConfigError

DEFAULT_BLOCK_SIZE = WorkerConfig(model="").block_size
CPU_BLOCK_SIZE = 32
"""Tokens of a block on a CPU, where vLLM takes multiples of this number only, unless `worker.block_size` is set."""
FILE_LIMIT_BYTES = 1 << 20
OURS = {
    "model": "worker.model names the model",
    "served_model_name": "worker.model_name names the model",
    "kv_events_config": "the worker reads vLLM's events itself",
    "data_parallel_size": "one engine for each worker is served; start one worker for each rank",
    "disable_log_stats": "routers need the statistics",
    "headless": "the worker is the engine's only client",
}
"""Arguments that are refused where they differ from what is set here, and why."""


class _Parser(FlexibleArgumentParser):  # type: ignore[misc]  # vLLM is not there when types are checked
    """vLLM's parser, which raises instead of ending the program."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"vllm: {message}")


def engine_args(config: WorkerConfig) -> AsyncEngineArgs:
    """Return vLLM's arguments. Raise ConfigError, which names the argument, and ModelError."""
    given = _read_file(config.vllm_args) | config.vllm
    names = [field.name for field in dataclasses.fields(AsyncEngineArgs)]
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            raise ConfigError(f"vllm.{name}: no such argument of vLLM" + (f"; did you mean {near[0]}?" if near else ""))
    _check(given, config)
    args = AsyncEngineArgs.from_cli_args(_parse(_defaults(config) | given))
    if args.runner == "pooling" and args.pooler_config is None:
        args.pooler_config = _pooler(config)
    return args


def _check(given: Mapping[str, Any], config: WorkerConfig) -> None:
    """Raise ConfigError where an argument contradicts what is set elsewhere."""
    for name, reason in OURS.items():
        if name in given and str(given[name]).lower() not in (
            "false",
            "none",
            "1" if name == "data_parallel_size" else "",
        ):
            raise ConfigError(f"vllm.{name}: {reason}")
    if str(given.get("enable_prefix_caching", True)).lower() == "false":
        raise ConfigError("vllm.enable_prefix_caching: false, but routers choose by what is cached")
    size = given.get("block_size")
    if size is not None and config.block_size not in (DEFAULT_BLOCK_SIZE, int(size)):
        raise ConfigError(f"vllm.block_size: {size}, but worker.block_size is {config.block_size}")


def _defaults(config: WorkerConfig) -> dict[str, Any]:
    """Return the arguments that follow from the worker's settings."""
    size = config.block_size
    if size == DEFAULT_BLOCK_SIZE and current_platform.is_cpu():
        size = CPU_BLOCK_SIZE
    defaults: dict[str, Any] = {
        "model": config.model,
        "block_size": size,
        "max_num_seqs": config.max_running,
        "scheduling_policy": "priority",
        "enable_prefix_caching": True,
    }
    if config.capacity_blocks:
        defaults["num_gpu_blocks_override"] = config.capacity_blocks
    return defaults


def _parse(values: Mapping[str, Any]) -> Any:
    """Parse the values as vLLM parses its flags. Raise ConfigError."""
    words: list[str] = []
    for name, value in values.items():
        flag = "--" + name.replace("_", "-")
        if value is None:
            continue
        text = str(value).lower()
        if text in ("true", "false"):
            words.append(flag if text == "true" else flag.replace("--", "--no-", 1))
        elif isinstance(value, list):
            words += [flag, *(str(one) for one in value)]
        else:
            words += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    try:
        return AsyncEngineArgs.add_cli_args(_Parser(exit_on_error=False)).parse_args(words)
    except ConfigError:
        raise
    except Exception as wrong:  # noqa: BLE001 - argparse and vLLM's converters raise many kinds
        raise ConfigError(f"vllm: {' '.join(str(wrong).split())}") from None


def _pooler(config: WorkerConfig) -> Any:
    """Return how the model's files say that embeddings are pooled. Raise ModelError, ConfigError."""
    from vllm.config import PoolerConfig

    pooling = read_pooling(Path(config.model))
    if not pooling:
        raise ConfigError(f"{config.model}: the model's pooling is not built; set vllm.pooler_config")
    return PoolerConfig(pooling_type=pooling.upper())


def _read_file(path: str) -> dict[str, Any]:
    """Return the arguments in a YAML file, with underscores in their names. Raise ConfigError."""
    if not path:
        return {}
    file = Path(path)
    try:
        with file.open("rb") as opened:
            content = yaml.safe_load(opened.read(FILE_LIMIT_BYTES))
    except (OSError, yaml.YAMLError) as wrong:
        raise ConfigError(f"worker.vllm_args: {file}: {' '.join(str(wrong).split())}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"worker.vllm_args: {file}: expected names and values")
    return {str(name).replace("-", "_"): value for name, value in content.items()}
