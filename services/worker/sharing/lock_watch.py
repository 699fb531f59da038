"""LockWatch: the kernel lock of another process, by which its death is proven.

`shared.pool.lock` says why a free lock proves that neither the process nor its GPU reads or writes any more.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from shared.ownership import ownership_fault
from shared.pool.lock import OWNERS, is_owner

_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class LockWatch:
    """The open lock file of one process: its own lock is watched, not another file under its name."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @staticmethod
    def of(directory: Path, owner: str) -> LockWatch | None:
        """Watch the lock of `owner` next to the pool in `directory`; None if no living process holds it. Raise OSError
        if that cannot be seen, since this process or the machine has no file descriptor left."""
        if not is_owner(owner):
            return None
        try:
            descriptor = os.open(directory / OWNERS / owner, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as wrong:
            if wrong.errno in _NO_DESCRIPTOR:
                raise
            return None
        watch = LockWatch(descriptor)
        if ownership_fault(os.fstat(descriptor), "file", "") or watch.is_free():
            watch.close()
            return None
        return watch

    def is_free(self) -> bool:
        """Return whether the process is dead. False also while another process looks at the same lock: ask again."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        return True

    def close(self) -> None:
        os.close(self._descriptor)
