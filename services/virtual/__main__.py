"""Runs fleets in virtual time: a line of JSON on stdin is a run, the line on stdout what came of it.

python -m services.virtual
"""

from __future__ import annotations

import os
import sys

import msgspec

from services.virtual.run import run
from shared.errors import MALFORMED, HeadraceError
from shared.messages.virtual import RUN, VirtualFailure, VirtualResult
from shared.parent_death import die_with_parent


def main() -> int:
    """Answer each line until stdin ends, or the parent does in the middle of a run."""
    die_with_parent(os.getppid())
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(msgspec.json.encode(_answer(line)) + b"\n")
        sys.stdout.buffer.flush()
    return 0


def _answer(line: bytes) -> VirtualResult | VirtualFailure:
    try:
        return run(RUN.decode(line))
    except (HeadraceError, OSError, *MALFORMED) as wrong:
        return VirtualFailure(str(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
