"""`headrace status`: asks discovery, the routers and the block stores once, and collects the workers' load reports for
a moment."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from http import HTTPStatus

import msgspec

from deploy.local import probe
from deploy.local.colour import highlight
from deploy.local.show.fleet import FleetConfig, ask_each, connect_bus, discovery_entries, instances_of
from deploy.local.show.overview import Overview, overview, render
from shared import subjects
from shared.bus.contract import Message
from shared.bus.nats_bus import NatsBus
from shared.errors import BusDown, ProtocolError
from shared.kvbm_messages import KVBM_STATE, KvbmState
from shared.messages import LOAD_REPORT, ROUTER_STATE, LoadReport, RouterState
from shared.runtime.lifecycle import pid_namespace

LISTEN_S = 0.3
"""Time to collect load reports: workers report every 250 ms."""
HEALTH_LIMIT_S = 2.0
"""Limit in seconds of a frontend's answer to /health."""


def show(config: FleetConfig, *, as_json: bool) -> int:
    """Print the overview. Raise DiscoveryDown; if NATS is down, a note says so."""
    logging.basicConfig(level=logging.CRITICAL)  # silence the log of retry loops; the notes have the reason
    view = asyncio.run(_look(config))
    text = msgspec.json.format(msgspec.json.encode(view)).decode() if as_json else ""
    print(text or highlight(render(view), sys.stdout))
    return 0


async def _look(config: FleetConfig) -> Overview:
    return await collect(config, await discovery_entries(config))


async def collect(config: FleetConfig, values: Mapping[str, bytes], remarks: Sequence[str] = ()) -> Overview:
    """Return the overview of a fleet with these entries in discovery. `remarks` are added to its notes."""
    reports: dict[str, LoadReport] = {}
    states: list[RouterState] = []
    stores: list[KvbmState] = []
    notes: list[str] = []
    namespace = config.namespace
    routers, kvbms = instances_of("router", config, values), instances_of("kvbm", config, values)
    try:
        async with connect_bus(config, "headrace status") as bus:
            (states, silent), (stores, mute), _ = await asyncio.gather(
                ask_each(bus, "router", routers, partial(subjects.router_state, namespace), ROUTER_STATE),
                ask_each(bus, "kvbm", kvbms, lambda kvbm: subjects.kvbm(namespace, kvbm, "stat"), KVBM_STATE),
                _listen(bus, namespace, reports),
            )
            notes = silent + mute
    except BusDown as wrong:
        notes = [f"{wrong}; so no load is known"]
    where = (namespace, config.nats_shown, config.discovery_shown)
    seen = overview(*where, values, reports, states, stores, [*remarks, *notes], time.time(), pid_namespace())
    frontends = [(row.instance, row.http) for row in seen.instances if row.service == "frontend" and row.http]
    faults = [fault for each in await asyncio.gather(*(model_faults(*one) for one in frontends)) for fault in each]
    return msgspec.structs.replace(seen, notes=(*seen.notes, *faults))


async def model_faults(frontend: str, url: str) -> list[str]:
    """Return why a frontend cannot serve models that have workers, such as a chat template with an error. Empty also if
    it is not reached from here; discovery says then that it is gone."""
    try:
        status, body = await probe.get(f"{url}/health", timeout_s=HEALTH_LIMIT_S)
        reasons = [] if status == HTTPStatus.OK else json.loads(body)["reasons"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [f"frontend {frontend}: {reason}" for reason in reasons if str(reason).startswith("model ")]


async def _listen(bus: NatsBus, namespace: str, reports: dict[str, LoadReport]) -> None:
    async def on_report(message: Message) -> None:
        try:
            report = LOAD_REPORT.decode(message.payload)
        except ProtocolError:  # from a newer or broken worker; its load is shown as unknown
            return
        reports[report.instance] = report

    await bus.subscribe(subjects.worker(namespace, "*", "load"), on_report)
    await asyncio.sleep(LISTEN_S)
