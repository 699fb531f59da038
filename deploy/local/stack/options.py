"""Turns the flags of `up` into its options. What is wrong at sight is refused here; services check their settings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import get_args

from msgspec.structs import replace

from deploy.local import install_diffusers, install_vllm
from deploy.local.stack import gpus, servers
from deploy.local.stack.block_store import parse_size, store_request
from deploy.local.stack.gpus import OWN_PART, assign_gpus, parallel_sizes, visible_gpus, vllm_arguments
from deploy.local.stack.model import CHAT_TEMPLATE, SAMPLING
from deploy.local.stack.stack import (
    LOOPBACK,
    AccessFiles,
    BlockStoreOptions,
    DiffusersPlace,
    Gpus,
    ServiceName,
    Setting,
    UpOptions,
    Value,
    default_replicas,
)
from deploy.local.stack.turns import turn_words
from deploy.local.usage import DEFAULT_MODEL, GPU_MEMORY_SHARE, UpFlags
from shared.bus.nats_servers import without_password
from shared.chat_templates import NAMES
from shared.config import environment
from shared.errors import ConfigError
from shared.installation import COMMAND
from shared.processors import usable_processors
from shared.vllm_args import read_file

UPS_OWN = {"gpu": "CUDA_VISIBLE_DEVICES chooses", "memory_share": "--gpu-memory-share does that"}
"""Settings of a worker's table `cuda` that `up` sets itself → what the user can do instead."""
ENGINES = ("vllm", "attached", "simulated", "diffusers")
TABLES = {"cuda": ("device", "cuda"), **{engine: ("engine", engine) for engine in ENGINES}}
"""Tables of a worker's settings that have an effect with one flag of `up` alone → that flag and its value."""
SERVICES: tuple[ServiceName, ...] = get_args(ServiceName)
OBSERVE_HOST = "HEADRACE_OBSERVE_HOST"
"""The variable by which services listen, for other machines, at an address of this one."""
JOIN = "to join a fleet that has the other role, give its --nats and --etcd"
WIRING = re.compile(
    r"\w+-(config|namespace|(nats|discovery)-.*|observe-(host|port|events|url-file))"
    r"|frontend-(http-(port|reuse-port|tls-cert|tls-key)|access-keys-file)"
    r"|worker-(cuda-(gpu|memory-share)|vllm-gpus|diffusers-gpu|role|tensor-parallel|turns)|turns-(device|awake)"
)
"""Settings that `--set` refuses: those that connect the processes, and those that `up` must know itself."""
INSTEAD = {"role": "; use --prefill, --decode and --encode", "tensor-parallel": "; use --tensor-parallel"}


def checked_options(flags: UpFlags) -> tuple[UpOptions, BlockStoreOptions]:
    """Return the options of an `up`, without its model, and which block store is wanted. Raise ConfigError."""
    words, flags = turn_words(flags), _check(flags)
    prefill, decode = _roles(flags)
    frontends, routers, workers = _numbers(flags, prefill + decode or len(words))
    encode = _encode(flags, workers)
    roles, workers = prefill + decode + encode > 0, workers + encode
    simulated = _settings("--simulated", flags.simulated)
    vllm_python = str(install_vllm.require()) if flags.engine == "vllm" else ""
    wanted = _wanted_store(flags, roles=roles)
    of_gpus = _gpus(flags)
    weights_bytes = _weights_bytes(flags)
    access, overrides = _access(flags), _overrides(flags.set)
    _check_overrides(flags, overrides, stores=wanted.pool_bytes > 0, turns=bool(words))
    asked = replace(flags, workers=workers) if roles else flags
    vllm_gpus = _vllm_gpus(asked, overrides.get("worker", ()), workers) if flags.engine == "vllm" else ()
    workers = len(vllm_gpus) or (of_gpus.workers(flags.workers, workers) if of_gpus is not None else workers)
    _check_servers(flags)
    options = UpOptions(
        model="",
        model_name="",
        port=flags.port,
        frontends=frontends,
        routers=routers,
        workers=workers,
        late_workers=takes_turns(flags, roles=roles, on_gpus=bool(vllm_gpus)),
        prefill=prefill,
        decode=decode,
        encode=encode,
        chat_template=_chat_template(flags),
        sampling=SAMPLING if flags.model == DEFAULT_MODEL and not words else {},
        awake=flags.awake or 1,
        policy=flags.policy,
        discovery=flags.discovery,
        engine=flags.engine,
        tensor_parallel=flags.tensor_parallel,
        simulated=simulated,
        vllm_python=vllm_python,
        vllm_args="" if flags.vllm_args is None else str(flags.vllm_args.absolute()),
        vllm_gpus=vllm_gpus,
        diffusers=_diffusers() if flags.engine == "diffusers" else None,
        gpus=of_gpus,
        weights_bytes=weights_bytes,
        standby=flags.standby,
        store=replace(wanted, pool=str(flags.state_dir.run)) if wanted.pool_bytes else None,
        nats=flags.nats,
        etcd=flags.etcd,
        single=flags.single,
        observe_host=environment().get(OBSERVE_HOST) or LOOPBACK,
        access=access,
        log_level=flags.log_level,
        overrides=overrides,
    )
    return options, wanted


