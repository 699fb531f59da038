"""Reads files that may be anything: a pipe, a device, endless.

A file is opened without waiting, must be a regular file, and is read up to a limit. Every fault is an OSError whose
`strerror` says what is wrong.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular_file(path: Path) -> BinaryIO:
    """Open a file for reading. Raise OSError if it is missing or not a regular file."""
    try:
        # A pipe that nothing writes to would hold a plain open() up for ever.
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    except IsADirectoryError:
        raise OSError(errno.EISDIR, "not a regular file") from None
    except ValueError as wrong:  # a path may contain anything
        raise OSError(errno.EINVAL, str(wrong)) from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file")
    return file


def read_regular_file(path: Path, limit_bytes: int) -> bytes:
    """Return the whole file. Raise OSError, also if it has more than `limit_bytes`."""
    with open_regular_file(path) as file:
        content = file.read(limit_bytes + 1)
    if len(content) > limit_bytes:
        raise OSError(errno.EFBIG, f"larger than {limit_bytes} bytes")
    return content
