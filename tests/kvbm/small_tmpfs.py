"""A file system that is soon full."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_tmpfs(place: Path) -> Iterator[Path]:
    """Mount a tmpfs of 2 MiB at `place`. Skips the test where that is not allowed."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m,mode=700", "none", str(place)]
    mounted = subprocess.run(command, capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.decode().strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)
