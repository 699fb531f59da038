"""The `headrace` command: checks the arguments and runs the command."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from deploy.local import usage
from deploy.local.install import InstallError
from deploy.local.stack.stack import BlockStoreOptions, TurnModel, UpOptions
from deploy.local.state import CACHE_VARIABLE, StateDirectory
from deploy.local.terminal import Terminal, highlight, paint
from shared.config import environment
from shared.errors import ConfigError, DiscoveryDown, HeadraceError, Unavailable
from shared.installation import COMMAND, install_command, version_text
from shared.machine_memory import usable_memory_bytes

if TYPE_CHECKING:
    from deploy.local.show.fleet import FleetConfig

LEAST_WATCH_S, MOST_WATCH_S = 0.2, 3600.0
"""Limits of the seconds between two views of `status --watch` and `top`."""


def main(words: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 0 success, 1 failure, 2 wrong usage or configuration."""
    words = sys.argv[1:] if words is None else words
    try:
        return _run(words)
    except (HeadraceError, InstallError) as wrong:
        print(f"{paint('error:', 'red', sys.stderr)} {wrong}", file=sys.stderr)
        return 2 if isinstance(wrong, ConfigError) else 1
    except BrokenPipeError:  # `headrace status | head`
        sys.stderr.close()
        return 1
    except KeyboardInterrupt:
        return 130


def _run(words: Sequence[str]) -> int:  # noqa: C901 - the table of commands
    match usage.parse(words):
        case usage.CheckFlags() as flags:
            return _check(flags)
        case usage.UpFlags() as flags:
            return _up(flags)
        case usage.RouteFlags() as flags:
            return _route(flags)
        case usage.PullFlags() as flags:
            _pull(flags)
        case usage.StatusFlags() as flags:
            return _status(flags)
        case usage.TopFlags() as flags:
            return _top(flags)
        case usage.ExplainFlags() as flags:
            return _explain(flags)
        case usage.LogFlags() as flags:
            return _log_level(flags)
        case usage.WorkerFlags() | usage.LoraFlags() as flags:
            return _operate(flags)
        case usage.FreeWeightsFlags() as flags:
            _free_weights(flags)
        case usage.ChatFlags() as flags:
            _chat(flags)
        case usage.BenchFlags() as flags:
            with _ended_as_interrupted():
                return _bench(flags, words)
        case usage.EstimateFlags() as flags:
            return _estimate(flags)
        case usage.ProfileFlags() as flags:
            with _ended_as_interrupted():
                return _profile(flags)
        case usage.PlanFlags() as flags:
            return _plan(flags)
        case usage.HeatFlags() as flags:
            return _heat(flags)
        case usage.AutoscaleFlags() as flags:
            return _autoscale(flags)
        case usage.NewKeyFlags() | usage.KeysFileFlags() as flags:
            _key(flags)
        case usage.CompletionFlags() as flags:
            _completion(flags)
        case usage.UnitFlags() as flags:
            _unit(flags)
        case usage.DocsFlags() as flags:
            _docs(flags)
        case usage.InstallGpuFlags():
            _install_gpu()
        case usage.InstallNixlFlags():
            _install_nixl()
        case usage.InstallVllmFlags() as flags:
            _install_vllm(flags)
        case usage.InstallDiffusersFlags() as flags:
            _install_diffusers(flags)
        case usage.VersionFlags():
            print(version_text())
        case _:  # no command: the commands are shown
            pass
    return 0


