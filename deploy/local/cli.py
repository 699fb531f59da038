"""The `headrace` command: checks the arguments and runs the command."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import msgspec

from deploy.local.colour import highlight, paint
from deploy.local.stack.stack import AccessFiles, Gpus, ServiceName, Setting, UpOptions, default_replicas
from deploy.local.state import CACHE_VARIABLE, StateDirectory
from deploy.local.terminal import Terminal
from deploy.local.usage import (
    DEFAULT_MODEL,
    DEFAULT_URL,
    GPU_MEMORY_SHARE,
    BenchFlags,
    ChatFlags,
    ClientFlags,
    CompletionFlags,
    ExplainFlags,
    FleetFlags,
    InstallGpuFlags,
    KeysFileFlags,
    ListKeysFlags,
    NewKeyFlags,
    PullFlags,
    RevokeKeyFlags,
    StatusFlags,
    UpFlags,
    VersionFlags,
    parse,
)
from shared.config import environment
from shared.errors import ConfigError, DiscoveryDown, HeadraceError
from shared.version import VERSION

if TYPE_CHECKING:
    from deploy.local.show.fleet import FleetConfig

BENCH_LIMIT = 1_000_000
"""Upper limit of the numbers that `bench` takes."""
LEAST_WATCH_S, MOST_WATCH_S = 0.2, 3600.0
"""Limits of the seconds between two views of `status --watch`."""
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
    words = sys.argv[1:] if words is None else words
    try:
        match parse(words):
            case UpFlags() as flags:
                return _up(flags)
            case PullFlags() as flags:
                _pull(flags)
            case StatusFlags(watch=float(every_s)) as flags:
                return _watch(flags, every_s)
            case StatusFlags() as flags:
                from deploy.local.show.status import show  # imported here because it loads gRPC: `chat` needs none

                with _fleet(flags) as config:
                    return show(config, as_json=flags.json)
            case ExplainFlags() as flags:
                from deploy.local.show import explain

                with _fleet(flags) as config:
                    return explain.show(config, flags.request, as_json=flags.json)
            case ChatFlags() as flags:
                from deploy.local.chat.api import ChatApi
                from deploy.local.chat.chat import chat

                chat(ChatApi(_url(flags), _api_key(flags)), flags)
            case BenchFlags() as flags:
                return _bench(flags, words)
            case NewKeyFlags() | KeysFileFlags() as flags:
                _key(flags)
            case CompletionFlags() as flags:
                from deploy.local.completion import script

                print(script(flags.shell), end="")
            case InstallGpuFlags():
                _install_gpu()
            case VersionFlags():
                print(f"headrace {VERSION}")
            case _:  # no command: the commands are shown
                return 0
    except HeadraceError as wrong:
        print(f"{paint('error:', 'red', sys.stderr)} {wrong}", file=sys.stderr)
        return 2 if isinstance(wrong, ConfigError) else 1
    except BrokenPipeError:  # `headrace status | head`
        sys.stderr.close()
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _up(flags: UpFlags) -> int:
    from deploy.local.stack import servers
    from deploy.local.stack.block_store import block_store, store_request
    from deploy.local.stack.check import check
    from deploy.local.stack.model import SAMPLING
    from deploy.local.stack.model_source import cache_directory, fetch_source, find_default, find_source
    from deploy.local.stack.up import exclusive, up

    if not 1 <= flags.port <= 65535:
        raise ConfigError("--port is 1 to 65535")
    usual = default_replicas(len(os.sched_getaffinity(0)))
    frontends, routers = (usual if each is None else each for each in (flags.frontends, flags.routers))
    for flag, number in (("workers", flags.workers), ("frontends", frontends), ("routers", routers)):
        if not 1 <= number <= 64:
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
    state_dir, weights = flags.state_dir, flags.engine == "native"
    cache = cache_directory(state_dir)
    os.environ.pop(CACHE_VARIABLE, None)  # workers get it from their file; the other services would refuse it
    source = find_default(cache) if flags.model == DEFAULT_MODEL else find_source(flags.model, weights=weights)
    options = UpOptions(
        model=str(source.path),
        model_name=flags.model_name or source.name,
        cache=str(cache),
        port=flags.port,
        frontends=frontends,
        routers=routers,
        workers=flags.workers,
        chat_template=_chat_template(flags),
        sampling=SAMPLING if flags.model == DEFAULT_MODEL else {},
        policy=flags.policy,
        discovery=flags.discovery,
        engine=flags.engine,
        simulated=simulated,
        gpus=gpus,
        store=msgspec.structs.replace(wanted, pool=str(state_dir.run)) if wanted.pool_bytes else None,
        nats=flags.nats,
        etcd=flags.etcd,
        access=access,
        log_level=flags.log_level,
        overrides=overrides,
    )
    terminal = Terminal()

    def check_model(path: str, *, here: bool = True) -> None:
        options_here = msgspec.structs.replace(options, model=path)
        check(options_here, state_dir, python=sys.executable, model=here, notice=terminal.notice)

    check_model(options.model, here=source.here)  # first, because fetching the model may take minutes
    with exclusive(state_dir, flags.port), block_store(wanted, terminal.notice) as store:
        path = fetch_source(source, check_model, terminal, weights=weights)
        return up(msgspec.structs.replace(options, model=str(path), store=store), state_dir, terminal)


def _pull(flags: PullFlags) -> None:
    from deploy.local.stack.check import check
    from deploy.local.stack.hub_files import parse_name
    from deploy.local.stack.model_source import NAMES, fetch_named

    named, terminal = parse_name(flags.name), Terminal()
    if named is None:
        raise ConfigError(f"pull {flags.name}: {NAMES}")

    def check_model(path: str) -> None:
        options = UpOptions(model=path, model_name=named.repository, discovery="file")
        check(options, flags.state_dir, python=sys.executable, model=True, notice=terminal.notice)

    print(fetch_named(named, check_model, terminal))


def _chat_template(flags: UpFlags) -> str:
    """Return the chat template for the workers: a name, or the absolute path of a file; empty: the model's own."""
    from deploy.local.stack.model import CHAT_TEMPLATE
    from shared.chat_templates import NAMES

    given = flags.chat_template or (CHAT_TEMPLATE if flags.model == DEFAULT_MODEL else "")
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
            raise ConfigError(f"--set {path}: `up` sets that itself")
        more.setdefault(service, []).append((f"--{setting}", value))
    return more


