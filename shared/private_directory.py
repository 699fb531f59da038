"""A directory that lives as long as its process, also if that is killed.

PARENT/headrace-UID-…     mode 0700, locked (flock on the directory) by the process that made it, for as long as it
                          lives: an unlocked one is left of a process that was killed, and the next one removes it
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shared.regular_file import ownership_fault

_ATTEMPTS = 20


class NoDirectory(Exception):
    """A private directory could not be made."""

    def __init__(self, place: object, why: str, between: str = ": ") -> None:
        super().__init__(f"{place}{between}{why}")
        self.place, self.why = place, why


@contextmanager
def private_directory(parent: Path, name: str = "", *, prefix: str = "") -> Iterator[Path]:
    """Yield a new directory, or that with the `name`; remove it afterwards. Its own name begins with `prefix`, or with
    one for this user. Raise NoDirectory."""
    prefix = prefix or usual_prefix()
    try:
        _sweep(parent, prefix, keep=name)
        directory, lock = _make(parent, prefix, name)
    except OSError as wrong:
        raise NoDirectory(wrong.filename or parent, wrong.strerror or str(wrong)) from None
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


def usual_prefix() -> str:
    """Return what the names of this user's private directories begin with."""
    return f"headrace-{os.geteuid()}-"


def _make(parent: Path, prefix: str, name: str) -> tuple[Path, int]:
    for _ in range(_ATTEMPTS):
        if name:
            directory = parent / f"{prefix}{name}"
            directory.mkdir(mode=0o700, exist_ok=True)
            if fault := ownership_fault(directory.lstat(), "directory", "open"):
                raise NoDirectory(directory, fault, between=" ")
        else:
            directory = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))  # mode 0700
        try:
            lock = _locked(directory)
        except FileNotFoundError:
            lock = None
        if lock is not None:
            return directory, lock
        if name and directory.exists():
            raise NoDirectory(directory, "another process uses it")
        # Another process removed it between the two calls.
    raise NoDirectory(parent, "each new directory is taken away")


def _sweep(parent: Path, prefix: str, keep: str) -> None:
    for directory in parent.glob(f"{prefix}*"):
        if directory.name == f"{prefix}{keep}":
            continue  # of this process's predecessor, which has ended
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
