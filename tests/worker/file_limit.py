"""A system without memory that other processes can map: no file of this process, or of one that it starts, grows."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager

LIMIT_BYTES = 1 << 20
"""The largest file: enough for what tests write."""


@contextmanager
def small_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
