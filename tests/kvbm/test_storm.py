"""Nothing goes wrong in many storms; KVBM_STORMS sets their number (60)."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.kvbm.storm import storms

STORMS = int(os.environ.get("KVBM_STORMS", "60"))
BLOCK = 20
"""The number of storms in one test."""
_seen: Counter[str] = Counter()


@pytest.mark.parametrize("first", range(0, STORMS, BLOCK))
async def test_no_wrong_bytes_and_no_lost_slot_from_storm(first: int) -> None:
    _seen.update(await storms(first, min(BLOCK, STORMS - first)))


def test_the_storms_were_storms() -> None:
    engines = ("right from memory", "right from disk", "written", "forgotten", "died", "expired", "away", "no_arena")
    workers = ("saved", "loaded", "not loaded", "used")
    for what in engines + workers:
        assert _seen[what], what
