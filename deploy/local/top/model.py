"""What is known of a fleet from one look after the other, and one view of it. Pure.

Look, samples ──Known.learn──▶ what is known; the last values stay while NATS is away
                                 │
Controls ────────────────────────┴──Known.view──▶ View: tables and texts, ready to be drawn
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from deploy.local.show.overview import InstanceRow, Look
from deploy.local.show.rates import Rates, Sample, departures, duration, rates
from deploy.local.table import age
from deploy.local.top import tables
from deploy.local.top.keys import ORDERS, Controls
from deploy.local.top.tables import LINES_KEPT, Bar, Heading, Line, Listing, plain
from shared.messages.frontends import RecentRequests
from shared.messages.kvbm import KvbmState
from shared.messages.load import LoadReport
from shared.messages.people import RouterState
from shared.token_rates import TokenRates

WORKERS_KNOWN = 4096
"""Workers that are sorted, filtered and scrolled through; the view says how many more there are."""
WINDOW_LINES = 256
"""Workers of one view, from the first one that is scrolled to: more than a terminal has rows."""
SILENT_S = 1.5
"""Seconds without a load report after which a worker is silent; workers report every 250 ms."""
MEAN_S = 10.0
"""Seconds over which rates are means, or one interval if that is longer."""
SAMPLES_KEPT = 64

_WORKERS = (
    *(Heading("WORKER"), Heading("STATE"), Heading("ROLE"), Heading("MODEL", spare=2)),
    *(
        Heading("DEVICE", spare=3),
        Heading("MACHINE", spare=4),
        Heading("RUN", number=True),
        Heading("WAIT", number=True),
    ),
    *(Heading("TOK/S", number=True, spare=1), Heading("USED", number=True, spare=1), Heading("BLOCKS")),
)


class View(Struct, frozen=True):
    """All that can be drawn now; the terminal's size says how much of it is."""

    head: tuple[str, ...]
    """Short texts, the most important first."""
    controls: Controls
    fill: Bar = Bar()
    """The blocks of all workers whose load is known."""
    notes: tuple[str, ...] = ()
    notes_left_out: int = 0
    workers: Listing = Listing(_WORKERS)
    """The workers from the offset on."""
    offset: int = 0
    """The number of workers before them, by order and filter."""
    chosen: int = 0
    """The number of workers that the filter leaves."""
    all: int = 0
    """The number of workers, with those that are gone and those that are not followed."""
    others: tuple[Listing, ...] = ()
    """The other tables, the most important first."""


class _Worker(Struct):
    """One worker, with what is known of it."""

    name: str
    state: str
    """ready, starting, silent, gone, or what an operator asked for: draining, drained, asleep."""
    model: str
    role: str
    """prefill or decode. Empty if it does all of a request, or has no model card."""
    device: str
    machine: str
    load: LoadReport | None
    old_s: float | None
    """The age of what is known. None if it is of now."""
    per_s: float | None
    """Tokens per second."""