def _gpus(flags: UpFlags) -> Gpus | None:
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


def _key(flags: NewKeyFlags | KeysFileFlags) -> None:
    from deploy.local import key

    match flags:
        case NewKeyFlags():
            key.new(flags.name, {limit: getattr(flags, limit) for limit in key.LIMITS}, flags.file, flags.out)
        case ListKeysFlags():
            print(highlight(key.listed(_keys_file(flags)), sys.stdout))
        case RevokeKeyFlags():
            key.revoke(flags.name, _keys_file(flags))


def _keys_file(flags: KeysFileFlags) -> Path:
    """Return the keys file: that of the flags, else that of the `up` that runs here."""
    file = flags.file or _running(flags.state_dir).get("keys")
    if not file:
        raise ConfigError("name the keys file with --file: no `up` with --keys runs here")
    return Path(file)


def _install_gpu() -> None:
    """Check that CuPy is installed: `./headrace` has installed it before this runs. A missing GPU is no error, because
    images are built without one and the driver may be installed later."""
    from deploy.local.stack import gpus

    gpus.require_cupy()
    print("CuPy is installed")
    try:
        print(f"{gpus.count_visible()} GPUs: ./headrace up --device cuda")
    except ConfigError as wrong:
        print(f"no GPU can be used yet: {wrong}")


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


@contextmanager
def _fleet(flags: FleetFlags) -> Iterator[FleetConfig]:
    """Yield the addresses of the fleet: those in the flags, else those of the `up` that runs here."""
    from deploy.local.show.fleet import fleet_config

    state_dir = flags.state_dir
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


def _watch(flags: StatusFlags, every_s: float) -> int:
    from deploy.local.show.watch import watch

    if flags.json:
        raise ConfigError("--watch shows tables: leave out --json")
    if not LEAST_WATCH_S <= every_s <= MOST_WATCH_S:
        raise ConfigError(f"--watch is {LEAST_WATCH_S:g} to {MOST_WATCH_S:g} seconds")
    with _fleet(flags) as config:
        return watch(config, every_s)


def _bench(flags: BenchFlags, words: Sequence[str]) -> int:
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
        **msgspec.structs.asdict(msgspec.structs.replace(flags, url=_url(flags))),
        points=plan.points(flags.concurrency or ("" if flags.rate else "1,8,32"), flags.rate, flags.requests),
        command=" ".join(("headrace", *words)),
        given=[] if flags.prompts is None else plan.lines(_text(flags.prompts), str(flags.prompts)),
        api_key=_api_key(flags),
    )
    return aiperf.run(options) if flags.driver == "aiperf" else sweep.bench(options)


def _url(flags: ClientFlags) -> str:
    """Return the URL of the API: that of the flags, else that of the `up` that runs here."""
    running = {} if flags.url else _running(flags.state_dir)
    return (flags.url or str(running.get("url", DEFAULT_URL))).rstrip("/")


def _api_key(flags: ClientFlags) -> str:
    """Return the API key from a file or, as for all OpenAI clients, from the environment; empty: none. No flag takes
    the key itself, because `ps` would show it."""
    file = flags.api_key_file
    key = (os.environ.get("OPENAI_API_KEY", "") if file is None else _text(file)).strip()
    if not key.isascii() or not key.isprintable():
        source = "OPENAI_API_KEY" if file is None else f"--api-key-file {file}"
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
