"""Plans what `up` runs: the programs, their settings as TOML and their order. Pure: options and free ports in, launches
out."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from deploy.local.stack import servers
from deploy.local.stack.supervise import Program
from deploy.local.state import StateDirectory

Value = str | int | float | bool | list[str]
Settings = Mapping[str, "Value | Mapping[str, Value]"]
"""The content of a TOML file: keys and one level of tables."""

LOOPBACK = "127.0.0.1"
SERVICE_DRAIN_S = 40.0
"""Seconds from SIGTERM to SIGKILL for a service. Above the services' own limits: a service drains, then ends by
itself."""
SINGLE = "single"
"""The name of the program that is frontend, router and worker."""
SERVER_DRAIN_S = 5.0
"""Seconds from SIGTERM to SIGKILL for NATS and etcd."""


class BlockStoreOptions(Struct, frozen=True):
    """Settings of the block store (kvbm) that the workers share."""

    pool: str
    """Absolute path of a directory in memory."""
    pool_bytes: int
    disk: str = ""
    """Absolute path of a directory. Empty means no disk tier."""
    disk_bytes: int = 0
    needed: bool = True
    """True if a flag asked for it: `up` stops when it cannot start, instead of going on without it."""


class Gpus(Struct, frozen=True):
    """The GPUs of the workers: worker i computes on GPU i modulo `count`, or with several ranks on the group i modulo
    the number of groups: GPUs 0 to ranks - 1, and so on."""

    count: int
    memory_share: float
    """Share of each GPU's memory for all of its workers together, above 0 and at most 1."""
    settings: Mapping[str, Value] = {}
    """Further settings of a worker's table `cuda`."""
    ranks: int = 1
    """The GPUs of a worker."""

    @property
    def groups(self) -> int:
        """How many workers can have GPUs of their own."""
        return max(1, self.count // self.ranks)

    def place_of(self, worker: int, workers: int) -> tuple[int, int]:
        """Return the first GPU of one of the `workers`, and how many of them share it."""
        group = worker % self.groups
        return group * self.ranks, len(range(group, workers, self.groups))

    def workers(self, asked: int | None, usual: int) -> int:
        """Return how many workers there are, of which `asked` were asked for: as many as is `usual`, but one if they
        are of several ranks and would share GPUs."""
        return usual if asked is not None or self.ranks == 1 else min(usual, self.groups)


class AccessFiles(Struct, frozen=True):
    """Absolute paths of the frontends' API keys, TLS certificate and TLS key. Empty if there is none."""

    keys: str = ""
    tls_cert: str = ""
    tls_key: str = ""


ServiceName = Literal["frontend", "router", "worker", "kvbm", "turns"]
Setting = tuple[str, str]
"""A flag of a service and its value."""


class TurnModel(Struct, frozen=True):
    """A model that takes turns with others, on a worker of its own."""

    name: str
    path: str
    chat_template: str = ""
    sampling: Mapping[str, Value] = {}


class DiffusersPlace(Struct, frozen=True):
    """What workers with diffusers compute with."""

    python: str
    """Path of the Python of diffusers' environment."""
    gpus: tuple[str, ...] = ()
    """GPUs that the workers take in turn. None if they compute on the CPU."""


class UpOptions(Struct, frozen=True):
    """Options of `up`, checked."""

    model: str
    """Absolute path of a directory or GGUF file."""
    model_name: str
    cache: str = ""
    """Absolute path of the directory of converted weights. Empty means in the state directory."""
    chat_template: str = ""
    """The absolute path of a chat template, or the name of one that Headrace has. Empty means the model's own."""
    sampling: Mapping[str, Value] = {}
    """Sampling parameters of requests that do not set them; those that are missing are the model's own."""
    port: int = 8000
    frontends: int = 1
    """Number of frontends; several share the port."""
    routers: int = 1
    workers: int = 2
    late_workers: bool = False
    """True if only the first worker starts with the other programs, and the rest once it serves."""
    prefill: int = 0
    """Number of workers among them that only compute prompts."""
    decode: int = 0
    """Number of workers among them that only decode. They and those of `prefill` and `encode` are all workers, or there
    are none of either."""
    encode: int = 0
    """Number of workers among them that only encode images."""
    policy: str = "kv"
    turns: Sequence[TurnModel] = ()
    """The models that take turns, one for each worker; `model` is the first of them. Empty if one model is served."""
    turns_device: str = "cpu"
    """The name of the device on which they take turns: no other machine of the fleet has one of that name."""
    awake: int = 1
    """The number of them that may be awake at once."""
    discovery: Literal["etcd", "file"] = "etcd"
    engine: str = "native"
    tensor_parallel: int = 1
    simulated: Mapping[str, Value] = {}
    """Settings of the simulated engine."""
    vllm_python: str = ""
    """Path of the Python of vLLM's environment. Empty with another engine."""
    vllm_args: str = ""
    """Path of a file with arguments of vLLM. Empty if there is none."""
    vllm_gpus: tuple[str, ...] = ()
    """GPUs of each worker with vLLM. None if vLLM computes on the CPU."""
    diffusers: DiffusersPlace | None = None
    """What workers with diffusers compute with. None with another engine."""
    gpus: Gpus | None = None
    """None if workers compute on the CPU."""
    weights_bytes: int = 0
    """Most bytes of weights that workers share in memory. 0 means that they are converted on the disk."""
    standby: bool = False
    """True if an engine stands by at each worker."""
    store: BlockStoreOptions | None = None
    nats: str = ""
    """URL of a NATS that runs already. Empty means that one is started."""
    etcd: str = ""
    """host:port of an etcd that runs already. Empty means that one is started."""
    namespace: str = "default"
    single: bool = False
    """True if the services are one process, which needs no servers: one frontend, one router, one worker."""
    observe_host: str = LOOPBACK
    """The address of services' /health and KV events. If it is not of loopback, other machines follow the events."""
    access: AccessFiles = AccessFiles()
    log_level: str = "info"
    overrides: Mapping[ServiceName, Sequence[Setting]] = {}
    """Settings of services that take precedence over those that `plan` derives."""


class Launch(Struct, frozen=True):
    """One program of a stack, with its command line."""

    program: Program
    arguments: tuple[str, ...]
    observe: str = ""
    """Base URL of its /live, /health and /metrics; empty for servers that have none."""
    also: tuple[str, ...] = ()
    """Base URLs of the program's other services, in the order in which they become ready. It is ready when all are."""
    hands_over: bool = False
    """True for a worker with a role: before it exchanges blocks with the kvbm, no prompt is handed over to it or by
    it. Also for a kvbm that a flag asked for."""
    added: bool = False
    """True for a program that is added to a stack that runs."""


class Stack(Struct, frozen=True):
    """Everything that one `up` runs."""

    launches: tuple[Launch, ...]
    files: dict[Path, str]
    """Text of each file to write before the programs start."""
    url: str
    model: str
    """The model's name for clients."""
    nats: str
    """URL of NATS; empty if the services are one process."""
    etcd: str
    """Address of etcd; empty if discovery uses files or memory."""
    access: AccessFiles = AccessFiles()
    common: Settings = {}
    """The settings that all services share: what connects them."""
    by_turns: tuple[str, ...] = ()
    """The names of the models that take turns: `up` is ready once their workers are, and each frontend knows them."""
    other_role: str = ""
    """The role that other machines of the fleet bring; empty if this one needs no other."""

    @property
    def shares_blocks(self) -> bool:
        """Whether a flag lets kvbms of other machines read the blocks of this one."""
        return any(re.match("--peers[.-]listen=.", flag) for launch in self.launches for flag in launch.arguments)

    @property
    def makes_pictures(self) -> bool:
        """Whether the model makes pictures or videos."""
        return any('engine = "diffusers"' in text for text in self.files.values())

    @property
    def single(self) -> bool:
        """Whether the services are one process."""
        return not self.nats

    @property
    def page(self) -> str:
        """The address of the frontends' page; empty if keys or settings of the page may have moved it."""
        moved = any(flag.startswith("--ui-") for launch in self.launches for flag in launch.arguments)
        return "" if self.access.keys or moved else f"{self.url}/ui"

    @property
    def picker(self) -> str:
        """HOST:PORT of the endpoint picker, which gateways ask; empty if there is none."""
        flags = [flag for launch in self.launches for flag in launch.arguments]
        settings = [match for flag in flags if (match := re.match(r"--picker[.-](host|port)=(.+)", flag))]
        found = {match[1]: match[2] for match in settings}
        return f"{found.get('host', '127.0.0.1')}:{found['port']}" if found.get("port", "0") != "0" else ""


def default_replicas(cores: int) -> int:
    """Return the default number of frontends and of routers. With two, one may fail; on two cores or fewer, a second
    one would take time from the engines."""
    return 2 if cores > 2 else 1


def ports_needed(options: UpOptions) -> int:
    """Return how many free ports `plan` needs: one for NATS and one to observe each service."""
    services = options.frontends + options.routers + options.workers
    return 1 + services + (options.store is not None) + bool(options.turns)


def plan(
    options: UpOptions, state_dir: StateDirectory, ports: list[int], *, python: str, cores: int, password: str
) -> Stack:
    """Return the programs and their files. `ports` are `ports_needed` free ports; the workers share the `cores`.

    The NATS server that is started gives a client with `password` the rights of a service. etcd listens on a socket in
    the run directory, which only this user can enter. Programs start in that directory.
    """
    assert len(ports) == ports_needed(options)
    nats_port, *observed = ports
    nats, etcd = ("", "") if options.single else _addresses(options, state_dir, nats_port)
    launches: list[Launch] = []
    files: dict[Path, str] = {}

    def service(program: Program, module: ServiceName, settings: Settings, *, hands_over: bool = False) -> None:
        launch, texts = _service(options, state_dir, program, module, settings, observed.pop(), python)
        launches.append(replace(launch, hands_over=hands_over))
        files.update(texts)

    services = {"user": servers.NATS_USER, "password": password, "inbox": servers.NATS_INBOX}
    wiring: dict[str, Value | Mapping[str, Value]] = {}
    if not options.single:
        wiring["nats"] = {"url": nats, **({} if options.nats else services)}
        path, endpoints = str(state_dir.run / "discovery"), etcd.split(",") if etcd else []
        wiring["discovery"] = {"backend": options.discovery, "endpoints": endpoints, "path": path}
        files[state_dir.fleet] = toml({**wiring, "observe": {"events": str(state_dir.run)}})
        if not options.nats:
            files[state_dir.run / "nats.conf"] = servers.nats_settings(nats_port) + servers.nats_authorization(password)
        launches += _servers(options, state_dir)
    common = {"namespace": options.namespace, **wiring}
    access = options.access
    for name in _names("frontend", options.frontends):
        service(Program(name, 0, SERVICE_DRAIN_S), "frontend", {**common, **_door(options)})
    for name in _names("router", options.routers):
        service(Program(name, 2, SERVICE_DRAIN_S), "router", common | {"policy": options.policy})
    store = options.store
    if store is not None:
        # On two cores, starting it with the others delays the first token by a tenth. So the default block store starts
        # late; one that flags ask for starts with the others, so that the user learns early if it cannot work.
        program = Program("kvbm", 2, SERVICE_DRAIN_S, store.needed, not store.needed)
        settings = common | tiers(store, arenas=2 if options.encode else 1)
        service(program, "kvbm", settings, hands_over=store.needed)
    if options.turns:
        turns: dict[str, Value | Mapping[str, Value]] = {"device": options.turns_device, "awake": options.awake}
        service(Program("turns", 2, SERVICE_DRAIN_S), "turns", common | turns)
    if options.weights_bytes:
        launches.append(_memory(options, state_dir, python))
    for index, (name, role) in enumerate(named_workers(options)):
        settings = common | worker_settings(options, index, role, state_dir, cores)
        program = Program(name, 1, SERVICE_DRAIN_S, late=options.late_workers and index > 0)
        service(program, "worker", settings, hands_over=bool(role))
    if options.single:
        launches = [_as_one(launches, python)]
    url = f"{'https' if access.tls_cert else 'http'}://127.0.0.1:{options.port}"
    other_role = {(True, False): "decode", (False, True): "prefill"}.get((options.prefill > 0, options.decode > 0), "")
    by_turns = tuple(model.name for model in options.turns)
    return Stack(tuple(launches), files, url, options.model_name, nats, etcd, access, common, by_turns, other_role)


def _door(options: UpOptions) -> dict[str, Value | Mapping[str, Value]]:
    """Return what only frontends have in their settings."""
    access = options.access
    http: dict[str, Value] = {"port": options.port, "tls_cert": access.tls_cert, "tls_key": access.tls_key}
    if options.frontends > 1:
        http["reuse_port"] = True
    expected: dict[str, Value] = {}
    if options.turns:
        expected = {"expected_models": [model.name for model in options.turns]}
    return {**expected, "http": http, "access": {"keys_file": access.keys}}


def module_of(service: ServiceName) -> str:
    """Return the module that a service is started as."""
    return "services.worker.turns" if service == "turns" else f"services.{service}"


def separated(options: UpOptions) -> UpOptions:
    """Return options by which each service is a program of its own, whose settings can be checked alone."""
    return replace(options, single=False, discovery="file", nats="nats://127.0.0.1") if options.single else options


def _addresses(options: UpOptions, state_dir: StateDirectory, nats_port: int) -> tuple[str, str]:
    """Return the URL of NATS and the address of etcd."""
    etcd = "" if options.discovery == "file" else options.etcd or f"unix:{state_dir.run / servers.ETCD_SOCKET}"
    return options.nats or f"nats://127.0.0.1:{nats_port}", etcd


def _as_one(launches: Sequence[Launch], python: str) -> Launch:
    """Return the program that runs the services of these launches: frontend, router and worker."""
    words: list[str] = []
    for launch in launches:
        _python, _isolated, _module, module, *flags = launch.arguments
        words += [module.removeprefix("services."), *flags]
    frontend, router, worker = (launch.observe for launch in launches)
    program = Program(SINGLE, 0, sum(launch.program.drain_limit_s for launch in launches))
    return Launch(program, (python, "-P", "-m", "services.single", *words), frontend, also=(worker, router))


def plan_attached(
    options: UpOptions,
    stack: Stack,
    state_dir: StateDirectory,
    name: str,
    attached: Mapping[str, Value],
    port: int,
    *,
    python: str,
) -> tuple[Launch, dict[Path, str]]:
    """Return one more worker of a stack that runs, with its files: one for a server that runs already. `attached` has
    its settings, `port` is to observe it."""
    one = replace(options, workers=1)
    return plan_worker(one, stack, state_dir, name, port, python=python, more={"attached": attached})


def plan_worker(
    options: UpOptions,
    stack: Stack,
    state_dir: StateDirectory,
    name: str,
    port: int,
    *,
    python: str,
    index: int = 0,
    role: str = "",
    cores: int = 1,
    more: Settings | None = None,
) -> tuple[Launch, dict[Path, str]]:
    """Return one more worker of a stack that runs, with its files: that with the number `index`, and with `more`
    settings."""
    settings = {**stack.common, **worker_settings(options, index, role, state_dir, cores), **(more or {})}
    program = Program(name, 1, SERVICE_DRAIN_S, needed=False)
    launch, files = _service(options, state_dir, program, "worker", settings, port, python)
    return replace(launch, added=True, hands_over=bool(role)), files


def _service(
    options: UpOptions,
    state_dir: StateDirectory,
    program: Program,
    module: ServiceName,
    settings: Settings,
    port: int,
    python: str,
) -> tuple[Launch, dict[Path, str]]:
    """Return the launch of a service that is observed at `port`, and its file."""
    file = state_dir.run / f"{program.name}.toml"
    host = options.observe_host
    events = str(state_dir.run) if host == LOOPBACK else ""
    observe: dict[str, Value] = {"host": host, "port": port, "events": events, "log_level": options.log_level}
    flags = [f"{flag}={value}" for flag, value in options.overrides.get(module, ())]
    arguments = (python, "-P", "-m", module_of(module), "--config", str(file), *flags)
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    return Launch(program, arguments, url), {file: toml({**settings, "observe": observe})}


def _servers(options: UpOptions, state_dir: StateDirectory) -> list[Launch]:
    """Return the NATS server and etcd, unless the user's own are used."""
    found: list[Launch] = []
    if not options.nats:
        arguments = (str(servers.nats_server()), "-c", str(state_dir.run / "nats.conf"))
        found.append(Launch(Program("nats", 3, SERVER_DRAIN_S), arguments))
    if options.discovery != "file" and not options.etcd:
        client, peer = f"unix://{servers.ETCD_SOCKET}", f"unix://{servers.PEER_SOCKET}"
        etcd = servers.etcd_arguments(client, peer, state_dir.run / "etcd")
        found.append(Launch(Program("etcd", 3, SERVER_DRAIN_S), (str(servers.etcd()), *etcd)))
    return found


def _memory(options: UpOptions, state_dir: StateDirectory, python: str) -> Launch:
    """Return the memory service, which keeps the workers' weights: they are drained first."""
    flags = (
        f"--directory={state_dir.weights}",
        f"--size-bytes={options.weights_bytes}",
        f"--log-level={options.log_level}",
    )
    program = Program("memory", 2, SERVER_DRAIN_S, needed=False)
    return Launch(program, (python, "-P", "-m", "services.worker.memory", *flags))


PICTURES: dict[str, Value] = {"max_running": 4, "stall_s": 600.0}
"""Settings of workers that make pictures: each takes memory of its own, and a step of a large video takes minutes."""


def worker_settings(
    options: UpOptions, index: int, role: str, state_dir: StateDirectory, cores: int
) -> dict[str, Value | Mapping[str, Value]]:
    """Return what only workers have in their settings. The worker `index` has the role `role`, or does all."""
    own = options.turns[index] if options.turns else _one_model(options)
    at_once = options.awake if options.turns else options.workers
    settings: dict[str, Value | Mapping[str, Value]] = {
        "model": own.path,
        "model_name": own.name,
        "chat_template": own.chat_template,
        "sampling": own.sampling,
        "cache": options.cache or str(state_dir.models),
        "engine": options.engine,
        "threads": 0 if options.vllm_gpus else max(1, cores // at_once),  # vLLM on GPUs chooses better
        "simulated": options.simulated,
        "kvbm": {"pool": options.store.pool if options.store is not None else "", **_embeddings(options)},
    }
    if options.tensor_parallel > 1:
        settings |= {"tensor_parallel": options.tensor_parallel}
    if options.weights_bytes:
        settings |= {"weights": {"memory": str(state_dir.weights)}}
    if options.turns:
        settings |= {"turns": options.turns_device}
    if options.standby:
        settings |= {"standby": True}
    if role:
        settings |= {"role": role}
    if options.vllm_python:
        settings |= {"vllm_python": options.vllm_python, "vllm_args": options.vllm_args}
    if options.vllm_gpus:
        settings |= {"vllm_gpus": options.vllm_gpus[index]}
    if options.diffusers is not None:
        taken = options.diffusers.gpus
        gpu = {"gpu": taken[index % len(taken)]} if taken else {}
        settings |= {"diffusers": {"python": options.diffusers.python, **gpu}, **PICTURES}
    if options.gpus is not None:
        settings |= {"device": "cuda", "cuda": _cuda(options, options.gpus, index)}
    return settings


def _embeddings(options: UpOptions) -> dict[str, Value]:
    """Return the setting by which workers share embeddings of images, if there are some that only encode."""
    return {"embeddings": True} if options.encode else {}


def _one_model(options: UpOptions) -> TurnModel:
    """Return the model that all workers serve."""
    return TurnModel(options.model_name, options.model, options.chat_template, options.sampling)


def _cuda(options: UpOptions, gpus: Gpus, worker: int) -> dict[str, Value]:
    """Return a worker's table `cuda`. The workers of one GPU have equal parts of its memory; models take turns on the
    first one."""
    gpu, sharing = (0, options.awake) if options.turns else gpus.place_of(worker, options.workers)
    return {"gpu": gpu, "memory_share": gpus.memory_share / sharing, **gpus.settings}


def tiers(store: BlockStoreOptions, *, arenas: int = 1) -> dict[str, Mapping[str, Value]]:
    """Return what only a kvbm has in its settings. Embeddings of images need an arena of their own."""
    pool: dict[str, Value] = {"directory": store.pool, "size_bytes": store.pool_bytes}
    if arenas > 1:
        pool["arenas"] = arenas
    found: dict[str, Mapping[str, Value]] = {"pool": pool}
    if store.disk:
        found["disk"] = {"directory": store.disk, "limit_bytes": store.disk_bytes}
    return found


def _names(service: str, count: int) -> list[str]:
    return [service] if count == 1 else [f"{service}-{index}" for index in range(count)]


def named_workers(options: UpOptions) -> list[tuple[str, str]]:
    """Return the name and the role of each worker; the role is empty if each does all."""
    encode = [(f"encode-{index}", "encode") for index in range(options.encode)]
    if not options.prefill and not options.decode:
        return [*((f"worker-{index}", "") for index in range(options.workers - options.encode)), *encode]
    roles = {"prefill": options.prefill, "decode": options.decode}
    split = [(f"{role}-{index}", role) for role, number in roles.items() for index in range(number)]
    return split + encode


def toml(settings: Settings) -> str:
    """Return `settings` as TOML. JSON's strings, numbers, booleans and arrays of strings are TOML too, except for the
    character DEL."""
    plain = [f"{key} = {_value(value)}" for key, value in settings.items() if not isinstance(value, Mapping)]
    for name, table in settings.items():
        if isinstance(table, Mapping):
            plain += ["", f"[{name}]", *(f"{key} = {_value(value)}" for key, value in table.items())]
    return "\n".join(plain) + "\n"


def _value(value: Value | Mapping[str, Value]) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
