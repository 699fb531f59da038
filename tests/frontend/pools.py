"""Threads for tests that encode texts without a frontend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from services.frontend.models.encode_pool import EncodePool, KeyPool


@contextmanager
def encode_pool(used: list[bool] | None = None, made: Callable[[int], None] = lambda _: None) -> Iterator[KeyPool]:
    """Yield the pool of one request, with one thread; `used` gets an item when the thread begins."""
    begun = [] if used is None else used
    with ThreadPoolExecutor(1, initializer=begun.append, initargs=(True,)) as threads:
        yield EncodePool(threads, 1).of("", made)
