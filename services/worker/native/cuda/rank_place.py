"""RankPlace: which of a group's ranks a process is, on which GPU, and what it gives the others to know at its start."""

from __future__ import annotations

from dataclasses import dataclass

import cupy as cp  # pyright: ignore[reportMissingImports]
from cupy.cuda import runtime  # pyright: ignore[reportMissingImports]
from msgspec.structs import replace

from services.worker.config import WorkerConfig
from services.worker.native.config import ModelConfig
from services.worker.native.cuda.exchange import DeviceExchange, exchange_bytes
from services.worker.native.parallel.operations import RankLimits
from services.worker.native.parallel.peers import Peers
from services.worker.native.parallel.shares import Share
from services.worker.sharing.memory import MapFailed
from services.worker.transfer.block_shape import SlotPart
from shared.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RankRoom:
    """What a GPU has; of several ranks, the least that those of all have."""

    free_bytes: int
    """Bytes of free memory for one rank."""
    total_bytes: int
    processors: int = 0
    """The multiprocessors for which ranks plan, so that a step is laid out the same for all. 0 means those of the
    GPU."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """One rank of a group."""

    rank: int
    config: ModelConfig
    """The shape of the whole model."""
    shares: tuple[Share, ...]
    gpus: tuple[int, ...]
    """The GPU of each rank."""
    peers: Peers
    start_limit_s: float
    limit_s: float
    """How long a rank waits for another in a step."""

    @property
    def share(self) -> Share:
        return self.shares[self.rank]

    @property
    def gpu(self) -> int:
        return self.gpus[self.rank]

    @property
    def limits(self) -> RankLimits:
        return RankLimits(self.limit_s)

    @property
    def vocabulary(self) -> list[slice]:
        """The part of each rank."""
        return [share.vocab for share in self.shares]

    @property
    def exchange_bytes(self) -> int:
        """Bytes of device memory that the exchange takes."""
        return exchange_bytes(self.vocabulary)

    def settings(self, settings: WorkerConfig) -> WorkerConfig:
        """Return the settings of this rank alone: its GPU, and its share of it."""
        cuda = settings.cuda
        memory_share = cuda.memory_share / self.gpus.count(self.gpu)
        return replace(settings, cuda=replace(cuda, gpu=self.gpu, memory_share=memory_share))

    def room(self) -> RankRoom:
        """Return what all ranks have, when all have come here, and none has taken memory. Raise RankLost."""
        self.peers.meet()
        free_bytes, total_bytes = runtime.memGetInfo()
        processors = int(cp.cuda.Device().attributes["MultiProcessorCount"])
        said = self.peers.numbers([free_bytes // self.gpus.count(self.gpu), total_bytes, processors])
        return RankRoom(*(min(each) for each in zip(*said, strict=True)))

    def exchange(self) -> DeviceExchange:
        """Return this rank's part in the exchange, when all ranks make theirs. Raise RankLost, ConfigError,
        DeviceFailed, DeviceMemoryExhausted."""
        try:
            return DeviceExchange(self.peers, self.rank, self.vocabulary, self.config.hidden, self.gpu)
        except MapFailed as wrong:
            raise ConfigError(
                f"tensor_parallel is {len(self.gpus)}, but GPUs cannot write each other's memory: {wrong}; choose"
                " others by CUDA_VISIBLE_DEVICES, or set tensor_parallel = 1"
            ) from wrong

    def slot_part(self, item_bytes: int, block_size: int) -> SlotPart:
        """Return where this rank's heads lie in the pool's slots."""
        config, head_bytes = self.config, self.config.head_dim * item_bytes
        pitch_bytes = config.kv_heads * head_bytes
        rows = config.layers * 2 * block_size
        return SlotPart(self.share.kv_heads.start * head_bytes, pitch_bytes, rows * pitch_bytes)
