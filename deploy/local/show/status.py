"""`headrace status`: asks discovery, routers and block stores, and collects the workers' load reports, once or, with
--watch, again and again, with what the services did in between.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from pathlib import Path

import msgspec
from msgspec.structs import replace

from deploy.local import probe
from deploy.local.show.fleet import FleetConfig, ask_each, connect_bus, discovery_entries, readable_entries
from deploy.local.show.overview import InstanceRow, Look, Overview, overview, render
from deploy.local.show.rates import Sample, departures, rates, render_rates, sample
from deploy.local.show.weights import shared_rows
from deploy.local.terminal import highlight
from shared import subjects
from shared.bus.contract import Message
from shared.bus.nats_bus import NatsBus
from shared.errors import BusDown, DiscoveryDown, ProtocolError, Unavailable
from shared.messages.cards import Instance, ServiceName
from shared.messages.frontends import RECENT_REQUESTS, RecentRequests
from shared.messages.kvbm import KVBM_STATE, KvbmState
from shared.messages.load import LOAD_REPORT, LoadReport
from shared.messages.people import ROUTER_STATE, RouterState
from shared.messages.turns import TURNS_STATE, TurnsState
from shared.runtime.runtime import pid_namespace

LISTEN_S = 0.5
"""Limit of the time to collect load reports, in seconds: workers report every 250 ms."""
SERVICES: tuple[ServiceName, ...] = ("frontend", "router", "kvbm", "turns", "worker")
LOADS_HEARD = 4096
"""Workers whose reports are kept, at most."""
HEALTH_LIMIT_S = 2.0
"""Limit in seconds of a frontend's answer to /health."""
DISCOVERY_LIMIT_S = 5.0
SCRAPE_LIMIT_S = 1.0
METRICS_LIMIT_BYTES = 4 << 20
"""The maximum size of a process's metrics: a frontend with 1,000 keys has 1 MB."""


def show(config: FleetConfig, *, as_json: bool, weights: Path | None = None) -> int:
    """Print the overview. `weights` is the directory of this machine's memory service. Raise DiscoveryDown; if NATS is
    down, a note says so."""
    view = asyncio.run(_look(config))
    if weights is not None and weights.exists():
        view = _with_weights(view, weights)
    text = msgspec.json.format(msgspec.json.encode(view)).decode() if as_json else ""
    print(text or highlight(render(view), sys.stdout))
    return 0


def _with_weights(view: Overview, directory: Path) -> Overview:
    try:
        return replace(view, weights=shared_rows(directory))
    except Unavailable as wrong:
        return replace(view, notes=(*view.notes, str(wrong)))


async def _look(config: FleetConfig) -> Overview:
    return await collect(config, await discovery_entries(config))


async def collect(config: FleetConfig, values: Mapping[str, bytes], remarks: Sequence[str] = ()) -> Overview:
    """Return the overview of a fleet with these entries in discovery. `remarks` are added to its notes."""
    return (await look(config, values, remarks)).overview


