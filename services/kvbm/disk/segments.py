"""The files of one layout's disk tier, and whether they can be trusted. Files of former layouts make room for
others.

    DIRECTORY/                mode 0700, this user's, no symbolic link
        0123456789abcdef/     one a layout, the same; locked (flock) by the process that uses it
            segment-000000    mode 0600, this user's, a plain file with one name; made when first written to
            probe             exists for a moment when the directory is opened

Everything is opened relative to descriptors of the two directories, so a path that is exchanged meanwhile is not
followed. A segment is allocated whole, so that a full disk is found when a file is made and not in the middle of a
record. Every problem raises OSError; the caller decides what it means.

Threads share one `Segments`. The loop counts its users, and the last `release` closes it, since a descriptor that is
closed while a thread uses it may be another file's a moment later.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import threading
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from services.kvbm.disk.format import DIGEST_BYTES, PAGE_BYTES, DiskGeometry, Header, decode_header
from services.kvbm.tiers.disk_records import HeaderProblem
from shared.regular_file import ownership_fault

SEGMENT = re.compile(r"segment-(\d{6,9})")
PROBE = "probe"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_LAYOUT = re.compile(f"[0-9a-f]{{{2 * DIGEST_BYTES}}}")


class Segments:
    """One opening of the directory; the next opening is a new object."""

    def __init__(self, directory: Path, geometry: DiskGeometry, min_free_bytes: int) -> None:
        self.direct = False
        """Whether requests bypass the page cache."""
        self.no_space = ""
        """Why no segment can be made at the moment; empty if no reason is known."""
        self._directory = directory
        self._path = directory / geometry.layout
        self._geometry = geometry
        self._min_free_bytes = min_free_bytes
        self._users = 0
        """The number of users of the descriptors. Used by the loop alone."""
        self._own = -1
        """Descriptor of the layout's directory."""
        self._directories: list[int] = []
        self._files: dict[int, int] = {}
        """Descriptor of each segment."""
        self._allocated: set[int] = set()
        """Segments that have their full size."""
        self._growing = threading.Lock()

    # --- in the loop

    def acquire(self) -> None:
        """Add a user."""
        self._users += 1

    def release(self) -> None:
        """Remove a user; the last one closes everything."""
        assert self._users > 0
        self._users -= 1
        if not self._users:
            for descriptor in (*self._files.values(), *self._directories):
                os.close(descriptor)
            self._files.clear()
            self._directories.clear()

    # --- from threads

    def open(self) -> None:
        """Make the two directories where they are missing (never their parents), check and lock them, and open the
        existing segments. Raise OSError, whose text names the path and what is wrong with it."""
        top = open_directory(self._directory, None)
        self._directories.append(top)
        self._own = open_directory(self._path, top)
        self._directories.append(self._own)
        lock(self._own, self._path)
        self._adopt()

    def existing(self) -> list[int]:
        """Return the existing segments, in order."""
        return sorted(self._files)

    def write(self, record: int, page: memoryview, memory: memoryview) -> None:
        """Write header page and payload, in one request."""
        segment, offset = self._geometry.position(record)
        if segment not in self._allocated:
            self._make(segment)
        written = os.pwritev(self._files[segment], [page, memory], offset)
        if written != self._geometry.record_bytes:
            raise OSError(errno.EIO, f"{written} of {self._geometry.record_bytes} bytes were written")

    def erase(self, record: int, page: memoryview) -> None:
        """Write zeros over the header page, if there is one."""
        segment, offset = self._geometry.position(record)
        file = self._files.get(segment)
        if file is not None and offset < os.fstat(file).st_size:
            page[:] = bytes(PAGE_BYTES)
            if os.pwritev(file, [page], offset) != PAGE_BYTES:
                raise OSError(errno.EIO, f"the header of record {record} was not erased")

    def read(self, record: int, page: memoryview, memory: memoryview) -> bool:
        """Read header page and payload, in one request. Return False if the file ends before the record does, or was
        never made."""
        segment, offset = self._geometry.position(record)
        file = self._files.get(segment)
        return file is not None and os.preadv(file, [page, memory], offset) == self._geometry.record_bytes

    def scan(self, segment: int, first: int, count: int, page: memoryview) -> list[tuple[int, Header | HeaderProblem]]:
        """Return the headers of `count` records of a segment from its `first` on, or fewer if the file ends. A sector
        that cannot be read costs its record alone."""
        file, start = self._files[segment], segment * self._geometry.records_per_segment
        headers: list[tuple[int, Header | HeaderProblem]] = []
        for index in range(first, first + count):
            try:
                if os.preadv(file, [page], index * self._geometry.record_bytes) != PAGE_BYTES:
                    break
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                headers.append((start + index, "torn"))
                continue
            headers.append((start + index, decode_header(page, self._geometry)))
        return headers

    def check(self) -> None:
        """Raise OSError if the directory or a segment is not there any more, or was replaced. A full disk may make
        segments again."""
        try:
            there = self._path.lstat()
        except FileNotFoundError as error:
            raise OSError(errno.ENOENT, f"{self._path} has vanished") from error
        if not os.path.samestat(there, os.fstat(self._own)):
            raise OSError(errno.ENOENT, f"{self._path} is another directory now")
        for segment, file in list(self._files.items()):
            found = os.fstat(file)
            if found.st_nlink == 0:
                raise OSError(errno.ENOENT, f"{self._path / _name(segment)} has vanished")
            if found.st_size < self._size_bytes(segment):
                self._allocated.discard(segment)  # the file was cut off; the next write restores its size
        self.no_space = ""

    # --- within

    def _adopt(self) -> None:
        """Open what is there: find out whether O_DIRECT works and whether the directory can be written. Cut off what is
        after the last record, to keep to the limit in bytes."""
        self._probe()
        for name in os.listdir(self._own):  # noqa: PTH208 — below the descriptor
            named = SEGMENT.fullmatch(name)
            if named is None:
                continue
            segment = int(named[1])
            if segment >= self._geometry.segments:
                os.unlink(name, dir_fd=self._own)
                continue
            self._open(segment, 0)
            size_bytes = os.fstat(self._files[segment]).st_size
            if size_bytes > self._size_bytes(segment):
                os.ftruncate(self._files[segment], self._size_bytes(segment))
            if size_bytes >= self._size_bytes(segment):
                self._allocated.add(segment)

    def _probe(self) -> None:
        """Write a page and read it back, with O_DIRECT if the file system allows it."""
        for direct in (os.O_DIRECT, 0):
            try:
                self._write_and_read(direct)
                self.direct = bool(direct)
                return
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    self.direct = bool(direct)  # opening worked, and existing records can be read
                    return
                if not direct or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise

    def _write_and_read(self, direct: int) -> None:

        page = mmap.mmap(-1, PAGE_BYTES)  # aligned, as O_DIRECT requires
        try:
            probe = os.open(PROBE, _FILE | os.O_CREAT | direct, 0o600, dir_fd=self._own)
            try:
                _check_file(probe, f"{self._path}/{PROBE}")
                if os.pwritev(probe, [page], 0) != PAGE_BYTES or os.preadv(probe, [page], 0) != PAGE_BYTES:
                    raise OSError(errno.EIO, f"{self._path}/{PROBE}: a page could not be written and read")
            finally:
                os.close(probe)
                os.unlink(PROBE, dir_fd=self._own)
        finally:
            page.close()

    def _make(self, segment: int) -> None:
        """Make or complete a segment. Raise ENOSPC at once while `no_space` is set."""
        with self._growing:
            if segment in self._allocated:
                return
            if self.no_space:
                raise OSError(errno.ENOSPC, self.no_space)
            try:
                self._allocate(segment)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    self.no_space = error.strerror or str(error)
                raise

    def _allocate(self, segment: int) -> None:
        size_bytes = self._size_bytes(segment)
        room = os.fstatvfs(self._own)
        if room.f_bavail * room.f_frsize - size_bytes < self._min_free_bytes:
            raise OSError(errno.ENOSPC, f"less than disk.min_free_bytes ({self._min_free_bytes}) would stay free")
        if segment not in self._files:
            self._open(segment, os.O_CREAT)
        file = self._files[segment]
        before_bytes = os.fstat(file).st_size
        try:
            os.posix_fallocate(file, 0, size_bytes)
        except OSError:
            os.ftruncate(file, before_bytes)  # give back what was allocated
            raise
        self._allocated.add(segment)

    def _open(self, segment: int, flags: int) -> None:
        direct = os.O_DIRECT if self.direct else 0
        file = os.open(_name(segment), _FILE | flags | direct, 0o600, dir_fd=self._own)
        try:
            _check_file(file, f"{self._path / _name(segment)}")
        except OSError:
            os.close(file)
            raise
        self._files[segment] = file

    def _size_bytes(self, segment: int) -> int:
        return self._geometry.records_in(segment) * self._geometry.record_bytes


