"""One view of the fleet for the page: the numbers that the page shows. Pure.

    address book, model cards ─┐
    load reports, rates        ├─▶ snapshot ─▶ PageEvent, as JSON one event of the page's stream
    routers, block stores      │
    latest requests            ┘

Every list is bounded, and the snapshot says how many entries it leaves out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from services.frontend.ui.views import (
    FrontendView,
    LayoutView,
    ModelView,
    NotShown,
    PageEvent,
    Process,
    RequestView,
    RouterView,
    StoreView,
    TierView,
    Totals,
    WorkerView,
)
from shared.lora import name_of_lora
from shared.messages.cards import Instance, ModelCard
from shared.messages.frontends import RecentRequests, RequestWay
from shared.messages.kvbm import KvbmState, LayoutState, TierState
from shared.messages.load import LoadReport
from shared.messages.people import Explanation, Explanations, RouterState
from shared.request_names import short_name

WORKERS_SHOWN = 64
OTHERS_SHOWN = 16
"""Frontends, routers and block stores in one snapshot, of each kind."""
LAYOUTS_SHOWN = 8
"""Layouts of one block store."""
MODELS_SHOWN = 32
REQUESTS_SHOWN = 40
"""Requests in one snapshot: the latest of all frontends."""
NOTES_SHOWN = 8
TEXT_SHOWN = 160
"""Characters of a text from other processes; longer ones are cut."""
NAME_LIMIT = 512
"""Characters of a model's name; a model with a longer one is left out, because a cut name could not be asked for."""
SILENT_S = 1.5
"""Seconds without a load report after which a worker is shown as silent; workers report every 250 ms."""


class SeenLoad(Struct, frozen=True):
    """The last load report of a worker."""

    report: LoadReport
    age_s: float
    tokens_per_s: float | None
    """Tokens drawn per second since the view before. None if there was no report then."""


class Facts(Struct, frozen=True):
    """All that one snapshot is made from."""

    namespace: str
    frontend: str
    """The frontend that makes it."""
    version: str
    wall_s: float
    """Seconds since 1970."""
    connected: bool
    """Whether NATS is reached: if not, loads are old and nothing was asked."""
    instances: Mapping[str, Instance]
    cards: Mapping[tuple[str, str], ModelCard]
    refused: Mapping[tuple[str, str], str]
    loads: Mapping[str, SeenLoad] = {}
    routers: Sequence[RouterState] = ()
    stores: Sequence[KvbmState] = ()
    recent: Sequence[RecentRequests] = ()


def snapshot(facts: Facts) -> PageEvent:
    """Return the view of the fleet."""
    of_service: dict[str, list[Instance]] = {"frontend": [], "router": [], "worker": [], "kvbm": []}
    for each in facts.instances.values():
        of_service.setdefault(each.service, []).append(each)
    for found in of_service.values():
        found.sort(key=lambda each: (each.started, each.instance))
    cards = {each.instance: each.turns.card for each in facts.instances.values() if each.turns is not None}
    cards |= {card.instance: card for card in facts.cards.values()}
    routers = {state.router: state for state in facts.routers}
    stores = {state.instance: state for state in facts.stores}
    recent = {state.frontend: state for state in facts.recent}
    shown = {kind: found[: WORKERS_SHOWN if kind == "worker" else OTHERS_SHOWN] for kind, found in of_service.items()}
    models, all_models = _models(cards.values())
    requests = sorted(
        (_request(state.frontend, way, facts.wall_s) for state in facts.recent for way in state.requests),
        key=lambda each: (each.began_ms, each.id),
    )
    notes = [f"{model} at {instance} is refused: {why}" for (model, instance), why in sorted(facts.refused.items())]
    left_out = {kind: len(of_service[kind]) - len(shown[kind]) for kind in shown}
    return PageEvent(
        at_ms=round(1000 * facts.wall_s),
        namespace=facts.namespace,
        frontend=facts.frontend,
        version=facts.version,
        connected=facts.connected,
        totals=_totals(of_service["worker"], facts.loads, facts.recent),
        frontends=[_frontend(_process(each, facts), recent.get(each.instance)) for each in shown["frontend"]],
        routers=[_router(_process(each, facts), routers.get(each.instance)) for each in shown["router"]],
        workers=[_worker(each, facts, cards.get(each.instance)) for each in shown["worker"]],
        stores=[_store(_process(each, facts), stores.get(each.instance)) for each in shown["kvbm"]],
        models=models[:MODELS_SHOWN],
        requests=requests[-REQUESTS_SHOWN:],
        notes=[_cut(note) for note in notes[:NOTES_SHOWN]],
        left_out=NotShown(
            workers=left_out["worker"],
            frontends=left_out["frontend"],
            routers=left_out["router"],
            stores=left_out["kvbm"],
            models=all_models - len(models[:MODELS_SHOWN]),
            requests=max(0, len(requests) - REQUESTS_SHOWN),
            notes=max(0, len(notes) - NOTES_SHOWN),
        ),
    )


def _cut(text: str) -> str:
    return text if len(text) <= TEXT_SHOWN else text[: TEXT_SHOWN - 1] + "…"


def _process(entry: Instance, facts: Facts) -> Process:
    age_s = max(0.0, round(facts.wall_s - entry.started, 1))
    return Process(entry.instance, _cut(entry.machine), _cut(entry.version), age_s)


