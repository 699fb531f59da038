"""`.venv/bin/python -m tests.simulation SEED` runs one seed: every message, fault and answer, and what went wrong."""

from __future__ import annotations

import logging
import signal
import sys

import msgspec

from tests.simulation.plan import plan
from tests.simulation.world import run


def main(arguments: list[str]) -> int:
    """Exit status: 0 if nothing went wrong."""
    if len(arguments) != 1 or not arguments[0].isdigit():
        print(__doc__, file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.INFO, format="           %(levelname)s %(name)s %(message)s", stream=sys.stdout)
    chosen = plan(int(arguments[0]))
    print(msgspec.json.format(msgspec.json.encode(chosen)).decode())
    wrong = run(chosen, print)
    print("\n".join(["", *wrong]) if wrong else "\nnothing went wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `… | head` ends it, and no world is told of it
    sys.exit(main(sys.argv[1:]))
