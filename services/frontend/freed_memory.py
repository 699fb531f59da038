"""Has glibc keep the memory that requests free.

Otherwise the pages of each body of megabytes, such as one with an image, are given back and taken again, which costs a
sixth of such a request.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress

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
