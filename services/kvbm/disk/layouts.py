"""Former layouts in a disk directory: a model that is no longer served leaves its segments until others need the space.
A layout that a process uses is locked and never touched, and only files that `segments` makes are removed."""

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
    """Bytes allocated on disk."""
    opened_s: float
    """When the layout was last opened, in seconds since 1970: its probe touches the directory."""


def stored_layouts(directory: Path) -> list[StoredLayout]:
    """Return the layouts in the directory, those opened longest ago first. Raise OSError."""
    found: list[StoredLayout] = []
    for path in directory.iterdir():
        if _LAYOUT.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            with suppress(FileNotFoundError):  # another process is removing it
                used_bytes = sum(segment.lstat().st_blocks * 512 for segment in path.iterdir())
                found.append(StoredLayout(path.name, used_bytes, path.stat().st_mtime))
    return sorted(found, key=lambda layout: layout.opened_s)


def make_room(directory: Path, keep_bytes: int, keep: frozenset[str] = frozenset()) -> list[StoredLayout]:
    """Remove layouts that are neither in `keep` nor in use, those opened longest ago first, until those not in `keep`
    have at most `keep_bytes`. Return the removed ones. Raise OSError."""
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
    """Remove the layout. Return False if it is in use, or not ours."""
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
            path.rmdir()  # unless something else is in it
    except OSError:
        return False
    finally:
        os.close(own)
    return True
