"""A directory in memory for the block store of one `up`, removed when `up` ends.

/dev/shm/headrace-UID-…     mode 0700, locked (flock on the directory) by the `up` that made it, for as long as it
                            lives: an unlocked one is left of an `up` that was killed, and the next `up` removes it
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

MEMORY = Path("/dev/shm")  # noqa: S108 every Linux has its tmpfs there; our directory has mode 0700


@contextmanager
def private_pool(memory: Path = MEMORY) -> Iterator[Path]:
    """Yield a new directory for one block store; remove it afterwards. Raise ConfigError if `memory` cannot be
    used."""
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
        # Another `up` removed it between the two calls.


def _sweep(memory: Path, prefix: str) -> None:
    for directory in memory.glob(f"{prefix}*"):
        try:
            lock = _locked(directory) if directory.lstat().st_uid == os.geteuid() else None
        except OSError:  # removed meanwhile, or not a directory
            continue
        if lock is not None:
            shutil.rmtree(directory, ignore_errors=True)
            os.close(lock)


def _locked(directory: Path) -> int | None:
    """Lock the directory at that path and return the descriptor that holds the lock; None if another process holds it.
    The lock ends with this process; programs that it starts do not inherit it. Raise OSError."""
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
