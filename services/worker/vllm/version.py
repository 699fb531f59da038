"""The versions of vLLM that this program works with. Pure."""

from __future__ import annotations

import re

from shared.errors import ConfigError

AT_LEAST = (0, 32)
BELOW = (0, 33)


def check(version: str, needed_by: str = "this engine") -> None:
    """Raise ConfigError unless the version is in the range. `needed_by` says what works with the range."""
    found = re.match(r"(\d+)\.(\d+)", version)
    numbers = (int(found[1]), int(found[2])) if found else (0, 0)
    if not AT_LEAST <= numbers < BELOW:
        raise ConfigError(
            f"vLLM {version} is installed; {needed_by} works with {AT_LEAST[0]}.{AT_LEAST[1]} up to, not including,"
            f" {BELOW[0]}.{BELOW[1]}: ./headrace install-vllm installs one"
        )
