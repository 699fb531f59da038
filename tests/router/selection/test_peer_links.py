"""Blocks of other machines' stores: what a kvbm's report makes of links, and what candidates are credited for."""

from __future__ import annotations

from math import inf, nan
from random import Random
from typing import Any

import pytest

from services.router.config import LoadConfig, RouterConfig
from services.router.index.index import Index
from services.router.index.inheritance import StoreId
from services.router.selection.model_router import ModelRouter
from services.router.selection.peer_links import (
    LINKS_MOST,
    STARTS_MOST,
    PeerLink,
    PeerLinks,
    RemoteBlocks,
    RemoteSearch,
)
from services.router.selection.policies.kv import KvPolicy
from shared.hashing import pack_hashes
from shared.messages.cards import KvLayout, ModelCard, Role
from shared.messages.kvbm import KvbmReport, PeerRates
from shared.messages.load import LoadReport
from shared.messages.select import Overlap, Select, Selected

BLOCK_BYTES = 1000
HASHES = list(range(1, 101))
LAYOUT = KvLayout("float32", 1, 1, 4, 4)
FAST = 1e9


def links(rates: dict[str, dict[str, float]], *, wait_s: float = 1.0, least: int = 1) -> PeerLinks:
    known = PeerLinks()
    for kvbm, others in rates.items():
        known.learn(kvbm, PeerRates(wait_s, least, others))
    return known


def search(known: PeerLinks, held: dict[StoreId, range], hashes: list[int] = HASHES) -> RemoteSearch:
    """Return the search in stores that hold these blocks in memory."""
    index = Index(limit_bytes=1 << 20)
    numbers: dict[StoreId, int] = {}
    for store, blocks in held.items():
        slot = index.open_slot((store, 0))
        index.set_store((f"worker of {store}", 0), (store, 0))
        if blocks:
            index.add_blocks(slot, 1, list(blocks))
        numbers[store] = slot.number
    return RemoteSearch(known, index, numbers, hashes, BLOCK_BYTES)


def test_what_a_report_says_replaces_what_was_reported_before() -> None:
    known = links({"a": {"b": FAST}})
    assert known
    assert known.link("a/l", "b/l") == PeerLink(FAST, 1.0, 1)
    known.learn("a", PeerRates(1.0, 1, {"c": FAST}))
    assert known.link("a/l", "b/l") is None
    known.learn("a", None)
    assert not known


def test_blocks_of_another_layout_are_never_read() -> None:
    assert links({"a": {"b": FAST}}).link("a/one", "b/other") is None


@pytest.mark.parametrize("rate", [0.0, -1.0, nan, inf])
def test_a_rate_that_makes_no_sense_is_ignored(rate: float) -> None:
    assert not links({"a": {"b": rate, "a": FAST}})


@pytest.mark.parametrize("wait_s", [0.0, -1.0, nan, 1e6])
def test_a_wait_that_makes_no_sense_is_ignored(wait_s: float) -> None:
    assert not links({"a": {"b": FAST}}, wait_s=wait_s)


def test_a_kvbm_has_a_bound_on_links() -> None:
    known = links({"a": {f"b{number}": FAST for number in range(LINKS_MOST + 5)}})
    known.validate()
    assert known.link("a/l", f"b{LINKS_MOST}/l") is None


def test_a_store_gets_what_follows_its_own_blocks_from_the_store_that_has_most() -> None:
    known = links({"a": {"b": FAST, "c": FAST / 2}})
    found = search(known, {"a/l": range(1, 11), "b/l": range(1, 31), "c/l": range(5, 51)})
    assert (found.rest("a/l", 10).blocks, found.rest("a/l", 10).block_s) == (40, BLOCK_BYTES / (FAST / 2))
    assert found.rest("a/l", 0).blocks == 30, "c does not have the first block"
    assert found.rest("a/l", 50).blocks == 0
    assert found.rest("b/l", 0).blocks == 0, "b reads nobody"
    assert found.rest(None, 0).blocks == 0
    assert found.rest("a/l", len(HASHES)).blocks == 0


