"""What `headrace plan` says: each fleet that was simulated, and the answer. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from deploy.local.size.plan_files import FleetOrder, step_tokens
from deploy.local.size.profile_file import Profile
from deploy.local.size.search import FleetCandidate, FleetSearch, Targets
from deploy.local.size.traffic import Traffic
from deploy.local.table import table
from shared.messages.virtual import VirtualResult

ROWS = 12
"""The most fleets that the table shows; --json has all."""


class Prices(Struct, frozen=True):
    """What turns figures of a fleet into GPUs, money and bytes."""

    gpu_hour: float
    gpus_a_worker: int
    kv_token_bytes: int
    gpu_watts: float = 0.0


class PlanRow(Struct, frozen=True):
    """One fleet that was simulated."""

    fleet: FleetCandidate
    server: str
    """What was profiled: an address, or the flags of an `up`."""
    name: str
    gpus: int
    price_an_hour: float
    """0 if no price is known."""
    meets: bool
    of_target: dict[str, float]
    """Each figure divided by its target."""
    tokens_a_gpu_hour: float
    """The tokens of answers in an hour, for each GPU."""
    price_a_million_tokens: float
    gpu_hours_a_million_requests: float
    store_bytes: int
    """The bytes of the block store."""
    step_tokens: int
    """The tokens of a prompt that take the time of one step."""
    result: VirtualResult
    watt_hours_a_million_tokens: float = 0.0
    """0 if a GPU's power was not given."""


class PlanReport(Struct, frozen=True):
    """The answer, and what it was chosen from."""

    model: str
    requests: int
    requests_per_s: float
    targets: dict[str, float]
    best: PlanRow | None
    """The cheapest fleet that meets the targets. None if none does."""
    binds: str
    """Which target leaves the least room."""
    rows: list[PlanRow]
    """All fleets, the best first."""
    notes: list[str] = []
    """Why figures may be wrong."""


def rows_of(search: FleetSearch, profile: Profile, prices: Prices, targets: Targets) -> list[PlanRow]:
    """Return a row for each fleet of a search that has ended."""
    return [row_of(candidate, result, prices, targets, profile) for candidate, result in search.results.items()]


def report_of(rows: Sequence[PlanRow], model: str, traffic: Traffic, targets: Targets, notes: list[str]) -> PlanReport:
    """Return the report of all fleets that were run."""
    ordered = sorted(rows, key=lambda row: (not row.meets, row.gpus if row.meets else 0, max(row.of_target.values())))
    first = ordered[0]
    return PlanReport(
        model=model,
        requests=len(traffic.rows),
        requests_per_s=traffic.rate,
        targets=dict(targets.limits),
        best=first if first.meets else None,
        binds=max(first.of_target, key=lambda name: first.of_target[name]),
        rows=ordered,
        notes=notes,
    )


def row_of(
    candidate: FleetCandidate, result: VirtualResult, prices: Prices, targets: Targets, profile: Profile
) -> PlanRow:
    """Return the row of a fleet."""
    gpus = candidate.workers * prices.gpus_a_worker
    price = gpus * prices.gpu_hour
    tokens_an_hour = max(1e-9, 3600 * result.output_tokens_per_s)
    return PlanRow(
        fleet=candidate,
        server=profile.subject.server,
        name=candidate.name if prices.gpus_a_worker == 1 else f"{candidate.name}, {prices.gpus_a_worker} GPUs each",
        gpus=gpus,
        price_an_hour=price,
        meets=targets.worst(result) <= 1,
        of_target=targets.misses(result),
        tokens_a_gpu_hour=tokens_an_hour / gpus,
        price_a_million_tokens=1e6 * price / tokens_an_hour,
        gpu_hours_a_million_requests=1e6 * gpus / max(1e-9, 3600 * result.requests_per_s),
        store_bytes=candidate.setting.store_tokens * prices.kv_token_bytes,
        step_tokens=step_tokens(profile.prefill, candidate.setting.step_s),
        result=result,
        watt_hours_a_million_tokens=1e6 * gpus * prices.gpu_watts / tokens_an_hour,
    )


def render(made: PlanReport) -> str:
    """Return the report as text."""
    wanted = ", ".join(f"{name.replace('_', ' ')} {limit:g} s" for name, limit in made.targets.items())
    first = made.rows[0]
    worst = f"{made.binds.replace('_', ' ')} is at {first.of_target[made.binds]:.0%} of its target"
    if made.best is None:
        answer = f"no fleet of those that were tried meets the targets; the nearest is {first.name}: {worst}"
    else:
        answer = f"the cheapest that meets them: {first.name}: {worst}"
    head = f"{made.requests} requests, {made.requests_per_s:.3g} a second, to {made.model}; targets: {wanted}"
    names = "  ".join(f"{name.replace('_', ' ').upper()} MS" for name in made.targets)
    priced = bool(first.price_an_hour)
    columns = f"FLEET  GPUS{'  PRICE/H' if priced else ''}  {names}  OF TARGET  TOKENS/GPU HOUR"
    columns += f"{'  PRICE/M TOKENS' if priced else ''}  GPU HOURS/M REQUESTS"
    columns += "  WH/M TOKENS" if first.watt_hours_a_million_tokens else ""
    lines = [head, answer, "", table(columns, [_cells(row, made) for row in made.rows[:ROWS]])]
    notes = [*made.notes]
    if (left := len(made.rows) - ROWS) > 0:
        notes.append(f"{left} fleets are not shown; --json has all")
    step_s = min(row.fleet.setting.step_s for row in made.rows)
    if made.best is None and made.binds.startswith("itl") and step_s > made.targets[made.binds]:
        notes.append(f"steps with parts of prompts, of up to {step_s:g} s, are longer than that target: --step-s")
    return "\n".join([*lines, *(f"note: {note}" for note in notes)])


def _cells(row: PlanRow, made: PlanReport) -> list[object]:
    figures = {name: 1000 * row.of_target[name] * limit for name, limit in made.targets.items()}
    worst = max(row.of_target.values())
    given_up = row.result.given_up or row.result.failed
    return [
        row.name,
        row.gpus,
        *([f"{row.price_an_hour:,.2f}"] if row.price_an_hour else []),
        *(
            f"over {figure:,.1f}" if given_up and name.startswith("ttft") else f"{figure:,.1f}"
            for name, figure in figures.items()
        ),
        f"{worst:.0%}" if row.meets else f"{worst:.0%}, misses",
        "-" if given_up else f"{row.tokens_a_gpu_hour:,.0f}",
        *(["-" if given_up else f"{row.price_a_million_tokens:,.2f}"] if row.price_an_hour else []),
        "-" if given_up else f"{row.gpu_hours_a_million_requests:,.0f}",
        *(["-" if given_up else f"{watt_hours:,.0f}"] if (watt_hours := row.watt_hours_a_million_tokens) else []),
    ]


def order_of(row: PlanRow, made: PlanReport) -> FleetOrder:
    """Return how a fleet is started."""
    return FleetOrder(
        fleet=row.fleet,
        model=made.model,
        started=[] if "://" in row.server or row.server == "up" else row.server.split(" "),
        store_bytes=row.store_bytes,
        gpus_a_worker=row.gpus // row.fleet.workers,
        step_tokens=row.step_tokens,
    )
