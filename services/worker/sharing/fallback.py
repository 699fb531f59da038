"""Memory for an engine's blocks that others can map, if there is such memory; otherwise the engine shares
nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from services.worker.transfer.errors import DeviceFailed

Pages = TypeVar("Pages")

_log = logging.getLogger(__name__)


def pages_to_share(make: Callable[[], Pages]) -> Pages | None:
    """Return the memory that `make` allocates; None, after a warning, where the device or the system has none that
    others can map. Ordinary memory serves then. Raise DeviceMemoryExhausted: ordinary memory has no more room."""
    try:
        return make()
    except (DeviceFailed, OSError) as wrong:
        _log.warning(
            "this engine shares no blocks, which decode workers get from the kvbm only: its memory cannot be shared"
            " with other processes: %s (kvbm.lending = false ends this warning)",
            wrong,
        )
        return None
