"""Nothing goes wrong in storms over two machines that read from each other; KVBM_PEER_STORMS sets their number (3)."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.kvbm.peer_storm import one

STORMS = int(os.environ.get("KVBM_PEER_STORMS", "3"))
_seen: Counter[str] = Counter()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(STORMS))
async def test_no_wrong_bytes_and_nothing_held_for_ever_from_storm(seed: int) -> None:
    _seen.update(await one(seed))


def test_the_storms_were_storms() -> None:
    for what in ("freeze", "kill", "cut", "leave", "written", "right from memory", "read from a peer", "died"):
        assert _seen[what], what
