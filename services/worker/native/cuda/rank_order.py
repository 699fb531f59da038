"""CudaRankOrder: what a further rank's process on a GPU gets as its argument. Pure."""

from __future__ import annotations

from services.worker.config import WorkerConfig
from services.worker.native.parallel.rank_peers import RankPeers


class CudaRankOrder(RankPeers, frozen=True, kw_only=True):
    """What a rank is to do."""

    settings: WorkerConfig
    """The settings of the engine."""
    directory: str
    """The prepared model."""
    gpus: tuple[int, ...]
    copies: tuple[int, ...]
    """The descriptors of CopyEnds."""
