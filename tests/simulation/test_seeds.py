"""Nothing goes wrong in the worlds of many seeds: the first ones, the same in each run, and new ones.

The environment may set SIMULATION_SEEDS, how many of the first ones, and SIMULATION_NEW, how many new ones. A failure
names its seed and the command that runs it again, and the header of the run names the range of the new ones.
"""

from __future__ import annotations

import pytest

from tests.simulation.conftest import NEW, SEEDS, first_new
from tests.simulation.seeds import failures

BLOCK = 10
"""Seeds a test: few, since a machine that does much else has only so long for a test."""
BLOCKS = [
    (first, min(BLOCK, start + count - first))
    for start, count in ((0, SEEDS), (first_new, NEW))
    for first in range(start, start + count, BLOCK)
]


@pytest.mark.parametrize(("first", "count"), BLOCKS)
def test_nothing_goes_wrong_from_seed(first: int, count: int) -> None:
    found = failures(first, count)
    assert not found, "\n" + "\n".join(found)
