"""Whether a file or directory is this user's own, and closed to other users."""

from __future__ import annotations

import os
import stat
from typing import Literal

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
