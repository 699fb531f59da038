"""CudaRankGroup: the ranks of one engine on GPUs, as rank 0 starts them, has them compute, and ends them.

    engine process = rank 0, GPU 0   scheduler, sampler, KV connector; its part of each layer
        │ a step as it is laid out, once a step (orders.py); blocks to copy (parallel/copies.py)
    rank 1 … n - 1, each its GPU     their parts of each layer, and their heads of all blocks
        the sums of a step go from GPU to GPU (exchange.py)

A rank that is lost ends the group, and with it the engine. docs/decisions/0082 gives the reasons.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec
from cupy.cuda import runtime  # pyright: ignore[reportMissingImports]

from services.worker.config import WorkerConfig
from services.worker.contracts.runner import AttachedPool
from services.worker.native.config import ModelConfig
from services.worker.native.cuda.orders import RankDuty, encode_order
from services.worker.native.cuda.rank_order import CudaRankOrder
from services.worker.native.cuda.rank_place import RankPlace
from services.worker.native.parallel.copies import CopyEnds, GroupCopier
from services.worker.native.parallel.group import LEAST_LIMIT_S, STALL_SHARE
from services.worker.native.parallel.operations import OPERATION_LIMIT_S
from services.worker.native.parallel.peers import Peers, buffer_bytes
from services.worker.native.parallel.processes import RankProcesses, close_ends, connect
from services.worker.native.parallel.shares import share_out_evenly
from services.worker.sharing.host_pages import HostPages
from services.worker.transfer.copier import Copier
from shared.errors import ConfigError

RANK_MODULE = "services.worker.native.cuda.rank"
"""The program of a further rank."""
START_LIMIT_S = 600.0
"""Most seconds until a rank has loaded its weights and compiled its kernels."""


def rank_gpus(settings: WorkerConfig) -> tuple[int, ...]:
    """Return the GPU of each rank: those from `cuda.gpu` on. Raise ConfigError if there are too few, or if one has no
    access to the memory of another."""
    first, ranks = settings.cuda.gpu, settings.tensor_parallel
    count = int(runtime.getDeviceCount())
    gpus = tuple((first + rank) % count for rank in range(ranks))
    if first + ranks > count and not settings.cuda.ranks_share_gpus:
        raise ConfigError(
            f"tensor_parallel is {ranks}, from GPU {first} (cuda.gpu) on, but CUDA shows {count};"
            " CUDA_VISIBLE_DEVICES chooses which"
        )
    for one in sorted(set(gpus)):
        for other in sorted(set(gpus) - {one}):
            if not runtime.deviceCanAccessPeer(one, other):
                raise ConfigError(
                    f"tensor_parallel is {ranks}, but GPU {one} has no access to the memory of GPU {other};"
                    " choose others by CUDA_VISIBLE_DEVICES, or set tensor_parallel = 1"
                )
    return gpus


class CudaRankGroup:
    """The further ranks' processes and rank 0's place. It belongs to the thread that made it, with which they die."""

    def __init__(
        self, settings: WorkerConfig, directory: Path, config: ModelConfig, start_limit_s: float = START_LIMIT_S
    ) -> None:
        """Start the ranks of a prepared model. Raise ConfigError and ModelError."""
        self._settings, self._directory, self._config = settings, directory, config
        ranks = settings.tensor_parallel
        shares, gpus = share_out_evenly(config, ranks), rank_gpus(settings)
        self._exchange = HostPages(2 * ranks * buffer_bytes(config.vocab, ranks))
        self._processes = RankProcesses()
        ends = connect(ranks)
        copies = [CopyEnds.pair() for _ in range(1, ranks)]
        self._copies = [own for own, _ in copies]
        peers = Peers(0, ends[0], self._exchange.array, [share.vocab for share in shares])
        limit_s = max(LEAST_LIMIT_S, settings.stall_s / STALL_SHARE)
        self.place = RankPlace(0, config, shares, gpus, peers, start_limit_s, limit_s)
        peers.limit(start_limit_s)
        try:
            for rank, (_, theirs) in enumerate(copies, 1):
                order = CudaRankOrder(
                    settings=settings,
                    directory=str(directory),
                    rank=rank,
                    gpus=gpus,
                    exchange=self._exchange.descriptors()[0],
                    exchange_bytes=self._exchange.size_bytes,
                    sockets=tuple(-1 if end is None else end.fileno() for end in ends[rank]),
                    copies=tuple(end.fileno() for end in theirs.all),
                    start_limit_s=start_limit_s,
                    limit_s=limit_s,
                    parent_pid=os.getpid(),
                )
                sockets = [end for end in order.sockets if end >= 0]
                inherited = [order.exchange, *sockets, *order.copies]
                self._processes.spawn(RANK_MODULE, msgspec.json.encode(order), inherited)
        except BaseException:
            self.close()
            raise
        finally:
            close_ends(ends[1:])
            for _, theirs in copies:
                theirs.close()

    def started_again(self, capacity_blocks: int) -> CudaRankGroup:
        """Return a group like this one, which has ended, whose ranks have `capacity_blocks` and as long to start as an
        operation takes. Raise what the first start raises."""
        settings = msgspec.structs.replace(self._settings, capacity_blocks=capacity_blocks, capacity_bytes=0)
        return CudaRankGroup(settings, self._directory, self._config, OPERATION_LIMIT_S)

    def guard(self) -> AbstractContextManager[None]:
        """Return what ends the group where a rank is lost in what all do together. It raises RankLost."""
        return self._processes.guard(self.close)

    def tell(self, order: RankDuty) -> None:
        """Have all other ranks carry out an order. Raise RankLost."""
        self.place.peers.tell(encode_order(order))

    def copier(self, own: Copier, block_bytes: int, place: Callable[[], AttachedPool]) -> GroupCopier:
        """Return what copies whole blocks of `block_bytes`, of which `own` copies rank 0's part."""
        return GroupCopier(own, block_bytes, self._copies, place, self._processes.await_end, self.place.limit_s)

    @property
    def pids(self) -> Sequence[int]:
        """The processes of rank 1 and higher."""
        return self._processes.pids

    def close(self) -> None:
        """End all ranks, also those that stand still, and wait for their end. Idempotent."""
        self._processes.kill()
        self.place.peers.close()
        for ends in self._copies:
            ends.close()
        self._exchange.close()