class Known:
    """What is known of the fleet. Times are seconds on a clock that never goes back."""

    def __init__(self) -> None:
        self._look: Look | None = None
        self._at_s = 0.0
        self._alive: dict[str, str] = {}
        """Process → its service."""
        self._gone: dict[str, tuple[str, float]] = {}
        """Process that is gone → its service, and since when."""
        self._workers: dict[str, _Worker] = {}
        self._left: dict[str, _Worker] = {}
        """Workers that are gone, as they were."""
        self._loads: dict[str, tuple[LoadReport, float, float | None]] = {}
        """Worker → its last report, when it came, tokens per second."""
        self._token_rates = TokenRates()
        self._samples: deque[tuple[float, Mapping[str, Sample]]] = deque(maxlen=SAMPLES_KEPT)
        """What frontends had counted at the end of each look."""
        self._asked_s: float | None = None
        """When the following were last heard."""
        self._routers: dict[str, RouterState] = {}
        self._stores: dict[str, KvbmState] = {}
        self._recent: dict[str, RecentRequests] = {}
        self._silent: tuple[str, ...] = ()

    def learn(self, look: Look, samples: Mapping[str, Sample], silent: Sequence[str], now_s: float) -> None:
        """Take what a look has found, the frontends' samples, and a line for each frontend that gave none."""
        seen = look.overview
        alive = {row.instance: row.service for row in seen.instances}
        self._left |= {name: worker for name, worker in self._workers.items() if name not in alive}
        self._gone = departures(self._alive, alive, self._gone, now_s)
        self._left = {name: worker for name, worker in self._left.items() if name in self._gone}
        self._alive, self._look, self._at_s, self._silent = alive, look, now_s, tuple(silent)
        rows = [row for row in seen.instances if row.service == "worker"][:WORKERS_KNOWN]
        for row in rows:
            if row.load is not None:
                at_s = look.heard_s[row.instance]
                self._loads[row.instance] = (row.load, at_s, self._token_rates.update(row.load, at_s))
        served = {instance: row.model for row in seen.models for instance in row.instances}
        self._workers = {row.instance: self._worker(row, served.get(row.instance)) for row in rows}
        self._loads = {name: load for name, load in self._loads.items() if name in self._workers}
        self._token_rates.forget_all_but(self._workers)
        self._samples.append((now_s, samples))
        while len(self._samples) > 2 and self._samples[0][0] < now_s - MEAN_S:
            self._samples.popleft()
        if look.connected:
            self._asked_s = now_s
            self._routers = {state.router: state for state in seen.routers}
            self._stores = {state.instance: state for state in seen.stores}
            self._recent = {state.frontend: state for state in look.recent}

    def _worker(self, row: InstanceRow, model: str | None) -> _Worker:
        """Return a worker that is alive; `model` is None as long as it has no model card."""
        load, at_s, per_s = self._loads.get(row.instance, (None, 0.0, None))
        old_s = None if load is None or self._at_s - at_s < SILENT_S else self._at_s - at_s
        state = row.state or ("starting" if model is None else "ready")
        if old_s is not None or (load is None and state != "starting"):
            state, per_s = "silent", None
        role = "" if row.role == "aggregated" else row.role
        return _Worker(row.instance, state, model or row.model, role, row.device, row.machine, load, old_s, per_s)

    def view(self, controls: Controls, clock: str) -> View:
        """Return the view; `clock` is the time of day, for people."""
        look = self._look
        if look is None:
            return View((clock, "looking …"), controls)
        since = {name: self._at_s - self._gone[name][1] for name in self._left}
        left = [replace(one, state="gone", old_s=since[name], per_s=None) for name, one in self._left.items()]
        everyone = [*self._workers.values(), *left]
        chosen = self._chosen(everyone, controls)
        offset = max(0, min(controls.offset, len(chosen) - 1))
        window = chosen[offset : offset + WINDOW_LINES]
        notes = self._notes(look)
        fresh = [one for one in self._workers.values() if one.load is not None and one.old_s is None]
        unknown = sum(service == "worker" for service in self._alive.values()) - len(self._workers)
        return View(
            (plain(look.overview.namespace), clock, *self._sums(fresh)),
            controls,
            _fill([one.load for one in fresh if one.load is not None]),
            tuple(map(plain, notes[:LINES_KEPT])),
            max(0, len(notes) - LINES_KEPT),
            Listing(_WORKERS, tuple(map(_line, window)), unknown),
            offset,
            len(chosen),
            len(everyone) + unknown,
            tuple(each for each in self._others(look) if each.lines),
        )

    def _chosen(self, workers: Sequence[_Worker], controls: Controls) -> list[_Worker]:
        """Return the workers that the filter leaves, in order."""
        wanted, order = controls.filter.casefold(), ORDERS[controls.order]
        chosen = [worker for worker in workers if not wanted or wanted in _text(worker)]
        chosen.sort(key=lambda worker: worker.name)
        if order == "state":
            chosen.sort(key=lambda worker: worker.state)
        elif order != "worker":
            chosen.sort(key=lambda worker: _number(order, worker), reverse=True)
        return chosen[::-1] if controls.reversed else chosen

    def _stale_s(self) -> float:
        """Return how old the answers of routers, stores and frontends are. 0 if they are of now."""
        return 0.0 if self._asked_s is None else self._at_s - self._asked_s

    def _sums(self, fresh: Sequence[_Worker]) -> list[str]:
        """Return the numbers of the head."""
        loads = [one.load for one in fresh if one.load is not None]
        speeds = [one.per_s for one in fresh if one.per_s is not None]
        samples = self._samples[-1][1]
        over = rates(self._samples[0][1], samples) if len(self._samples) > 1 else Rates()
        streams = sum(each.inflight for each in samples.values())
        if not samples:  # their metrics are not reached from here
            streams = sum(each.arriving + each.running for each in self._recent.values())
        split = any(one.role == "prefill" for one in self._workers.values())
        hits = " ".join(f"{tier} {100 * share:.0f} %" for tier, share in over.hits.items())
        return [
            *([f"values {age(self._stale_s())} old"] if self._stale_s() else []),
            f"running {sum(load.running for load in loads)}",
            f"waiting {sum(load.waiting for load in loads)}",
            f"tokens/s {sum(speeds):.0f}" if speeds else "tokens/s -",
            f"streams {streams:.0f}" if samples or self._recent else "streams -",
            f"requests/s {over.per_s['requests']:.3g}" if over.over_s else "requests/s -",
            *([f"hand-overs/s {over.per_s['hand_overs']:.3g}" if over.over_s else "hand-overs/s -"] if split else []),
            f"ttft p50 {duration(over.first_token_p50_s)} p90 {duration(over.first_token_p90_s)}",
            f"hits {hits or '-'}",
        ]

    def _notes(self, look: Look) -> list[str]:
        seen = look.overview
        gone = [(name, *each) for name, each in self._gone.items() if each[0] != "worker"]
        return [
            *seen.notes,
            *(f"gone: {service} {name}, {age(self._at_s - since_s)} ago" for name, service, since_s in gone),
            *(f"refused: {row.model} at {row.instance}: {row.reason}" for row in seen.refused),
            *(f"unreadable: {each}" for each in seen.unreadable),
            *self._silent,
        ]

    def _others(self, look: Look) -> list[Listing]:
        stale_s, rows = self._stale_s(), look.overview.instances
        doors = [row for row in rows if row.service in ("frontend", "router")]
        stores = [row for row in rows if row.service == "kvbm"]
        asked = [row for row in doors if row.instance in look.asked]
        pools = [row for row in stores if row.instance in look.asked]
        old, loads = stale_s > 0, {name: load for name, (load, _, _) in self._loads.items()}
        return [
            tables.tiers(pools, self._stores, len(stores) - len(pools), old=old),
            tables.migrations(self._recent, stale_s),
            tables.models(look.overview.models, loads, old=old),
            tables.services(asked, self._routers, self._recent, len(doors) - len(asked), old=old),
        ]


