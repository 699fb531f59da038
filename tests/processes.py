"""What tests ask of processes that they did not start themselves."""

from __future__ import annotations

from pathlib import Path


def has_ended(pid: int) -> bool:
    """Return whether there is no such process, or only what its parent has not waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
