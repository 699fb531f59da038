"""An operation that all ranks of a group do, or none: each does its part, and they say how it went.

rank 0 tells it ─▶ each rank does it ─▶ all hear all ─▶ a rank failed: the others undo it
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.worker.contracts.messages import Operate
from services.worker.native.lora import LoraStore, operate_loras
from services.worker.native.parallel.peers import Peers

OPERATION_LIMIT_S = 180.0
"""Most seconds that a rank waits for another in an operation. Well below those after which the worker kills an engine
that has not answered (ENGINE_LIMIT_S of its operator), because the rank that stands still would not be named then."""


@dataclass(frozen=True, slots=True)
class RankLimits:
    """How long a rank waits for another."""

    step_s: float
    operation_s: float = OPERATION_LIMIT_S
    """In an operation, in which each may read files for long."""


def do_together(peers: Peers, limits: RankLimits, do: Callable[[], str], undo: Callable[[], object]) -> str:
    """Do this rank's part of an operation, which all ranks do now, and undo it if another one failed. `do` returns why
    it was not done, empty if it was, and has changed nothing then. Return the same of all ranks. Raise RankLost."""
    peers.limit(limits.operation_s)
    own = do()
    said = peers.words(own)
    peers.limit(limits.step_s)
    failed = [f"{words} (rank {rank})" if rank else words for rank, words in enumerate(said) if words]
    if failed and not own:
        undo()
    return failed[0] if failed else ""


def operate_loras_together(store: LoraStore, order: Operate, peers: Peers, limits: RankLimits) -> str:
    """Load or unload a LoRA as all ranks do now; return why it was not done, empty if it was. Raise RankLost."""

    def undo() -> None:
        if order.operation == "load_lora":
            store.unload(order.name)

    return do_together(peers, limits, lambda: operate_loras(store, order.operation, order.name, order.path), undo)
