"""The program of a vLLM engine: `PYTHON -m services.worker.vllm.main CONFIG_JSON SOCKET_FD`, with vLLM's own Python.

It ends on Shutdown, when vLLM fails, and when the shell dies. vLLM's processes import this module again, under another
name; so each of them dies with the process that started it, too.

docs/decisions/0056 gives the reasons.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import signal
import socket
import sys
import tempfile
import traceback
from contextlib import closing, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from services.worker.config import NO_IMAGES, EngineConfig, WorkerConfig
from services.worker.contracts.messages import (
    FIRST_TOKENS,
    FIRST_TOKENS_LIMIT_S,
    EngineOperation,
    Failed,
    Loading,
    Ready,
)
from services.worker.engine.channel import ChannelClosed, EngineEnd
from services.worker.engine.one_line import one_line
from services.worker.model.facts import read_pooling
from services.worker.vllm.start_failure import (
    VARIABLE,
    Cause,
    explained,
    failure,
    is_passing,
    note_exceptions,
    noting_exceptions,
    read_cause,
)
from services.worker.vllm.step_pace import STEP_S
from services.worker.vllm.version import check as check_version
from shared.errors import ConfigError, ModelError
from shared.installation import COMMAND
from shared.messages.cards import KvLayout, Pooling

if TYPE_CHECKING:
    from vllm.config import PoolerConfig, VllmConfig

    from services.worker.vllm.images import ImagePrompts

NO_COMPILER = "TORCH_COMPILE_DISABLE"
"""The environment variable with which torch compiles nothing in vLLM's processes: else the first request for log
probabilities waits until a kernel of vLLM's is compiled, which also needs a C++ compiler on a CPU."""
_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main(arguments: list[str]) -> int:
    """Return the exit status: 0 after Shutdown or when the shell has gone, 1 after Failed."""
    config = msgspec.json.decode(arguments[0], type=EngineConfig)
    if os.getppid() != config.parent_pid:
        return 0
    # The shell answers a signal to the whole process group (Ctrl-C): it drains, then sends Shutdown.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = socket.socket(fileno=int(arguments[1]))
    with closing(EngineEnd(connection)) as channel, suppress(ChannelClosed), tempfile.TemporaryDirectory() as directory:
        with asyncio.Runner(loop_factory=_new_loop) as runner:
            failed = runner.run(_guarded(config, channel, connection, Path(directory)))
        if failed is not None:
            channel.send(failed)
            return 1
    return 0


