"""By how much compared fleets differ: ratios of their figures, round by round. Pure.

    A B  B A  A B     each pair has the same requests; a ratio is B ÷ A of one pair

The median, the least and the most of all rounds are shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from msgspec import Struct

from deploy.local.bench.rows import BenchRow
from deploy.local.table import table

UNSTEADY = 1.25
"""Rounds of one fleet whose tokens a second differ by more are noted."""


class Ratio(Struct, frozen=True):
    """A figure of a variant, divided by that of the first variant in the same round."""

    load: str
    figure: str
    variant: str
    first: float
    """The median of the first variant."""
    value: float
    """The median of this variant."""
    ratio: float
    """The median over the rounds."""
    least: float
    most: float


def figures(row: BenchRow) -> Mapping[str, float]:
    """Return the figures of a row that are compared, by their names in tables; those that it has."""
    found = {
        "tokens/s": row.tokens_per_s,
        "prompt tokens/s": row.prompt_tokens_per_s,
        "TTFT s p50": row.first_token_s.p50,
        "TTFT s p90": row.first_token_s.p90,
        "TTFT s p99": row.first_token_s.p99,
        "inter-token s p50": row.inter_token_s.p50,
        "inter-token s p99": row.inter_token_s.p99,
        "whole s p50": row.whole_s.p50,
        "cached share": row.cached_ratio,
    }
    return {name: value for name, value in found.items() if value is not None}


def ratios(rows: Sequence[BenchRow], names: Sequence[str]) -> list[Ratio]:
    """Return the ratios of all variants but the first of `names`, for each load and figure that both have."""
    found: list[Ratio] = []
    for load in dict.fromkeys(row.name for row in rows):
        by_round = {(row.variant, row.round): figures(row) for row in rows if row.name == load and row.complete}
        for figure in dict.fromkeys(name for each in by_round.values() for name in each):
            for name in names[1:]:
                pairs = [
                    (before[figure], by_round[name, number][figure])
                    for (variant, number), before in by_round.items()
                    if variant == names[0] and before.get(figure) and figure in by_round.get((name, number), {})
                ]
                if pairs:
                    found.append(_ratio(load, figure, name, pairs))
    return found


def _ratio(load: str, figure: str, variant: str, pairs: Sequence[tuple[float, float]]) -> Ratio:
    each = [value / first for first, value in pairs]
    firsts, values = median(first for first, _ in pairs), median(value for _, value in pairs)
    return Ratio(load, figure, variant, firsts, values, median(each), min(each), max(each))


def _cells(each: Ratio) -> tuple[str, ...]:
    """Return a row of the table, whose times are in milliseconds as in the table of loads."""
    scale = 1000 if " s " in each.figure else 1
    return (
        *(each.load, each.figure.replace(" s ", " ms "), f"{scale * each.first:,.4g}"),
        *(each.variant, f"{scale * each.value:,.4g}"),
        *(f"{each.ratio:.2f}", f"{each.least:.2f}", f"{each.most:.2f}"),
    )


def render_ratios(found: Sequence[Ratio], first: str) -> str:
    """Return the ratios as a table."""
    cells = [_cells(each) for each in found]
    head = f"LOAD  FIGURE  {first}  FLEET  ITS VALUE  RATIO  LEAST  MOST"
    return (
        f"{table(head, cells)}\nratios are to {first} in the same round; above 1 is better for rates, worse for times"
    )


def unsteady(rows: Sequence[BenchRow]) -> list[str]:
    """Return a note for each fleet and load whose rounds differ much."""
    by_fleet: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        by_fleet.setdefault((row.name, row.variant), []).append(row.tokens_per_s)
    return [
        f"note: {load}, {variant}: tokens a second differ by {max(rates) / min(rates) - 1:.0%} between rounds: the "
        "fleet did not settle, or the machine was busy"
        for (load, variant), rates in by_fleet.items()
        if min(rates) > 0 and max(rates) > UNSTEADY * min(rates)
    ]
