"""Plans what Ray runs: the programs, their settings and where they run. Pure: options and the head node in, orders out.

head node        NATS and etcd, unless they run already; the first frontend and the first router
any node         further frontends and routers
nodes of workers the workers, spread, each with GPUs of its own if it computes on some
                 one kvbm on each of these nodes, which watch.py adds as Ray places workers. With roles they read
                 from each other, since a prompt may be computed at another node than the one that decodes
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from deploy.local.ray.order import Order, Place
from deploy.local.stack import servers
from deploy.local.stack.stack import (
    SERVER_DRAIN_S,
    SERVICE_DRAIN_S,
    AccessFiles,
    ServiceName,
    Settings,
    UpOptions,
    Value,
    named_workers,
    tiers,
    toml,
    worker_settings,
)
from deploy.local.state import StateDirectory

SETTINGS = "settings.toml"
SERVICE_VARIABLES: Mapping[str, Place] = {"HEADRACE_OBSERVE_HOST": "host", "HEADRACE_OBSERVE_URL_FILE": "url_file"}
HEAD_PORTS = 3
"""Free ports that the head node needs: NATS, and two of etcd."""


class Head(Struct, frozen=True):
    """The head node of a cluster."""

    node: str
    """Ray's id of the node."""
    host: str
    ports: tuple[int, ...]
    """HEAD_PORTS free ports of it."""


class Fleet(Struct, frozen=True):
    """Everything that one `up --on ray` runs."""

    name: str
    """A word that is in the names of this fleet's directories."""
    orders: tuple[Order, ...]
    workers: Mapping[str, Order]
    """Role → a worker of it, without its name. The role is empty if workers do all."""
    store: Order | None
    """The kvbm of a node, without the node. None if there is none."""
    url: str
    """The API of the first frontend, without /v1."""
    model: str
    nats: str
    etcd: str
    access: AccessFiles
    text: str
    """The settings with which a further process joins, as TOML."""


def plan(options: UpOptions, head: Head, state_dir: StateDirectory, *, name: str, password: str) -> Fleet:
    """Return what Ray is to run. NATS that is started gives who has the `password` the rights of a service."""
    nats = options.nats or f"nats://{head.host}:{head.ports[0]}"
    etcd = options.etcd or f"{head.host}:{head.ports[1]}"
    users: dict[str, Value] = {"user": servers.NATS_USER, "password": password, "inbox": servers.NATS_INBOX}
    wiring: dict[str, Value | Mapping[str, Value]] = {
        "nats": {"url": nats, **({} if options.nats else users)},
        "discovery": {"backend": "etcd", "endpoints": etcd.split(",")},
    }
    common = {"namespace": options.namespace, **wiring}
    access = options.access
    http: dict[str, Value] = {"port": options.port, "tls_cert": access.tls_cert, "tls_key": access.tls_key}
    if options.frontends > 1:
        http["reuse_port"] = True  # several nodes may have one address
    frontend = _service(options, "frontend", 0, common | {"http": http, "access": {"keys_file": access.keys}})
    router = _service(options, "router", 2, common | {"policy": options.policy})
    orders = _servers(options, head, password)
    for order, count in ((frontend, options.frontends), (router, options.routers)):
        names = [order.name] if count == 1 else [f"{order.name}-{index}" for index in range(count)]
        orders += [replace(order, name=each, node="" if index else head.node) for index, each in enumerate(names)]
    named = named_workers(options)
    workers = {role: _worker(options, common, state_dir, role) for _, role in named}
    orders += [replace(workers[role], name=worker) for worker, role in named]
    store = None
    if options.store is not None:
        store = _service(options, "kvbm", 2, common | tiers(options.store, arenas=2 if options.encode else 1))
        store = replace(store, owns_pool=True, needed=options.store.needed)
    scheme = "https" if access.tls_cert else "http"
    url = f"{scheme}://{head.host}:{options.port}"
    return Fleet(name, tuple(orders), workers, store, url, options.model_name, nats, etcd, access, toml(wiring))


