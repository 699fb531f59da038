"""Paths of Unix sockets, of which the kernel takes 107 bytes."""

from __future__ import annotations

import errno
import os
import re
from contextlib import ExitStack

LIMIT_BYTES = 107
_STRANGE = re.compile(r"[^\w/.:~+@=-]", re.ASCII)
"""What may mean something else in a URL."""


def reachable(path: str, opened: ExitStack, *, in_url: bool = False) -> str:
    """The path, or where it is longer another one to the same socket, through its directory's descriptor: it holds in
    this process until `opened` is closed. `in_url`: the same where the directory has characters that a URL cannot have
    as they are. Raises OSError where there is no such directory, or can be none."""
    if len(os.fsencode(path)) <= LIMIT_BYTES and not (in_url and _STRANGE.search(path)):
        return path
    if "\0" in path:  # other processes name paths too, and Python has another error for it
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
    directory, name = os.path.split(path)
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    opened.callback(os.close, descriptor)
    return f"/proc/self/fd/{descriptor}/{name}"
