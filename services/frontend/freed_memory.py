"""Has glibc keep the memory that requests free.

Otherwise the pages of each body of megabytes, such as one with an image, are given back and taken again, which costs a
sixth of such a request.
"""

from __future__ import annotations

import ctypes
import resource
from contextlib import suppress
from pathlib import Path

from shared.freed_memory import give_memory_back

KEPT_BYTES = 32 << 20
"""Most bytes of freed memory that the process keeps in one piece."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt, as glibc numbers them."""


def keep_freed_memory() -> None:
    """Have memory kept from now on. Nothing changes with another C library."""
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(_MMAP_THRESHOLD, KEPT_BYTES)


def give_back_freed_memory(beyond_bytes: int) -> None:
    """Give memory that was freed back to the system, if the process has more than these bytes. Nothing happens with
    another C library."""
    with suppress(OSError, AttributeError):
        if int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() > beyond_bytes:
            give_memory_back()