def _new_loop() -> asyncio.AbstractEventLoop:
    """Return uvloop's, on which a step costs less, and which vLLM needs itself: without it `_load` says what is
    missing."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def _guarded(
    config: EngineConfig, channel: EngineEnd, connection: socket.socket, directory: Path
) -> Failed | None:
    """Run vLLM until it ends, and return whatever it raises as a Failed. Raise ChannelClosed."""
    try:
        return await _run(config, channel, connection, directory)
    except (ModelError, ConfigError) as wrong:
        return Failed(reason=str(wrong), model=True)
    except ChannelClosed:
        raise
    except Exception as wrong:  # noqa: BLE001 - the program's edge: the shell learns of every failure
        traceback.print_exc()
        return Failed(reason=one_line(wrong))


async def _run(config: EngineConfig, channel: EngineEnd, connection: socket.socket, directory: Path) -> Failed | None:
    """Run vLLM until it ends. Return why it failed, or None after Shutdown. Raise ChannelClosed."""
    channel.send(Loading("loading vLLM", 0.0))
    if unloaded := _load():
        return unloaded
    from prometheus_client import generate_latest
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    from services.worker.vllm.engine import VllmEngine
    from services.worker.vllm.events import EventReader
    from services.worker.vllm.images import ImagePrompts
    from services.worker.vllm.own_metrics import KeptMetrics, unknown_name
    from services.worker.vllm.stat_logger import StatLogger
    from services.worker.vllm.weights import LoadedWeights

    settings = replace(config.worker, model=str(_prepared(config, channel)))
    args = _engine_args(settings, directory)
    channel.send(Loading("starting vLLM", 0.1))
    logger, noted, weights = StatLogger(), directory / "cause", LoadedWeights(Path(settings.model))
    os.environ[VARIABLE] = str(noted)
    readers: list[EventReader] = []
    try:
        with noting_exceptions():
            vllm_config = args.create_engine_config()
        noted.unlink(missing_ok=True)  # it has not kept vLLM from starting
        readers += [EventReader(directory, rank) for rank in range(vllm_config.parallel_config.data_parallel_size)]
        llm = AsyncLLM.from_vllm_config(vllm_config, stat_loggers=[lambda *_: logger])
    except Exception as wrong:  # noqa: BLE001 - whatever vLLM raises of model, arguments and machine
        traceback.print_exc()
        for reader in readers:
            reader.close()
        return failure(Cause.of(wrong), read_cause(noted))
    try:
        images = ImagePrompts.read(vllm_config.model_config, settings.most_images)
        facts = _facts(vllm_config, images, settings)
        wrong_probe = settings.health.fault(vocab_size=facts.vocab_size, context_length=facts.context_length)
        if wrong_probe:
            return Failed(reason=wrong_probe, model=True)
        registry = get_prometheus_registry()
        if unknown := unknown_name(registry, settings.engine_metrics):
            return Failed(reason=f"engine_metrics: this vLLM has no metric {unknown}", model=True)
        own_metrics = KeptMetrics(registry, settings.engine_metrics)
        engine = VllmEngine(
            *(config, llm, channel, connection, readers, lambda: generate_latest(own_metrics).decode(), images, weights)
        )
        logger.record_step = engine.record_step
        channel.send(Loading(FIRST_TOKENS, 0.9))
        try:
            await engine.probe(FIRST_TOKENS_LIMIT_S)
        except Exception as wrong:  # noqa: BLE001 - an engine that cannot compute a token has not started
            traceback.print_exc()
            return failure(Cause.of(wrong), read_cause(noted))
        channel.send(facts)
        gc.freeze()  # what was imported stays: the garbage collector need not look at it again
        return explained(await engine.run(), read_cause(noted))
    finally:
        for reader in readers:
            reader.close()
        llm.shutdown()


def _load() -> Failed | None:
    """Import vLLM and what needs it. Return why that fails, which is a half environment mostly. Raise ConfigError for
    a vLLM of another version or of another device."""
    try:
        import vllm

        check_version(vllm.__version__)
        from vllm.platforms import current_platform

        if current_platform.is_unspecified():
            raise ConfigError(
                f"vLLM {vllm.__version__} finds no device here that it was built for: without a GPU, remove"
                f" {sys.prefix}, then {COMMAND} install-vllm --device cpu"
            )
        import_module("services.worker.vllm.engine")
    except ConfigError:
        raise
    except Exception as wrong:  # noqa: BLE001 - packages that do not fit raise anything while they are imported
        traceback.print_exc()
        text = f"vLLM cannot be loaded ({one_line(wrong)}); {COMMAND} install-vllm makes its environment"
        return Failed(reason=text, model=not is_passing(Cause.of(wrong)))
    return None


def _engine_args(settings: WorkerConfig, directory: Path) -> Any:
    """Return vLLM's AsyncEngineArgs: the worker's settings, events that are published in `directory`, and the
    connector. Raise ConfigError."""
    from vllm.config import ECTransferConfig, KVEventsConfig, KVTransferConfig
    from vllm.platforms import current_platform

    from services.worker.vllm.events import UNREAD_LIMIT, endpoints
    from services.worker.vllm.images import takes_images
    from services.worker.vllm.kv_transfer import ec_transfer, kv_transfer
    from services.worker.vllm.settings import engine_args

    endpoint, replay_endpoint = endpoints(directory)
    published = KVEventsConfig(
        enable_kv_cache_events=True,
        publisher="zmq",
        endpoint=endpoint,
        replay_endpoint=replay_endpoint,
        hwm=UNREAD_LIMIT,
    )
    ours: dict[str, Any] = {"kv_events_config": published}
    if transfer := kv_transfer(settings):
        ours["kv_transfer_config"] = KVTransferConfig(**transfer)
    if (transfer := ec_transfer(settings, str(directory))) and takes_images(Path(settings.model)):
        ours["ec_transfer_config"] = ECTransferConfig(**transfer)
    args = engine_args(settings, on_cpu=current_platform.is_cpu(), ours=ours)
    if settings.role == "encode" and "ec_transfer_config" not in ours:
        raise ConfigError(NO_IMAGES)
    if settings.role == "encode" and args.data_parallel_size > 1:
        raise ConfigError(f"role is encode, but vllm.data_parallel_size is {args.data_parallel_size}; leave it out")
    if args.runner == "pooling" and settings.role != "aggregated":
        raise ConfigError(f"role is {settings.role}, but vllm.runner is pooling: embeddings are not handed over")
    os.environ[STEP_S] = str(settings.step_s)
    if current_platform.is_cpu() and args.enforce_eager:
        os.environ.setdefault(NO_COMPILER, "1")
    if args.runner == "pooling" and args.pooler_config is None:
        args.pooler_config = _pooler(settings)
    return args


def _prepared(config: EngineConfig, channel: EngineEnd) -> Path:
    """Return the model's directory; a GGUF file is converted into one. Raise ModelError."""
    source = Path(config.worker.model)
    if source.is_dir():
        return source
    from services.worker.native.prepare import prepare

    return prepare(source, Path(config.worker.cache), channel.send)


