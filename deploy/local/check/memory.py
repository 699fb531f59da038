"""Measures memory for the block store: room, huge pages, locked memory, overcommit, limits of a container."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from deploy.local.check.measurements import MemoryMeasured
from shared.machine_memory import memory_limits, memory_sizes

DRIVER = Path("/dev/nvidiactl")


def measure(directory: Path) -> MemoryMeasured:
    """Return what the pool in `directory` would find. Raise OSError."""
    there = existing(directory)
    kind, options = mounted(there)
    about, memory = os.statvfs(there), memory_sizes()
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return MemoryMeasured(
        directory=str(there),
        filesystem=kind,
        mount_options=options,
        free_bytes=about.f_bavail * about.f_frsize if about.f_blocks else None,  # 0 blocks: a tmpfs without a limit
        total_bytes=memory["MemTotal"],
        available_bytes=memory["MemAvailable"],
        group_limit_bytes=min(memory_limits(), default=None),
        memlock_bytes=None if locked == resource.RLIM_INFINITY else locked,
        overcommit=int(Path("/proc/sys/vm/overcommit_memory").read_text(encoding="ascii")),
        commit_left_bytes=memory["CommitLimit"] - memory["Committed_AS"],
        nvidia=DRIVER.exists(),
    )


def existing(directory: Path) -> Path:
    """Return the directory, or the nearest one above it that exists."""
    return next(each for each in (directory.absolute(), *directory.absolute().parents) if each.is_dir())


def mounted(directory: Path) -> tuple[str, str]:
    """Return the type and the options of the file system that a directory is on; empty if they are not known."""
    device = directory.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        mount, _, filesystem = line.partition(" - ")
        if mount.split()[2] == wanted:
            kind, _, options = filesystem.split(" ", 2)
            return kind, options
    return "", ""
