"""Many seeds: which of them went wrong, and how to run them again."""

from __future__ import annotations

import logging

from tests.simulation.plan import plan
from tests.simulation.world import run


def failures(first: int, count: int) -> list[str]:
    """One text for each of the seeds `first` … `first + count - 1` in which something went wrong."""
    logging.disable(logging.CRITICAL)  # what services say of a storm would take most of the time
    try:
        return [told for seed in range(first, first + count) if (told := failure(seed))]
    finally:
        logging.disable(logging.NOTSET)


def failure(seed: int) -> str:
    """What went wrong in a seed; empty: nothing."""
    again = f".venv/bin/python -m tests.simulation {seed}"
    try:
        wrong = run(plan(seed))
    except BaseException as error:
        error.add_note(again)
        raise
    return "\n  ".join([again, *wrong]) if wrong else ""
