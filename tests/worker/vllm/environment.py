"""vLLM's environment, for tests that need it: `./headrace install-vllm` makes it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

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
needs_vllm = pytest.mark.vllm


def run_there(code: str) -> Any:
    """Run code with vLLM's Python; return what it prints as JSON in its last line."""
    ran = subprocess.run(
        [str(PYTHON), "-c", code],
        env=os.environ | VARIABLES,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return json.loads(ran.stdout.strip().rpartition("\n")[2])
