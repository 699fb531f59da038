"""CudaRankOrder: what a further rank's process on a GPU gets as its argument. Pure."""

from __future__ import annotations

from msgspec import Struct

from services.worker.config import WorkerConfig


class CudaRankOrder(Struct, frozen=True, kw_only=True):
    """What a rank is to do. Descriptors are numbers that it has from its parent."""

    settings: WorkerConfig
    """The settings of the engine."""
    directory: str
    """The prepared model."""
    rank: int
    gpus: tuple[int, ...]
    exchange: int
    """The descriptor of the memory of Peers."""
    exchange_bytes: int
    sockets: tuple[int, ...]
    """The descriptor of the connection to each rank; -1 for itself."""
    copies: tuple[int, ...]
    """The descriptors of CopyEnds."""
    start_limit_s: float
    limit_s: float
    parent_pid: int
