"""The engine processes that this kvbm serves, and the kernel locks that prove which of them are dead.

                 poll, is_alive              poll
    unknown ───────────────────▶ watched ─────────────▶ dead: returned once, its file deleted

The file of a watched owner is kept open, so that its own lock is checked, and not another file under its name: a living
engine whose file was deleted stays alive.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from shared.pool.lock import OWNERS, is_owner
from shared.regular_file import ownership_fault

MOST_OWNERS = 256
"""The most owners that are watched, one descriptor each. No further engine can attach."""


class OwnerLocks:
    """The locks in `directory`/owners. Every call blocks for a few calls of the file system."""

    def __init__(self, directory: Path) -> None:
        """Make the directory if it is missing. Raise OSError."""
        self._directory = directory / OWNERS
        self._directory.mkdir(mode=0o700, exist_ok=True)
        self._watched: dict[str, int] = {}
        """An open descriptor of each watched owner's file."""

    @property
    def watched(self) -> frozenset[str]:
        """The owners that were alive at the last `poll`."""
        return frozenset(self._watched)

    @property
    def full(self) -> bool:
        """Whether no further engine can be watched."""
        return len(self._watched) >= MOST_OWNERS

    def is_alive(self, owner: str) -> bool:
        """Return whether the owner's lock is held now, and watch it from now on if there is room. False for a name that
        no owner may have. Raise OSError if the lock cannot be checked."""
        if not is_owner(owner):
            return False
        if owner not in self._watched and not self._watch(owner):
            return False
        return not _free(self._watched[owner])

    def poll(self) -> list[str]:
        """Watch new owners, delete the files of dead ones, and return those that were watched and have died. Raises
        OSError if the locks cannot be checked; a later call returns the dead then."""
        for file in self._directory.iterdir():
            if is_owner(file.name) and file.name not in self._watched:
                self._watch(file.name)
        dead = [owner for owner, descriptor in self._watched.items() if _free(descriptor)]
        for owner in dead:
            descriptor = self._watched.pop(owner)
            self._delete(owner, descriptor)
            os.close(descriptor)
        return dead

    def close(self) -> None:
        for descriptor in self._watched.values():
            os.close(descriptor)
        self._watched.clear()

    def _watch(self, owner: str) -> bool:
        """Watch the owner. Return False if there is none, if it is dead already (its file is deleted), or if there is
        no room."""
        if self.full:
            return False
        try:
            descriptor = os.open(self._directory / owner, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        except OSError:
            if (self._directory / owner).is_symlink():
                return False  # no engine makes a link
            raise
        if ownership_fault(os.fstat(descriptor), "file", ""):
            os.close(descriptor)
            return False
        if _free(descriptor):
            self._delete(owner, descriptor)
            os.close(descriptor)
            return False
        self._watched[owner] = descriptor
        return True

    def _delete(self, owner: str, descriptor: int) -> None:
        """Delete the file of the descriptor, whose lock we hold until it is closed. An engine that has just made the
        file and was about to lock it sees that it is deleted, and makes it again."""
        path = self._directory / owner
        with suppress(FileNotFoundError):
            if os.path.samestat(path.lstat(), os.fstat(descriptor)):
                path.unlink()


def _free(descriptor: int) -> bool:
    """Return whether the lock was free; it is ours then."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
