"""services/router/selection/heat.py: which prefixes the latest prompts share, against counting all of them."""

from __future__ import annotations

from collections import Counter
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from services.router.config import RouterConfig
from services.router.queries import heat
from services.router.selection.decision_log import KEPT_HASHES
from services.router.selection.heat import HOLDERS_SHOWN, PREFIXES_MOST, hot_prefixes
from services.router.selection.model_router import ModelRouter
from services.router.selection.policies.kv import KvPolicy
from shared.hashing import pack_hashes
from shared.messages.cards import KvLayout, ModelCard
from shared.messages.people import PrefixHeat
from shared.messages.select import Prefilled, Select

BLOCK = 4


def fleet(*instances: str) -> ModelRouter:
    router = ModelRouter("m", "r1", RouterConfig(), KvPolicy(), Random(1))
    layout = KvLayout("float32", 1, 1, 4, BLOCK)
    for instance in instances or ("a", "b"):
        router.add_card(ModelCard("m", instance, "/m", "0", "0", 4096, 1000, BLOCK, 1000, layout), 0.0)
    return router


def ask(router: ModelRouter, request: str, hashes: list[int], now_s: float, cached_blocks: int = 0) -> None:
    tokens = BLOCK * len(hashes) + 1
    router.select(Select(request, 1, "f", "m", pack_hashes(hashes), tokens, 10), now_s)
    router.apply_load_event(Prefilled(request, 1, BLOCK * cached_blocks, 0.1), now_s)


def found(router: ModelRouter, now_s: float = 10.0, most: int = PREFIXES_MOST) -> list[PrefixHeat]:
    return hot_prefixes("m", router.index, router.decisions.entries(), most, now_s)[0]


def test_a_prefix_that_prompts_share_is_found_with_its_hits_and_its_age() -> None:
    router = fleet()
    ask(router, "r1", [1, 2, 3], 1.0)
    ask(router, "r2", [1, 2, 9], 2.0, cached_blocks=2)
    ask(router, "r3", [7, 8], 3.0)
    (one,) = found(router)
    assert (one.block, one.blocks, one.tokens) == (f"{2:016x}", 2, 8)
    assert (one.asked, one.hits, one.age_s) == (2, 1, 8.0)


def test_those_that_could_save_most_come_first_and_the_number_is_bounded() -> None:
    router = fleet()
    for number in range(3):
        ask(router, f"short{number}", [1, 100 + number], 1.0)
        ask(router, f"long{number}", [2, 3, 4, 5, 200 + number], 1.0)
    assert [one.blocks for one in found(router)] == [4, 1]
    assert [one.blocks for one in found(router, most=1)] == [4]
    state = heat("r1", {"m": router}, 10**6, 10.0)
    assert (state.requests, state.over_s) == (6, 9.0)
    assert state.asked_blocks == 1 + 3 + 4 + 3
    assert heat("r1", {}, 5, 10.0).prefixes == []


def test_the_workers_that_hold_all_of_a_prefix_are_counted_by_the_tier_they_need() -> None:
    router = fleet(*(f"w{number:02}" for number in range(20)))
    ask(router, "r1", [1, 2, 3], 1.0)
    ask(router, "r2", [1, 2, 4], 1.0)
    for number in range(20):
        slot = router.caches.chains[f"w{number:02}", 0].slot
        router.index.add_blocks(slot, 0, [1, 2] if number < 18 else [1])
        if number == 18:
            router.index.add_blocks(slot, 1, [2], 1)
        if number == 19:
            router.index.add_blocks(slot, 2, [2], 1)
    (one,) = found(router)
    assert len(one.device) == HOLDERS_SHOWN
    assert (one.host, one.disk) == (1, 1)


def test_one_request_counts_once_and_one_with_no_whole_block_not_at_all() -> None:
    router = fleet()
    for attempt in (1, 2, 3):
        router.select(Select("r1", attempt, "f", "m", pack_hashes([1, 2]), 9, 10), 1.0)
    router.select(Select("r2", 1, "f", "m", b"", 3, 10), 1.0)
    assert found(router) == []
    assert heat("r1", {"m": router}, 5, 10.0).requests == 2


def test_of_a_long_prompt_the_leading_blocks_count() -> None:
    router = fleet()
    hashes = list(range(1, 2 * KEPT_HASHES))
    ask(router, "r1", hashes, 1.0)
    ask(router, "r2", hashes, 1.0)
    router.decisions.validate()
    (one,) = found(router)
    assert one.blocks == KEPT_HASHES


def test_whole_prompts_that_are_equal_count_as_found_though_their_last_block_is_always_computed() -> None:
    router = fleet()
    for number in range(2):
        tokens = 2 * BLOCK
        router.select(Select(f"r{number}", 1, "f", "m", pack_hashes([1, 2]), tokens, 10), 1.0)
        router.apply_load_event(Prefilled(f"r{number}", 1, BLOCK * number, 0.1), 1.0)
    (one,) = found(router)
    assert (one.blocks, one.asked, one.hits) == (2, 2, 1)


@given(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=6), max_size=12))
def test_all_shared_prefixes_are_those_that_counting_finds(prompts: list[list[int]]) -> None:
    router = fleet()
    names: dict[tuple[int, ...], int] = {}
    counts: Counter[tuple[int, ...]] = Counter()
    for number, prompt in enumerate(prompts):
        prefixes = [tuple(prompt[: end + 1]) for end in range(len(prompt))]
        counts.update(prefixes)
        ask(router, f"r{number}", [names.setdefault(prefix, len(names) + 1) for prefix in prefixes], 1.0)
    expected = {
        f"{names[prefix]:016x}": count
        for prefix, count in counts.items()
        # Of prefixes with the same prompts the longest one counts.
        if count > 1 and all(counts[(*prefix, more)] < count for more in (1, 2, 3))
    }
    prefixes_found, distinct = hot_prefixes("m", router.index, router.decisions.entries(), PREFIXES_MOST, 10.0)
    assert {one.block: one.asked for one in prefixes_found} == expected
    assert distinct == len(counts)
