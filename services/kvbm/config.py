"""The settings of kvbm, as its config file, flags and environment name them."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from services.kvbm.tickets.results import TicketLimits
from services.kvbm.tiers import policies
from services.kvbm.tiers.actions import TierSizes
from shared.config import ServiceConfig

Positive = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(gt=0, le=1)]
Seconds = Annotated[float, Meta(gt=0, le=86400)]
PeerBackend = Literal["sockets", "nixl"]


class PoolConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The host tier: memory that kvbm and the engines of its machine share."""

    directory: Annotated[str, Meta(min_length=1)]
    """The pool's directory, on a tmpfs and open to this user alone; made if it is missing. Workers name the same
    one."""
    size_bytes: Positive
    """The size of the pool in bytes, all of it made at the start."""
    arenas: Positive = 1
    """The number of equal parts of the pool. Each layout takes one, so this is how many layouts can be served at once.
    The disk tier is divided likewise."""
    prefault_threads: Positive = 4
    """The number of threads that make the pool's memory at the start, at low priority."""


class DiskConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The disk tier."""

    directory: str = ""
    """The directory of the disk tier; made if it is missing, but not its parents. Empty if there is no disk tier."""
    limit_bytes: Positive = 64 << 30
    """Bytes that all layouts together may have on disk, including layouts that are not served any more."""
    segment_bytes: Positive = 1 << 30
    """The approximate size of one file, in bytes."""
    min_free_bytes: Natural = 4 << 30
    """Bytes that stay free on the disk for others: no file is made that would leave less."""
    threads: Positive = 16
    """The number of threads, and so of requests that the disk has at once."""
    queue: Positive = 8192
    """The number of reads that may be queued or under way, and of writes. A block whose read finds the queue full is
    computed instead."""
    retry_s: Seconds = 5.0
    """Seconds between two checks of the disk, which is also how soon a disk that is off or full is tried again."""


class TiersConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """What is kept in which tier, and what is evicted first."""

    host_policy: str = policies.DEFAULT
    """The eviction policy of the host tier: reuse, lru or module:attribute."""
    disk_policy: str = policies.DISK_DEFAULT
    """The eviction policy of the disk tier; the choice is that of `host_policy`."""
    host_sightings: Positive = 1
    """How often a block must have been seen before it gets a slot; a worker's offer counts as one."""
    disk_sightings: Positive = 2
    """How often a block must have been seen before it goes to disk."""
    fill_disk: bool = True
    """Whether any block goes to disk while the disk has a free record, however often the block was seen."""
    held_share: Share = 0.5
    """The share of the slots that readers may hold at once. Nothing more is read from disk while held slots and
    abandoned reads reach it."""

    def sizes(self, slots: int, records: int) -> TierSizes:
        """Return the sizes and rules of one layout's tiers."""
        return TierSizes(
            slots=slots,
            records=records,
            host_sightings=self.host_sightings,
            disk_sightings=self.disk_sightings,
            fill_disk=self.fill_disk,
            held_share=self.held_share,
        )


class StatisticsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The statistics that people see."""

    window_s: Seconds = 300.0
    """Seconds that the hit rates look back."""
    log_s: Annotated[float, Meta(ge=0, le=86400)] = 60.0
    """Seconds between two log lines about each layout; 0 writes none."""


class PeersConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Blocks of other machines: kvbms that listen read one another's memory."""

    listen: str = ""
    """The address at which kvbms of other machines may read blocks, as HOST:PORT, or PORT on 127.0.0.1; port 0 takes a
    free one. Empty if none may, and this kvbm reads none. Without TLS, every process that reaches the port can
    read the blocks."""
    advertise: str = ""
    """The host at which other machines reach this one, for the address book. Empty means that of `listen`, or the
    machine's name if that is any address."""
    backend: PeerBackend = "sockets"
    """What moves the bytes of blocks: sockets or nixl, the same for all machines. NIXL has no TLS: every process that
    reaches its ports can read and write this kvbm's pool."""
    nixl_device: str = ""
    """The network device that NIXL uses, such as eth0 or mlx5_0:1. Empty means the one that has the address of
    `listen`."""
    nixl_transports: Annotated[str, Meta(min_length=1)] = "tcp"
    """The transports that NIXL may use, as UCX names them (UCX_TLS), such as tcp or rc."""
    tls_cert: str = ""
    """Path of a PEM file with this machine's certificate; kvbms then speak only TLS 1.3 to each other. Empty means no
    TLS."""
    tls_key: str = ""
    """Path of a PEM file with the key of `tls_cert`, without a passphrase."""
    tls_ca: str = ""
    """Path of a PEM file with the authority whose certificates are believed, in both directions."""
    streams: Annotated[int, Meta(ge=1, le=16)] = 4
    """The number of connections over which the blocks of one read come."""
    take_bytes: Positive = 16 << 20
    """The approximate number of bytes that a connection is asked for at once."""
    reads: Annotated[int, Meta(ge=1, le=64)] = 4
    """The number of reads from other machines at once; one that finds no place behaves as a miss."""
    read_s: Seconds = 10.0
    """Seconds that a read may take at most."""
    connections: Annotated[int, Meta(ge=1, le=1024)] = 64
    """The number of connections that other machines may have to this one, each with a thread."""
    loans: Positive = 64
    """The number of reads by other machines at once."""
    lent_bytes: Positive = 1 << 30
    """The number of bytes that other machines may be reading at once."""
    lend_s: Seconds = 30.0
    """Seconds for which the blocks of one read by another machine are held at most."""
    wait_s: Annotated[float, Meta(ge=0, le=60)] = 0.25
    """Seconds that a Fetch waits at most for blocks of other machines, and no longer than three quarters of its
    worker's kvbm.timeout_s. 0 means that they are not asked."""
    least_blocks: Positive = 8
    """The number of missing blocks, and of blocks that a machine has, from which on they are worth reading."""

    def __post_init__(self) -> None:
        """Raise ValueError, which becomes a ConfigError, for settings that contradict each other."""
        if len({bool(self.tls_cert), bool(self.tls_key), bool(self.tls_ca)}) > 1:
            raise ValueError("tls_cert, tls_key and tls_ca need each other")
        if self.backend == "nixl" and self.tls_cert:
            raise ValueError("backend nixl has no TLS: remove tls_cert, tls_key and tls_ca, or take backend sockets")
        if self.listen:
            self.address  # noqa: B018 - raises
        elif useless := self._useless():
            named = ", ".join(useless)
            raise ValueError(
                f"without listen no blocks go between machines, and {named} would have no effect: set peers.listen to"
                f" HOST:PORT of this machine, or remove {named}"
            )

    def _useless(self) -> list[str]:
        """Return the settings that were set for other machines' sake and need `listen`."""
        named = ("advertise", "nixl_device", "tls_cert", "tls_key", "tls_ca")
        return ["backend"] * (self.backend != "sockets") + [name for name in named if getattr(self, name)]

    @property
    def address(self) -> tuple[str, int]:
        """The host and port of `listen`. Raise ValueError."""
        host, _, port = self.listen.rpartition(":")
        if not port.isascii() or not port.isdecimal() or int(port) > 0xFFFF:
            raise ValueError(f"listen: {self.listen!r} is not HOST:PORT")
        return host.strip("[]") or "127.0.0.1", int(port)


class KvbmConfig(ServiceConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All settings of kvbm."""

    pool: PoolConfig
    disk: DiskConfig = DiskConfig()
    tiers: TiersConfig = TiersConfig()
    tickets: TicketLimits = TicketLimits()
    statistics: StatisticsConfig = StatisticsConfig()
    peers: PeersConfig = PeersConfig()
