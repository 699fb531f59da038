"""One program that Ray is asked to run. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

Place = Literal["host", "peers", "pool", "url_file"]
"""What differs from node to node: its address, also with port 0; the directory of its pool; the file for a service's
URL."""


class Order(Struct, frozen=True):
    """One program that Ray is asked to run, in an actor of its own."""

    name: str
    arguments: tuple[str, ...]
    """The words after the program's path, or after Python's."""
    files: Mapping[str, str]
    """Text of each file in its working directory."""
    stage: int
    """Stage of the drain; the lowest is drained first."""
    drain_s: float
    """Seconds from SIGTERM to SIGKILL."""
    server: Literal["", "nats", "etcd"] = ""
    """The server that it is. Empty for a service of ours."""
    variables: Mapping[str, Place] = {}
    """What it finds in its environment about its node."""
    node: str = ""
    """The only node where it may run. Empty means that Ray chooses."""
    cpus: float = 0
    gpus: float = 0
    service: str = ""
    """The service of ours: frontend, router, worker or kvbm."""
    owns_pool: bool = False
    """True for a kvbm, whose pool is made before it starts and removed after it."""
    needed: bool = True
    """True if all programs are stopped when this one cannot work as configured."""

    def at(self, node: str) -> Order:
        """Return the same program for one node, with a name of its own."""
        return replace(self, name=f"{self.name}-{node[:8]}", node=node)