def _numbers(flags: UpFlags, given: int) -> tuple[int, int, int]:
    """Return how many frontends, routers and workers there are; `given` workers, if that is not 0. Raise
    ConfigError."""
    usual = default_replicas(usable_processors())
    frontends, routers = (usual if each is None else each for each in (flags.frontends, flags.routers))
    attached = flags.engine == "attached"
    workers = given or ((1 if attached else 2) if flags.workers is None else flags.workers)
    least = 0 if flags.nats and flags.etcd and flags.on == "machine" else 1  # other machines of the fleet may have them
    for flag, number, fewest in (("workers", workers, 1), ("frontends", frontends, least), ("routers", routers, least)):
        if not fewest <= number <= 64:
            raise ConfigError(f"--{flag} is {fewest} to 64")
    if attached and workers > 1:
        raise ConfigError("--workers: an attached server is one worker")
    return frontends, routers, workers


def _check_servers(flags: UpFlags) -> None:
    """Raise ConfigError if none of the servers that flags name answers."""
    for flag, addresses in (("--nats", flags.nats), ("--etcd", flags.etcd)):
        if addresses and not any(servers.answers(flag, each.strip()) for each in addresses.split(",")):
            raise ConfigError(f"{flag} {without_password(addresses)}: no server answers there")


def takes_turns(flags: UpFlags, *, roles: bool, on_gpus: bool) -> bool:
    """Return whether workers start one after the other, and the first serves alone meanwhile: if they compute with vLLM
    on a CPU, whose start takes a processor for half a minute, and their number was not asked for. *Pure.*"""
    return flags.engine == "vllm" and flags.workers is None and not roles and not on_gpus


def _check(flags: UpFlags) -> UpFlags:
    """Return the flags, with what --single means. Raise ConfigError for flags that contradict one another, and for
    files that are not there."""
    if not 1 <= flags.port <= 65535:
        raise ConfigError("--port is 1 to 65535")
    if flags.simulated and flags.engine != "simulated":
        raise ConfigError("--simulated needs --engine simulated")
    if flags.engine == "diffusers" and not Path(flags.model).is_dir():
        raise ConfigError(
            "--engine diffusers needs --model DIRECTORY, a pipeline as diffusers' save_pretrained writes it"
        )
    if flags.vllm_args is not None and flags.engine != "vllm":
        raise ConfigError("--vllm-args needs --engine vllm")
    if flags.vllm_args is not None and not flags.vllm_args.is_file():
        raise ConfigError(f"--vllm-args {flags.vllm_args}: no such file")
    if flags.tensor_parallel != 1:
        _check_tensor_parallel(flags)
    if flags.standby:
        _check_standby(flags)
    if flags.ray_address and flags.on != "ray":
        raise ConfigError("--ray-address needs --on ray")
    if flags.on == "ray":
        _check_ray(flags)
    return _single(flags) if flags.single else flags


def _check_standby(flags: UpFlags) -> None:
    """Raise ConfigError if no engine can stand by."""
    others = {
        f"--engine {flags.engine}": flags.engine in ("vllm", "attached", "diffusers"),
        f"--tensor-parallel {flags.tensor_parallel}": flags.tensor_parallel > 1,
        "--models": bool(flags.models),
    }
    for other in (name for name, given in others.items() if given):
        raise ConfigError(f"--standby: not with {other}; the native engine can stand by, as one rank of one model")


