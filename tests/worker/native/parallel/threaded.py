"""Ranks as threads of one process: the same code and sockets as in processes, without their start."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import numpy as np

from services.worker.native.parallel.peers import Peers

LIMIT_S = 60.0
Result = TypeVar("Result")


def connected(ranks: int, *, bytes_each: int = 1 << 12, columns: Sequence[slice] = ()) -> list[Peers]:
    """Return each rank's end of a group, whose buffers have `bytes_each`."""
    memory = np.zeros(2 * ranks * bytes_each, np.uint8)
    ends: list[list[socket.socket | None]] = [[None] * ranks for _ in range(ranks)]
    for one in range(ranks):
        for other in range(one + 1, ranks):
            ends[one][other], ends[other][one] = socket.socketpair()
    found = [Peers(rank, ends[rank], memory, columns) for rank in range(ranks)]
    for peers in found:
        peers.limit(LIMIT_S)
    return found


@contextmanager
def closing_all(group: list[Peers]) -> Iterator[list[Peers]]:
    try:
        yield group
    finally:
        for peers in group:
            peers.close()


def at_once(calls: Sequence[Callable[[], Result]]) -> list[Result]:
    """Call all functions in threads of their own; return what they return. Raise the first one's error."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(LIMIT_S) for future in [pool.submit(call) for call in calls]]
