"""`headrace heat`: asks the routers which prefixes of prompts are asked for often, and where they are cached."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec
from msgspec.structs import replace

from deploy.local import picture
from deploy.local.show.fleet import FleetConfig, ask_each, connect_bus, discovery_entries, instances_of
from deploy.local.show.heat_plot import draw
from deploy.local.table import age, table
from deploy.local.terminal import highlight
from shared import subjects
from shared.errors import ConfigError, Unavailable
from shared.messages.people import HEAT, HeatState, PrefixHeat

MOST = 100
"""The most prefixes that are shown; a router answers with no more."""
_HEAD = "PREFIX  MODEL  TOKENS  REQUESTS  HITS  AGO  ON DEVICE  HOST  DISK"


def show(config: FleetConfig, top: int, png: str, *, as_json: bool) -> int:
    """Print the hottest prefixes, and draw them if `png` names a file. Raise ConfigError, Unavailable and what
    discovery raises."""
    if not 1 <= top <= MOST:
        raise ConfigError(f"--top is 1 to {MOST}")
    if png and not Path(png).absolute().parent.is_dir():
        raise ConfigError(f"--png {png}: no such directory: {Path(png).parent}")
    if png and not picture.can_draw():
        raise ConfigError(f"--png {png}: {picture.HINT}")
    states, silent = asyncio.run(_ask(config))
    for line in silent:
        print(f"note: {line}", file=sys.stderr)
    found = merged(states)[:top]
    if as_json:
        print(msgspec.json.format(msgspec.json.encode({"routers": states, "prefixes": found})).decode())
    else:
        print(highlight(render(states, found), sys.stdout))
    if png:
        draw(found, Path(png))
        print(f"{png} is drawn", file=sys.stderr)
    return 0


async def _ask(config: FleetConfig) -> tuple[list[HeatState], list[str]]:
    routers = instances_of("router", config, await discovery_entries(config))
    if not routers:
        raise Unavailable(f"no router is registered in {config.discovery_shown}")
    async with connect_bus(config, "headrace heat") as bus:
        subject = partial(subjects.router_heat, config.namespace)
        states, silent = await ask_each(bus, "router", routers, subject, HEAT, str(MOST).encode())
    if not states:
        raise Unavailable(f"no router answers: {'; '.join(silent)}")
    return states, silent


def merged(states: Sequence[HeatState]) -> list[PrefixHeat]:
    """Return the prefixes of all routers, each of which has routed some of the requests. *Pure.*"""
    found: dict[tuple[str, str], PrefixHeat] = {}
    for one in (prefix for state in states for prefix in state.prefixes):
        other = found.get((one.model, one.block))
        if other is not None:
            one = replace(
                one, asked=one.asked + other.asked, hits=one.hits + other.hits, age_s=min(one.age_s, other.age_s)
            )
        found[one.model, one.block] = one
    return sorted(found.values(), key=lambda one: (-one.asked * one.blocks, one.block))


def render(states: Sequence[HeatState], prefixes: Sequence[PrefixHeat]) -> str:
    """Return the prefixes as a table, with what they are found in. *Pure.*"""
    requests, over_s = sum(state.requests for state in states), max(state.over_s for state in states)
    asked, held = sum(state.asked_blocks for state in states), max(state.index_blocks for state in states)
    about = (
        f"the latest {requests} requests, of {age(over_s)}, asked for {asked} different blocks;"
        f" {held} blocks are known to be cached"
    )
    if not prefixes:
        return f"{about}\nno two of these requests share a whole block"
    rows = (
        (
            one.block,
            one.model,
            one.tokens,
            one.asked,
            f"{100 * one.hits / one.asked:.0f} %",
            age(one.age_s),
            len(one.device),
            one.host,
            one.disk,
        )
        for one in prefixes
    )
    return f"{about}\n\n{table(_HEAD, rows)}"
