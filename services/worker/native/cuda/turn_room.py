"""Waits until a GPU has room for an engine whose model takes turns with those of other engines (docs/model_turns.md).

All of them start at the same time, and each takes most of the GPU until it sleeps. So they load one after the other:
the lock of a file keeps two from taking the same room.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from shared.errors import ModelError

ROOM_LIMIT_S = 600.0
"""Seconds to wait for room: the start of dozens of models, or a turn of some others."""
_POLL_S = 0.1


@contextmanager
def turn_room(
    file: Path,
    needed_bytes: int,
    free_bytes: Callable[[], int],
    waits: Callable[[], None],
    *,
    limit_s: float = ROOM_LIMIT_S,
) -> Iterator[None]:
    """Wait until the GPU has `needed_bytes` free and no other engine loads, and keep others from loading until the end
    of the block. `waits` is called once if there is something to wait for. Raise ModelError after `limit_s`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    until_s = time.monotonic() + limit_s
    with file.open("ab") as opened:  # its lock ends with the process, too
        locked = told = False
        while not (locked := locked or _lock(opened)) or free_bytes() < needed_bytes:
            if time.monotonic() > until_s:
                raise ModelError(
                    f"turns is set, and the GPU had no room for {needed_bytes} bytes in {limit_s:g} s: models that take"
                    f" turns have given {free_bytes()} back; lower cuda.memory_share, or free the GPU"
                )
            if not told:
                told = True
                waits()
            time.sleep(_POLL_S)
        yield


def _lock(opened: IO[bytes]) -> bool:
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