def test_a_store_is_read_of_which_most_comes_in_time_not_the_one_that_has_most() -> None:
    known = links({"a": {"slow": 20.0 * BLOCK_BYTES, "fast": FAST}}, least=8)
    held = {"a/l": range(0), "slow/l": range(1, 101), "fast/l": range(1, 91)}
    assert search(known, held).rest("a/l", 0) == RemoteBlocks(90, BLOCK_BYTES / FAST)
    held["fast/l"] = range(1, 11)
    assert search(known, held).rest("a/l", 0) == RemoteBlocks(20, 1 / 20)


def test_a_gap_ends_what_is_read() -> None:
    known = links({"a": {"b": FAST}})
    found = search(known, {"a/l": range(0), "b/l": range(1, 200)}, [*HASHES[:20], 999, *HASHES[20:]])
    assert found.rest("a/l", 5).blocks == 15


def test_only_what_comes_in_time_counts_and_few_blocks_are_not_read() -> None:
    held = {"a/l": range(0), "b/l": range(1, 101)}
    slow = {"a": {"b": 20.0 * BLOCK_BYTES}}
    assert search(links(slow), held).rest("a/l", 0).blocks == 20
    assert search(links(slow, least=21), held).rest("a/l", 0).blocks == 0
    assert search(links(slow, wait_s=0.01), held).rest("a/l", 0).blocks == 0
    unknown = RemoteSearch(links(slow), Index(limit_bytes=1 << 20), {}, HASHES, 0)
    assert unknown.handed_over("a/l", "b/l", 50).blocks == 0, "the size of a block is unknown"


def test_from_more_starts_than_the_bound_nothing_is_searched() -> None:
    found = search(links({"a": {"b": FAST}}), {"a/l": range(0), "b/l": range(1, 101)})
    counts = [found.rest("a/l", start).blocks for start in range(STARTS_MOST + 2)]
    assert counts == [100 - start for start in range(STARTS_MOST)] + [0, 0]
    assert found.rest("a/l", 0).blocks == 100, "an equal question is answered again"


# --- the router


def card(instance: str, kvbm: str, role: Role = "aggregated", **more: Any) -> ModelCard:
    layout = more.pop("layout", "l")
    return ModelCard(
        "m", instance, "/m", "0", "0", 4096, 1000, 4, 1000, LAYOUT, role=role, kvbm=kvbm, kvbm_layout=layout
    )


def router_of(*cards: ModelCard) -> ModelRouter:
    router = ModelRouter("m", "r1", RouterConfig(load=LoadConfig(ramp_s=0)), KvPolicy(), Random(1))
    for each in cards:
        router.add_card(each)
    for name in sorted(router.caches.instances_of_store):
        router.caches.add_store(name)
    for number, each in enumerate(cards):
        report = LoadReport(each.instance, 1, number, 0, 0, 0, 1000, 0, 0, 10_000.0, 0.01)
        router.apply_load_report(report, 0.0)
    return router


def stored(router: ModelRouter, store: StoreId, blocks: int) -> None:
    """Have a store hold the first blocks of the prompt in memory."""
    router.index.add_blocks(router.caches.stores[store].slot, 1, HASHES[:blocks])


def reads(router: ModelRouter, kvbm: str, *others: str, rate: float = FAST, wait_s: float = 1.0) -> None:
    router.caches.apply_kvbm_report(KvbmReport(kvbm, [], PeerRates(wait_s, 1, dict.fromkeys(others, rate))))


def chosen(router: ModelRouter, request: str = "r", **more: Any) -> Selected:
    ask = Select(request, 1, "f", "m", pack_hashes(HASHES), 4 * len(HASHES) + 1, 100, explain=True, **more)
    reply = router.select(ask, 1.0).reply
    assert isinstance(reply, Selected), reply
    router.validate()
    return reply


