"""Kernel locks as proofs of life, beside a kvbm's pool.

    DIR/lock            held by the kvbm, one a directory; its note "PID INSTANCE\n" is how workers find it (`kvbm_of`)
    DIR/owners/OWNER    held by an engine process that maps the pool, from before it attaches until it ends

The kernel lets go of a lock when its process ends, however it ends, and not before: a process that is stopped (SIGSTOP)
keeps its lock, since it may go on and write. So a free lock proves that no thread of the process will ever write again;
no timer and no lease can.

A GPU writes for its process, and for some ms after its death: until the driver's files are closed. Linux closes what a
dead process had open in the order of the numbers, and lets go of it in the opposite one. So an engine that uses a GPU
keeps its lock under a number that is lower than those of the driver's files (`HeldLock.move`). Measured on an H200 with
copies under way: else the lock is free 0.5 ms after SIGKILL, and the pool is written to for 4 to 6 ms more; so it is
free after 40 to 50 ms, and nothing is written any more.

A lock is a `flock`, which belongs to an open file and so to every process that has inherited it. It must end with its
owner alone: the descriptor is closed by `exec`, and a child of `os.fork` closes it first thing. (A library that forks
in C without `exec` would keep it; then a dead owner's slots stay unused for as long as that child lives.)
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
from contextlib import suppress
from pathlib import Path
from weakref import WeakSet

from shared import subjects
from shared.errors import HeadraceError
from shared.pool.format import PoolUnfit

LOCK = "lock"
OWNERS = "owners"
POOL = "pool"
_NOTE_BYTES = 128
_OWNER = re.compile(r"[0-9A-Za-z_-]{1,128}")
_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Not through a link, and not waiting for the other end of a pipe."""


class LockTaken(HeadraceError):
    """Another process holds the lock. `note` is what it wrote into the file, perhaps nothing yet."""

    def __init__(self, path: Path, note: str) -> None:
        super().__init__(f"{path} is held by another process")
        self.note = note


class HeldLock:
    """A file whose kernel lock this process holds until `close`, or until it ends. Made by `take` or `make`."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        _held.add(self)

    @staticmethod
    def take(path: Path, note: str) -> HeldLock:
        """The lock of a file that stays; `note` is written into it. Raises LockTaken, OSError."""
        descriptor = os.open(path, _OPEN | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, note.encode(), 0)
        except BlockingIOError:
            written = os.pread(descriptor, _NOTE_BYTES, 0).decode("ascii", "replace").strip()
            os.close(descriptor)
            raise LockTaken(path, written) from None
        except OSError:
            os.close(descriptor)
            raise
        return HeldLock(path, descriptor)

    @staticmethod
    def make(path: Path) -> HeldLock:
        """The lock of a new file, which whoever finds it unlocked may delete. Raises OSError."""
        while True:
            held = HeldLock(path, os.open(path, _OPEN | os.O_CREAT | os.O_EXCL, 0o600))
            try:  # without waiting: who found the file unlocked may be stopped by now
                fcntl.flock(held._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if held.held:
                    return held
            except BlockingIOError:
                pass
            except OSError:
                held.close(delete=True)
                raise
            held.close(delete=True)  # deleted or locked by another, between the two calls

    @property
    def held(self) -> bool:
        """Whether the file that others see is still the locked one."""
        if self._descriptor < 0:
            return False
        try:
            return os.path.samestat(self.path.lstat(), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False

    def move(self, number: int) -> None:
        """To this descriptor, which is open: what it was is closed, and if that was a lock it is let go."""
        for other in _held:
            if other._descriptor == number:
                other._descriptor = -1
        os.dup2(self._descriptor, number, inheritable=False)
        self._let_go()
        self._descriptor = number

    def close(self, *, delete: bool = False) -> None:
        """Lets go; idempotent."""
        if delete and self.held:
            self.path.unlink(missing_ok=True)
        self._let_go()

    def _let_go(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


_held: WeakSet[HeldLock] = WeakSet()


def _forget_in_child() -> None:
    """The parent's lock stays: it is let go only when its last descriptor is closed."""
    for lock in list(_held):
        with suppress(OSError):
            lock._let_go()


os.register_at_fork(after_in_child=_forget_in_child)


def hold_directory(directory: Path, instance: str) -> HeldLock:
    """The lock of the kvbm `instance` on its pool's directory. Raises LockTaken, OSError."""
    return HeldLock.take(directory / LOCK, f"{os.getpid()} {instance}\n")


def kvbm_of(directory: Path) -> str:
    """The instance id of the kvbm that last held the directory; empty where none did, or none that can be read. Takes
    no lock: whether it lives is discovery's to say."""
    try:
        descriptor = os.open(directory / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        note = os.pread(descriptor, _NOTE_BYTES, 0).decode("ascii", "replace")
    except OSError:
        return ""
    finally:
        os.close(descriptor)
    _, _, instance = note.removesuffix("\n").partition(" ")
    return instance if note.endswith("\n") and subjects.is_id(instance) else ""


def is_owner(name: str) -> bool:
    """Whether an owner may have this name, which becomes a file's."""
    return _OWNER.fullmatch(name) is not None


def hold_owner(directory: Path, owner: str) -> HeldLock:
    """The lock of this engine process beside the pool in `directory`; a name is used once. Everything that is granted
    to the owner ends when it is closed (`close(delete=True)`), so only once nothing of the pool is touched any more.

    Raises PoolUnfit where no kvbm has ever run there, or where others could have put their own files there.
    """
    assert is_owner(owner), owner
    try:
        check_directory(directory)
        check_directory(directory / OWNERS)
        return HeldLock.make(directory / OWNERS / owner)
    except OSError as wrong:
        raise PoolUnfit(f"{wrong.filename or directory}: {wrong.strerror}") from None


def check_directory(directory: Path) -> None:
    """Raises PoolUnfit where another user owns or can change it, OSError where it cannot be looked at."""
    about = directory.stat()
    if not stat.S_ISDIR(about.st_mode):
        raise PoolUnfit(f"{directory} is no directory")
    if about.st_uid != os.geteuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PoolUnfit(f"{directory} must belong to this user and be writable by nobody else")
