"""Waiting for a line in the log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def logged(text: str, by: str) -> Iterator[asyncio.Event]:
    """An event that is set when the logger `by` logs a message with `text` in it."""
    found = asyncio.Event()

    def look(record: logging.LogRecord) -> bool:
        if text in record.getMessage():
            found.set()
        return True

    log = logging.getLogger(by)
    log.addFilter(look)
    try:
        yield found
    finally:
        log.removeFilter(look)
