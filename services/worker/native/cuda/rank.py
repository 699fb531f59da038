"""One further rank's process on a GPU: `python -m services.worker.native.cuda.rank ORDER_JSON`.

    load ─▶ meet the others ─▶ hear an order ─▶ compute its part of the step ─▶ hear the next one …
    threads: copy this rank's part of blocks (parallel/copies.py)

Rank 0, the engine's process, starts it with the connections that it needs. It ends when its parent dies, when a peer is
lost, and when it fails, of which it says why. It draws no tokens.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback
from pathlib import Path

import msgspec

from services.worker.native.config import read_config
from services.worker.native.cuda.orders import decode_order
from services.worker.native.cuda.rank_order import CudaRankOrder
from services.worker.native.parallel.copies import CopyEnds, RankCopies
from services.worker.native.parallel.peers import Peers, RankLost
from services.worker.native.parallel.shares import share_out_evenly
from services.worker.sharing.host_pages import HostPages
from shared.parent_death import die_with_parent


def main(arguments: list[str]) -> int:
    """Return the exit status: 0 if another rank is lost, 1 if this one failed."""
    number = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)  # before CUDA opens its files: `shared.pool.lock` says why
    order = msgspec.json.decode(arguments[0], type=CudaRankOrder)
    die_with_parent(order.parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 ends the group
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    memory = HostPages(order.exchange_bytes, order.exchange).array
    sockets = [None if one < 0 else socket.socket(fileno=one) for one in order.sockets]
    peers = Peers(order.rank, sockets, memory, ())
    peers.limit(order.start_limit_s)
    try:
        _serve(order, peers, number)
    except RankLost as lost:
        peers.say_failed(lost)
        return 0
    except Exception as wrong:  # noqa: BLE001 - the rank's edge: rank 0 learns of every failure
        last = traceback.extract_tb(wrong.__traceback__)[-1]
        why = f"failed: {type(wrong).__name__}: {wrong} ({Path(last.filename).name}:{last.lineno})"
        peers.say_failed(RankLost(order.rank, why))
        return 1
    return 0


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
