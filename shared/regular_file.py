"""Reads files that may be anything, and tells whether one is this user's own, so that no other user can forge it.

A file may be a pipe, a device, or endless. It is opened without waiting, must be a regular file, and is read up to a
limit. Every fault is an OSError whose `strerror` says what is wrong.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO, Literal


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


Denied = Literal["open", "write to", ""]
"""What no other user may do with it. Empty if the mode does not matter, because the directory around it denies it."""
_BITS: dict[Denied, int] = {"open": stat.S_IRWXG | stat.S_IRWXO, "write to": stat.S_IWGRP | stat.S_IWOTH, "": 0}


def ownership_fault(about: os.stat_result, kind: Literal["file", "directory"], denied: Denied) -> str:
    """Return what is wrong with a file or directory that must be this user's own, to stand after its path. Empty if
    nothing is."""
    if not (stat.S_ISREG if kind == "file" else stat.S_ISDIR)(about.st_mode):
        return f"is not a {kind}"
    if about.st_uid == os.geteuid() and not about.st_mode & _BITS[denied]:
        return ""
    rule = f", and no other user may {denied} it" if denied else ""
    mode = stat.S_IMODE(about.st_mode)
    return f"must belong to this user{rule}: it belongs to user {about.st_uid} and has mode {mode:04o}"
