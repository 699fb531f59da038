"""Many seeds: which ones a run has, which of them went wrong, and how to run them again."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from tests.simulation.plan import plan
from tests.simulation.world import run
from tests.tiers import Tier

REGRESSIONS = (3315, 659332734608, 659332738877)
"""Seeds that once found a fault. Add one together with the mend of what it found."""
NEW: Mapping[Tier, int] = {"check": 200, "all": 300, "long": 4500}
"""How many seeds each tier draws that no run had before."""


def drawn(tiers: Sequence[Tier], first: int, count: int | None) -> list[tuple[int, int, Tier]]:
    """Return a row of seeds for each of these tiers, or one row of `count`: the first, how many, and the tier."""
    found: list[tuple[int, int, Tier]] = []
    for tier, number in [(tiers[0], count)] if count is not None else NEW.items():
        if tier in tiers:
            found.append((first, number, tier))
            first += number
    return found


def failures(first: int, count: int) -> list[str]:
    """One text for each of the seeds `first` … `first + count - 1` in which something went wrong."""
    logging.disable(logging.CRITICAL)  # what services say of a storm would take most of the time
    try:
        return [told for seed in range(first, first + count) if (told := failure(seed))]
    finally:
        logging.disable(logging.NOTSET)


def failure(seed: int) -> str:
    """What went wrong in a seed. Empty if there is nothing."""
    again = f".venv/bin/python -m tests.simulation {seed}"
    try:
        wrong = run(plan(seed))
    except BaseException as error:
        error.add_note(again)
        raise
    return "\n  ".join([again, *wrong]) if wrong else ""
