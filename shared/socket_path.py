"""Paths of Unix sockets, which the kernel limits to 107 bytes."""

from __future__ import annotations

import errno
import os
import re
from contextlib import AsyncExitStack, ExitStack

LIMIT_BYTES = 107
_STRANGE = re.compile(r"[^\w/.:~+@=-]", re.ASCII)
"""A character that may have another meaning in a URL."""


def reachable(path: str, opened: ExitStack | AsyncExitStack, *, in_url: bool = False) -> str:
    """Return a path to the socket that the kernel accepts.

    That is `path` itself, or, if it is too long, one through the descriptor of its directory, which is valid in this
    process until `opened` is closed. With `in_url` this is also done for characters that need escapes in a URL.

    Raise OSError if there is no such directory, or `path` is invalid.
    """
    if len(os.fsencode(path)) <= LIMIT_BYTES and not (in_url and _STRANGE.search(path)):
        return path
    if "\0" in path:  # the path may come from another process, and Python would raise ValueError
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
    directory, name = os.path.split(path)
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    opened.callback(os.close, descriptor)
    return f"/proc/self/fd/{descriptor}/{name}"
