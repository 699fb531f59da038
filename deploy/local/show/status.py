"""`headrace status`: asks discovery, the routers and the block stores once, and collects the workers' load reports for
a moment."""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial

import msgspec

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


def show(config: FleetConfig, *, as_json: bool) -> int:
    """Print the overview. Raises DiscoveryDown; if NATS is down, a note says so."""
    logging.basicConfig(level=logging.CRITICAL)  # silence the log of retry loops; the notes have the reason
    view = asyncio.run(_collect(config))
    print(msgspec.json.format(msgspec.json.encode(view)).decode() if as_json else render(view))
    return 0


async def _collect(config: FleetConfig) -> Overview:
    values = await discovery_entries(config)
    reports: dict[str, LoadReport] = {}
    states: list[RouterState] = []
    stores: list[KvbmState] = []
    notes: list[str] = []
    try:
        async with connect_bus(config, "headrace status") as bus:
            (states, silent), (stores, mute), _ = await asyncio.gather(
                _routers(bus, config, values), _stores(bus, config, values), _listen(bus, config.namespace, reports)
            )
            notes = silent + mute
    except BusDown as wrong:
        notes = [f"{wrong}; so no load is known"]
    where = (config.namespace, config.nats_shown, config.discovery_shown)
    return overview(*where, values, reports, states, stores, notes, time.time(), pid_namespace())


async def _routers(bus: NatsBus, config: FleetConfig, values: dict[str, bytes]) -> tuple[list[RouterState], list[str]]:
    routers = instances_of("router", config, values)
    return await ask_each(bus, "router", routers, partial(subjects.router_state, config.namespace), b"", ROUTER_STATE)


async def _stores(bus: NatsBus, config: FleetConfig, values: dict[str, bytes]) -> tuple[list[KvbmState], list[str]]:
    def stat(instance: str) -> str:
        return subjects.kvbm(config.namespace, instance, "stat")

    return await ask_each(bus, "kvbm", instances_of("kvbm", config, values), stat, b"", KVBM_STATE)


async def _listen(bus: NatsBus, namespace: str, reports: dict[str, LoadReport]) -> None:
    async def on_report(message: Message) -> None:
        try:
            report = LOAD_REPORT.decode(message.payload)
        except ProtocolError:  # from a newer or broken worker; its load is shown as unknown
            return
        reports[report.instance] = report

    await bus.subscribe(subjects.worker(namespace, "*", "load"), on_report)
    await asyncio.sleep(LISTEN_S)
