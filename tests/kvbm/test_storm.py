"""Nothing goes wrong in many storms, 60 of them in CI and 600 at a release."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.kvbm.storm import storms

STORMS = 60
LONG_STORMS = 600
BLOCK = 20
"""The number of storms in one test."""
MOST_MORE = 100
"""The most storms beyond that, where something has not come to pass."""
_seen: Counter[str] = Counter()


@pytest.mark.parametrize("first", range(0, STORMS, BLOCK))
async def test_no_wrong_bytes_and_no_lost_slot_from_storm(first: int) -> None:
    _seen.update(await storms(first, BLOCK))


async def test_the_storms_were_storms() -> None:
    """On a slow machine tickets of 0.03 s expire before anything is loaded, so that it takes more storms."""
    engines = ("right from memory", "right from disk", "written", "forgotten", "died", "expired", "away", "no_arena")
    workers = ("saved", "loaded", "not loaded", "used", "asked, away", "asked, late")
    broken = (
        "broken to kvbm",
        "broken within a frame to kvbm",
        "broken from kvbm",
        "broken within a frame from kvbm",
        "unread",
    )
    for first in range(STORMS, STORMS + MOST_MORE, BLOCK):
        if all(_seen[what] for what in engines + workers + broken):
            break
        _seen.update(await storms(first, BLOCK))
    for what in engines + workers + broken:
        assert _seen[what], what


@pytest.mark.tier("long")
@pytest.mark.parametrize("first", range(STORMS, LONG_STORMS, BLOCK))
async def test_no_wrong_bytes_and_no_lost_slot_from_many_more_storms(first: int) -> None:
    await storms(first, BLOCK)
