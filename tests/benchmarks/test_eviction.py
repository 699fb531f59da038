from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from benchmarks.eviction import TieredStore, foresight, rows_of
from benchmarks.eviction_loads import agents, batch, conversations, documents
from services.kvbm.tiers.actions import TierSizes
from services.virtual.loads import LoadTrace, TraceRequest, ideal
from shared.hashing import ContentKey


def keys(*numbers: int) -> list[ContentKey]:
    return [number.to_bytes(16) for number in numbers]


@pytest.mark.parametrize("make", [conversations, agents, documents, batch])
def test_made_up_loads_are_in_order_with_names_for_all_tokens_and_share_whole_prefixes(
    make: Callable[[int, Random], LoadTrace],
) -> None:
    load = make(300, Random(1))
    assert [each.number for each in load.requests] == list(range(300))
    arrivals = [each.arrival_s for each in load.requests]
    assert arrivals == sorted(arrivals)
    parents: dict[int, int | None] = {}
    for each in load.requests:
        assert len(each.names) == -(-each.prompt_tokens // load.block_size)
        parent = None
        for name in each.names:
            assert parents.setdefault(name, parent) == parent
            parent = name
    assert 0.2 < ideal(load).cached_tokens / ideal(load).prompt_tokens < 0.98


def store(slots: int, records: int = 0, *, twice: bool = False) -> TieredStore:
    sizes = TierSizes(
        slots=slots,
        records=records,
        disk_sightings=2 if twice else 1,
        fill_disk=False,
        held_share=1.0,
    )
    return TieredStore("lru", "lru", sizes)


def test_the_longest_prefix_counts_and_is_kept_while_its_end_makes_room() -> None:
    tiers = store(4)
    tiers.ask(keys(1, 2, 3), 3)
    tiers.ask(keys(1, 2, 4), 3)
    assert (tiers.found, tiers.stored) == (2, 4)
    tiers.ask(keys(5), 1)
    tiers.ask(keys(1, 2, 7), 3)
    assert tiers.found == 2 + 2, "3 made room, and not the blocks before it"


def test_an_evicted_block_is_found_on_disk_and_copied_to_the_host() -> None:
    tiers = store(2, 4)
    tiers.ask(keys(1, 2), 2)
    tiers.ask(keys(3, 4), 2)
    assert tiers.written == 4
    tiers.ask(keys(1, 2), 2)
    assert (tiers.found, tiers.found_in_host, tiers.written) == (2, 0, 4)
    tiers.ask(keys(1, 2), 2)
    assert (tiers.found, tiers.found_in_host) == (4, 2)


def test_admission_after_two_requests_writes_only_blocks_that_are_requested_again() -> None:
    tiers = store(2, 4, twice=True)
    tiers.ask(keys(1, 2), 2)
    tiers.ask(keys(1, 3), 2)
    tiers.ask(keys(4, 5), 2)
    assert tiers.written == 1, "1 was seen twice, 2 and 3 were not"


def test_no_policy_finds_more_than_foresight() -> None:
    prompts = [(keys(1), 1), (keys(2), 1), (keys(1), 1), (keys(3), 1), (keys(2), 1), (keys(1), 1)]
    assert foresight(prompts, 1) == 2
    assert foresight(prompts, 2) == 3
    load = conversations(150, Random(2))
    rows = list(rows_of(load, (0.1,), ["lru", "reuse"]))
    best = next(row.hits for row in rows if row.policy == "foresight")
    assert all(row.hits <= best <= 1 for row in rows if row.tiers == "host")


def test_a_prompt_never_finds_its_last_token() -> None:
    whole = [TraceRequest(number, float(number), [7, 8], 128, 1) for number in range(2)]
    rows = list(rows_of(LoadTrace("made", 64, whole), (1.0,), ["lru"]))
    assert {row.hits for row in rows} == {1.0}, "one block of two is of use, and is found"
