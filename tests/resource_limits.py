"""Processes that may not have more: file descriptors, or larger files."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager

LIMIT_BYTES = 1 << 20
"""The largest of `small_files`: enough for what tests write."""


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """A process without a free file descriptor."""
    with _limited(resource.RLIMIT_NOFILE, 0):
        yield


@contextmanager
def small_files() -> Iterator[None]:
    """A system without memory that other processes can map: no file of this process, or of one that it starts,
    grows."""
    with _limited(resource.RLIMIT_FSIZE, LIMIT_BYTES):
        yield


@contextmanager
def _limited(which: int, limit: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(which)
    resource.setrlimit(which, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(which, (soft, hard))