def _models(cards: Iterable[ModelCard]) -> tuple[list[ModelView], int]:
    """Return the models that can be asked for, by name, and how many models there are."""
    by_name: dict[str, list[ModelCard]] = {}
    for card in cards:
        if card.decodes:
            for name in (card.model, *map(name_of_lora, card.lora)):
                by_name.setdefault(name, []).append(card)
    views = [
        ModelView(
            name,
            len(served),
            min(card.context_length for card in served),
            served[0].block_size,
            all(card.generates for card in served),
            all(card.pictures is not None and not card.pictures.frames for card in served),
        )
        for name, served in sorted(by_name.items())
        if len(name) <= NAME_LIMIT
    ]
    return views, len(by_name)


def _totals(workers: Sequence[Instance], loads: Mapping[str, SeenLoad], recent: Sequence[RecentRequests]) -> Totals:
    seen = [loads[each.instance] for each in workers if each.instance in loads]
    heard = [each.report for each in seen if each.age_s < SILENT_S]
    return Totals(
        workers=len(workers),
        running=sum(report.running for report in heard),
        waiting=sum(report.waiting for report in heard),
        tokens_per_s=round(sum(each.tokens_per_s or 0.0 for each in seen if each.age_s < SILENT_S), 1),
        held=sum(report.held_blocks for report in heard),
        cached=sum(report.cached_blocks for report in heard),
        blocks=sum(report.total_blocks for report in heard),
        begun=sum(state.begun for state in recent),
    )


def _worker(entry: Instance, facts: Facts, card: ModelCard | None) -> WorkerView:
    load = facts.loads.get(entry.instance)
    silent = load is None or load.age_s >= SILENT_S
    device, model, kvbm = ("", entry.model, "") if card is None else (card.device, card.model, card.kvbm)
    state = "silent" if silent else _cut(entry.state) or ("ready" if card is not None else "starting")
    role: str = entry.role if card is None else card.role
    role = "" if role == "aggregated" else role
    process = _process(entry, facts)
    view = WorkerView(process, state, role, _cut(device), _cut(model), kvbm, None)
    if load is None:
        return view
    report = load.report
    return replace(
        view,
        reported_s=round(load.age_s, 2),
        running=report.running,
        waiting=report.waiting,
        waiting_tokens=report.waiting_tokens,
        held=report.held_blocks,
        cached=report.cached_blocks,
        blocks=report.total_blocks,
        tokens_per_s=None if load.tokens_per_s is None or silent else round(load.tokens_per_s, 1),
        step_s=round(report.step_s, 6),
        prefill_tokens_per_s=round(report.prefill_tokens_per_s),
    )


def _frontend(process: Process, state: RecentRequests | None) -> FrontendView:
    if state is None:
        return FrontendView(process)
    return FrontendView(process, state.arriving, state.running, state.begun)


def _router(process: Process, state: RouterState | None) -> RouterView:
    if state is None:
        return RouterView(process)
    return RouterView(
        process,
        answered=True,
        policy=_cut(state.policy),
        trouble=_cut(state.policy_trouble),
        reserved=sum(model.reservations for model in state.models),
        index_blocks=sum(model.index_blocks for model in state.models),
        index_bytes=sum(model.index_bytes for model in state.models),
        sources={"off": 0} if state.events == "off" else dict(Counter(_cut(each.state) for each in state.sources)),
    )


def _store(process: Process, state: KvbmState | None) -> StoreView:
    if state is None:
        return StoreView(process)
    return StoreView(
        process,
        answered=True,
        pool_bytes=state.pool_bytes,
        reserved=round(state.reserved, 3),
        window_s=state.window_s,
        layouts=[_layout(each) for each in state.layouts[:LAYOUTS_SHOWN]],
        layouts_left_out=max(0, len(state.layouts) - LAYOUTS_SHOWN),
    )


def _layout(state: LayoutState) -> LayoutView:
    tiers = [("host", state.host), ("disk", state.disk)]
    return LayoutView(
        _cut(state.model),
        _cut(state.kv.dtype),
        state.kv.block_bytes,
        state.owners,
        sum(state.tickets.values()),
        [_tier(name, tier) for name, tier in tiers if tier is not None],
    )


def _tier(name: str, state: TierState) -> TierView:
    hit_rate = None if state.hit_rate is None else round(state.hit_rate, 3)
    return TierView(name, _cut(state.state), _cut(state.reason), state.blocks, state.capacity_blocks, hit_rate)


def _request(frontend: str, way: RequestWay, wall_s: float) -> RequestView:
    below = way.cached_host_tokens + way.cached_disk_tokens
    return RequestView(
        id=_cut(way.name),
        frontend=frontend,
        model=_cut(way.model),
        began_ms=round(1000 * (wall_s - way.age_s)),
        prompt=way.prompt_tokens,
        output=way.output_tokens,
        cached=(max(0, way.cached_tokens - below), way.cached_host_tokens, way.cached_disk_tokens),
        attempt=way.attempt,
        instances=way.instances,
        times=(way.tokenised_s, way.selected_s, way.accepted_s, way.first_token_s, way.ended_s),
        outcome=_cut(way.outcome),
    )


DECISIONS_SHOWN = 20


class Decisions(Struct, frozen=True):
    """The choices for one request, oldest first: its attempts, and of several choices of a body each."""

    decisions: list[Explanation]
    left_out: int
    routers: int
    """The number of routers that answered."""
    silent: int
    """The number of routers that did not answer in time, or were not asked because there are too many."""


def merged_decisions(answers: Iterable[Explanations], asked: int) -> Decisions:
    """Return the answers of all routers as one. `asked` is how many routers there are.

    The page names requests by the first digits of their ids (`shared.request_names`).
    """
    heard = list(answers)
    found = sorted((one for answer in heard for one in answer.decisions), key=lambda one: -one.age_s)
    shown = [replace(one, request=short_name(one.request)) for one in found[-DECISIONS_SHOWN:]]
    return Decisions(shown, len(found) - len(shown), len(heard), asked - len(heard))