def test_a_candidate_is_credited_for_what_its_store_can_read_elsewhere() -> None:
    router = router_of(card("here", "k1"), card("there", "k2"))
    stored(router, "k2/l", 80)
    stored(router, "k1/l", 10)
    reads(router, "k1", "k2")
    reply = chosen(router)
    rows = {row.instance: row.overlap for row in reply.candidates}
    assert rows == {"here": Overlap(host=10, remote=70), "there": Overlap(host=80)}
    assert reply.instance == "there", "what is nearer costs less"


def test_without_a_rate_there_is_no_credit() -> None:
    router = router_of(card("here", "k1"), card("there", "k2"))
    stored(router, "k2/l", 80)
    reads(router, "k1")
    reads(router, "unknown kvbm", "k2")
    assert not router.caches.links
    assert {row.overlap.remote for row in chosen(router).candidates} == {0}


def test_a_slow_link_costs_no_more_than_computing() -> None:
    router = router_of(card("here", "k1"), card("there", "k2"))
    stored(router, "k2/l", 80)
    scores = []
    for rate in (FAST, 1.0):
        reads(router, "k1", "k2", rate=rate, wait_s=3000.0)
        scores.append(
            {row.instance: row.score for row in chosen(router, f"at {rate}", excluded=["there"]).candidates}["here"]
        )
    assert scores[0] < scores[1]
    reads(router, "k1")
    nothing = {row.instance: row.score for row in chosen(router, "nothing", excluded=["there"]).candidates}["here"]
    assert scores[1] <= nothing + 1_000, "apart from the load of the requests before"


def test_links_go_with_the_last_store_of_a_kvbm() -> None:
    router = router_of(card("here", "k1"), card("there", "k2"))
    reads(router, "k1", "k2")
    assert router.caches.links
    router.remove_instance("here")
    router.caches.remove_store("k1/l")
    assert not router.caches.links


def pair_of(router: ModelRouter, request: str = "r") -> tuple[str, str]:
    """Return the workers of a choice when those that decode are busy; the second is empty if one worker does all."""
    for name in ("d1", "d2"):
        if name in router.cards:
            attempts = [(f"{name}-{number}", 1) for number in range(12)]
            report = LoadReport(name, 1, 50, 0, 12, 0, 1000, 0, 0, 10_000.0, 0.01, attempts=attempts)
            router.apply_load_report(report, 0.0)
    reply = chosen(router, request)
    return reply.instance, reply.decode


def test_prompts_are_handed_over_between_machines_where_the_decode_workers_store_reads_the_other() -> None:
    router = router_of(card("p1", "k1", "prefill"), card("d2", "k2", "decode"))
    assert pair_of(router, "apart") == ("d2", ""), "k2 reads nothing from k1"
    router = router_of(card("p1", "k1", "prefill"), card("d2", "k2", "decode"))
    reads(router, "k2", "k1")
    assert pair_of(router) == ("p1", "d2")
    decoded = router.decisions.get(("r", 2)).selected
    assert decoded.overlap == Overlap(remote=len(HASHES))


def test_a_link_in_the_wrong_direction_or_of_another_layout_makes_no_pair() -> None:
    router = router_of(card("p1", "k1", "prefill"), card("d2", "k2", "decode"))
    reads(router, "k1", "k2")
    assert pair_of(router) == ("d2", "")
    router = router_of(card("p1", "k1", "prefill"), card("d2", "k2", "decode", layout="other"))
    reads(router, "k2", "k1")
    assert pair_of(router) == ("d2", "")


def test_a_pair_on_one_machine_is_preferred_to_one_over_a_slow_link() -> None:
    cards = (card("p1", "k1", "prefill"), card("d1", "k1", "decode"), card("d2", "k2", "decode"))
    router = router_of(*cards)
    reads(router, "k2", "k1", rate=1e6)
    assert pair_of(router) == ("p1", "d1")
