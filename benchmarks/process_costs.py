"""Reads the CPU time and the memory of a process from /proc."""

from __future__ import annotations

import os
from pathlib import Path

from msgspec import Struct


class Cpu(Struct, frozen=True):
    """The CPU time of a process so far."""

    user_s: float
    kernel_s: float

    @property
    def sum_s(self) -> float:
        """User and kernel time together."""
        return self.user_s + self.kernel_s


def cpu_of(pid: int) -> Cpu:
    """Read a process's CPU time, which has a resolution of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    ticks = os.sysconf("SC_CLK_TCK")
    return Cpu(int(fields[11]) / ticks, int(fields[12]) / ticks)


def rss_bytes(pid: int) -> int:
    """Return the resident memory of a process, in bytes."""
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
