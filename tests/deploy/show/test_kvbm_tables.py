"""deploy/local/show/kvbm_tables.py: the block stores' tiers as people read them."""

from __future__ import annotations

from deploy.local.show.kvbm_tables import block_stores
from shared.messages.cards import KvLayout
from shared.messages.kvbm import KvbmState, LayoutState, TierState

KV = KvLayout("float32", 2, 1, 8, 16)
HOST = TierState("on", "", 1386, 340, 0.414)
NO_TICKETS = {"store": 0, "fetch": 0, "expired": 0}


def state(name: str, *layouts: LayoutState, reserved: float = 1.0) -> KvbmState:
    return KvbmState(name, f"/pools/{name}", 1 << 30, reserved, 300.0, list(layouts))


def test_each_layout_has_a_row_for_each_of_its_tiers() -> None:
    disk = TierState("on", "", 9000, 12, None)
    first = LayoutState("0011223344556677", "m", KV, HOST, disk, 2, {"store": 1, "fetch": 2, "expired": 0})
    second = LayoutState("8899aabbccddeeff", "n", KV, HOST, None, 0, NO_TICKETS)
    assert block_stores([state("k1", first, second), state("k2", reserved=0.999)]) == [
        "KVBM  POOL       MEMORY   RESERVED  HITS OVER\n"
        "k1    /pools/k1  1.07 GB  100 %     5m\n"
        "k2    /pools/k2  1.07 GB  99 %      5m",
        "",
        "KVBM  LAYOUT            MODEL  DTYPE    ENGINES  TICKETS          TIER  STATE  BLOCKS  OF    HITS\n"
        "k1    0011223344556677  m      float32  2        1 store 2 fetch  host  on     340     1386  41 %\n"
        "                                                                  disk  on     12      9000  -\n"
        "k1    8899aabbccddeeff  n      float32  0        0                host  on     340     1386  41 %",
    ]


def test_a_tier_that_is_off_or_does_not_grow_says_why() -> None:
    off = TierState("off", "/blocks: No space left on device", 0, 0, None)
    told = block_stores([state("k1", LayoutState("0011223344556677", "m", KV, HOST, off, 1, NO_TICKETS))])
    assert told[-1] == "disk tier of 0011223344556677 at kvbm k1: off: /blocks: No space left on device"


def test_without_layouts_there_is_the_pool_alone() -> None:
    (pools,) = block_stores([state("k1")])
    assert pools.count("\n") == 1
