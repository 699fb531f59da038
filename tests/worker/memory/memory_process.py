"""An engine as the memory service sees it, in a process of its own, which a test commands and kills.

    python -m tests.worker.memory.memory_process DIRECTORY MODEL SIZE

It asks at once, and answers each line of its standard input with one line: `half` writes half of the weights, `commit`
the rest and commits, `sum` adds all bytes that are mapped, `poke` tries to write to them. It ends with its input.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
from pathlib import Path

import numpy as np

from services.worker.memory.client import NoSharedWeights, WeightsLock
from services.worker.memory.messages import WeightsIdentity
from services.worker.sharing.host_pages import IMMUTABLE, memory_file, seal_memory

LAYOUT = "a" * 16


def identity_of(model: int) -> WeightsIdentity:
    return WeightsIdentity(f"{model:016x}", LAYOUT)


def content_of(model: int, size_bytes: int) -> bytes:
    """Return the weights of a model."""
    return bytes((model + place) % 251 for place in range(251)) * (size_bytes // 251 + 1)


def sum_of(model: int, size_bytes: int) -> int:
    """Return the sum of all bytes of a model's weights."""
    return sum(content_of(model, size_bytes)[:size_bytes])


def mapped_sum(descriptor: int) -> int:
    """Map the memory for reading; return the sum of all its bytes."""
    with mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) as memory:
        return int(np.frombuffer(memory[:], np.uint8).sum(dtype=np.uint64))


def poke(descriptor: int) -> str:
    """Try to change the memory; return how the kernel refuses it."""
    try:
        mmap.mmap(descriptor, 0, prot=mmap.PROT_READ | mmap.PROT_WRITE).close()
    except OSError as wrong:
        refused = errno.errorcode[wrong.errno or 0]
    else:
        return "mapped for writing"
    try:
        os.pwrite(descriptor, b"\0", 0)
    except OSError as wrong:
        return f"{refused} {errno.errorcode[wrong.errno or 0]}"
    return "written"


def say(word: object) -> None:
    print(word, flush=True)


def main(directory: str, model: int, size_bytes: int) -> None:
    try:
        lock = WeightsLock(Path(directory), identity_of(model), size_bytes, 20.0)
        descriptors = lock.ask(f"model-{model}", 60.0, lambda: say("waits"))
    except NoSharedWeights as wrong:
        say(f"refused {wrong}")
        return
    descriptor = memory_file("headrace-test") if descriptors is None else descriptors[0]
    say("writes" if descriptors is None else "maps")
    content = content_of(model, size_bytes)[:size_bytes]
    for line in sys.stdin:
        match line.strip():
            case "half":
                os.pwrite(descriptor, content[: size_bytes // 2], 0)
                say("half")
            case "commit":
                os.pwrite(descriptor, content, 0)
                try:
                    seal_memory(descriptor, IMMUTABLE)
                    lock.commit(descriptor)
                except NoSharedWeights as wrong:
                    say(f"refused {wrong}")
                else:
                    say("committed")
            case "sum":
                say(mapped_sum(descriptor))
            case "poke":
                say(poke(descriptor))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