def _fill(loads: Sequence[LoadReport]) -> Bar:
    held, cached = sum(load.held_blocks for load in loads), sum(load.cached_blocks for load in loads)
    return Bar(held, cached, sum(load.total_blocks for load in loads))


def _line(worker: _Worker) -> Line:
    load, old = worker.load, worker.old_s is not None
    state = worker.state if worker.old_s is None else f"{worker.state} {age(worker.old_s)}"
    who = tuple(map(plain, (worker.name, state, worker.role, worker.model, worker.device, worker.machine)))
    if load is None:
        return Line((*who, "?", "?", "-", "-", Bar()), old)
    per_s = "-" if worker.per_s is None else f"{worker.per_s:.0f}"
    numbers = (str(load.running), str(load.waiting), per_s, f"{100 * _share(load):.0f} %")
    return Line((*who, *numbers, _fill([load])), old)


def _text(worker: _Worker) -> str:
    """Return what a filter is looked for in."""
    texts = (worker.name, worker.state, worker.role, worker.model, worker.device, worker.machine)
    return plain(" ".join(texts)).casefold()


def _share(load: LoadReport) -> float:
    return load.held_blocks / load.total_blocks if load.total_blocks > 0 else 0.0


def _number(order: str, worker: _Worker) -> float:
    """Return by what a worker is sorted; one that is gone, or whose load is not known, has the least."""
    load = worker.load
    if load is None or worker.state == "gone":
        return -1.0
    by = {"load": _share(load), "running": load.running, "waiting": load.waiting, "tokens/s": worker.per_s or 0.0}
    return by[order]