def _check_tensor_parallel(flags: UpFlags) -> None:
    """Raise ConfigError if the engine cannot be several ranks. The worker checks the model."""
    flag = f"--tensor-parallel {flags.tensor_parallel}"
    if not 1 <= flags.tensor_parallel <= 8:
        raise ConfigError(f"{flag}: it is 1 to 8")
    if flags.engine == "vllm":
        raise ConfigError(
            f"{flag}: with --engine vllm it is --set worker.vllm.tensor_parallel_size={flags.tensor_parallel}"
        )
    if flags.engine != "native":
        raise ConfigError(f"{flag}: engine {flags.engine} computes nothing; use --engine native")
    if flags.device == "cuda":
        refused = {
            "--prefill": flags.prefill is not None,
            "--decode": flags.decode is not None,
            "--weights-bytes": flags.weights_bytes not in ("", "0"),
        }
        for other in (name for name, given in refused.items() if given):
            raise ConfigError(f"{flag}: not with {other} and --device cuda; ranks on GPUs do all, with own weights")
    if flags.on == "machine" and flags.tensor_parallel > (processors := usable_processors()):
        raise ConfigError(f"{flag}: more ranks than the processors that can be used here ({processors})")


def _check_ray(flags: UpFlags) -> None:
    """Raise ConfigError for flags that do not go with --on ray."""
    refused = {
        "--single": flags.single,
        "--weights-bytes": flags.weights_bytes not in ("", "0"),
        f"--engine {flags.engine}": flags.engine in ("attached", "diffusers"),
        "--discovery file": flags.discovery == "file",
        "--tensor-parallel": flags.tensor_parallel != 1,
    }
    for flag, given in refused.items():
        if given:
            raise ConfigError(
                f"{flag}: not with --on ray, which runs each service as a program of its own (docs/ray.md)"
            )


def _single(flags: UpFlags) -> UpFlags:
    """Return the flags of services that are one process. Raise ConfigError for those that ask for more."""
    numbers = {name: getattr(flags, name) for name in ("frontends", "routers", "workers")}
    refused = {
        **{f"--{name} {number}": number not in (None, 1) for name, number in numbers.items()},
        "--prefill": flags.prefill is not None,
        "--decode": flags.decode is not None,
        "--encode": flags.encode is not None,
        "--standby": flags.standby,
        "--engine attached": flags.engine == "attached",
        "--weights-bytes": flags.weights_bytes not in ("", "0"),
        "--kvbm-bytes": flags.kvbm_bytes not in ("", "0"),
        "--kvbm-disk": flags.kvbm_disk is not None,
        "--set kvbm": any(each.startswith("kvbm.") for each in flags.set),
        "--set worker.checkpoint": any(each.startswith("worker.checkpoint.") for each in flags.set),
        "--set worker.standby": any(each.startswith("worker.standby=") for each in flags.set),
        "--nats": bool(flags.nats),
        "--etcd": bool(flags.etcd),
        "--discovery file": flags.discovery == "file",
    }
    for flag, given in refused.items():
        if given:
            raise ConfigError(
                f"{flag}: not with --single, which is one frontend, one router and one worker with an engine of its"
                " own, in one process without kvbm, NATS and etcd"
            )
    return replace(flags, **dict.fromkeys(numbers, 1), kvbm_bytes="0")


def _roles(flags: UpFlags) -> tuple[int, int]:
    """Return how many workers compute prompts and how many decode; (0, 0): each does all. Raise ConfigError."""
    if flags.prefill is None and flags.decode is None:
        return 0, 0
    joins = bool(flags.nats and flags.etcd)
    for name, number in (("prefill", flags.prefill), ("decode", flags.decode)):
        if number is not None and number < 1 and not joins:
            raise ConfigError(
                f"--{name} {number}: at least 1; leave --prefill and --decode out, and each worker does both"
            )
    if not joins and (flags.prefill is None or flags.decode is None):
        if flags.decode is None:
            raise ConfigError(f"--prefill needs --decode: without a worker that decodes nothing is answered; {JOIN}")
        raise ConfigError(f"--decode needs --prefill; workers that also compute all prompts are --workers; {JOIN}")
    prefill, decode = flags.prefill or 0, flags.decode or 0
    if flags.workers is not None:
        raise ConfigError("--workers: --prefill and --decode say how many there are")
    if flags.engine not in ("native", "simulated", "vllm"):
        raise ConfigError(f"--prefill and --decode: workers with engine {flags.engine} have no roles")
    least = 0 if joins else 1
    if min(prefill, decode) < least or not 1 <= prefill + decode <= 64:
        raise ConfigError(
            f"--prefill and --decode are at least {'1' if least else '0, 1 together'}, and 64 together at most"
        )
    return prefill, decode


