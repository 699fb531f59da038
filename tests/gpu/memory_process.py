"""An engine on a GPU as the memory service sees it: `tests.worker.memory.memory_process` with weights in device memory.

    python -m tests.gpu.memory_process DIRECTORY MODEL SIZE

After a refused `poke` the process has no CUDA any more.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import cupy as cp  # pyright: ignore[reportMissingImports]
import msgspec
import numpy as np

from services.worker.memory.client import NoSharedWeights, WeightsLock
from services.worker.sharing.device_pages import DeviceMapper, DevicePages
from services.worker.sharing.driver import Driver
from services.worker.transfer.cuda import use_device
from tests.worker.memory.memory_process import content_of, identity_of, say


def poke(memory: Any) -> str:
    """Try to change the memory; return how the device refuses it."""
    try:
        memory += 1  # by a kernel
        cp.cuda.runtime.deviceSynchronize()
    except cp.cuda.runtime.CUDARuntimeError as wrong:
        return str(wrong).partition(":")[0]
    return "written"


def main(directory: str, model: int, size_bytes: int) -> None:
    use_device(0)
    uuid = Driver().uuid(0)
    identity = msgspec.structs.replace(identity_of(model), device=uuid)
    try:
        lock = WeightsLock(Path(directory), identity, size_bytes, 20.0)
        descriptors = lock.ask(f"model-{model}", 60.0, lambda: say("waits"))
    except NoSharedWeights as wrong:
        say(f"refused {wrong}")
        return
    pages = DevicePages(size_bytes, 0) if descriptors is None else None
    mapped = pages or DeviceMapper(0).map(descriptors or [], size_bytes, uuid)
    memory = cp.ndarray(
        (size_bytes,), cp.uint8, cp.cuda.MemoryPointer(cp.cuda.UnownedMemory(mapped.address, size_bytes, mapped, 0), 0)
    )
    say("writes" if pages else "maps")
    content = np.frombuffer(content_of(model, size_bytes)[:size_bytes], np.uint8)
    for line in sys.stdin:
        match line.strip():
            case "half":
                memory[: size_bytes // 2].set(content[: size_bytes // 2])
                cp.cuda.runtime.deviceSynchronize()
                say("half")
            case "commit":
                assert pages is not None
                memory.set(content)
                try:
                    pages.protect()
                    lock.commit(pages.descriptors()[0])
                except NoSharedWeights as wrong:
                    say(f"refused {wrong}")
                else:
                    say("committed")
            case "sum":
                say(int(memory.sum(dtype=cp.uint64)))
            case "poke":
                say(poke(memory))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