def paths_needed(options: UpOptions) -> list[tuple[str, str]]:
    """Return the paths that nodes must have, each after the flag that names it."""
    access = options.access
    named = [
        ("--model", options.model),
        ("--chat-template", options.chat_template if options.chat_template.startswith("/") else ""),
        ("--keys", access.keys),
        ("--tls-cert", access.tls_cert),
        ("--tls-key", access.tls_key),
        ("--engine vllm", options.vllm_python),
        ("--vllm-args", options.vllm_args),
    ]
    return [(flag, path) for flag, path in named if path]


def lacking(options: UpOptions, orders: tuple[Order, ...], resources: Mapping[str, float]) -> str:
    """Return what a cluster with these resources, free or in use, lacks for the orders. Empty if nothing."""
    for resource, flag, needed in (
        ("GPU", "--engine vllm" if options.vllm_gpus else "--device cuda", sum(order.gpus for order in orders)),
        ("CPU", "--prefill, --decode" if _roles(options) else "--workers", sum(order.cpus for order in orders)),
    ):
        if needed > (found := resources.get(resource, 0.0)):
            return (
                f"{flag}: the workers need {needed:g} {resource}s, the nodes of this Ray cluster have {found:g}"
                f" (`ray start --num-{resource.lower()}s` says how many a node has)"
            )
    return ""


def _service(options: UpOptions, service: ServiceName, stage: int, settings: Settings) -> Order:
    observe: dict[str, Value] = {"log_level": options.log_level}
    flags = [f"{flag}={value}" for flag, value in options.overrides.get(service, ())]
    variables = dict(SERVICE_VARIABLES)
    if service == "frontend":
        variables["HEADRACE_HTTP_HOST"] = "host"
    elif service == "kvbm":
        variables["HEADRACE_POOL_DIRECTORY"] = "pool"
        if _roles(options):
            variables["HEADRACE_PEERS_LISTEN"] = "peers"
    elif service == "worker" and options.store is not None:
        variables["HEADRACE_KVBM_POOL"] = "pool"
    arguments = ("-m", f"services.{service}", "--config", SETTINGS, *flags)
    files = {SETTINGS: toml({**settings, "observe": observe})}
    return Order(service, arguments, files, stage, SERVICE_DRAIN_S, variables=variables, service=service)


def _roles(options: UpOptions) -> bool:
    """Return whether each worker has one role."""
    return options.prefill + options.decode > 0


def _worker(options: UpOptions, common: Settings, state_dir: StateDirectory, role: str) -> Order:
    """Return a worker. On a CPU it takes as many of Ray's CPUs as it has threads; on GPUs one CPU and its GPUs, which
    Ray names to it."""
    gpus = 1 if options.gpus is not None else len(options.vllm_gpus[0].split(",")) if options.vllm_gpus else 0
    threads = 1
    for flag, value in options.overrides.get("worker", ()):
        if flag == "--threads" and value.isdecimal():
            threads = int(value)
    settings = worker_settings(replace(options, workers=1, vllm_gpus=()), 0, role, state_dir, threads)
    settings["threads"] = 0 if gpus else threads
    order = _service(options, "worker", 1, {**common, **settings})
    return replace(order, cpus=1 if gpus else max(1, threads), gpus=gpus)


def _servers(options: UpOptions, head: Head, password: str) -> list[Order]:
    """Return the NATS server and etcd, unless the user's own are used."""
    found: list[Order] = []
    if not options.nats:
        files = {"nats.conf": servers.nats_settings(head.ports[0], head.host) + servers.nats_authorization(password)}
        found.append(Order("nats", ("-c", "nats.conf"), files, 3, SERVER_DRAIN_S, server="nats", node=head.node))
    if not options.etcd:
        client, peer = (f"http://{head.host}:{port}" for port in head.ports[1:])
        arguments = servers.etcd_arguments(client, peer, Path("etcd"))
        found.append(Order("etcd", tuple(arguments), {}, 3, SERVER_DRAIN_S, server="etcd", node=head.node))
    return found
