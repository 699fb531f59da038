"""One further rank's process on a GPU: `python -m services.worker.native.cuda.rank ORDER_JSON`.

    load ─▶ meet the others ─▶ hear an order ─▶ compute its part of the step ─▶ hear the next one …
    threads: copy this rank's part of blocks (parallel/copies.py)

Rank 0, the engine's process, starts it with the connections that it needs. It ends when its parent dies, when a peer is
lost, and when it fails, of which it says why. It draws no tokens.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from services.worker.native.config import read_config
from services.worker.native.cuda.orders import decode_order
from services.worker.native.cuda.rank_order import CudaRankOrder
from services.worker.native.parallel.copies import CopyEnds, RankCopies
from services.worker.native.parallel.peers import Peers
from services.worker.native.parallel.program import run_rank
from services.worker.native.parallel.shares import share_out_evenly


def main(arguments: list[str]) -> int:
    """Return the exit status, as `run_rank` does."""
    number = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)  # before CUDA opens its files: `shared.pool.lock` says why
    order = msgspec.json.decode(arguments[0], type=CudaRankOrder)
    return run_rank(order, (), lambda peers: _serve(order, peers, number))


def _serve(order: CudaRankOrder, peers: Peers, number: int) -> None:
    """Compute steps until a peer is lost. Raise RankLost, and what the runner raises."""
    from services.worker.native.cuda.rank_place import RankPlace  # here: they import CuPy
    from services.worker.native.cuda.start import start_runner

    config = msgspec.structs.replace(read_config(Path(order.directory)), vision=None)
    shares = share_out_evenly(config, len(order.sockets))
    place = RankPlace(order.rank, config, shares, order.gpus, peers, order.start_limit_s, order.limit_s)
    runner = start_runner(order.settings, Path(order.directory), config, lambda _loading: None, place)
    RankCopies(place.rank, runner.copier(), CopyEnds.of(order.copies), number, stores=place.share.stores)
    while True:
        runner.obey(decode_order(peers.hear()))


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))  # at an orderly end CUDA would wait for a step that waits for a lost rank
