"""Which servers an InferencePool of the Gateway API Inference Extension stands for. Pure.

Each port of the pool at each of its Pods that is ready, and not being deleted, is a server.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from ipaddress import ip_address
from typing import Annotated

from msgspec import Meta, Struct, field

from deploy.local.route.reflector import Metadata
from deploy.local.route.targets import Target, parse_target
from shared.errors import ConfigError

_NAME = r"[a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?"
_POOL_NAME = re.compile(rf"({_NAME})/({_NAME})")


class PoolPort(Struct, frozen=True):
    """A port at which each Pod of a pool serves."""

    number: Annotated[int, Meta(ge=1, le=65535)]


class PoolSelector(Struct, frozen=True, rename="camel"):
    """Which Pods belong to a pool: those with all of these labels."""

    match_labels: Annotated[dict[str, str], Meta(min_length=1, max_length=64)]


class PoolSpec(Struct, frozen=True, rename="camel"):
    """What a pool should be."""

    selector: PoolSelector
    target_ports: Annotated[tuple[PoolPort, ...], Meta(min_length=1, max_length=8)]
    app_protocol: str = "http"


class InferencePool(Struct, frozen=True):
    """An object of `inference.networking.k8s.io/v1`."""

    metadata: Metadata
    spec: PoolSpec

    @property
    def label_selector(self) -> str:
        """The Pods of the pool, as a query names them."""
        return ",".join(f"{name}={value}" for name, value in sorted(self.spec.selector.match_labels.items()))


class PodCondition(Struct, frozen=True):
    """One of the conditions of a Pod."""

    type: str
    status: str


class PodStatus(Struct, frozen=True):
    """How a Pod is."""

    pod_ip: str = field(name="podIP", default="")
    conditions: tuple[PodCondition, ...] = ()


class Pod(Struct, frozen=True):
    """An object of `v1`."""

    metadata: Metadata
    status: PodStatus = PodStatus()

    @property
    def serves(self) -> bool:
        """True if it is ready, and not being deleted."""
        ready = any(one.type == "Ready" and one.status == "True" for one in self.status.conditions)
        return ready and self.metadata.deletion_timestamp is None


def parse_pool_name(text: str) -> tuple[str, str]:
    """Return the namespace and the name of a pool. Raise ConfigError."""
    if not (found := _POOL_NAME.fullmatch(text)):
        raise ConfigError(f"--inference-pool {text}: not NAMESPACE/NAME")
    return found[1], found[2]


def servers_of(pool: InferencePool | None, pods: Collection[Pod]) -> tuple[tuple[Target, ...], str]:
    """Return the servers of a pool, which is None if there is no such pool, and why there are none; empty if there are
    some."""
    if pool is None:
        return (), "there is no such InferencePool; it is waited for"
    if pool.spec.app_protocol != "http":
        return (), f"its appProtocol is {pool.spec.app_protocol}, and servers are asked by HTTP/1.1 alone"
    urls: dict[str, None] = {}
    for pod in sorted(filter(lambda pod: pod.serves, pods), key=lambda pod: pod.metadata.name):
        try:
            address = ip_address(pod.status.pod_ip)
        except ValueError:
            continue
        host = f"[{address}]" if address.version > 4 else str(address)
        urls |= dict.fromkeys(f"http://{host}:{port.number}" for port in pool.spec.target_ports)
    why = "" if urls else f"none of its Pods ({len(pods)}) is ready"
    return tuple(parse_target(url) for url in urls), why
