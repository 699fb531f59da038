"""A process that holds a lock and whose GPU writes to shared memory without end, with many copies queued ahead.

It is started as `python -m tests.gpu.endless_writer POOL_DIRECTORY MEMORY_FILE` and prints "going" after each copy. It
takes the lock as an engine does: under a descriptor that it opened before CUDA opened its own.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections import deque
from pathlib import Path

from shared.pool.lock import hold_owner

OWNER = "writer"
AHEAD = 30


def main(directory: Path, memory: Path) -> None:
    number = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    import cupy  # pyright: ignore[reportMissingImports]
    from cupy.cuda import runtime  # pyright: ignore[reportMissingImports]

    with memory.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
    at = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    runtime.hostRegister(at, len(mapped), 0)
    source, stream = runtime.malloc(len(mapped)), cupy.cuda.Stream(non_blocking=True)
    hold_owner(directory, OWNER).move_to(number)
    ahead: deque[object] = deque()
    value = 0
    while True:
        value = value % 250 + 1
        runtime.memsetAsync(source, value, len(mapped), stream.ptr)
        runtime.memcpyAsync(at, source, len(mapped), runtime.memcpyDeviceToHost, stream.ptr)
        event = cupy.cuda.Event(block=True, disable_timing=True)
        event.record(stream)
        ahead.append(event)
        if len(ahead) > AHEAD:
            ahead.popleft().synchronize()  # type: ignore[attr-defined]
            print("going", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