async def look(
    config: FleetConfig, values: Mapping[str, bytes], remarks: Sequence[str] = (), *, most: int | None = None
) -> Look:
    """Return what a fleet with these entries in discovery answers now. `remarks` are added to the overview's notes.

    At most `most` processes of each service are asked, and the reports of at most LOADS_HEARD workers are kept. With
    `most`, the frontends are also asked for their latest requests.
    """
    loads: dict[str, tuple[LoadReport, float]] = {}
    states: list[RouterState] = []
    stores: list[KvbmState] = []
    recent: list[RecentRequests] = []
    turns: list[TurnsState] = []
    notes: list[str] = []
    namespace, connected = config.namespace, True
    alive = [each for each in readable_entries(namespace, values) if isinstance(each, Instance)]
    frontends, routers, kvbms, deciders, workers = (
        sorted(each.instance for each in alive if each.service == service) for service in SERVICES
    )
    heard = [] if most is None else frontends[:most]
    asked = frozenset((*frontends[:most], *routers[:most], *kvbms[:most]))
    try:
        async with connect_bus(config, "headrace status") as bus:
            (states, silent), (stores, mute), (recent, dumb), (turns, still), _ = await asyncio.gather(
                ask_each(bus, "router", routers[:most], partial(subjects.router_state, namespace), ROUTER_STATE),
                ask_each(bus, "kvbm", kvbms[:most], lambda kvbm: subjects.kvbm(namespace, kvbm, "stat"), KVBM_STATE),
                ask_each(bus, "frontend", heard, partial(subjects.recent_requests, namespace), RECENT_REQUESTS),
                ask_each(bus, "turns", deciders[:most], partial(subjects.turns_state, namespace), TURNS_STATE),
                _listen(bus, namespace, loads, set(workers)),
            )
            notes = silent + mute + dumb + still
    except BusDown as wrong:
        notes, connected = [f"{wrong}; so no load is known"], False
    where = (namespace, config.nats_shown, config.discovery_shown)
    reports = {worker: report for worker, (report, _) in loads.items()}
    seen = overview(*where, values, reports, states, stores, [*remarks, *notes], time.time(), pid_namespace())
    doors = [row for row in seen.instances if row.service == "frontend" and row.http and row.instance in asked]
    answers = await asyncio.gather(*(model_faults(row.instance, row.http) for row in doors))
    faults = [fault for each in answers for fault in each]
    gone = await _gone([each for each in alive if each.instance not in loads])
    rows = tuple(replace(row, state="gone") if row.instance in gone else row for row in seen.instances)
    seen = replace(seen, instances=rows, notes=(*seen.notes, *faults), turns=tuple(turns))
    heard_s = {worker: at_s for worker, (_, at_s) in loads.items()}
    return Look(seen, heard_s, tuple(recent), asked, connected)


async def _gone(silent: Sequence[Instance]) -> set[str]:
    """Return the processes of this machine that have ended. Discovery has them until their leases end. One that answers
    is alive: it is of another machine with the same name."""
    ended = _ended(silent)
    answers = await asyncio.gather(*(_answers(each.http) for each in ended))
    return {each.instance for each, answered in zip(ended, answers, strict=True) if not answered}


def _ended(silent: Sequence[Instance]) -> list[Instance]:
    here = socket.gethostname(), pid_namespace()
    mine = [each for each in silent if each.pid_namespace and (each.machine, each.pid_namespace) == here]
    return [each for each in mine if not Path(f"/proc/{each.pid}").exists()]


async def _answers(url: str) -> bool:
    try:
        await probe.get(f"{url}/live", timeout_s=SCRAPE_LIMIT_S)
    except (OSError, ValueError):
        return False
    return True


