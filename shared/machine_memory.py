"""How much memory this machine and this process's control groups have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def memory_sizes() -> dict[str, int]:
    """Return the fields of /proc/meminfo, such as MemTotal and MemAvailable, in bytes."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    sizes = (line.replace(":", "").split() for line in lines)
    return {name: int(number) * 1024 for name, number, *_ in sizes}


def memory_limits(root: Path = CGROUPS, memberships: Path = Path("/proc/self/cgroup")) -> Iterator[int]:
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
