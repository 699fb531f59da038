"""The processes that a running process has started, by their ids."""

from __future__ import annotations

from pathlib import Path


def children(pid: int) -> list[int]:
    """Return the children of a process, whichever thread started them; a worker's engine is one. Empty once it has
    ended."""
    try:
        return [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except OSError:
        return []


def below(pid: int) -> list[int]:
    """Return the children of a process, and those that these have started."""
    return [each for child in children(pid) for each in (child, *below(child))]
