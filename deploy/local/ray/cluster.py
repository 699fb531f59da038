"""The cluster: the only module that calls Ray, which is imported when it is needed.

    connect ──▶ Cluster.check_nodes ──▶ create ──▶ ask … ──▶ drain, kill ──▶ close

Ray ends all our actors when this process ends, however it ends.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import msgspec

from deploy.local.ray import actor as actor_module
from deploy.local.ray.order import Order
from deploy.local.ray.plan import HEAD_PORTS, Head
from deploy.local.ray.watch import ActorReport
from deploy.local.stack import servers
from shared.config import PREFIX, environment
from shared.errors import ConfigError
from shared.installation import install_command
from shared.version import VERSION

NODES_LIMIT_S = 120.0
"""Seconds that all nodes have to be checked in: each starts a process of Ray's for it."""
CONNECT_LIMIT_S = 30.0
CALLS = 4
"""Calls that an actor answers at a time: one that waits, and the drain."""
DRAIN_MARGIN_S = 10.0
HEAD_RESOURCE = "node:__internal_head__"
"""The resource by which Ray marks its head node."""


QUIET = {"log_to_driver": False, "configure_logging": False}


class ActorSilent(Exception):
    """The actor does not answer now; Ray starts it again."""


class ActorLost(Exception):
    """Ray has given the actor up; the message says why."""


