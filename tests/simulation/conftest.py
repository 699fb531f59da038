"""Which seeds this run has, and a line at its head that says so."""

from __future__ import annotations

import os
import secrets

import pytest

from tests.simulation.seeds import REGRESSIONS, drawn
from tests.tiers import tiers_of

DRAWN_FROM = 1 << 40
FIRST = int(os.environ.get("SIMULATION_FIRST") or secrets.randbelow(DRAWN_FROM))
_COUNT = os.environ.get("SIMULATION_NEW")
NEW = drawn(tiers_of(os.environ.get("TEST_TIERS") or "check"), FIRST, int(_COUNT) if _COUNT else None)
"""A pytest that is started by hand has those of `check`."""


def pytest_report_header(config: pytest.Config) -> str:
    """The line that names the seeds."""
    count = sum(number for _, number, _ in NEW)
    return (
        f"simulation: the seeds {REGRESSIONS}, which once found a fault, and {count} new ones from {FIRST} on"
        f" (SIMULATION_FIRST={FIRST} SIMULATION_NEW={count} runs them again)"
    )
