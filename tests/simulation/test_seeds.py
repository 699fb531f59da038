"""Nothing goes wrong in the worlds of many seeds: those that once found a fault, and new ones.

A failure names its seed and the command that runs it again; the header of the run names all that were drawn. The
environment may set SIMULATION_NEW, how many seeds are drawn, and SIMULATION_FIRST, the first of them.
"""

from __future__ import annotations

import pytest

from tests.simulation.conftest import NEW
from tests.simulation.seeds import REGRESSIONS, failures

BLOCK = 10
"""Seeds a test: few, since a machine that does much else has only so long for a test."""
BLOCKS = [
    pytest.param(at, min(BLOCK, first + count - at), marks=pytest.mark.tier(tier))
    for first, count, tier in NEW
    for at in range(first, first + count, BLOCK)
]


@pytest.mark.parametrize("seed", REGRESSIONS)
def test_nothing_goes_wrong_any_more_from_a_seed_that_once_found_a_fault(seed: int) -> None:
    assert not failures(seed, 1)


@pytest.mark.parametrize(("first", "count"), BLOCKS)
def test_nothing_goes_wrong_from_seed(first: int, count: int) -> None:
    found = failures(first, count)
    assert not found, "\n" + "\n".join(found)
