"""The Python of vLLM's environment: checked before an engine is started with it, since a program that lacks its
packages could only die without a report."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from shared.errors import ModelError

PACKAGES = ("vllm", "msgspec", "zmq")
"""What the engine's program imports."""
LEAST_PYTHON = (3, 11)
LIMIT_S = 60.0
"""Seconds within which the check must end; on a slow disk Python's own start may take some."""
_REMEDY = "./headrace install-vllm makes an environment"
_QUESTION = f"""
import importlib.util, json, sys
lacking = [name for name in {PACKAGES!r} if importlib.util.find_spec(name) is None]
print(json.dumps([list(sys.version_info[:2]), lacking]))
"""


def check_vllm_python(setting: str) -> str:
    """Return the absolute path of `vllm_python`. Blocks for some 50 ms. Raise ModelError, naming the setting, if it
    is not there, is no Python, is too old, or lacks a package."""
    python = str(Path(setting).absolute())
    where = f"worker.vllm_python is {python}"
    if not os.access(python, os.X_OK) or Path(python).is_dir():
        raise ModelError(f"{where}, which is not there: {_REMEDY}")
    try:
        ran = subprocess.run(
            [python, "-c", _QUESTION], stdin=subprocess.DEVNULL, capture_output=True, timeout=LIMIT_S, check=True
        )
        version, lacking = json.loads(ran.stdout)
        (major, minor), lacking = map(int, version), list(map(str, lacking))
    except (OSError, ValueError, TypeError, subprocess.SubprocessError):
        raise ModelError(f"{where}, which does not run as a Python: {_REMEDY}") from None
    if (major, minor) < LEAST_PYTHON:
        raise ModelError(
            f"{where}, which is Python {major}.{minor}; at least {LEAST_PYTHON[0]}.{LEAST_PYTHON[1]} works"
        )
    if lacking:
        raise ModelError(f"{where}, which lacks {', '.join(lacking)}: {_REMEDY}")
    return python
