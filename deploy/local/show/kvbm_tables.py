"""Renders the machines' block stores for `headrace status`: one row for each pool, one for each tier. Pure.

KVBM  POOL                    MEMORY   RESERVED  HITS OVER
k1    /dev/shm/headrace-0-…   1.07 GB  100 %     5m

KVBM  LAYOUT            MODEL  DTYPE    ENGINES  TICKETS          TIER  STATE  BLOCKS  OF    HITS
k1    0011223344556677  m      float32  2        1 store 2 fetch  host  on     340     1386  41 %
                                                                  disk  off    0       9000  -
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from deploy.local.table import age, size, table
from shared.kvbm_messages import KvbmState, LayoutState, TierState

_POOLS = ("KVBM", "POOL", "MEMORY", "RESERVED", "HITS OVER")
_TIERS = ("KVBM", "LAYOUT", "MODEL", "DTYPE", "ENGINES", "TICKETS", "TIER", "STATE", "BLOCKS", "OF", "HITS")


def block_stores(states: Sequence[KvbmState]) -> list[str]:
    """Return two tables, and a line for each tier that gives a reason for its state."""
    pools: list[tuple[str, ...]] = [_POOLS]
    for state in states:
        memory = (size(state.pool_bytes), f"{int(100 * state.reserved)} %")
        pools.append((state.instance, state.pool, *memory, age(state.window_s)))
    layouts = [(state.instance, layout) for state in states for layout in state.layouts]
    parts = [table(pools)]
    if layouts:
        parts += ["", table([_TIERS, *(row for kvbm, layout in layouts for row in _rows(kvbm, layout))])]
    for kvbm, layout in layouts:
        for tier, tier_state in _tiers(layout):
            if tier_state.reason:
                parts.append(f"{tier} tier of {layout.layout} at kvbm {kvbm}: {tier_state.state}: {tier_state.reason}")
    return parts


def _rows(kvbm: str, layout: LayoutState) -> Iterator[tuple[str, ...]]:
    tickets = " ".join(f"{count} {kind}" for kind, count in layout.tickets.items() if count) or "0"
    whose: tuple[str, ...] = (kvbm, layout.layout, layout.model, layout.kv.dtype, str(layout.owners), tickets)
    for tier, state in _tiers(layout):
        hits = "-" if state.hit_rate is None else f"{100 * state.hit_rate:.0f} %"
        yield (*whose, tier, state.state, str(state.blocks), str(state.capacity_blocks), hits)
        whose = ("",) * len(whose)


def _tiers(layout: LayoutState) -> Iterator[tuple[str, TierState]]:
    yield "host", layout.host
    if layout.disk is not None:
        yield "disk", layout.disk