def _wanted_store(flags: UpFlags, *, roles: bool) -> BlockStoreOptions:
    """Return which block store is wanted. Raise ConfigError, also if it is none and workers have roles."""
    wanted = store_request(
        flags.kvbm_bytes, flags.kvbm_disk, flags.kvbm_disk_bytes, engine=flags.engine, device=flags.device, needed=roles
    )
    if roles and not wanted.pool_bytes:
        flag = "--encode needs" if flags.encode else "--prefill and --decode need"
        what = "embeddings" if flags.encode else "prompts"
        raise ConfigError(f"{flag} some --kvbm-bytes: {what} are handed over through that memory")
    return wanted


def _encode(flags: UpFlags, others: int) -> int:
    """Return how many workers only encode images, next to `others`. Raise ConfigError."""
    if flags.encode is None:
        return 0
    if not 1 <= flags.encode <= 64:
        raise ConfigError(f"--encode {flags.encode}: 1 to 64; leave it out, and each worker encodes its own images")
    if flags.encode + others > 64:
        both = f"with the others they are {flags.encode + others} workers"
        raise ConfigError(f"--encode {flags.encode}: {both}; 64 together at most")
    if flags.engine not in ("native", "vllm"):
        raise ConfigError(f"--encode: engine {flags.engine} encodes no images; use --engine native or vllm")
    if flags.model == DEFAULT_MODEL:
        raise ConfigError("--encode: the default model takes no images; name one that does with --model")
    if flags.tensor_parallel != 1:
        raise ConfigError(f"--encode: not with --tensor-parallel {flags.tensor_parallel}; one rank encodes images")
    return flags.encode


def _chat_template(flags: UpFlags) -> str:
    """Return the chat template for the workers: a name, or the absolute path of a file. Empty means the model's own."""
    default = CHAT_TEMPLATE if flags.model == DEFAULT_MODEL and not flags.models else ""
    given = flags.chat_template or default
    if not given or given in NAMES:
        return given
    if not Path(given).is_file():
        raise ConfigError(f"--chat-template {given}: no such file, and not one of {', '.join(sorted(NAMES))}")
    return str(Path(given).absolute())


def _access(flags: UpFlags) -> AccessFiles:
    files: dict[str, str] = {}
    for name, file in (("keys", flags.keys), ("tls_cert", flags.tls_cert), ("tls_key", flags.tls_key)):
        if file is not None and not file.is_file():
            raise ConfigError(f"--{name.replace('_', '-')} {file}: no such file")
        files[name] = "" if file is None else str(file.absolute())
    if bool(flags.tls_cert) != bool(flags.tls_key):
        raise ConfigError("--tls-cert and --tls-key must be given together")
    return AccessFiles(**files)


def _overrides(given: Sequence[str]) -> dict[ServiceName, list[Setting]]:
    """Parse the values of `--set`, SERVICE.SETTING=VALUE. The services check the settings and values."""
    more: dict[ServiceName, list[Setting]] = {}
    for text in given:
        path, equals, value = text.partition("=")
        service, _, setting = path.partition(".")
        if service not in SERVICES or not equals or not setting:
            raise ConfigError(f"--set {text}: not SERVICE.SETTING=VALUE; services are {', '.join(SERVICES)}")
        flag = setting.replace(".", "-").replace("_", "-")
        if WIRING.fullmatch(f"{service}-{flag}"):
            raise ConfigError(f"--set {path}: `up` sets that itself{INSTEAD.get(flag, '')}")
        more.setdefault(service, []).append((f"--{setting}", value))
    return more


def _check_overrides(
    flags: UpFlags, overrides: Mapping[ServiceName, Sequence[Setting]], *, stores: bool, turns: bool
) -> None:
    """Raise ConfigError for a setting of what this `up` does not have."""
    if "kvbm" in overrides and not stores:
        setting = overrides["kvbm"][0][0].removeprefix("--")
        raise ConfigError(f"--set kvbm.{setting}: this `up` has no kvbm; give it one with --kvbm-bytes")
    if "turns" in overrides and not turns:
        raise ConfigError(f"--set turns.{overrides['turns'][0][0].removeprefix('--')}: it needs --models")
    worker = [setting.removeprefix("--") for setting, _ in overrides.get("worker", ())]
    for setting in worker:
        flag, value = TABLES.get(setting.partition(".")[0], ("", ""))
        if flag and getattr(flags, flag) != value and flag not in worker:
            raise ConfigError(f"--set worker.{setting}: it needs --{flag} {value}")


