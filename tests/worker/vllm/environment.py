"""vLLM's environment, for tests that need it: `./headrace install-vllm` makes it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from deploy.local.engine_environment import STAMP
from deploy.local.install_vllm import device_of

CHECKOUT = Path(__file__).parents[3]
PYTHON = CHECKOUT / ".headrace" / "vllm" / "bin" / "python"
VARIABLES = {
    "PYTHONPATH": str(CHECKOUT),
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
WORKER = ("--threads", "1", "--block-size", "32")
"""Settings of workers: the block size that a CPU takes, on a GPU, too."""
LIMIT_S = 900.0
"""How long tests wait for a vLLM to start or to answer. Each start has a minute of imports, on a machine that may be
busy with other tests."""
needs_vllm = pytest.mark.vllm
INSTALLED = (PYTHON.parents[1] / STAMP).exists()
"""Whether vLLM is there, and not just being installed."""
ON_GPU = INSTALLED and device_of(PYTHON.parents[1]) == "cuda"
"""Whether the vLLM that is installed computes on a GPU."""
ON_DEVICE: dict[str, Any] = (
    {"gpu_memory_utilization": 0.02, "kv_cache_memory_bytes": 1 << 28, "enable_sleep_mode": True} if ON_GPU else {}
)
"""Arguments that every engine of a test gets. Engines share a GPU, so that none may look how much memory is free."""
LORA_DTYPE = "bfloat16" if ON_GPU else "float32"
"""vLLM's kernels of LoRAs on a GPU take no float32."""
ON_DEVICE_WORDS = {name: str(value).lower() for name, value in ON_DEVICE.items()}
"""The same as texts, for command lines."""


def needs_gpus(count: int) -> pytest.MarkDecorator:
    """Skip a test of several ranks, which need a GPU each, if vLLM computes on fewer GPUs."""
    found = len(list(Path("/dev").glob("nvidia[0-9]*")))
    return pytest.mark.skipif(ON_GPU and found < count, reason=f"vLLM needs {count} GPUs for it; there are {found}")


def run_there(code: str) -> Any:
    """Run code with vLLM's Python; return the list or object that it prints as JSON in its last such line."""
    ran = subprocess.run(
        [str(PYTHON), "-c", code],
        env=os.environ | VARIABLES,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    lines = ran.stdout.splitlines()  # a process that ends may print more after it
    return json.loads(next(line for line in reversed(lines) if line.startswith(("[", "{"))))
