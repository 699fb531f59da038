"""What the process of a further rank does, on a CPU as on a GPU: it takes its place among its peers, serves, and says
why it ends."""

from __future__ import annotations

import signal
import socket
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from services.worker.native.parallel.peers import Peers, RankLost
from services.worker.native.parallel.rank_peers import RankPeers
from services.worker.sharing.host_pages import HostPages
from shared.parent_death import die_with_parent


def run_rank(order: RankPeers, columns: Sequence[slice], serve: Callable[[Peers], None]) -> int:
    """Serve until a peer is lost, with Peers that join `columns`. Return the exit status: 0 if another rank is lost, 1
    if this one failed."""
    die_with_parent(order.parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 ends the group
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    memory = HostPages(order.exchange_bytes, order.exchange).array
    sockets = [None if one < 0 else socket.socket(fileno=one) for one in order.sockets]
    peers = Peers(order.rank, sockets, memory, columns)
    peers.limit(order.start_limit_s)
    try:
        serve(peers)
    except RankLost as lost:
        peers.say_failed(lost)
        return 0
    except Exception as wrong:  # noqa: BLE001 - the rank's edge: rank 0 learns of every failure
        last = traceback.extract_tb(wrong.__traceback__)[-1]
        why = f"failed: {type(wrong).__name__}: {wrong} ({Path(last.filename).name}:{last.lineno})"
        peers.say_failed(RankLost(order.rank, why))
        return 1
    return 0
