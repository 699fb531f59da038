"""Waits until a file can be read."""

from __future__ import annotations

import select
from typing import Protocol


class HasDescriptor(Protocol):
    """A file, a socket, or what has one."""

    def fileno(self) -> int: ...


def readable(source: HasDescriptor, limit_s: float) -> bool:
    """Wait at most `limit_s` seconds until it can be read or has ended; return whether it has. Its descriptor may have
    any number, while `select.select` takes none from 1024 on, which vLLM's process may well reach."""
    poll = select.poll()
    poll.register(source, select.POLLIN)
    return bool(poll.poll(1000 * limit_s))  # rounded up to milliseconds
