"""Draws the hottest prefixes as a PNG, for `headrace heat`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from deploy.local.picture import new_figure, save
from shared.messages.people import PrefixHeat


def draw(prefixes: Sequence[PrefixHeat], path: Path) -> None:
    """Draw a bar for each prefix, as long as requests had it, and its part that was found cached; the hottest one
    above."""
    rows = list(reversed(prefixes))
    names = [f"{one.block}  {one.tokens} tokens, {len(one.device)} on device" for one in rows]
    figure = new_figure(9, 1.2 + 0.28 * max(1, len(rows)))
    axis = figure.subplots()
    axis.barh(range(len(rows)), [one.asked for one in rows], color="#f2c6a0", label="requests")
    axis.barh(range(len(rows)), [one.hits for one in rows], color="#c8501e", label="found cached")
    axis.set_yticks(range(len(rows)), names, family="monospace", fontsize=8)
    axis.set(title="prefixes of the latest requests", xlabel="requests")
    axis.legend(loc="lower right")
    figure.tight_layout()
    save(figure, path)
