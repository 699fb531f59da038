"""One further rank's process: `python -m services.worker.native.parallel.rank ORDER_JSON`.

    load ─▶ meet the others ─▶ hear a plan ─▶ compute its step ─▶ hear the next one …

Rank 0, the engine's process, starts it with the connections and the memory that it needs. It ends when its parent dies,
when a peer is lost, and when it fails, of which it says why. It writes nothing and has no other client.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import numpy as np

from services.worker.native.config import ModelConfig, read_config
from services.worker.native.decoder import Decoder
from services.worker.native.kv_cache import KvCache, KvPart
from services.worker.native.linear import calibrate_linear
from services.worker.native.parallel.peers import Peers
from services.worker.native.parallel.plan import decode_plan
from services.worker.native.parallel.program import run_rank
from services.worker.native.parallel.rank_peers import RankPeers
from services.worker.native.parallel.shares import Share, share_out
from services.worker.native.parallel.weights import rank_weights
from services.worker.native.weights import Weights, load_weights
from services.worker.sharing.host_pages import HostPages
from shared.messages.cards import KvLayout


class RankOrder(RankPeers, frozen=True, kw_only=True):
    """What a rank is to do."""

    directory: str
    weights_file: str
    """The file with the weights; empty if they are in the directory."""
    layout: KvLayout
    """The layout of whole blocks."""
    capacity_blocks: int
    context_length: int
    pages: int
    """The descriptor of the KV pages of all ranks."""


def rank_cache(layout: KvLayout, capacity_blocks: int, share: Share, pages: HostPages, peers: Peers) -> KvCache:
    """Return the KV cache of a rank, which writes and reads its heads of the blocks of all ranks."""
    written = peers.meet if share.copied else None
    return KvCache(layout, capacity_blocks, part=KvPart(pages, share.kv_heads, share.stores, written))


def rank_decoder(
    config: ModelConfig, weights: Weights, share: Share, cache: KvCache, peers: Peers, context_length: int
) -> Decoder:
    """Return the decoder of a rank. `config` and `weights` are those of the whole model."""
    own = rank_weights(weights, config, share)
    linear = calibrate_linear([layer.up for layer in own.layers])
    return Decoder(share.of(config), own, cache, linear, context_length, peers)


def main(arguments: list[str]) -> int:
    """Return the exit status, as `run_rank` does."""
    order = msgspec.json.decode(arguments[0], type=RankOrder)
    config = read_config(Path(order.directory))
    columns = [share.vocab for share in share_out(config, len(order.sockets))]
    return run_rank(order, columns, lambda peers: _serve(order, config, peers))


def _serve(order: RankOrder, config: ModelConfig, peers: Peers) -> None:
    """Compute steps until a peer is lost. Raise RankLost, and what the decoder raises."""
    share = share_out(config, len(order.sockets))[order.rank]
    pages = HostPages(order.layout.block_bytes * order.capacity_blocks, order.pages)
    cache = rank_cache(order.layout, order.capacity_blocks, share, pages, peers)
    file = Path(order.weights_file) if order.weights_file else None
    weights = load_weights(Path(order.directory), config, file)
    decoder = rank_decoder(config, weights, share, cache, peers, order.context_length)
    peers.meet()
    peers.limit(order.limit_s)
    with np.errstate(over="ignore", invalid="ignore"):  # rank 0 finds numbers that are not finite
        while True:
            decoder.step(decode_plan(peers.hear()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
