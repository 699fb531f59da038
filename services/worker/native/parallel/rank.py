"""One further rank's process: `python -m services.worker.native.parallel.rank ORDER_JSON`.

    load ─▶ meet the others ─▶ hear a plan ─▶ compute its step, or do its operation ─▶ hear the next one …

Rank 0, the engine's process, starts it with the connections and the memory that it needs. It ends when its parent dies,
when a peer is lost, and when it fails, of which it says why. It writes nothing and has no other client.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct

from services.worker.contracts.messages import Operate
from services.worker.native.config import ModelConfig, read_config
from services.worker.native.decoder import Decoder
from services.worker.native.kv_cache import KvCache, KvPart
from services.worker.native.linear import calibrate_linear
from services.worker.native.lora import LoraStore, spans_by_lora
from services.worker.native.parallel.operations import RankLimits, do_together, operate_loras_together
from services.worker.native.parallel.peers import Peers
from services.worker.native.parallel.plan import PlannedWork, decode_plan
from services.worker.native.parallel.program import run_rank
from services.worker.native.parallel.rank_peers import RankPeers
from services.worker.native.parallel.shares import Share, share_out
from services.worker.native.parallel.weights import rank_lora, rank_weights
from services.worker.native.tensor_file import no_memory_as_model_error
from services.worker.native.weights import Weights, load_weights
from services.worker.sharing.host_pages import HostPages
from shared.errors import ModelError
from shared.freed_memory import give_memory_back
from shared.messages.cards import KvLayout


class RankSizes(Struct, frozen=True):
    """What bounds a rank."""

    capacity_blocks: int
    context_length: int
    lora_rank: int
    lora_bytes: int


class RankOrder(RankPeers, frozen=True, kw_only=True):
    """What a rank is to do."""

    directory: str
    weights_file: str
    """The file with the weights. Empty if they are in the directory."""
    layout: KvLayout
    """The layout of whole blocks."""
    sizes: RankSizes
    pages: int
    """The descriptor of the KV pages of all ranks."""


def rank_cache(layout: KvLayout, capacity_blocks: int, share: Share, pages: HostPages, peers: Peers) -> KvCache:
    """Return the KV cache of a rank, which writes and reads its heads of the blocks of all ranks."""
    written = peers.meet if share.copied else None
    return KvCache(layout, capacity_blocks, part=KvPart(pages, share.kv_heads, share.stores, written))


def rank_decoder(
    config: ModelConfig, weights: Weights, share: Share, cache: KvCache, peers: Peers, sizes: RankSizes
) -> Decoder:
    """Return the decoder of a rank. `config` and `weights` are those of the whole model."""
    own = rank_weights(weights, config, share)
    linear = calibrate_linear([layer.up for layer in own.layers])
    return Decoder(share.of(config), own, cache, linear, sizes.context_length, peers)


def rank_loras(config: ModelConfig, share: Share, sizes: RankSizes) -> LoraStore:
    """Return what keeps a rank's part of LoRAs. `config` is that of the whole model."""
    return LoraStore(
        config,
        most_rank=sizes.lora_rank,
        most_bytes=sizes.lora_bytes,
        place=lambda layers: rank_lora(layers, config, share),
    )


def main(arguments: list[str]) -> int:
    """Return the exit status, as `run_rank` does."""
    order = msgspec.json.decode(arguments[0], type=RankOrder)
    config = read_config(Path(order.directory))
    columns = [share.vocab for share in share_out(config, len(order.sockets))]
    return run_rank(order, columns, lambda peers: _serve(order, config, peers))


def _serve(order: RankOrder, config: ModelConfig, peers: Peers) -> None:
    """Compute steps until a peer is lost. Raise RankLost, and what the decoder raises."""
    rank = _Rank(order, config, peers)
    peers.meet()
    peers.limit(order.limit_s)
    with np.errstate(over="ignore", invalid="ignore"):  # rank 0 finds numbers that are not finite
        while True:
            plan = decode_plan(peers.hear())
            if isinstance(plan, Operate):
                rank.operate(plan)
            else:
                rank.compute(plan)


class _Rank:
    """A further rank's part of the model."""

    def __init__(self, order: RankOrder, config: ModelConfig, peers: Peers) -> None:
        """Map the weights. Raise ModelError."""
        self._order, self._config, self._peers = order, config, peers
        self._share = share_out(config, len(order.sockets))[order.rank]
        pages = HostPages(order.layout.block_bytes * order.sizes.capacity_blocks, order.pages)
        self._cache = rank_cache(order.layout, order.sizes.capacity_blocks, self._share, pages, peers)
        self._loras = rank_loras(config, self._share, order.sizes)
        self._decoder: Decoder | None = self._loaded(order.weights_file)
        """None while a sleeping engine has no weights."""

    def compute(self, works: list[PlannedWork]) -> None:
        """Compute this rank's part of a step."""
        assert self._decoder is not None, "it is awake"
        self._decoder.pool(works, (), self._loras.of(spans_by_lora(works)))

    def operate(self, order: Operate) -> None:
        """Do this rank's part of an operation."""
        limits = RankLimits(self._order.limit_s)
        match order.operation:
            case "sleep":
                do_together(self._peers, limits, self._drop, lambda: None)
            case "wake":
                do_together(self._peers, limits, lambda: self._wake(order.path), self._drop)
            case "load_lora" | "unload_lora":
                operate_loras_together(self._loras, order, self._peers, limits)
            case "clear":
                raise AssertionError("rank 0 does it alone")

    def _loaded(self, weights_file: str) -> Decoder:
        directory, file = Path(self._order.directory), Path(weights_file) if weights_file else None
        weights = load_weights(directory, self._config, file)
        return rank_decoder(self._config, weights, self._share, self._cache, self._peers, self._order.sizes)

    def _wake(self, weights_file: str) -> str:
        try:
            with no_memory_as_model_error(Path(self._order.directory), "the weights"):
                self._decoder = self._loaded(weights_file)
        except ModelError as wrong:
            return f"wake: {wrong}"
        return ""

    def _drop(self) -> str:
        self._decoder = None
        give_memory_back()
        return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
