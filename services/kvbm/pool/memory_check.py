"""Checks whether this machine has room for a pool, before memory is touched: later failures are signals.

If the file system or a container's limit has no room for a page, the process that touches it ends (by SIGBUS, or by the
kernel's out-of-memory killer), and that may be an engine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from shared.errors import ConfigError

_CGROUPS = Path("/sys/fs/cgroup")


def check_memory(directory: Path, size_bytes: int, there_bytes: int) -> None:
    """Raise ConfigError if a pool of `size_bytes` in `directory` has no room. `there_bytes` of it are in memory
    already, or will be freed for it."""
    missing_bytes = max(0, size_bytes - there_bytes)
    rooms: list[tuple[str, int | None, int]] = [
        ("this machine's memory", _memory_bytes("MemTotal"), size_bytes),
        ("this process's memory limit", min(memory_limits(), default=None), size_bytes),
        (f"the free space of {directory}", _free_bytes(directory), missing_bytes),
        ("the memory that is available now", _memory_bytes("MemAvailable"), missing_bytes),
    ]
    for what, room_bytes, needed_bytes in rooms:
        if room_bytes is not None and needed_bytes > room_bytes:
            raise ConfigError(
                f"a pool of {_size(size_bytes)} needs {_size(needed_bytes)}, and {what} is {_size(room_bytes)}"
            )


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB" if size_bytes >= 1 << 30 else f"{size_bytes / 2**20:.1f} MiB"


def _free_bytes(directory: Path) -> int | None:
    about = os.statvfs(directory)
    return about.f_bavail * about.f_frsize if about.f_blocks else None  # a tmpfs without a limit reports 0 blocks


def _memory_bytes(field: str) -> int | None:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        name, _, rest = line.partition(":")
        if name == field:
            return int(rest.split()[0]) * 1024
    return None


def memory_limits(root: Path = _CGROUPS, memberships: Path = Path("/proc/self/cgroup")) -> Iterator[int]:
    """Yield the memory limits of this process's control groups, from its own up to the root."""
    try:
        lines = memberships.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "memory" if controllers else root
        file = "memory.limit_in_bytes" if controllers else "memory.max"
        group = top / path.lstrip("/")
        for place in (group, *group.parents):
            try:
                text = (place / file).read_text(encoding="ascii").strip()
            except OSError:  # the root has no limit; a container may see only its own group
                text = "max"
            if text != "max":
                yield int(text)
            if place == top:
                break
