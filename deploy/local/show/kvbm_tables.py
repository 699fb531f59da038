"""Renders the machines' block stores for `headrace status`: one row for each pool, one for each tier. Pure.

KVBM  POOL                    MEMORY   RESERVED  HITS OVER
k1    /dev/shm/headrace-0-…   1.07 GB  100 %     5m

KVBM  LAYOUT            MODEL  DTYPE    ENGINES  TICKETS          TIER  STATE  BLOCKS  OF    HITS
k1    0011223344556677  m      float32  2        1 store 2 fetch  host  on     340     1386  41 %
                                                                  disk  off    0       9000  -
"""

from __future__ import annotations

from collections.abc import Sequence

from deploy.local.table import age, size, table
from shared.messages.kvbm import KvbmState

_POOLS = "KVBM  POOL  MEMORY  RESERVED  HITS OVER"
_TIERS = "KVBM  LAYOUT  MODEL  DTYPE  ENGINES  TICKETS  TIER  STATE  BLOCKS  OF  HITS"


def block_stores(states: Sequence[KvbmState]) -> list[str]:
    """Return two tables, and a line for each tier that gives a reason for its state."""
    pools = [
        (each.instance, each.pool, size(each.pool_bytes), f"{int(100 * each.reserved)} %", age(each.window_s))
        for each in states
    ]
    tiers: list[tuple[object, ...]] = []
    reasons: list[str] = []
    for kvbm, layout in ((state.instance, layout) for state in states for layout in state.layouts):
        tickets = " ".join(f"{count} {kind}" for kind, count in layout.tickets.items() if count) or "0"
        whose: tuple[object, ...] = (kvbm, layout.layout, layout.model, layout.kv.dtype, layout.owners, tickets)
        for name, tier in (("host", layout.host), ("disk", layout.disk)):
            if tier is None:
                continue
            hits = "-" if tier.hit_rate is None else f"{100 * tier.hit_rate:.0f} %"
            tiers.append((*whose, name, tier.state, tier.blocks, tier.capacity_blocks, hits))
            whose = ("",) * len(whose)
            if tier.reason:
                reasons.append(f"{name} tier of {layout.layout} at kvbm {kvbm}: {tier.state}: {tier.reason}")
    return [table(_POOLS, pools), *(["", table(_TIERS, tiers)] if tiers else []), *reasons]
