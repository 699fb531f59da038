"""The `headrace` command: checks the arguments and runs the command."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from deploy.local.stack.stack import (
    AccessFiles,
    BlockStoreOptions,
    Gpus,
    ServiceName,
    Setting,
    StateDirectory,
    UpOptions,
    default_replicas,
)
from deploy.local.terminal import Terminal
from deploy.local.usage import DEFAULT_MODEL, DEFAULT_URL, GPU_MEMORY_SHARE, parser
from shared.config import environment
from shared.errors import ConfigError, DiscoveryDown, HeadraceError
from shared.version import VERSION

if TYPE_CHECKING:
    from deploy.local.show.fleet import FleetConfig

BENCH_LIMIT = 1_000_000
"""Upper limit of the numbers that `bench` takes."""
UPS_OWN = {"gpu": "CUDA_VISIBLE_DEVICES chooses", "memory_share": "--gpu-memory-share does that"}
"""Settings of a worker's table `cuda` that `up` sets itself → what the user can do instead."""
SERVICES: tuple[ServiceName, ...] = get_args(ServiceName)
WIRING = re.compile(
    r"\w+-(config|namespace|(nats|discovery)-.*|observe-(host|port|events|url-file))"
    r"|frontend-(http-(port|reuse-port|tls-cert|tls-key)|access-keys-file)"
    r"|worker-cuda-(gpu|memory-share)"
)
"""Settings that `--set` refuses: those that connect the processes, and those that `up` must know itself."""


