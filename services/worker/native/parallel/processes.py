"""RankProcesses: the further ranks' processes of one engine, as rank 0 starts and ends them."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from services.worker.native.parallel.peers import ENDED, RankLost

END_WAIT_S = 1.0
"""Most seconds in which a rank whose connection has ended ends, too, so that its exit status is known."""


class RankProcesses:
    """The processes of rank 1 and higher. They die with the thread that started them."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []

    def spawn(self, module: str, order: bytes, descriptors: Sequence[int]) -> None:
        """Start the next rank in this process's group, which its shell ends as a whole. It inherits `descriptors`."""
        command = [sys.executable, "-m", module, order.decode()]
        self._processes.append(subprocess.Popen(command, pass_fds=descriptors, stdin=subprocess.DEVNULL))

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def await_end(self, rank: int) -> None:
        """Return when a rank's process has ended, with all that its device still wrote: Linux closes the files of a
        process, the driver's too, before its end can be waited for."""
        self._processes[rank - 1].wait()

    def kill(self) -> None:
        """End all, also those that stand still, and wait for their end."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()

    @contextmanager
    def guard(self, close: Callable[[], None]) -> Iterator[None]:
        """Do what all ranks do together. Raise RankLost, with what the end of its process says, after all have ended
        and `close` was called."""
        try:
            yield
        except RankLost as lost:
            said = self._end(lost)
            close()
            raise said from None

    def _end(self, lost: RankLost) -> RankLost:
        """End all; return what was lost, with what the end of its process says."""
        status = 0
        if lost.rank and lost.reason == ENDED:
            with suppress(subprocess.TimeoutExpired):
                status = self._processes[lost.rank - 1].wait(END_WAIT_S)
        self.kill()
        if status == 0:
            return lost
        if status > 0:  # a library ended it, as OpenBLAS does without memory, and has said why on standard error
            return RankLost(lost.rank, f"ended with status {status}; the log may have its last words")
        return RankLost(lost.rank, f"was killed by signal {-status} ({signal.Signals(-status).name})")


def connect(ranks: int) -> list[list[socket.socket | None]]:
    """Return the ends of a connection between each two ranks, by rank and peer."""
    ends: list[list[socket.socket | None]] = [[None] * ranks for _ in range(ranks)]
    for one in range(ranks):
        for other in range(one + 1, ranks):
            ends[one][other], ends[other][one] = socket.socketpair()
    return ends


def close_ends(ends: Sequence[Sequence[socket.socket | None]]) -> None:
    """Close the ends that other ranks have inherited."""
    for of_rank in ends:
        for end in of_rank:
            if end is not None:
                end.close()
