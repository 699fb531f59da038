"""Nothing goes wrong in the worlds of many seeds; SIMULATION_SEEDS says of how many (5,000)."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.simulation.seeds import failures

SEEDS = int(os.environ.get("SIMULATION_SEEDS", "5000"))
BLOCK = 20
"""Seeds a test: few, since a machine that does much else has only so long for a test."""
PROCESSES = 2


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(PROCESSES, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.mark.parametrize("first", range(0, SEEDS, BLOCK))
def test_nothing_goes_wrong_from_seed(first: int, processes: ProcessPoolExecutor) -> None:
    share = -(-min(BLOCK, SEEDS - first) // PROCESSES)
    starts = range(first, min(first + BLOCK, SEEDS), share)
    counts = [min(share, SEEDS - start) for start in starts]
    found = [told for one in processes.map(failures, starts, counts) for told in one]
    assert not found, "\n" + "\n".join(found)
