"""Runs scripts with the Python of vLLM's environment."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.worker.vllm.environment import LIMIT_S

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".headrace" / "vllm" / "bin" / "python"


def run_script(script: str) -> str:
    """Return what a script prints; skip the test where vLLM's environment is missing."""
    if not PYTHON.exists():
        pytest.skip("vLLM's environment, .headrace/vllm, is not installed")
    own = {
        "PYTHONPATH": str(ROOT),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [PYTHON, "-c", script], env=os.environ | own, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
