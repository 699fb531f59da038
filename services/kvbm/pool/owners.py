"""The engine processes that this kvbm serves, and proof of which of them are dead.

                 look, alive                 look
    unknown ───────────────────▶ watched ─────────────▶ dead: reported once, its file deleted

A watched owner's file is kept open, so that its lock is asked, and not whatever lies under its name: a living engine
whose file somebody deleted stays alive.
"""

from __future__ import annotations

import fcntl
import os
import stat
from contextlib import suppress
from pathlib import Path

from shared.pool.lock import OWNERS, is_owner

MOST_OWNERS = 256
"""Watched at once, one descriptor each. More engines than these cannot attach."""


class OwnerLocks:
    """Those with a file in `directory`/owners. Blocking, for as long as a few calls of the file system take."""

    def __init__(self, directory: Path) -> None:
        """Makes the directory. Raises OSError."""
        self._directory = directory / OWNERS
        self._directory.mkdir(mode=0o700, exist_ok=True)
        self._watched: dict[str, int] = {}
        """A descriptor each."""

    @property
    def watched(self) -> frozenset[str]:
        """Alive, as far as `look` knew."""
        return frozenset(self._watched)

    @property
    def full(self) -> bool:
        """No other engine can be taken up."""
        return len(self._watched) >= MOST_OWNERS

    def is_alive(self, owner: str) -> bool:
        """Whether its lock is held now; whoever was not watched is, if there is room. False for a name that no owner
        may have. Raises OSError where it cannot be told."""
        if not is_owner(owner):
            return False
        if owner not in self._watched and not self._watch(owner):
            return False
        return not _free(self._watched[owner])

    def poll(self) -> list[str]:
        """Takes up new owners, deletes the files of dead ones, and returns those that were watched and have died.
        Raises OSError where it cannot be told; then nobody is dead who is not returned by a later look."""
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
        """False: there is no such owner, it is dead already (and its file deleted), or there is no room."""
        if self.full:
            return False
        try:
            descriptor = os.open(self._directory / owner, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        except OSError:
            if (self._directory / owner).is_symlink():
                return False  # no engine made it
            raise
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid():
            os.close(descriptor)
            return False
        if _free(descriptor):
            self._delete(owner, descriptor)
            os.close(descriptor)
            return False
        self._watched[owner] = descriptor
        return True

    def _delete(self, owner: str, descriptor: int) -> None:
        """Deletes the file of the descriptor, whose lock we hold until it is closed. An engine that has just made the
        file and was about to lock it sees that it is gone, and makes it again."""
        path = self._directory / owner
        with suppress(FileNotFoundError):
            if os.path.samestat(path.lstat(), os.fstat(descriptor)):
                path.unlink()


def _free(descriptor: int) -> bool:
    """Whether nobody held the lock; then we do."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