@contextmanager
def _ended_as_interrupted() -> Iterator[None]:
    """Have SIGTERM and SIGHUP end a measurement as Ctrl-C does: it keeps its figures, and ends the `up`s that it has
    started."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell's background job
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.raise_signal(signal.SIGINT)

    ours = (signal.SIGTERM, signal.SIGHUP) if threading.current_thread() is threading.main_thread() else ()
    taken = [number for number in ours if signal.getsignal(number) == signal.SIG_DFL]  # not that of nohup
    for number in taken:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _status(flags: usage.StatusFlags) -> int:
    if flags.watch is not None:
        return _watch(flags, flags.watch)
    from deploy.local.show.status import show  # imported here because it loads gRPC: `chat` needs none

    with _fleet(flags) as config:
        return show(config, as_json=flags.json, weights=flags.state_dir.weights)


def _free_weights(flags: usage.FreeWeightsFlags) -> None:
    from deploy.local.show.weights import free_weights
    from deploy.local.table import size

    try:
        freed_bytes, held = free_weights(flags.memory or flags.state_dir.weights, flags.name or "")
    except Unavailable as wrong:
        if flags.memory:
            raise
        raise Unavailable(f"{wrong} (--memory DIR names the directory of a service that runs by itself)") from None
    if flags.name and not freed_bytes and not held:
        print(f"no weights of {flags.name} are there; `{COMMAND} status` lists those of `up`")
        return
    print(f"{size(freed_bytes)} of weights were freed")
    if held:
        print(f"engines use those of {', '.join(held)}; they stay")


def _explain(flags: usage.ExplainFlags) -> int:
    from deploy.local.show import explain

    with _fleet(flags) as config:
        if flags.key is None:
            return explain.show(config, flags.request, as_json=flags.json)
        if flags.request != "block":
            raise ConfigError(f"explain: one request, or block KEY; {flags.key!r} is too many")
        return explain.show_block(config, flags.key, as_json=flags.json)


def _log_level(flags: usage.LogFlags) -> int:
    from deploy.local.operate import change_level

    with _fleet(flags) as config:
        return change_level(config, flags.level, [flags.instance] if flags.instance else [], for_s=flags.for_s)


def _chat(flags: usage.ChatFlags) -> None:
    from deploy.local.chat.api import ChatApi
    from deploy.local.chat.chat import chat, noticed_interrupts

    with noticed_interrupts():
        chat(ChatApi(_url(flags), _api_key(flags)), flags)


def _completion(flags: usage.CompletionFlags) -> None:
    from deploy.local.completion import script

    print(script(flags.shell), end="")


def _unit(flags: usage.UnitFlags) -> None:
    from deploy.local.unit import unit

    print(unit(flags.service, flags.settings, of_user=flags.user), end="")


def _docs(flags: usage.DocsFlags) -> None:
    from deploy.local.docs import show

    show(" ".join(flags.topic))


def _up(flags: usage.UpFlags) -> int:
    from deploy.local.stack.block_store import block_store
    from deploy.local.stack.check import check
    from deploy.local.stack.model import NAME as BUNDLED
    from deploy.local.stack.model_source import cache_directory, fetch_source, find_default, find_source
    from deploy.local.stack.options import checked_options
    from deploy.local.stack.scale import ScaledWorkers
    from deploy.local.stack.up import exclusive, up

    if flags.model == BUNDLED and not Path(BUNDLED).exists():
        flags = replace(flags, model=usage.DEFAULT_MODEL)
    options, wanted = checked_options(flags)
    if flags.models:
        return _up_by_turns(flags, options, wanted)
    state_dir, weights = flags.state_dir, flags.engine in ("native", "vllm")
    cache = cache_directory(state_dir)
    os.environ.pop(CACHE_VARIABLE, None)  # workers get it from their file; the other services would refuse it
    source = find_default(cache) if flags.model == usage.DEFAULT_MODEL else find_source(flags.model, weights=weights)
    options = replace(options, model=str(source.path), model_name=flags.model_name or source.name, cache=str(cache))
    terminal = Terminal()

    def check_model(path: str, *, here: bool = True) -> None:
        options_here = replace(options, model=path)
        check(options_here, state_dir, python=sys.executable, model=here, notice=terminal.notice)

    check_model(options.model, here=source.here)  # first, because fetching the model may take minutes
    if flags.on == "ray":
        return _up_on_ray(flags, options, wanted, lambda: fetch_source(source, check_model, terminal, weights=weights))
    with exclusive(state_dir, flags.port), block_store(wanted, terminal.notice) as store:
        path = fetch_source(source, check_model, terminal, weights=weights)
        options = replace(options, model=str(path), store=store)
        return up(options, state_dir, terminal, None if flags.single else ScaledWorkers(options).keep)


def _up_by_turns(flags: usage.UpFlags, options: UpOptions, wanted: BlockStoreOptions) -> int:
    from deploy.local.stack.block_store import block_store
    from deploy.local.stack.check import check
    from deploy.local.stack.model_source import cache_directory, fetch_source
    from deploy.local.stack.turns import check_names, check_room, find_model, this_device, turn_model, turn_words
    from deploy.local.stack.up import exclusive, up

    state_dir, weights, terminal = flags.state_dir, flags.engine == "native", Terminal()
    cache = cache_directory(state_dir)
    options = replace(options, cache=str(cache), turns_device=this_device())
    os.environ.pop(CACHE_VARIABLE, None)  # as in _up
    words = turn_words(flags)
    sources = [find_model(word, cache, weights=weights) for word in words]
    check_names(sources)

    def check_model(name: str, path: str, *, here: bool = True) -> None:
        one = replace(options, model=path, model_name=name, turns=(TurnModel(name, path),), workers=1)
        check(one, state_dir, python=sys.executable, model=here, notice=terminal.notice)

    for source in sources:
        check_model(source.name, str(source.path), here=source.here)
    with exclusive(state_dir, flags.port), block_store(wanted, terminal.notice) as store:
        models = [
            turn_model(word, each.name, fetch_source(each, partial(check_model, each.name), terminal, weights=weights))
            for word, each in zip(words, sources, strict=True)
        ]
        if weights:
            check_room(models, options.awake, usable_memory_bytes())
        first = models[0]
        options = replace(options, model=first.path, model_name=first.name, turns=models, store=store)
        return up(options, state_dir, terminal)


def _up_on_ray(flags: usage.UpFlags, options: UpOptions, wanted: BlockStoreOptions, fetch: Callable[[], Path]) -> int:
    from deploy.local.ray.cluster import connect
    from deploy.local.ray.up import up_on_ray
    from deploy.local.stack.up import exclusive

    cluster = connect(flags.ray_address)
    try:
        with exclusive(flags.state_dir, flags.port, port_here=False):
            options = replace(options, model=str(fetch()), store=wanted if wanted.pool_bytes else None)
            return up_on_ray(options, cluster, flags.state_dir, Terminal())
    finally:
        cluster.close()


def _route(flags: usage.RouteFlags) -> int:
    from deploy.local.route.route import route

    return route(flags, Terminal())


def _pull(flags: usage.PullFlags) -> None:
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


def _key(flags: usage.NewKeyFlags | usage.KeysFileFlags) -> None:
    from deploy.local import key

    match flags:
        case usage.NewKeyFlags():
            key.new(flags.name, {name: getattr(flags, name) for name in key.LIMITS}, flags.file, flags.out)
        case usage.ListKeysFlags():
            print(highlight(key.listed(_keys_file(flags)), sys.stdout))
        case usage.RevokeKeyFlags():
            key.revoke(flags.name, _keys_file(flags))


def _keys_file(flags: usage.KeysFileFlags) -> Path:
    """Return the keys file: that of the flags, else that of the `up` that runs here."""
    file = flags.file or _running(flags.state_dir).get("keys")
    if not file:
        raise ConfigError("name the keys file with --file: no `up` with --keys runs here")
    return Path(file)


def _install_gpu() -> None:
    """Check that CuPy is installed, which `./headrace` of a checkout has done before this runs. A missing GPU is no
    error, because images are built without one and the driver may be installed later."""
    from deploy.local.stack import gpus

    gpus.require_cupy()
    print("CuPy is installed")
    try:
        print(f"{gpus.count_visible()} GPUs: {COMMAND} up --device cuda")
    except ConfigError as wrong:
        print(f"no GPU can be used yet: {wrong}")


def _install_nixl() -> None:
    """Check that NIXL is installed: `./headrace` of a checkout has installed it before this runs."""
    if find_spec("nixl_cu13") is None:
        raise ConfigError(f"NIXL is not installed here: {install_command('nixl')}")
    print("NIXL is installed: set peers.backend of every kvbm to nixl")


def _install_vllm(flags: usage.InstallVllmFlags) -> None:
    from deploy.local import install_vllm

    device = flags.device or ("cuda" if Path("/dev/nvidiactl").exists() else "cpu")
    new = install_vllm.install(device, lambda step: print(step, file=sys.stderr, flush=True), version=flags.version)
    print(f"vLLM is {'installed' if new else 'there already'}: {install_vllm.ENVIRONMENT}")
    print(f"{COMMAND} up --engine vllm")


def _install_diffusers(flags: usage.InstallDiffusersFlags) -> None:
    from deploy.local import install_diffusers

    device = flags.device or ("cuda" if Path("/dev/nvidiactl").exists() else "cpu")
    new = install_diffusers.install(device, lambda step: print(step, file=sys.stderr, flush=True))
    print(f"diffusers is {'installed' if new else 'there already'}: {install_diffusers.ENVIRONMENT}")
    print(f"{COMMAND} up --engine diffusers --model DIRECTORY")


def _operate(flags: usage.WorkerFlags | usage.LoraFlags) -> int:
    from deploy.local.operate import operate  # imported here because it loads gRPC
    from shared.messages.people import OperateWorker

    prefixes, model = (flags.instance, flags.model) if isinstance(flags, usage.LoraFlags) else ([flags.instance], "")
    match flags:
        case usage.SleepFlags(level=level):
            asked = OperateWorker("sleep", level=level)
        case usage.WakeFlags():
            asked = OperateWorker("wake")
        case usage.DrainFlags():
            asked = OperateWorker("drain")
        case usage.ResumeFlags():
            asked = OperateWorker("resume")
        case usage.ClearFlags():
            asked = OperateWorker("clear")
        case usage.LoadLoraFlags(name=name, directory=directory):
            asked = OperateWorker("load_lora", name, path=str(Path(directory).absolute()))
        case usage.UnloadLoraFlags(name=name):
            asked = OperateWorker("unload_lora", name)
        case _:
            raise AssertionError(flags)
    with _fleet(flags) as config:
        return operate(config, asked, prefixes, model, timeout_s=flags.timeout_s)


@contextmanager
def _fleet(flags: usage.AddressFlags) -> Iterator[FleetConfig]:
    """Yield the addresses of the fleet: those in the flags, else those of the `up` that runs here."""
    state_dir = flags.state_dir
    running = _running(state_dir)
    elsewhere = flags.etcd or any(name.startswith("HEADRACE_DISCOVERY_") for name in environment())
    if running.get("single"):
        if not elsewhere:
            raise ConfigError(
                "`up --single` runs here, one process whose services no other process reaches: use `chat`, `bench`,"
                " its page and its /metrics, or start it without --single"
            )
        running = {}
    if not (running or elsewhere):
        raise ConfigError(
            f"no `up` runs with --state {state_dir.home}; start one with `{COMMAND} up`, "
            "or name the servers of another fleet with --etcd and --nats"
        )
    config = _fleet_config(flags, running)
    logging.basicConfig(level=logging.CRITICAL)  # silence the log of retry loops; notes and errors have the reason
    try:
        yield config
    except DiscoveryDown as wrong:
        raise DiscoveryDown(f"{wrong}; does `{COMMAND} up` run? (--state, or --nats and --etcd)") from None
    except ConfigError as wrong:
        raise _as_typed(wrong, flags) from None


def _as_typed(wrong: ConfigError, flags: usage.AddressFlags) -> ConfigError:
    """Return an error of a setting as one of the flag that has set it."""
    text = str(wrong)
    for setting, flag, value in (("nats.url", "--nats", flags.nats), ("discovery.endpoints", "--etcd", flags.etcd)):
        if value and text.startswith(setting):
            return ConfigError(flag + text.removeprefix(setting))
    return wrong


def _fleet_config(flags: usage.AddressFlags, running: dict[str, Any]) -> FleetConfig:
    """Return the addresses in the flags, else those of the `up` with the record `running`, which may be empty."""
    from deploy.local.show.fleet import fleet_config

    if running and flags.nats in ("", running.get("nats")):
        return fleet_config(namespace=flags.namespace, nats="", etcd=flags.etcd, file=flags.state_dir.fleet)
    return fleet_config(  # do not send the password of this NATS to another one
        namespace=flags.namespace,
        nats=flags.nats,
        etcd=flags.etcd or running.get("etcd", ""),
        path="" if flags.etcd else running.get("discovery", ""),
    )


def _check(flags: usage.CheckFlags) -> int:
    from deploy.local.check.run import CheckOptions, check
    from deploy.local.check.serve import serve
    from deploy.local.check.wire import parse_address
    from deploy.local.stack.block_store import MEMORY, store_request

    address = {name: parse_address(getattr(flags, name) or "") for name in ("serve", "peer")}
    for name, parsed in address.items():
        if parsed is None and getattr(flags, name) not in (None, ""):
            raise ConfigError(f"--{name} {getattr(flags, name)}: not HOST:PORT")
    if flags.serve is not None:
        if flags.peer or flags.json or address["serve"] is None:
            raise ConfigError("--serve answers another machine: give HOST:PORT, and neither --peer nor --json")
        return serve(address["serve"])
    running, variables = _running(flags.state_dir), environment()
    running = {} if running.get("single") else running  # it has no servers
    fleet = _fleet_config(flags, running)
    device = "cuda" if Path("/dev/nvidiactl").exists() else "cpu"
    options = CheckOptions(
        fleet=fleet,
        nats=bool(flags.nats or running.get("nats") or "HEADRACE_NATS_URL" in variables),
        etcd=fleet.discovery.backend == "etcd"
        and bool(flags.etcd or running.get("etcd") or "HEADRACE_DISCOVERY_ENDPOINTS" in variables),
        pool=flags.kvbm_pool or MEMORY,
        pool_bytes=store_request(flags.kvbm_bytes, None, "", engine="native", device=device).pool_bytes,
        pool_named=bool(flags.kvbm_bytes),
        disk=flags.kvbm_disk or flags.state_dir.home,
        disk_named=flags.kvbm_disk is not None,
        peer=address["peer"],
    )
    try:
        return check(options, as_json=flags.json)
    except ConfigError as wrong:
        raise _as_typed(wrong, flags) from None


def _watch(flags: usage.StatusFlags, every_s: float) -> int:
    from deploy.local.show.status import watch

    if flags.json:
        raise ConfigError("--watch shows tables: leave out --json")
    if not LEAST_WATCH_S <= every_s <= MOST_WATCH_S:
        raise ConfigError(f"--watch is {LEAST_WATCH_S:g} to {MOST_WATCH_S:g} seconds")
    with _fleet(flags) as config:
        return watch(config, every_s)


def _top(flags: usage.TopFlags) -> int:
    if not LEAST_WATCH_S <= flags.every <= MOST_WATCH_S:
        raise ConfigError(f"--every is {LEAST_WATCH_S:g} to {MOST_WATCH_S:g} seconds")
    if find_spec("rich") is None:
        raise ConfigError(f"top needs the package rich, which is not installed; use `{COMMAND} status --watch`")
    from deploy.local.top.app import require_terminal, top

    require_terminal()
    with _fleet(flags) as config:
        return top(config, flags.every)


def _bench(flags: usage.BenchFlags, words: Sequence[str]) -> int:
    from deploy.local.bench import sweep
    from deploy.local.bench.files import plot_files
    from deploy.local.bench.flags import bench_options, prefix_of
    from deploy.local.chat.api import connection_to

    if flags.up[:1] == ["plot"]:
        return plot_files(flags.up[1:], "plot" if flags.out == usage.BenchFlags().out else prefix_of(flags.out))
    connection_to(url := _url(flags))  # checks the address
    prompts = "" if flags.prompts is None else _text("--prompts", flags.prompts)
    options = bench_options(flags, words, url, _api_key(flags), prompts)
    return sweep.run_aiperf(options) if flags.driver == "aiperf" else sweep.bench(options)


def _estimate(flags: usage.EstimateFlags) -> int:
    from deploy.local.size.estimate import estimate

    return estimate(flags)


def _profile(flags: usage.ProfileFlags) -> int:
    from deploy.local.chat.api import connection_to
    from deploy.local.size import profile

    profile.check_flags(flags)
    if flags.up and flags.url:
        raise ConfigError("--url measures an endpoint, flags after -- start one: give one of the two")
    if flags.workers > 1 and not flags.up:
        raise ConfigError(
            "--workers: workers are busy together only where they are started: give flags of `up` after --"
        )
    connection_to(url := _url(flags))  # checks the address
    options = profile.ProfileOptions(
        longest=flags.longest,
        most=flags.most,
        workers=flags.workers,
        limit_s=flags.limit_s,
        out=Path(flags.out),
        url="" if flags.up else url,
        model=flags.model,
        api_key=_api_key(flags),
        state=flags.state_dir.home if _running(flags.state_dir).get("url") == url else None,
        words=flags.up,
    )
    try:
        return profile.profile(options)
    except Unavailable as wrong:
        if flags.up or flags.url:
            raise
        raise Unavailable(f"{wrong}; flags of `up` after -- start a worker to measure: -- --engine native") from None


def _plan(flags: usage.PlanFlags) -> int:
    from deploy.local.size.plan import plan

    return plan(flags)


def _heat(flags: usage.HeatFlags) -> int:
    from deploy.local.show.heat import show

    with _fleet(flags) as config:
        return show(config, flags.top, flags.png, as_json=flags.json)


def _autoscale(flags: usage.AutoscaleFlags) -> int:
    from deploy.local.autoscale.autoscale import autoscale

    with _fleet(flags) as config:
        return autoscale(config, flags)


def _url(flags: usage.ClientFlags) -> str:
    """Return the URL of the API: that of the flags, else that of the `up` that runs here."""
    running = {} if flags.url else _running(flags.state_dir)
    return (flags.url or str(running.get("url", usage.DEFAULT_URL))).rstrip("/")


def _api_key(flags: usage.ClientFlags) -> str:
    """Return the API key from a file or, as for all OpenAI clients, from the environment. Empty if there is none. No
    flag takes the key itself, because `ps` would show it."""
    file = flags.api_key_file
    key = (os.environ.get("OPENAI_API_KEY", "") if file is None else _text("--api-key-file", file)).strip()
    if not key.isascii() or not key.isprintable():
        source = "OPENAI_API_KEY" if file is None else f"--api-key-file {file}"
        raise ConfigError(f"{source}: must contain only a key")
    return key


def _text(flag: str, file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as wrong:
        raise ConfigError(f"{flag} {file}: {getattr(wrong, 'strerror', None) or wrong}") from None


def _running(state_dir: StateDirectory) -> dict[str, Any]:
    """Return the record of the `up` that runs with this state directory; empty if none runs."""
    try:
        record = json.loads(state_dir.record.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


if __name__ == "__main__":
    sys.exit(main())
