"""Kernel locks (flock) of jobs: one frontend owns a job, and its death gives the job free at once."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class JobLock:
    """A lock that is held until `release`."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor

    @staticmethod
    def take(path: Path, *, create: bool = False) -> JobLock | None:
        """Return the lock. None if another frontend holds it, or its file is gone. Blocks. Raise OSError if the file
        cannot be made."""
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0)
        try:
            descriptor = os.open(path, flags, 0o600)
        except FileNotFoundError:
            if create:
                raise
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return None
        return JobLock(path, descriptor)

    def touch(self) -> None:
        """Keep the file from expiring."""
        os.utime(self._descriptor)

    def release(self, *, over: bool) -> None:
        """Let others own the job, or with `over` remove it."""
        try:
            if over:
                self._path.unlink(missing_ok=True)
        finally:
            os.close(self._descriptor)
