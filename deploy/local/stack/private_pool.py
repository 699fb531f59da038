"""A directory in memory for one `up`'s block store: made at its start, gone at its end, swept where it was killed.

/dev/shm/headrace-UID-…     mode 0700, locked (flock on the directory) by the `up` that made it, for as long as it
                            lives: an unlocked one is left over, and whoever comes next removes it
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shared.errors import ConfigError

MEMORY = Path("/dev/shm")  # noqa: S108 every Linux has its tmpfs there; what is in ours is this user's alone


@contextmanager
def private_pool(memory: Path = MEMORY) -> Iterator[Path]:
    """The directory, for one block store. Raises ConfigError where there is no such file system."""
    prefix = f"headrace-{os.geteuid()}-"
    try:
        _sweep(memory, prefix)
        directory, lock = _make(memory, prefix)
    except OSError as wrong:
        raise ConfigError(f"no memory for a block store: {wrong.filename or memory}: {wrong.strerror}") from None
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


def _make(memory: Path, prefix: str) -> tuple[Path, int]:
    while True:
        directory = Path(tempfile.mkdtemp(prefix=prefix, dir=memory))  # mode 0700
        try:
            lock = _locked(directory)
        except FileNotFoundError:
            lock = None
        if lock is not None:
            return directory, lock
        # Another `up` swept it between the two calls.


def _sweep(memory: Path, prefix: str) -> None:
    for directory in memory.glob(f"{prefix}*"):
        try:
            lock = _locked(directory) if directory.lstat().st_uid == os.geteuid() else None
        except OSError:  # gone meanwhile, or no directory
            continue
        if lock is not None:
            shutil.rmtree(directory, ignore_errors=True)
            os.close(lock)


def _locked(directory: Path) -> int | None:
    """A descriptor that holds the lock of the directory now at that path; None where another process does. The lock
    goes with this process, and no program that it starts inherits it. Raises OSError."""
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), directory.lstat()):
            return lock
    except BlockingIOError:
        pass
    except OSError:
        os.close(lock)
        raise
    os.close(lock)
    return None
