"""Measures a disk past the page cache: aligned requests of one size, by threads, as kvbm sends them.

The file has no name, so that it is gone with the process, however that ends.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

from deploy.local.check.measurements import DiskMeasured, Unmeasured
from deploy.local.check.memory import existing, mounted

REQUEST_BYTES = 2 << 20
THREADS = 8
FILE_BYTES = 1 << 30
"""Limit of the file; a slow disk gets less, as each direction has LIMIT_S."""
LIMIT_S = 2.0
LEFT_BYTES = 4 << 30
"""Room that is left to others: kvbm's `disk.min_free_bytes`."""
SINGLE_READS = 20
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)


def measure(directory: Path) -> DiskMeasured | Unmeasured:
    """Return the rates of the disk that `directory` is on, or would be on. Raise OSError if it fails."""
    there = existing(directory)
    about = os.statvfs(there)
    free_bytes, kind = about.f_bavail * about.f_frsize, mounted(there)[0]
    if free_bytes < LEFT_BYTES + FILE_BYTES:
        needed = (LEFT_BYTES + FILE_BYTES) >> 30
        return Unmeasured(
            f"{there} has {free_bytes / 2**30:.1f} GiB free; kvbm leaves 4 GiB to others, and this needs {needed}"
        )
    try:
        file = unnamed(there, os.O_DIRECT)
    except OSError as wrong:
        if wrong.errno not in NO_DIRECT:
            raise
        return DiskMeasured(str(there), kind, free_bytes, direct=False)
    try:
        return _measure(file, there, kind, free_bytes)
    except OSError as wrong:
        if wrong.errno not in NO_ROOM:
            raise
        return Unmeasured(f"{there}: {wrong.strerror}, before the file had {FILE_BYTES >> 30} GiB")
    finally:
        os.close(file)


def unnamed(directory: Path, flags: int = 0) -> int:
    """Open a new file without a name. Raise OSError."""
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    except OSError as wrong:
        if wrong.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    named, path = tempfile.mkstemp(prefix=".headrace-check-", dir=directory)  # a file system without O_TMPFILE
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags)
    finally:
        Path(path).unlink()
        os.close(named)


def _measure(file: int, there: Path, kind: str, free_bytes: int) -> DiskMeasured:
    pages = [mmap.mmap(-1, REQUEST_BYTES) for _ in range(THREADS)]  # aligned, as O_DIRECT requires
    for page in pages:
        page[:] = os.urandom(REQUEST_BYTES)  # a disk may compress what it is given
    with ThreadPoolExecutor(THREADS) as threads:
        written, write_s = _share(threads, pages, FILE_BYTES, lambda page, at: os.pwritev(file, [page], at))
        os.fdatasync(file)
        read, read_s = _share(threads, pages, written, lambda page, at: os.preadv(file, [page], at))
    singles = list[float]()
    for number in range(SINGLE_READS):
        began = time.perf_counter()
        os.preadv(file, [pages[0]], number * 7 * REQUEST_BYTES % written)
        singles.append(time.perf_counter() - began)
    return DiskMeasured(
        str(there), kind, free_bytes, True, written, written / write_s, read / read_s, read_s=median(singles)
    )


def _share(
    threads: ThreadPoolExecutor, pages: list[mmap.mmap], limit_bytes: int, move: Callable[[mmap.mmap, int], int]
) -> tuple[int, float]:
    """Move up to `limit_bytes` for up to LIMIT_S, each thread every THREADS-th request. Return bytes of the file's
    leading part that all threads have moved, and seconds. Raise OSError."""
    began = time.perf_counter()

    def work(number: int) -> int:
        moved, at = 0, number * REQUEST_BYTES
        while at < limit_bytes and (not moved or time.perf_counter() - began < LIMIT_S):
            if move(pages[number], at) != REQUEST_BYTES:
                raise OSError(errno.EIO, f"a request of {REQUEST_BYTES} bytes was not done whole")
            moved, at = moved + 1, at + THREADS * REQUEST_BYTES
        return moved

    moved = list(threads.map(work, range(THREADS)))
    return min(moved) * THREADS * REQUEST_BYTES, time.perf_counter() - began
