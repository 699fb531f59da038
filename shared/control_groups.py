"""The control groups of this process, of both versions: what a container's limits are read from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIPS = Path("/proc/self/cgroup")


def control_groups(
    controller: str, root: Path = CGROUPS, memberships: Path = MEMBERSHIPS
) -> Iterator[tuple[Path, bool]]:
    """Yield the directories of this process's groups that may limit what a controller counts, from its own up to the
    root, and whether they are of version 1. A container may see only its own group, as the root: the others may not be
    there."""
    try:
        lines = memberships.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / controller if controllers else root
        group = top / path.lstrip("/")
        for place in (group, *group.parents):
            yield place, bool(controllers)
            if place == top:
                break


def read(file: Path) -> str:
    """Return the text of a group's file. Empty if the group is not seen, or the root, which has no limits."""
    try:
        return file.read_text(encoding="ascii").strip()
    except OSError:
        return ""
