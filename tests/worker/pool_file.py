"""A small pool file as a kvbm makes it, without the kvbm."""

from __future__ import annotations

import os
from pathlib import Path

from shared.pool.format import PoolGeometry


def make_pool(path: Path, size_bytes: int) -> PoolGeometry:
    """Make a pool whose slots are all empty, and granted to no engine yet."""
    geometry = PoolGeometry.of(size_bytes)
    path.touch(0o600)
    os.truncate(path, size_bytes)
    with path.open("r+b") as opened:
        opened.write(geometry.header())
    return geometry
