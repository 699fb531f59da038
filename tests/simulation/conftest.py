"""Which seeds this run has, and a line at its head that says so."""

from __future__ import annotations

import os
import secrets

import pytest

SEEDS = int(os.environ.get("SIMULATION_SEEDS", "1000"))
"""Seeds from 0 on, the same in each run."""
NEW = int(os.environ.get("SIMULATION_NEW", "450"))
"""Seeds that no run had before, in a row."""
first_new = SEEDS + secrets.randbelow(1 << 40)


def pytest_report_header(config: pytest.Config) -> str:
    """The line that names the seeds."""
    return f"simulation: seeds 0 to {SEEDS - 1}, and new ones: {first_new} to {first_new + NEW - 1}"
