"""The layouts a disk directory still holds: a model that is not served any more leaves its segments until others need
the space. A layout that a process uses is locked and never touched, and only what `segments` makes is removed.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from services.kvbm.disk.format import DIGEST_BYTES
from services.kvbm.disk.segments import PROBE, SEGMENT, lock, open_directory

_LAYOUT = re.compile(f"[0-9a-f]{{{2 * DIGEST_BYTES}}}")


class StoredLayout(Struct, frozen=True):
    """One layout's directory."""

    layout: str
    used_bytes: int
    """Allocated."""
    opened_s: float
    """When it was last brought up, wall clock, seconds since 1970: its probe touches the directory."""


def stored_layouts(directory: Path) -> list[StoredLayout]:
    """What is there, the least recently opened first. Raises OSError."""
    found: list[StoredLayout] = []
    for path in directory.iterdir():
        if _LAYOUT.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            with suppress(FileNotFoundError):  # another process removes it meanwhile
                used_bytes = sum(segment.lstat().st_blocks * 512 for segment in path.iterdir())
                found.append(StoredLayout(path.name, used_bytes, path.stat().st_mtime))
    return sorted(found, key=lambda layout: layout.opened_s)


def make_room(directory: Path, keep_bytes: int, keep: frozenset[str] = frozenset()) -> list[StoredLayout]:
    """Removes layouts that are neither in `keep` nor in use, the least recently opened first, until those that are not
    in `keep` have at most `keep_bytes`. Returns what went. Raises OSError."""
    others = [layout for layout in stored_layouts(directory) if layout.layout not in keep]
    used_bytes = sum(layout.used_bytes for layout in others)
    removed: list[StoredLayout] = []
    for layout in others:
        if used_bytes <= keep_bytes:
            break
        if _remove(directory, layout.layout):
            removed.append(layout)
            used_bytes -= layout.used_bytes
    return removed


def _remove(directory: Path, layout: str) -> bool:
    """False: it is in use, or not ours."""
    path = directory / layout
    try:
        own = open_directory(path, None)
    except OSError:
        return False
    try:
        lock(own, path)
        for name in os.listdir(own):  # noqa: PTH208 — below the descriptor
            if SEGMENT.fullmatch(name) or name == PROBE:
                os.unlink(name, dir_fd=own)
        with suppress(OSError):
            path.rmdir()  # not where something else lies in it
    except OSError:
        return False
    finally:
        os.close(own)
    return True
