"""Whether a routing policy can be loaded: the router's own code is asked, in a process of its own. A policy is
somebody's module, and deployment imports no service."""

from __future__ import annotations

import subprocess
import sys

from shared.errors import ConfigError

LIMIT_S = 30.0
BUILT_IN = ("kv", "round-robin", "random", "least-loaded", "power-of-two")
"""Not worth a process; a test compares them."""
_LOAD = """
import sys
from services.router.policy import load_policy
from shared.errors import ConfigError
try:
    load_policy(sys.argv[1])
except ConfigError as wrong:
    sys.exit(str(wrong))
"""


def check(name: str) -> None:
    """Raises ConfigError where the routers of an `up` would not start with it."""
    if name in BUILT_IN:
        return
    command = (sys.executable, "-P", "-c", _LOAD, name)  # as `up` starts them
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"policy {name}: it was not loaded in {LIMIT_S:g} s") from None
    if asked.returncode:
        raise ConfigError(asked.stderr.strip().splitlines()[-1] if asked.stderr.strip() else f"policy {name}: no word")
