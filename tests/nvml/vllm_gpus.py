"""Prints the GPUs that vLLM engines would name, a line for each, with vLLM's own Python:

    PYTHON -m tests.nvml.vllm_gpus [CUDA_VISIBLE_DEVICES RANKS SIZE] …

vLLM's platform for NVIDIA's GPUs answers, over the driver of the environment. Its module imports the kernels for GPUs,
which a vLLM for CPUs does not have, and which nothing here calls.
"""

from __future__ import annotations

import os
import sys
import types
from types import SimpleNamespace
from typing import Any


def main(cases: list[str]) -> None:
    sys.modules.setdefault("vllm._C_stable_libtorch", types.ModuleType("vllm._C_stable_libtorch"))
    import vllm.platforms
    from vllm.platforms.cuda import NvmlCudaPlatform

    from services.worker.vllm.main import _gpus

    platforms: Any = vllm.platforms
    platforms._current_platform = NvmlCudaPlatform()
    for visible, ranks, size in zip(*[iter(cases)] * 3, strict=True):
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
        parallel = SimpleNamespace(world_size=int(size), data_parallel_size=int(ranks))
        config: Any = SimpleNamespace(parallel_config=parallel)
        print(*_gpus(config))


if __name__ == "__main__":
    main(sys.argv[1:])
