"""Prints what a vLLM lacks of the names that we use: `python -m tests.vllm_interface WHEEL_OR_DIRECTORY`.

The directory is the one above the package `vllm`, such as an environment's site-packages. Nothing of vLLM is imported.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

from services.worker.vllm.interface import missing_names
from services.worker.vllm.used_names import CONNECTOR, ENGINE


def lacks(place: Path) -> list[str]:
    """Return what the vLLM in a wheel or a directory lacks, a line each."""
    root = zipfile.Path(place) if place.is_file() else place
    return [*dict.fromkeys(missing_names(ENGINE, root) + missing_names(CONNECTOR, root))]


def main(words: list[str]) -> int:
    """Return 1 if anything is missing, 2 without a place."""
    if len(words) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    missing = lacks(Path(words[0]))
    print("\n".join([*missing, f"{len(missing)} of the names that Headrace uses are missing"]))
    return bool(missing)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
