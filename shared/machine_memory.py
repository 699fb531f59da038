"""How much memory this machine and this process's control groups have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from shared.control_groups import CGROUPS, MEMBERSHIPS, control_groups, read


def memory_sizes() -> dict[str, int]:
    """Return the fields of /proc/meminfo, such as MemTotal and MemAvailable, in bytes."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    sizes = (line.replace(":", "").split() for line in lines)
    return {name: int(number) * 1024 for name, number, *_ in sizes}


def memory_limits(root: Path = CGROUPS, memberships: Path = MEMBERSHIPS) -> Iterator[int]:
    """Yield the memory limits of this process's control groups, from its own up to the root."""
    for group, first_version in control_groups("memory", root, memberships):
        text = read(group / ("memory.limit_in_bytes" if first_version else "memory.max"))
        if text not in ("", "max"):
            yield int(text)


def usable_memory_bytes() -> int:
    """Return the memory that this process may use: the machine's, or less if a control group has less."""
    return min((memory_sizes()["MemTotal"], *memory_limits()))
