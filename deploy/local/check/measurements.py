"""What `headrace check` measures, as values. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace


class Unmeasured(Struct, frozen=True, tag="unmeasured"):
    """A part that could not be measured."""

    reason: str
    wanted: bool = False
    """Whether someone named this part, so that its absence is a fault."""
    advice: str = ""
    """What to set. Empty if there is nothing."""


class ClockSample(Struct, frozen=True):
    """One question for the time of another clock: seconds since 1970."""

    asked_s: float
    answered_s: float
    theirs_s: float
    resolution_s: float = 0.0
    """The step of their clock, which was rounded down."""


class ClockBounds(Struct, frozen=True):
    """The least and the greatest number of seconds by which another clock may be ahead of ours."""

    least_s: float
    most_s: float


def clock_bounds(samples: Iterable[ClockSample]) -> ClockBounds | None:
    """Return what all samples together allow; None without one. A clock that was set meanwhile gets wide bounds."""
    least = [each.theirs_s - each.answered_s for each in samples]
    most = [each.theirs_s + each.resolution_s - each.asked_s for each in samples]
    if not least:
        return None
    if max(least) <= min(most):
        return ClockBounds(max(least), min(most))
    return ClockBounds(min(least), max(most))


class BusMeasured(Struct, frozen=True, tag="bus"):
    """One NATS server."""

    address: str
    version: str
    round_trip_s: float
    """The time of half of the small messages from here through NATS to here."""
    slow_trip_s: float
    """The time within which nine tenths of them came."""
    max_payload_bytes: int
    """The server's limit of a message, headers included."""
    payload_limit_bytes: int
    """Our limit of a payload, without headers."""
    echoed_bytes: int
    """The size of the largest message that came back. 0 if it did not."""
    echo_s: float
    jetstream: bool
    refused: str = ""
    """What the server said when the user was not allowed to do something. Empty if there is nothing."""
    clock: ClockBounds | None = None
    down: tuple[str, ...] = ()
    """What is wrong with other servers that were named."""


class DiscoveryMeasured(Struct, frozen=True, tag="discovery"):
    """One etcd server."""

    address: str
    version: str
    read_s: float
    """The time of half of the reads of one key, of the cluster's latest state."""
    write_s: float
    """The time of half of the writes of one key under a lease."""
    value_bytes: int
    """The size of the largest value that could be written."""
    database_bytes: int
    faults: tuple[str, ...] = ()
    """What the server says of itself, such as an alarm."""
    clock: ClockBounds | None = None
    down: tuple[str, ...] = ()
    """What is wrong with other servers that were named."""


class MemoryMeasured(Struct, frozen=True, tag="memory"):
    """Memory for the block store, and the limits of the system."""

    directory: str
    """The directory of the pool, or the nearest one that exists."""
    filesystem: str
    mount_options: str
    free_bytes: int | None
    """The free room of the file system. None if it has no limit."""
    total_bytes: int
    available_bytes: int
    group_limit_bytes: int | None
    """The least limit of this process's control groups. None if there is none."""
    memlock_bytes: int | None
    """The limit of locked memory. None if there is none."""
    overcommit: int
    """The value of vm.overcommit_memory."""
    commit_left_bytes: int
    """What can still be reserved where overcommit is 2."""
    nvidia: bool
    """Whether there is an NVIDIA driver."""


class DiskMeasured(Struct, frozen=True, tag="disk"):
    """A file system, by requests past the page cache."""

    directory: str
    filesystem: str
    free_bytes: int
    direct: bool
    """Whether O_DIRECT works there; without it nothing was measured."""
    written_bytes: int = 0
    write_bytes_s: float = 0.0
    read_bytes_s: float = 0.0
    read_s: float = 0.0
    """The time of half of the reads of one request, alone."""


class GpuMeasured(Struct, frozen=True):
    """One GPU, and its bus."""

    index: int
    name: str
    to_device_bytes_s: float
    from_device_bytes_s: float
    peers: tuple[int, ...] = ()
    """The other GPUs whose memory it can reach."""
    peer_bytes_s: float = 0.0
    """The rate of copies from the first of them."""


class GpusMeasured(Struct, frozen=True, tag="gpus"):
    """All visible GPUs."""

    gpus: tuple[GpuMeasured, ...]
    pool_pinned: bool
    """Whether the driver pinned a file in the pool's directory."""
    pool_refusal: str = ""


class Rate(Struct, frozen=True):
    """The rate of one direction over one number of streams."""

    outward: bool
    streams: int
    bytes_s: float


class Road(Struct, frozen=True):
    """A way for KV blocks between this machine and the other."""

    name: str
    there: bool
    reason: str = ""
    """Why it is not there."""


class PeerMeasured(Struct, frozen=True, tag="peer"):
    """Another machine's `headrace check --serve`."""

    address: str
    version: str
    round_trip_s: float
    clock: ClockBounds | None
    rates: tuple[Rate, ...]
    roads: tuple[Road, ...]
    fault: str = ""
    """Why some rates are missing. Empty if none is."""


class Measurements(Struct, frozen=True):
    """All of one run."""

    bus: BusMeasured | Unmeasured
    discovery: DiscoveryMeasured | Unmeasured
    memory: MemoryMeasured | Unmeasured
    disk: DiskMeasured | Unmeasured
    gpus: GpusMeasured | Unmeasured
    peer: PeerMeasured | Unmeasured
    pool_bytes: int
    """The size of the block store that is planned."""
    pool_named: bool = False
    """Whether a flag gave that size, so that `up` would not go without."""
    disk_named: bool = False
    """Whether a flag asked for a disk tier."""


M = TypeVar("M", BusMeasured, DiscoveryMeasured)


def first_of(servers: Sequence[M | Unmeasured]) -> M | Unmeasured:
    """Return what was measured of the first server that answered, and what is wrong with the others."""
    faults = [each for each in servers if isinstance(each, Unmeasured)]
    down = tuple(each.reason for each in faults)
    for each in servers:
        if not isinstance(each, Unmeasured):
            return replace(each, down=down)
    return Unmeasured("; ".join(down), wanted=True, advice=faults[0].advice)
