"""Paths of Unix sockets, of which the kernel takes 107 bytes."""

from __future__ import annotations

import errno
import os
from contextlib import ExitStack

LIMIT_BYTES = 107


def reachable(path: str, opened: ExitStack) -> str:
    """The path, or where it is longer another one to the same socket, through its directory's descriptor: it holds in
    this process until `opened` is closed. Raises OSError where there is no such directory, or can be none."""
    if len(os.fsencode(path)) <= LIMIT_BYTES:
        return path
    if "\0" in path:  # other processes name paths too, and Python has another error for it
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
    directory, name = os.path.split(path)
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    opened.callback(os.close, descriptor)
    return f"/proc/self/fd/{descriptor}/{name}"
