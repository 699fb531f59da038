"""The worker's process: `python -m services.worker --config worker.toml`."""

from __future__ import annotations

from pathlib import Path

from services.worker.config import MODEL_INDEX, NO_IMAGES, WorkerConfig
from services.worker.model.card import served_name
from services.worker.model.facts import facts_of, read_pooling, read_sampling
from services.worker.rounds import serve
from services.worker.vllm.sizes import sizes_fault, written
from shared.errors import ConfigError, ModelError
from shared.model_file import TOKENIZER_LIMIT_BYTES, read_model_file
from shared.model_files.config_json import read_config_json
from shared.model_files.templates import read_templates
from shared.model_files.tokenizer import complete_tokenizer
from shared.runtime.lifecycle import Service, run
from shared.vllm_args import read_file

CLOSING_S = 15.0
"""Seconds after the drain for the engine's end, the last frames and the registration."""


def served_labels(config: WorkerConfig) -> dict[str, str]:
    """Return the labels of all series of the worker."""
    return {"model": served_name(config)}


def drain_limit_s(config: WorkerConfig) -> float:
    """Return the seconds from the first signal to the forced end."""
    return config.drain_s + CLOSING_S


def check_files(config: WorkerConfig) -> None:
    """Check the model's files. Raise ModelError or ConfigError, as the engine's start would."""
    if config.engine == "attached" and config.attached.kind == "text":  # no files of its model are needed
        from services.worker.attached.server import read_files

        read_files(config.attached)
        return
    source = Path(config.model)
    if config.engine == "diffusers":
        if not (source / MODEL_INDEX).is_file():
            raise ModelError(f"{source} has no {MODEL_INDEX}: it is no pipeline of diffusers")
        return
    if config.chat_template or source.is_dir():
        read_templates(source, config.chat_template)
    if config.engine == "native" or not source.is_dir():
        from services.worker.native.prepare import check_source  # here: it imports NumPy, which the shell does not need

        check_source(source, Path(config.cache))
    if config.role == "encode" and not (source.is_dir() and "vision_config" in read_config_json(source).outer):
        raise ConfigError(NO_IMAGES)
    if config.tensor_parallel > 1:
        _check_ranks(source, config)
    if source.is_dir():
        _check_directory(source, config)
    if config.engine == "attached":
        from services.worker.attached.server import read_files  # here: it imports HTTP's client

        read_files(config.attached)
    if config.simulated.table:
        from services.worker.simulated.runner import read_times

        read_times(config.simulated)


def _check_ranks(source: Path, config: WorkerConfig) -> None:
    from services.worker.native.config import read_config  # here: NumPy, as above
    from services.worker.native.parallel.group import check_processors
    from services.worker.native.parallel.shares import share_out, share_out_evenly

    check_processors(config.tensor_parallel)
    if source.is_dir():  # of a GGUF file the engine says it
        share = share_out_evenly if config.device == "cuda" else share_out
        share(read_config(source), config.tensor_parallel)


def _check_directory(source: Path, config: WorkerConfig) -> None:
    if config.engine not in ("native", "vllm"):  # vLLM reads what only it knows of
        facts_of(source, block_size=config.block_size, capacity_blocks=config.capacity_blocks)
    if config.engine == "vllm":
        arguments = written({"vllm_args": read_file(config.vllm_args), "vllm": config.vllm})
        if fault := sizes_fault(read_config_json(source).settings, arguments):
            raise ConfigError(fault)
    from tokenizers import Tokenizer

    file = source / "tokenizer.json"
    content = complete_tokenizer(source, read_model_file(file, TOKENIZER_LIMIT_BYTES))
    try:
        Tokenizer.from_buffer(content)
    except BaseException as wrong:  # noqa: BLE001  the package raises bare Exception; its panics are no Exception
        raise ModelError(f"{file}: {wrong}") from None
    read_pooling(source)
    read_sampling(source, config.sampling)


def may_be_frozen(config: WorkerConfig) -> bool:
    """Return whether the process may become an image."""
    return bool(config.checkpoint.directory)


SERVICE = Service(
    "worker",
    WorkerConfig,
    serve,
    drain_limit_s,
    publishes=True,
    check=check_files,
    plain_loop=may_be_frozen,
    labels=served_labels,
)


def main() -> None:
    """Run until a signal, then end the process with an exit status."""
    run(SERVICE)


if __name__ == "__main__":
    main()
