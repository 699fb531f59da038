"""Prints the GPUs that a vLLM engine would name: `PYTHON -m tests.nvml.vllm_gpus RANKS SIZE`, with vLLM's own Python.

vLLM's platform for NVIDIA's GPUs answers, over the driver of the environment. Its module imports the kernels for GPUs,
which a vLLM for CPUs does not have, and which nothing here calls.
"""

from __future__ import annotations

import sys
import types
from types import SimpleNamespace
from typing import Any


def main(ranks: int, size: int) -> None:
    sys.modules.setdefault("vllm._C_stable_libtorch", types.ModuleType("vllm._C_stable_libtorch"))
    import vllm.platforms
    from vllm.platforms.cuda import NvmlCudaPlatform

    from services.worker.vllm.main import _gpus

    platforms: Any = vllm.platforms
    platforms._current_platform = NvmlCudaPlatform()
    config: Any = SimpleNamespace(parallel_config=SimpleNamespace(world_size=size, data_parallel_size=ranks))
    print(*_gpus(config))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
