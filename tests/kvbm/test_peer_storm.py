"""Nothing goes wrong in storms over two machines that read from each other, 3 of them in CI and 30 at a release."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.kvbm.peer_storm import one

STORMS = 3
LONG_STORMS = 30
_seen: Counter[str] = Counter()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(STORMS))
async def test_no_wrong_bytes_and_nothing_held_for_ever_from_storm(seed: int) -> None:
    _seen.update(await one(seed))


def test_the_storms_were_storms() -> None:
    for what in ("freeze", "kill", "cut", "leave", "written", "right from memory", "read from a peer", "died"):
        assert _seen[what], what


@pytest.mark.tier("long")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(STORMS, LONG_STORMS))
async def test_no_wrong_bytes_and_nothing_held_for_ever_from_many_more_storms(seed: int) -> None:
    await one(seed)
