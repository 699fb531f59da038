"""Which prefixes the latest prompts share, and how often they were found cached. Pure.

    latest choices, their prompts' leading hashes, sorted     h1 h2 h3 h4 …        a prefix of several prompts is a
                                                              h1 h2 h3 h9 …        stretch of neighbours that agree:
                                                              h1 h2 h8 …           (h1 h2 h3) twice, (h1 h2) three times

Nothing is counted while requests are routed: the log of choices keeps the hashes, and all of this is done when a user
asks. With 1,000 choices it takes some 10 ms.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from services.router.index.index import Index
from services.router.selection.decision_log import Decision
from shared.hashing import unpack_hashes
from shared.messages.people import PrefixHeat

PREFIXES_MOST = 100
"""The most prefixes of one answer."""
HOLDERS_SHOWN = 16
_HASH_BYTES = 8


def hot_prefixes(
    model: str, index: Index, decisions: Iterable[Decision], most: int, now_s: float
) -> tuple[list[PrefixHeat], int]:
    """Return the prefixes that at least two of the prompts share, those that could save most first, and the number of
    distinct blocks that all of them asked for."""
    first: dict[str, Decision] = {}
    for entry in decisions:  # a request may have several: another attempt, or a worker that decodes
        if entry.hashes:
            first.setdefault(entry.selected.request, entry)
    entries = sorted(first.values(), key=lambda entry: entry.hashes)
    shared = [0, *(_common(a.hashes, b.hashes) for a, b in pairwise(entries))]
    distinct = sum(len(entry.hashes) // _HASH_BYTES for entry in entries) - sum(shared)
    spans = sorted(_spans(shared), key=lambda span: (-span[0] * (span[2] - span[1]), span))
    return [_heat(model, index, entries, span, now_s) for span in spans[: min(most, PREFIXES_MOST)]], distinct


def _spans(shared: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (blocks, first, last + 1) of all stretches of neighbours that agree in more blocks than those around
    them. `shared` has the blocks that each has in common with the one before it."""
    found: list[tuple[int, int, int]] = []
    open_: list[tuple[int, int]] = []
    for place, blocks in enumerate((*shared, 0)):
        first = place - 1
        while open_ and open_[-1][0] > blocks:
            depth, first = open_.pop()
            found.append((depth, first, place))
        if blocks and (not open_ or open_[-1][0] < blocks):
            open_.append((blocks, first))
    return found


def _common(a: bytes, b: bytes) -> int:
    """Return how many leading hashes two prompts have in common."""
    low, high = 0, min(len(a), len(b)) // _HASH_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a.startswith(b[: _HASH_BYTES * middle]) else (low, middle - 1)
    return low


def _heat(
    model: str, index: Index, entries: Sequence[Decision], span: tuple[int, int, int], now_s: float
) -> PrefixHeat:
    blocks, first, end = span
    asked = entries[first:end]
    size = asked[0].request.block_size
    hashes = unpack_hashes(asked[0].hashes[: _HASH_BYTES * blocks])
    cached = (
        entry.predicted_cached_tokens if entry.actual_cached_tokens is None else entry.actual_cached_tokens
        for entry in asked
    )
    held = {one: overlap for one, overlap in index.find(hashes).items() if overlap.here >= blocks}
    device = [instance for (instance, _), overlap in held.items() if overlap.device >= blocks]
    return PrefixHeat(
        model=model,
        block=f"{hashes[-1]:016x}",
        blocks=blocks,
        tokens=blocks * size,
        asked=len(asked),
        # The last block of a prompt is always computed again, so that as much as can be found counts.
        hits=sum(
            tokens >= min(blocks, (entry.request.prompt_tokens - 1) // size) * size
            for tokens, entry in zip(cached, asked, strict=True)
        ),
        age_s=round(max(0.0, now_s - max(entry.at_s for entry in asked)), 3),
        device=sorted({*device})[:HOLDERS_SHOWN],
        host=sum(overlap.device < blocks and not overlap.disk for overlap in held.values()),
        disk=sum(bool(overlap.disk) for overlap in held.values()),
    )
