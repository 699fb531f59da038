"""The versions of vLLM that Headrace works with. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

MINORS = ((0, 32), (0, 33))
"""The minor versions that are promised, each with all of its patch versions."""
DEFAULT = "0.32.0"
"""The version that `headrace install-vllm` installs if it is not given one."""


def is_promised(version: str) -> bool:
    """Return whether Headrace works with this version, such as 0.32.0 or 0.33.1rc1+cpu."""
    found = re.match(r"(\d+)\.(\d+)\.", f"{version}.")
    return found is not None and (int(found[1]), int(found[2])) in MINORS


def promise() -> str:
    """Return the promised versions in words."""
    return " and ".join(f"{major}.{minor}" for major, minor in MINORS)


def refusal(version: str, needed_by: str, missing: Sequence[str] = ()) -> str:
    """Return why a version that is not promised is refused: by the first thing that `needed_by` does not find there,
    in one line. `missing` are all of them."""
    more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
    why = f": {missing[0]}{more}" if missing else ""
    return f"vLLM {version} is not supported{why}; {needed_by} works with {promise()}"