def open_directory(path: Path, parent: int | None) -> int:
    """Return a descriptor of a directory that is this user's alone, made if it is missing; relative to `parent`, if
    given. Raise OSError."""
    name = path if parent is None else path.name
    with suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=parent)
    try:
        directory = os.open(name, _DIRECTORY, dir_fd=parent)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise OSError(error.errno, f"{path} is a symbolic link or no directory") from error
        raise
    if wrong := ownership_fault(os.fstat(directory), "directory", "open"):
        os.close(directory)
        raise PermissionError(errno.EPERM, f"{path} {wrong}")
    return directory


def lock(directory: int, path: Path) -> None:
    """Lock an open directory for as long as its descriptor is open. Raise OSError if another process has the
    lock."""
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise OSError(
            errno.EBUSY, f"{path} is in use: by another process, or by a request the disk has not answered"
        ) from error


def _check_file(file: int, path: str) -> None:
    found = os.fstat(file)
    wrong = ownership_fault(found, "file", "")
    if wrong or found.st_nlink != 1:
        raise PermissionError(errno.EPERM, f"{path} {wrong or f'has {found.st_nlink} names'}")


def _name(segment: int) -> str:
    return f"segment-{segment:06d}"


class StoredLayout(Struct, frozen=True):
    """One layout's directory."""

    layout: str
    used_bytes: int
    """Bytes allocated on disk."""
    opened_s: float
    """When the layout was last opened, in seconds since 1970: its probe touches the directory."""