def main(words: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 0 success, 1 failure, 2 wrong usage or configuration."""
    commands = parser()
    flags = commands.parse_args(words)
    state_dir = StateDirectory(flags.state.absolute())
    try:
        match flags.command:
            case "up":
                return _up(flags, state_dir)
            case "status":
                return _status(flags, state_dir)
            case "explain":
                return _explain(flags, state_dir)
            case "chat":
                return _chat(flags, state_dir)
            case "bench":
                return _bench(flags, state_dir, sys.argv[1:] if words is None else words)
            case "key":
                return _key(flags)
            case "install-gpu":
                return _install_gpu()
            case "version":
                print(f"headrace {VERSION}")
                return 0
            case None:
                commands.print_help(sys.stderr)
                return 2
            case other:
                raise AssertionError(other)
    except ConfigError as wrong:
        print(f"error: {wrong}", file=sys.stderr)
        return 2
    except HeadraceError as wrong:
        print(f"error: {wrong}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `headrace status | head`
        sys.stderr.close()
        return 1
    except KeyboardInterrupt:
        return 130


def _up(flags: argparse.Namespace, state_dir: StateDirectory) -> int:
    from deploy.local.stack import model, servers
    from deploy.local.stack.block_store import block_store, store_request
    from deploy.local.stack.check import check
    from deploy.local.stack.up import exclusive, up

    if not 1 <= flags.port <= 65535:
        raise ConfigError("--port is 1 to 65535")
    usual = default_replicas(len(os.sched_getaffinity(0)))
    flags.frontends, flags.routers = (usual if each is None else each for each in (flags.frontends, flags.routers))
    for flag in ("workers", "frontends", "routers"):
        if not 1 <= getattr(flags, flag) <= 64:
            raise ConfigError(f"--{flag} is 1 to 64")
    if flags.simulated and flags.engine != "simulated":
        raise ConfigError("--simulated needs --engine simulated")
    simulated = _settings("--simulated", flags.simulated)
    wanted = store_request(
        flags.kvbm_bytes, flags.kvbm_disk, flags.kvbm_disk_bytes, engine=flags.engine, device=flags.device
    )
    gpus = _gpus(flags)
    access, overrides = _access(flags), _overrides(flags.set)
    for flag, address in (("--nats", flags.nats), ("--etcd", flags.etcd)):
        if address and not servers.answers(address):
            raise ConfigError(f"{flag} {address}: no server answers there")
    given = flags.model != DEFAULT_MODEL
    if given and not Path(flags.model).exists():
        raise ConfigError(f"--model {flags.model}: no such file or directory; Headrace asks no hub: fetch it first")
    source = Path(flags.model).absolute() if given else state_dir.models / model.FILE
    name = source.stem if source.suffix == ".gguf" else source.name

    def options(store: BlockStoreOptions | None) -> UpOptions:
        return UpOptions(
            model=str(source),
            model_name=flags.model_name or (name if given else model.NAME),
            port=flags.port,
            frontends=flags.frontends,
            routers=flags.routers,
            workers=flags.workers,
            policy=flags.policy,
            discovery=flags.discovery,
            engine=flags.engine,
            simulated=simulated,
            gpus=gpus,
            store=store,
            nats=flags.nats,
            etcd=flags.etcd,
            access=access,
            log_level=flags.log_level,
            overrides=overrides,
        )

    planned = (
        BlockStoreOptions(str(state_dir.run), wanted.pool_bytes, wanted.disk, wanted.disk_bytes)
        if wanted.pool_bytes
        else None
    )
    terminal = Terminal()
    # First, because fetching the model may take minutes.
    check(options(planned), state_dir, python=sys.executable, model=given, notice=terminal.notice)
    with exclusive(state_dir, flags.port), block_store(wanted, terminal.notice) as store:
        if not given:
            model.fetch_default(state_dir.models, terminal.progress)
            terminal.clear()
        return up(options(store), state_dir, terminal)


def _access(flags: argparse.Namespace) -> AccessFiles:
    files: dict[str, str] = {}
    for name in ("keys", "tls_cert", "tls_key"):
        file = getattr(flags, name)
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
            raise ConfigError(f"--set {path}: `up` sets that itself")
        more.setdefault(service, []).append((f"--{setting}", value))
    return more


def _gpus(flags: argparse.Namespace) -> Gpus | None:
    from deploy.local.stack import gpus

    share = flags.gpu_memory_share
    if flags.device == "cpu":
        if flags.cuda or share is not None:
            raise ConfigError(f"{'--cuda' if flags.cuda else '--gpu-memory-share'} needs --device cuda")
        return None
    if flags.engine != "native":
        raise ConfigError(f"--device cuda: engine {flags.engine} computes nothing; use --engine native")
    if share is not None and not 0 < share <= 1:
        raise ConfigError("--gpu-memory-share must be above 0 and at most 1")
    settings = _settings("--cuda", flags.cuda)
    for key, instead in UPS_OWN.items():
        if key in settings:
            raise ConfigError(f"--cuda {key}: {instead}")
    return Gpus(gpus.count_visible(), GPU_MEMORY_SHARE if share is None else share, settings)


def _install_gpu() -> int:
    """Check that CuPy is installed: `./headrace` has installed it before this runs. A missing GPU is no error, because
    images are built without one and the driver may be installed later."""
    from deploy.local.stack import gpus

    gpus.require_cupy()
    print("CuPy is installed")
    try:
        print(f"{gpus.count_visible()} GPUs: ./headrace up --device cuda")
    except ConfigError as wrong:
        print(f"no GPU can be used yet: {wrong}")
    return 0


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


def _status(flags: argparse.Namespace, state_dir: StateDirectory) -> int:
    from deploy.local.show.status import show  # imported here because it loads gRPC, which `chat` does not need

    with _fleet(flags, state_dir) as config:
        return show(config, as_json=flags.json)


def _explain(flags: argparse.Namespace, state_dir: StateDirectory) -> int:
    from deploy.local.show.explain import show

    with _fleet(flags, state_dir) as config:
        return show(config, flags.request, as_json=flags.json)


@contextmanager
def _fleet(flags: argparse.Namespace, state_dir: StateDirectory) -> Iterator[FleetConfig]:
    """Yield the addresses of the fleet: those in the flags, else those of the `up` that runs here."""
    from deploy.local.show.fleet import fleet_config

    running = _running(state_dir)
    if not (running or flags.etcd or any(name.startswith("HEADRACE_DISCOVERY_") for name in environment())):
        raise ConfigError(
            f"no `up` runs with --state {state_dir.home}; start one with `./headrace up`, "
            "or name the servers of another fleet with --etcd and --nats"
        )
    if running and flags.nats in ("", running.get("nats")):
        config = fleet_config(namespace=flags.namespace, nats="", etcd=flags.etcd, file=state_dir.fleet)
    else:  # do not send the password of this NATS to another one
        config = fleet_config(
            namespace=flags.namespace,
            nats=flags.nats,
            etcd=flags.etcd or running.get("etcd", ""),
            path="" if flags.etcd else running.get("discovery", ""),
        )
    try:
        yield config
    except DiscoveryDown as wrong:
        raise DiscoveryDown(f"{wrong}; does `./headrace up` run? (--state, or --nats and --etcd)") from None


def _chat(flags: argparse.Namespace, state_dir: StateDirectory) -> int:
    from deploy.local.chat import chat

    url = flags.url or _running(state_dir).get("url", DEFAULT_URL)
    chat(
        url.rstrip("/"),
        flags.question,
        model=flags.model,
        max_tokens=flags.max_tokens,
        temperature=flags.temperature,
        api_key=_api_key(flags),
    )
    return 0


def _bench(flags: argparse.Namespace, state_dir: StateDirectory, words: Sequence[str]) -> int:
    from deploy.local.bench import aiperf, plan, sweep

    at_least = {"words": 1, "output_tokens": 1, "shared_words": 0, "warmup": 0, "timeout_s": 0.001}
    for name, least in at_least.items():
        if not least <= getattr(flags, name) <= BENCH_LIMIT:
            raise ConfigError(f"--{name.replace('_', '-')} is {least} to {BENCH_LIMIT}")
    if flags.shared_words > flags.words:
        raise ConfigError("--shared-words must not exceed --words")
    if not Path(flags.out).parent.is_dir():
        raise ConfigError(f"--out {flags.out}: no such directory: {Path(flags.out).parent}")
    options = sweep.BenchOptions(
        url=(flags.url or _running(state_dir).get("url", DEFAULT_URL)).rstrip("/"),
        points=plan.points(flags.concurrency or ("" if flags.rate else "1,8,32"), flags.rate, flags.requests),
        command=" ".join(("headrace", *words)),
        model=flags.model,
        words=flags.words,
        shared_words=flags.shared_words,
        output_tokens=flags.output_tokens,
        may_stop=flags.may_stop,
        given=[] if flags.prompts is None else plan.lines(_text(flags.prompts), str(flags.prompts)),
        warmup=flags.warmup,
        timeout_s=flags.timeout_s,
        seed=flags.seed,
        api_key=_api_key(flags),
        out=flags.out,
        tokenizer=flags.tokenizer,
    )
    return aiperf.run(options) if flags.driver == "aiperf" else sweep.bench(options, as_json=flags.json)


def _key(flags: argparse.Namespace) -> int:
    from deploy.local import key

    key.new(flags.name, {limit: getattr(flags, limit) for limit in key.LIMITS})
    return 0


def _api_key(flags: argparse.Namespace) -> str:
    """Return the API key from a file or, as for all OpenAI clients, from the environment; empty: none. No flag takes
    the key itself, because `ps` would show it."""
    given = flags.api_key_file is not None
    key = (_text(flags.api_key_file) if given else os.environ.get("OPENAI_API_KEY", "")).strip()
    if not key.isascii() or not key.isprintable():
        source = f"--api-key-file {flags.api_key_file}" if given else "OPENAI_API_KEY"
        raise ConfigError(f"{source}: must contain only a key")
    return key


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as wrong:
        raise ConfigError(f"{file}: {getattr(wrong, 'strerror', None) or wrong}") from None


def _running(state_dir: StateDirectory) -> dict[str, Any]:
    """Return the record of the `up` that runs with this state directory; empty if none runs."""
    try:
        record = json.loads(state_dir.record.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


if __name__ == "__main__":
    sys.exit(main())
