"""`headrace explain`: asks a fleet what it remembers of a request or of a block.

routers     why a worker was chosen, and what came of it
frontends   refusals, lost attempts, waits for a worker
workers     waits for a first step, preemptions, ends without a complete answer; where blocks are
kvbm        where blocks are
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import msgspec

from deploy.local.show.explain_tables import merge, render_block, render_candidates, render_list, render_notes
from deploy.local.show.fleet import FleetConfig, ask_each, connect_bus, discovery_entries, instances_of
from deploy.local.terminal import highlight
from shared import subjects
from shared.bus.nats_bus import NatsBus
from shared.errors import ConfigError, ProtocolError, Unavailable
from shared.messages.cards import ServiceName
from shared.messages.control import CONTROL, FOUND_NOTES, FindNotes, FoundNotes
from shared.messages.people import EXPLANATIONS, Explanation, Explanations
from shared.notes import block_name

BLANK = ' \t\r\n"'


def show(config: FleetConfig, request: str | None, *, as_json: bool) -> int:
    """Print what is known of `request`, or the latest routing decisions of all requests if it is None. Return 1 if
    nothing is known of it.

    Raise Unavailable if discovery, NATS or every process that was asked cannot be reached.
    """
    nameless = request is not None and not request.strip(BLANK)  # an empty name would mean all requests
    known = _Known() if nameless else asyncio.run(_ask(config, request or ""))
    _print_remarks(known.remarks)
    decisions = merge(known.answers, latest=request is None)
    notes = [one for one in known.notes if one.notes]
    if as_json:
        told: dict[str, object] = {"decisions": decisions}
        if request is not None:
            told["notes"] = notes
        print(msgspec.json.format(msgspec.json.encode(told)).decode())
    elif request is None:
        text = render_list(decisions) if decisions else "no request was routed yet"
        print(highlight(text, sys.stdout) if decisions else text)
    else:
        parts = [render_candidates(decisions) if decisions else "", render_notes(notes) if notes else ""]
        if any(parts):
            print(highlight("\n\n".join(filter(None, parts)), sys.stdout))
    if request is not None and not (decisions or notes):
        name = request if request.isprintable() and not nameless else ascii(request)
        print(f"error: no process remembers {name}: it did not arrive, or too long ago", file=sys.stderr)
        return 1
    return 0


def show_block(config: FleetConfig, key: str, *, as_json: bool) -> int:
    """Print where a block is and what happened to it. Return 1 if nothing is known of it. Raise ConfigError, and what
    `show` raises."""
    try:
        block_name(key)
    except ProtocolError as wrong:
        raise ConfigError(str(wrong)) from None
    found, remarks = asyncio.run(_ask_block(config, key.lower()))
    _print_remarks([*remarks, *(f"{one.service} {one.instance}: {one.failed}" for one in found if one.failed)])
    found = [one for one in found if one.places or one.notes]
    if as_json:
        print(msgspec.json.format(msgspec.json.encode({"block": key.lower(), "found": found})).decode())
    elif found:
        print(highlight(render_block(found), sys.stdout))
    else:
        print("error: no worker and no block store answered", file=sys.stderr)
    return 0 if found else 1


def _print_remarks(remarks: Iterable[str]) -> None:
    for remark in remarks:
        print(f"note: {remark}", file=sys.stderr)


class _Known(msgspec.Struct):
    """What the processes know of a request."""

    answers: list[Explanations] = []
    notes: list[FoundNotes] = []
    remarks: list[str] = []
    """Processes that did not answer."""


async def _ask(config: FleetConfig, request: str) -> _Known:
    values = await discovery_entries(config)
    routers = instances_of("router", config, values)
    if not routers and not request:
        raise Unavailable(f"no router is registered in {config.discovery_shown}")
    async with connect_bus(config, "headrace explain") as bus:
        subject = partial(subjects.explain, config.namespace)
        question = request.encode(errors="surrogateescape")
        answers, remarks = await ask_each(bus, "router", routers, subject, EXPLANATIONS, question)
        if not request:
            if not answers:
                raise Unavailable(f"no router answers: {'; '.join(remarks)}")
            return _Known(answers, [], remarks)
        find = FindNotes(request=question.decode(errors="replace"))
        decisions = [one for answer in answers for one in answer.decisions]
        asked: dict[ServiceName, list[str]] = {
            "frontend": instances_of("frontend", config, values),
            "worker": _workers(config, values, decisions),
        }
        notes, silent = await _find_notes(bus, config, asked, find)
    if not (answers or notes):
        raise Unavailable(f"no process answers: {'; '.join([*remarks, *silent]) or 'none is registered'}")
    return _Known(answers, notes, remarks + silent)


def _workers(config: FleetConfig, values: Mapping[str, bytes], decisions: Sequence[Explanation]) -> list[str]:
    """Return the workers to ask of a request: those that were chosen for it, or all if no router remembers it."""
    alive = instances_of("worker", config, values)
    chosen = {one.instance for one in decisions}
    return [one for one in alive if one in chosen] if chosen else alive


async def _ask_block(config: FleetConfig, key: str) -> tuple[list[FoundNotes], list[str]]:
    values = await discovery_entries(config)
    kinds: tuple[ServiceName, ...] = ("worker", "kvbm")
    asked: dict[ServiceName, list[str]] = {kind: instances_of(kind, config, values) for kind in kinds}
    if not any(asked.values()):
        raise Unavailable(f"no worker and no block store is registered in {config.discovery_shown}")
    async with connect_bus(config, "headrace explain") as bus:
        return await _find_notes(bus, config, asked, FindNotes(block=key))


async def _find_notes(
    bus: NatsBus, config: FleetConfig, asked: Mapping[ServiceName, Sequence[str]], find: FindNotes
) -> tuple[list[FoundNotes], list[str]]:
    """Ask these processes at once. Return their answers, and a line for each that did not answer."""
    answers = await asyncio.gather(
        *(
            ask_each(
                bus, kind, each, partial(subjects.control, config.namespace, kind), FOUND_NOTES, CONTROL.encode(find)
            )
            for kind, each in asked.items()
        )
    )
    return [one for found, _ in answers for one in found], [line for _, silent in answers for line in silent]
