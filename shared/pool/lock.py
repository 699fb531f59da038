"""Kernel locks next to a kvbm's pool, which prove that its users live.

    DIR/lock            held by the directory's kvbm; engines over NATS find it by the note "PID INSTANCE\n" in it
    DIR/socket          no lock: where the kvbm listens (`shared.pool.socket_frames`)
    DIR/owners/OWNER    held by an engine process that maps the pool, from before it attaches until it ends

The kernel releases a lock when its process ends, for whatever reason, and not before. A process that is stopped
(SIGSTOP) keeps its lock, since it may continue and write. So a free lock proves that no thread of the process will ever
write again; no timer and no lease can prove that.

A GPU writes for its process until the driver's files are closed, some ms after the process has died. Linux closes the
files of a dead process in the order of their numbers, and releases them in reverse order. So an engine that uses a GPU
keeps its lock under a number that is lower than those of the driver's files (`HeldLock.move_to`). Measured on an H200
during copies: without this, the lock is free 0.5 ms after SIGKILL, and the GPU writes to the pool for 4 to 6 ms more.
With it, the lock is free after 40 to 50 ms, and nothing is written after that.

A lock is a `flock`, which belongs to an open file, and so to every process that has inherited the file. But it must end
with its owner: `exec` closes the descriptor, and a child of `os.fork` closes it first of all. (A library that forks in
C without `exec` would keep it. Then a dead owner's slots stay unused for as long as that child lives.)
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
from contextlib import suppress
from pathlib import Path
from weakref import WeakSet

from shared.errors import HeadraceError
from shared.pool.format import PoolUnfit
from shared.regular_file import ownership_fault

LOCK = "lock"
OWNERS = "owners"
POOL = "pool"
SOCKET = "socket"
_NOTE_BYTES = 128
_OWNER = re.compile(r"[0-9A-Za-z_-]{1,128}")
_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""The flags follow no link, and do not wait for the other end of a pipe."""


class LockTaken(HeadraceError):
    """Another process holds the lock. `note` is the text that it wrote into the file, perhaps still empty."""

    def __init__(self, path: Path, note: str) -> None:
        super().__init__(f"{path} is held by another process")
        self.note = note


class HeldLock:
    """A file whose kernel lock this process holds until `close`, or until it ends. Made by `acquire` or `create`."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        _held.add(self)

    @staticmethod
    def acquire(path: Path, note: str) -> HeldLock:
        """Lock a permanent file, and write `note` into it. Raise LockTaken or OSError."""
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
    def create(path: Path, *, shared: bool = False) -> HeldLock:
        """Lock a new file. Any process that finds it unlocked may delete it. With `shared`, others may `join`. Raise
        OSError."""
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        while True:
            held = HeldLock(path, os.open(path, _OPEN | os.O_CREAT | os.O_EXCL, 0o600))
            try:  # without waiting: a process that has locked it to delete it may be stopped by now
                fcntl.flock(held._descriptor, kind | fcntl.LOCK_NB)
                if held.held:
                    return held
            except BlockingIOError:
                pass
            except OSError:
                held.close(delete=True)
                raise
            held.close(delete=True)  # another process deleted or locked it between the two calls

    @staticmethod
    def join(path: Path) -> HeldLock:
        """Share the lock of a file that another process has made with `shared` and still holds. It is free when all of
        them have ended. Raise OSError, FileNotFoundError if it was free, and so deleted."""
        held = HeldLock(path, os.open(path, _OPEN))
        try:
            fcntl.flock(held._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if held.held:
                return held
        except OSError:
            held.close()
            raise
        held.close()
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

    @property
    def held(self) -> bool:
        """Whether the file that others see is still the locked one."""
        if self._descriptor < 0:
            return False
        try:
            return os.path.samestat(self.path.lstat(), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False

    def move_to(self, number: int) -> None:
        """Move the lock to the descriptor `number`, which is open: its file is closed, and if that was a lock,
        released."""
        for other in _held:
            if other._descriptor == number:
                other._descriptor = -1
        os.dup2(self._descriptor, number, inheritable=False)
        self._let_go()
        self._descriptor = number

    def close(self, *, delete: bool = False) -> None:
        """Release the lock. Idempotent."""
        if delete and self.held:
            self.path.unlink(missing_ok=True)
        self._let_go()

    def _let_go(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


_held: WeakSet[HeldLock] = WeakSet()


def _forget_in_child() -> None:
    """Close the parent's locks in a child. The parent keeps them, since its own descriptors are open."""
    for lock in list(_held):
        with suppress(OSError):
            lock._let_go()


os.register_at_fork(after_in_child=_forget_in_child)


def hold_directory(directory: Path, instance: str) -> HeldLock:
    """Lock the directory of a pool for the kvbm `instance`. Raise LockTaken or OSError."""
    return HeldLock.acquire(directory / LOCK, f"{os.getpid()} {instance}\n")


def is_owner(name: str) -> bool:
    """Return whether an owner may have this name, which becomes the name of a file."""
    return _OWNER.fullmatch(name) is not None


def hold_owner(directory: Path, owner: str, *, shared: bool = False) -> HeldLock:
    """Lock the file of this engine process next to the pool in `directory`. A name is used only once. With `shared`,
    the engine's other processes may `join_owner`.

    Closing the lock (`close(delete=True)`) ends everything that is granted to the owner, so close it only once nothing
    touches the pool.

    Raise PoolUnfit if no kvbm has ever run there, or if other users could have put their own files there.
    """
    assert is_owner(owner), owner
    try:
        check_directory(directory)
        check_directory(directory / OWNERS)
        return HeldLock.create(directory / OWNERS / owner, shared=shared)
    except OSError as wrong:
        raise PoolUnfit(f"{wrong.filename or directory}: {wrong.strerror}") from None


def join_owner(directory: Path, owner: str) -> HeldLock:
    """Share the lock of an engine whose other process holds it. Raise PoolUnfit if that has ended."""
    assert is_owner(owner), owner
    try:
        return HeldLock.join(directory / OWNERS / owner)
    except OSError as wrong:
        raise PoolUnfit(f"{wrong.filename or directory / OWNERS / owner}: {wrong.strerror}") from None


def check_directory(directory: Path) -> None:
    """Raise PoolUnfit if another user owns the directory or can change it, OSError if it cannot be inspected."""
    if wrong := ownership_fault(directory.stat(), "directory", "write to"):
        raise PoolUnfit(f"{directory} {wrong}")