def stored_layouts(directory: Path) -> list[StoredLayout]:
    """Return the layouts in the directory, those opened longest ago first. Raise OSError."""
    found: list[StoredLayout] = []
    for path in directory.iterdir():
        if _LAYOUT.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            with suppress(FileNotFoundError):  # another process is removing it
                used_bytes = sum(segment.lstat().st_blocks * 512 for segment in path.iterdir())
                found.append(StoredLayout(path.name, used_bytes, path.stat().st_mtime))
    return sorted(found, key=lambda layout: layout.opened_s)


def make_room(directory: Path, keep_bytes: int, keep: frozenset[str] = frozenset()) -> list[StoredLayout]:
    """Remove layouts that are neither in `keep` nor in use, those opened longest ago first, until those not in `keep`
    have at most `keep_bytes`. Return the removed ones. Raise OSError. A model that is no longer served leaves its
    segments until then. Only files that this module makes are removed."""
    others = [layout for layout in stored_layouts(directory) if layout.layout not in keep]
    used_bytes = sum(layout.used_bytes for layout in others)
    removed: list[StoredLayout] = []
    for layout in others:
        if used_bytes <= keep_bytes:
            break
        if _remove(directory, layout.layout):
            removed.append(layout)
            used_bytes -= layout.used_bytes
    return removed


def _remove(directory: Path, layout: str) -> bool:
    """Remove the layout. Return False if it is in use, or not ours."""
    path = directory / layout
    try:
        own = open_directory(path, None)
    except OSError:
        return False
    try:
        lock(own, path)
        for name in os.listdir(own):  # noqa: PTH208 — below the descriptor
            if SEGMENT.fullmatch(name) or name == PROBE:
                os.unlink(name, dir_fd=own)
        with suppress(OSError):
            path.rmdir()  # unless something else is in it
    except OSError:
        return False
    finally:
        os.close(own)
    return True