def _pooler(config: WorkerConfig) -> PoolerConfig:
    """Return how the model's files say that embeddings are pooled. Raise ModelError, ConfigError."""
    from vllm.config import PoolerConfig

    pooling = read_pooling(Path(config.model))
    if not pooling:
        raise ConfigError(f"{config.model}: the model's pooling is not built; set vllm.pooler_config")
    return PoolerConfig(pooling_type=pooling.upper())


def _pooling_of(config: VllmConfig) -> Pooling:
    """Return the pooling of an engine's embeddings; empty for text. Raise ConfigError for one that is not built."""
    pooler = config.model_config.pooler_config
    if config.model_config.runner_type != "pooling" or pooler is None:
        return ""
    match str(pooler.seq_pooling_type).lower():
        case "mean" | "last" as pooling:
            return pooling
        case other:
            raise ConfigError(f"vllm.pooler_config: {other.upper()} pooling; MEAN and LAST work")


def _facts(config: VllmConfig, images: ImagePrompts | None, settings: WorkerConfig) -> Ready:
    """Return what this engine serves. One that only encodes has no KV, and nothing to forget. Raise ConfigError."""
    from vllm.platforms import current_platform

    from services.worker.vllm.encoder_cache.connector import store_layout
    from services.worker.vllm.engine import eos_token_ids

    model, cache, ranks = config.model_config, config.cache_config, config.parallel_config.data_parallel_size
    dtype = str(model.dtype if cache.cache_dtype == "auto" else cache.cache_dtype).removeprefix("torch.")
    pooling = model.runner_type == "pooling"
    encodes = settings.role == "encode"
    if encodes and images is None:
        raise ConfigError(NO_IMAGES)
    shares = settings.kvbm.embeddings and images is not None and config.ec_transfer_config is not None
    operations: list[EngineOperation] = [] if encodes else ["clear"]
    if operations and (model.enable_sleep_mode or current_platform.is_cpu()):  # on a CPU it frees no memory
        operations += ["sleep", "wake"]
    if operations and config.lora_config is not None:
        operations += ["load_lora", "unload_lora"]
    return Ready(
        context_length=model.max_model_len,
        vocab_size=model.get_vocab_size(),
        eos_token_ids=eos_token_ids(config),
        block_size=cache.block_size,
        capacity_blocks=0 if encodes else cache.num_gpu_blocks // ranks,  # vLLM's client adds those of all ranks
        kv_layout=KvLayout(
            dtype=dtype,
            layers=model.get_total_num_hidden_layers(),
            kv_heads=model.get_total_num_kv_heads(),
            head_dim=model.get_head_size(),
            block_size=cache.block_size,
        ),
        path=model.model,
        grammars=not pooling,
        biases=not pooling,
        min_tokens=not pooling,
        prompt_logprobs=not pooling,
        allowed_tokens=not pooling,
        forgets_output=True,
        embedding_size=model.get_hidden_size() if pooling else 0,
        generates=not pooling,
        pooling=_pooling_of(config),
        operations=tuple(operations),
        ranks=ranks,
        gpus=_gpus(config),
        images=None if images is None else images.input,
        most_images=0 if images is None else images.most,
        embeddings_layout=store_layout(config).digest if shares else "",
    )


def _gpus(config: VllmConfig) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs of all ranks, which vLLM takes one after another of those that are visible. Empty
    without NVIDIA's GPUs, or if the driver does not say them: only metrics need them."""
    from vllm.platforms import current_platform

    parallel = config.parallel_config
    count = parallel.world_size * parallel.data_parallel_size if current_platform.is_cuda() else 0
    try:
        return tuple(current_platform.get_device_uuid(number) for number in range(count))
    except Exception:  # noqa: BLE001 - whatever NVML raises costs the metrics of the GPUs, not the engine
        traceback.print_exc()
        return ()


def _allow_amx() -> None:
    """Ask the kernel for the tiles of AMX, for this process. vLLM's kernels for quantised weights use them without
    asking: a process whose first step has a few tokens, as ours has, would die of SIGILL."""
    import torch

    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


if __name__ in ("__main__", "__mp_main__"):
    _die_with_parent()
if __name__ == "__mp_main__":
    from services.worker.vllm import cpu_generator

    note_exceptions()
    cpu_generator.install()
    _allow_amx()
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