def _gpus(flags: UpFlags) -> Gpus | None:
    share = flags.gpu_memory_share
    if flags.device == "cpu":
        if flags.cuda or share is not None:
            raise ConfigError(f"{'--cuda' if flags.cuda else '--gpu-memory-share'} needs --device cuda")
        return None
    if flags.engine == "vllm":
        raise ConfigError(f"--device cuda: vLLM computes on what it was installed for ({COMMAND} install-vllm)")
    if flags.engine == "diffusers":
        raise ConfigError("--device cuda: diffusers computes on the GPUs that it finds, without this flag")
    if flags.engine != "native":
        raise ConfigError(f"--device cuda: engine {flags.engine} computes nothing; use --engine native")
    if share is not None and not 0 < share <= 1:
        raise ConfigError("--gpu-memory-share must be above 0 and at most 1")
    settings = _settings("--cuda", flags.cuda)
    for key, instead in UPS_OWN.items():
        if key in settings:
            raise ConfigError(f"--cuda {key}: {instead}")
    # On Ray each worker sees one GPU, and this machine may have none.
    count = 1 if flags.on == "ray" else gpus.count_visible()
    return shared_gpus(count, GPU_MEMORY_SHARE if share is None else share, settings, flags.tensor_parallel)


def shared_gpus(count: int, share: float, settings: Mapping[str, Value], ranks: int) -> Gpus:
    """Return the GPUs of workers, each with several if it has several ranks. Raise ConfigError if there are too few.
    *Pure.*"""
    if ranks > count and settings.get("ranks_share_gpus") != "true":
        raise ConfigError(f"--tensor-parallel {ranks}: there must be as many GPUs, and CUDA shows {count}")
    return Gpus(count, share, settings, ranks)


def _weights_bytes(flags: UpFlags) -> int:
    """Return the size of the memory for shared weights; 0 if there is none. Raise ConfigError."""
    size_bytes = parse_size(flags.weights_bytes, "--weights-bytes") if flags.weights_bytes else 0
    if size_bytes and flags.engine != "native":
        raise ConfigError(f"--weights-bytes: engine {flags.engine} shares no weights; use --engine native")
    return size_bytes


def _vllm_gpus(flags: UpFlags, settings: Sequence[Setting], workers: int) -> tuple[str, ...]:
    """Return each worker's GPUs; none if vLLM computes on the CPU. On Ray their names mean nothing, as it chooses."""
    if install_vllm.device_of() != "cuda":
        return ()
    file = read_file("" if flags.vllm_args is None else str(flags.vllm_args))
    if flags.on == "ray":
        sizes = parallel_sizes(settings, file)
        return assign_gpus(workers, sizes, list(map(str, range(workers * prod(sizes.values())))))
    visible = visible_gpus(gpus.ask_driver("--engine vllm", 0), environment().get("CUDA_VISIBLE_DEVICES"))
    shared = OWN_PART.issubset(vllm_arguments(settings, file))
    return assign_gpus(flags.workers, parallel_sizes(settings, file), visible, shared=shared)


def _diffusers() -> DiffusersPlace:
    """Return what workers with diffusers compute with. Raise ConfigError if it is not installed."""
    python = str(install_diffusers.require())
    if install_diffusers.device_of() != "cuda":
        return DiffusersPlace(python)
    visible = visible_gpus(gpus.ask_driver("--engine diffusers", 0), environment().get("CUDA_VISIBLE_DEVICES"))
    return DiffusersPlace(python, tuple(visible))


def _settings(flag: str, given: Sequence[str]) -> dict[str, str | int | float]:
    """Parse settings of the form KEY=VALUE. The worker checks the keys and values."""
    settings: dict[str, str | int | float] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise ConfigError(f"{flag} {text}: not KEY=VALUE")
        settings[key] = _number(value)
    return settings


def _number(text: str) -> str | int | float:
    """Return the number that the text is, or the text itself."""
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            pass
    return text
