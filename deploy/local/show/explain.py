"""`headrace explain`: asks every router that discovery knows about its choices, and shows them together."""

from __future__ import annotations

import asyncio
import logging
import sys
from functools import partial

import msgspec

from deploy.local.colour import highlight
from deploy.local.show.explain_tables import merge, render_candidates, render_list
from deploy.local.show.fleet import FleetConfig, ask_each, connect_bus, discovery_entries, instances_of
from shared import subjects
from shared.errors import Unavailable
from shared.messages import EXPLANATIONS, Explanations

BLANK = ' \t\r\n"'


def show(config: FleetConfig, request: str | None, *, as_json: bool) -> int:
    """Print the routing decisions of `request`, or the latest of all requests if it is None. Return 1 if no router
    knows it.

    Raise Unavailable if discovery, NATS or every router cannot be reached.
    """
    logging.basicConfig(level=logging.CRITICAL)  # silence the log of retry loops
    nameless = request is not None and not request.strip(
        BLANK
    )  # for an empty name, routers return the latest decisions
    answers, notes = ([], []) if nameless else asyncio.run(_ask(config, request or ""))
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    decisions = merge(answers, latest=request is None)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode({"decisions": decisions})).decode())
    elif decisions:
        print(highlight(render_list(decisions) if request is None else render_candidates(decisions), sys.stdout))
    elif request is None:
        print("no request was routed yet")
    if request is not None and not decisions:
        name = request if request.isprintable() and not nameless else ascii(request)
        print(f"error: no router remembers {name}: it was not routed by them, or too long ago", file=sys.stderr)
        return 1
    return 0


async def _ask(config: FleetConfig, request: str) -> tuple[list[Explanations], list[str]]:
    routers = instances_of("router", config, await discovery_entries(config))
    if not routers:
        raise Unavailable(f"no router is registered in {config.discovery_shown}")
    async with connect_bus(config, "headrace explain") as bus:
        subject = partial(subjects.explain, config.namespace)
        question = request.encode(errors="surrogateescape")
        answers, notes = await ask_each(bus, "router", routers, subject, EXPLANATIONS, question)
    if not answers:
        raise Unavailable(f"no router answers: {'; '.join(notes)}")
    return answers, notes
