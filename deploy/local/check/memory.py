"""Measures memory for the block store: room, huge pages, locked memory, overcommit, limits of a container."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from deploy.local.check.measurements import MemoryMeasured

CGROUPS = Path("/sys/fs/cgroup")
DRIVER = Path("/dev/nvidiactl")


def measure(directory: Path) -> MemoryMeasured:
    """Return what the pool in `directory` would find. Raise OSError."""
    there = existing(directory)
    kind, options = mounted(there)
    about, memory = os.statvfs(there), _meminfo()
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return MemoryMeasured(
        directory=str(there),
        filesystem=kind,
        mount_options=options,
        free_bytes=about.f_bavail * about.f_frsize if about.f_blocks else None,  # 0 blocks: a tmpfs without a limit
        total_bytes=memory["MemTotal"],
        available_bytes=memory["MemAvailable"],
        group_limit_bytes=min(group_limits(), default=None),
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


def _meminfo() -> dict[str, int]:
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    sizes = (line.replace(":", "").split() for line in lines)
    return {name: int(number) * 1024 for name, number, *_ in sizes}


def group_limits(root: Path = CGROUPS, memberships: Path = Path("/proc/self/cgroup")) -> Iterator[int]:
    """Yield the memory limits of this process's control groups (version 2), from its own up to the root."""
    try:
        lines = memberships.read_text(encoding="utf-8").splitlines()
    except OSError:  # a kernel without control groups
        return
    for line in lines:
        number, _, path = line.split(":", 2)
        group = root / path.lstrip("/")
        for place in (group, *group.parents) if number == "0" else ():
            limit = place / "memory.max"
            if place.is_relative_to(root) and limit.is_file() and (text := limit.read_text().strip()) != "max":
                yield int(text)