async def model_faults(frontend: str, url: str) -> list[str]:
    """Return why a frontend cannot serve models that have workers, such as a chat template with an error. Empty also if
    it is not reached from here; discovery says then that it is gone."""
    try:
        status, body = await probe.get(f"{url}/health", timeout_s=HEALTH_LIMIT_S)
        reasons = [] if status == HTTPStatus.OK else json.loads(body)["reasons"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [f"frontend {frontend}: {reason}" for reason in reasons if str(reason).startswith("model ")]


async def _listen(bus: NatsBus, namespace: str, loads: dict[str, tuple[LoadReport, float]], expected: set[str]) -> None:
    """Hear load reports until each expected worker was heard, at most for LISTEN_S."""
    complete = asyncio.Event()
    missing = set(expected)

    async def on_report(message: Message) -> None:
        try:
            report = LOAD_REPORT.decode(message.payload)
        except ProtocolError:  # from a newer or broken worker; its load is shown as unknown
            return
        if report.instance in loads or len(loads) < LOADS_HEARD:
            loads[report.instance] = (report, time.monotonic())
        missing.discard(report.instance)
        if not missing:
            complete.set()

    await bus.subscribe(subjects.worker(namespace, "*", "load"), on_report, pending_limit=LOADS_HEARD)
    with suppress(TimeoutError):
        async with asyncio.timeout(LISTEN_S if expected else 0):
            await complete.wait()


def watch(config: FleetConfig, every_s: float) -> int:
    """Show the fleet every `every_s` seconds until Ctrl-C. Raise DiscoveryDown if it cannot be read at first."""
    with suppress(KeyboardInterrupt):
        asyncio.run(_watch(config, every_s))
    return 0


async def _watch(config: FleetConfig, every_s: float) -> None:
    values = await discovered(config)
    samples: Mapping[str, Sample] = {}
    known: dict[str, str] = {}
    gone: dict[str, tuple[str, float]] = {}
    notes: list[str] = []
    while True:
        begun_s = time.monotonic()
        view = await collect(config, values, notes)
        former, (samples, silent) = samples, await scrape(view.instances)
        alive = {row.instance: row.service for row in view.instances}
        gone = departures(known, alive, gone, begun_s)
        known = alive
        lost = [f"gone: {service} {name}, {begun_s - since_s:.0f} s ago" for name, (service, since_s) in gone.items()]
        head = f"{time.strftime('%H:%M:%S')}, every {every_s:g} s; Ctrl-C ends"
        columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
        _show("\n".join([head, "", render_rates(rates(former, samples)), "", render(view, columns), *silent, *lost]))
        await asyncio.sleep(max(0.0, begun_s + every_s - time.monotonic()))
        try:
            values, notes = await discovered(config), []
        except DiscoveryDown as wrong:
            notes = [f"{wrong}; these are the processes that were alive before"]


async def discovered(config: FleetConfig) -> dict[str, bytes]:
    """Return discovery's keys and values. Raise DiscoveryDown, also at the limit."""
    try:
        async with asyncio.timeout(DISCOVERY_LIMIT_S):
            return await discovery_entries(config)
    except TimeoutError:
        shown = config.discovery_shown
        raise DiscoveryDown(f"discovery did not answer within {DISCOVERY_LIMIT_S:g} s: {shown}") from None


async def scrape(instances: Sequence[InstanceRow]) -> tuple[dict[str, Sample], list[str]]:
    """Return instance → sample, and a line for each instance that gave none in time."""
    samples: dict[str, Sample] = {}
    silent: list[str] = []

    async def ask(row: InstanceRow) -> None:
        try:
            status, body = await probe.get(
                f"{row.http}/metrics", timeout_s=SCRAPE_LIMIT_S, limit_bytes=METRICS_LIMIT_BYTES
            )
            if status != 200:
                raise OSError(f"status {status}")
            samples[row.instance] = sample(row.service, body.decode(), time.monotonic())
        except (OSError, ValueError, KeyError) as wrong:
            reason = getattr(wrong, "strerror", None) or wrong
            silent.append(f"no answer: {row.service} {row.instance} at {row.http}/metrics: {reason}")

    await asyncio.gather(*map(ask, instances))
    return samples, sorted(silent)


def _show(text: str) -> None:
    """Show a view: on a terminal in place of the former one, else below it."""
    if sys.stdout.isatty():
        columns, lines = shutil.get_terminal_size()
        shown = highlight(fit(text, columns, lines - 1), sys.stdout)
        # Home; each line is written over the former one, and what is left of it is erased, so that nothing flickers.
        text = "\033[H" + "".join(f"{line}\033[K\n" for line in shown.splitlines()) + "\033[J"
    else:
        text += "\n\n"
    sys.stdout.write(text)
    sys.stdout.flush()


def fit(text: str, columns: int, lines: int) -> str:
    """Return as much of a text as a terminal has room for, and how much is left out."""
    rows = [row[:columns] for row in text.splitlines()]
    if len(rows) > lines:
        rows[lines - 1 :] = [f"… {len(rows) - lines + 1} more lines"]
    return "\n".join(rows)