class Cluster:
    """A connection to a cluster, and the actors that were asked for."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._strategies = ray.util.scheduling_strategies
        self._actors: dict[str, Any] = {}
        self._made = 0
        self._places: dict[str, Any] = {}
        """Program → its place in the placement group."""

    def check_nodes(self, paths: Sequence[tuple[str, str]], port: int) -> Head:
        """Return the head node, once all nodes are checked: Headrace, the `paths`, and the port on the head node. Raise
        ConfigError with a line for each node that cannot be used."""
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        checked = self._ray.remote(num_cpus=0, max_retries=0)(actor_module.check_node)
        asked = {}
        for node in nodes:
            is_head = HEAD_RESOURCE in node["Resources"]
            number, wanted = (HEAD_PORTS, port) if is_head else (0, 0)
            call = checked.options(scheduling_strategy=self._at(node["NodeID"]))
            asked[call.remote(VERSION, node["NodeManagerAddress"], paths, number, wanted)] = node
        done, late = self._ray.wait(list(asked), num_returns=len(asked), timeout=NODES_LIMIT_S)
        faults = [f"{_spelled(asked[ref])}: no answer within {NODES_LIMIT_S:g} s" for ref in late]
        head = None
        for ref in done:
            node = asked[ref]
            try:
                wrong, ports = self._ray.get(ref)
            except self._ray.exceptions.RayError as error:
                wrong, ports = _last_line(error), []
            if wrong:
                faults.append(f"{_spelled(node)}: {wrong}")
            elif ports:
                head = Head(node["NodeID"], node["NodeManagerAddress"], tuple(ports))
        if faults:
            raise ConfigError("\n".join(sorted(set(faults))))
        if head is None:
            raise ConfigError("--on ray: the cluster has no head node")
        return head

    def resources(self) -> Mapping[str, float]:
        """Return the resources of all nodes together."""
        found: Mapping[str, float] = self._ray.cluster_resources()
        return found

    def reserve(self, orders: Sequence[Order]) -> None:
        """Reserve places for the orders that take resources, on as many nodes as there are. Ray starts an actor again
        at its place, and moves a place whose node has died."""
        taking = [order for order in orders if order.cpus]
        bundles = [{"CPU": order.cpus, **({"GPU": order.gpus} if order.gpus else {})} for order in taking]
        group = import_module("ray.util.placement_group").placement_group(bundles, strategy="SPREAD")
        for index, order in enumerate(taking):
            place = self._strategies.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            self._places[order.name] = place

    def create(self, order: Order, fleet: str) -> None:
        """Ask Ray for the actor of an order. It starts it again whenever it ends by itself, or its node does."""
        place = self._places.get(order.name, "SPREAD")
        self._made += 1  # a program that leaves may still have its name in Ray when another one gets it
        actor = self._ray.remote(actor_module.ProgramActor).options(
            num_cpus=order.cpus,
            num_gpus=order.gpus,
            max_restarts=-1,
            max_concurrency=CALLS,
            scheduling_strategy=self._at(order.node) if order.node else place,
            name=f"headrace-{fleet}-{self._made}-{order.name}",
        )
        settings = {name: value for name, value in environment().items() if name.startswith(PREFIX)}
        self._actors[order.name] = actor.remote(order.name, fleet, VERSION, msgspec.structs.asdict(order), settings)

    async def ask(self, name: str) -> ActorReport:
        """Return what an actor reports. Raise ActorSilent or ActorLost."""
        errors, actor = self._ray.exceptions, self._actors.get(name)
        if actor is None:
            raise ActorSilent("it has just been removed")
        try:
            said = await asyncio.wrap_future(actor.status.remote().future())
        except (errors.ActorDiedError, errors.ActorUnschedulableError) as wrong:
            raise ActorLost(_last_line(wrong)) from None
        except errors.RayError as wrong:
            raise ActorSilent(_last_line(wrong)) from None
        return msgspec.convert(said, ActorReport)

    async def drain(self, order: Order) -> None:
        """Let the program of an actor end, then remove the actor, unless it was removed meanwhile."""
        actor = self._actors.get(order.name)
        if actor is None:
            return
        ended = asyncio.wrap_future(actor.drain.remote(order.drain_s).future())
        with suppress(TimeoutError, self._ray.exceptions.RayError):  # it hangs, or its node has just died
            await asyncio.wait_for(ended, order.drain_s + DRAIN_MARGIN_S)
        self.kill(order.name)

    def kill(self, name: str) -> None:
        """Remove an actor, and its program with it."""
        actor = self._actors.pop(name, None)
        if actor is not None:
            self._ray.kill(actor, no_restart=True)

    def close(self) -> None:
        """Leave the cluster; all actors that are left end."""
        self._ray.shutdown()

    def _at(self, node: str) -> Any:
        return self._strategies.NodeAffinitySchedulingStrategy(node, soft=False)


def connect(address: str) -> Cluster:
    """Connect to the cluster at an address, HOST:PORT, or if that is empty to the one that RAY_ADDRESS names, or that
    runs on this machine. Raise ConfigError."""
    if find_spec("ray") is None:
        raise ConfigError(f"--on ray: Ray is not installed here: {install_command('ray')}")
    flag = f"--ray-address {address}" if address else "--on ray"
    if not address and (address := environment().get("RAY_ADDRESS", "")):
        flag = f"RAY_ADDRESS {address}"
    if "://" in address:
        raise ConfigError(f"{flag}: `up` runs on a machine of the cluster; give HOST:PORT")
    address = address or "auto"
    if address != "auto" and not servers.answers(flag.split()[0], address):
        raise ConfigError(f"{flag}: no server answers there")
    if wrong := _refusal(address):
        raise ConfigError(f"{flag}: {wrong}")
    ray = import_module("ray")
    import_module("ray.util.scheduling_strategies")
    ray.cloudpickle.register_pickle_by_value(actor_module)
    ray.init(address, **QUIET)
    return Cluster(ray)


def _refusal(address: str) -> str:
    """Return why the cluster at an address cannot be used. Empty if it can. Another process tries: at what is no Ray,
    Ray waits long or ends its process."""
    words = [sys.executable, "-P", "-m", "deploy.local.ray.cluster", address]
    try:
        tried = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=CONNECT_LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"no Ray cluster answers within {CONNECT_LIMIT_S:g} s"
    if tried.returncode == 0:
        return ""
    return (tried.stderr.strip().splitlines() or [f"Ray ended with status {tried.returncode}"])[-1]


def _last_line(wrong: Exception) -> str:
    """Return the last line of an error of Ray's, which follows a traceback."""
    return (str(wrong).strip().splitlines() or [type(wrong).__name__])[-1].strip()


def _spelled(node: Mapping[str, Any]) -> str:
    return f"Ray's node {node['NodeManagerAddress']}"


def main(address: str) -> int:
    """Try to connect, and print the reason to stderr in one line if that fails."""
    ray = import_module("ray")
    try:
        ray.init(address, **QUIET)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as wrong:
        text = " ".join(str(wrong).split())
        if "Could not find any running Ray instance" in text:
            text = "no Ray cluster runs here; start one with `ray start --head`, or name one with --ray-address"
        print(text, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
