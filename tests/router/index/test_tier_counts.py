"""Counts of tiers along a prompt, compared with counting each block of each slot."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from services.router.index.tier_counts import TierCounts

SLOTS = 4
STRETCHES = st.lists(
    st.tuples(st.integers(1, 5), st.lists(st.sampled_from("DHK·"), min_size=SLOTS, max_size=SLOTS)), max_size=8
)
"""Stretches of blocks. For each one: its length, and the tier of each slot there: device, host memory, disk or none."""


def mask(slots: list[int]) -> int:
    return sum(1 << slot for slot in slots)


@given(STRETCHES)
@example(
    [(1, list("DHDD")), (1, list("DDDH")), (1, list("DHDD"))]
)  # slot 1 gets the same counts as slot 3, which leaves
def test_slots_that_change_tiers_are_counted_in_each_tier_until_they_end(
    stretches: list[tuple[int, list[str]]],
) -> None:
    lower = TierCounts()
    alive = set(range(SLOTS))
    counts = {slot: {"D": 0, "H": 0, "K": 0} for slot in range(SLOTS)}
    found: dict[int, tuple[int, int]] = {}
    at = 0

    def settle(ended: set[int]) -> None:
        for slots, host, disk in lower.counts_at(mask(sorted(ended)), at):
            found.update(dict.fromkeys((slot for slot in ended if slots >> slot & 1), (host, disk)))

    for blocks, tiers in stretches:
        left = {slot for slot in alive if tiers[slot] != "·"}
        host, disk = (mask([slot for slot in left if tiers[slot] == tier]) for tier in "HK")
        settle(alive - left)
        alive = left
        lower.update(mask(sorted(alive)), host, disk, at)
        for slot in alive:
            counts[slot][tiers[slot]] += blocks
        at += blocks
    settle(alive)
    expected = {slot: (count["H"], count["K"]) for slot, count in counts.items() if count["H"] or count["K"]}
    assert {slot: each for slot, each in found.items() if each != (0, 0)} == expected
    assert all(lower.slots >> slot & 1 for slot in found)
