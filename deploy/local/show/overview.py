"""Joins discovery's entries with the reports of the processes and renders them for `headrace status`. Pure."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter

from msgspec import Struct

from deploy.local.table import age, narrowed, size, table
from shared.discovery.catalogue import Catalogue, idle_workers, read_catalogue
from shared.messages.cards import ASLEEP, ModelCard
from shared.messages.frontends import RecentRequests
from shared.messages.kvbm import KvbmState
from shared.messages.load import LoadReport
from shared.messages.people import RouterState, SourceState
from shared.messages.turns import TurnsState

MACHINES_OWN = 0xEFFFFFFC
"""The number of the first PID namespace of every Linux; containers have other numbers."""
_POOLS = "KVBM  POOL  MEMORY  RESERVED  HITS OVER"
_TIERS = "KVBM  LAYOUT  MODEL  DTYPE  ENGINES  TICKETS  TIER  STATE  BLOCKS  OF  HITS"


class InstanceRow(Struct, frozen=True):
    """One running process."""

    service: str
    instance: str
    epoch: int
    pid: int
    pid_usable: bool
    """True if `pid` is valid where `status` runs: a PID of the machine or of the same container."""
    machine: str
    age_s: float
    version: str
    http: str
    device: str = ""
    """The device on which a worker computes, such as cpu or cuda:0."""
    model: str = ""
    """The model of a worker, also while it sleeps. Empty if it has had no card yet."""
    role: str = ""
    """What a worker does of a request: aggregated, prefill or decode. Empty if it is no worker, or has no card."""
    state: str = ""
    """Why a worker takes no requests although it lives: draining, drained, asleep or waking; gone if the process has
    ended and its lease has not."""
    load: LoadReport | None = None
    """The last report of a worker; None for other services, and without a report."""


class ModelRow(Struct, frozen=True):
    """One model, with the sums of all instances that serve it."""

    model: str
    instances: tuple[str, ...]
    """The workers that take requests now."""
    context_length: int
    """0 if all instances were put to sleep by hand, and so is the block size."""
    block_size: int
    total_blocks: int
    held_blocks: int
    cached_blocks: int
    makes: str = ""
    """pictures or videos, if it makes them. Empty if it answers with text or embeddings."""
    lora: dict[str, int] = {}
    """The LoRAs, and how many of the instances have each."""
    asleep: int = 0
    """The number of further instances, which sleep."""


class RefusedRow(Struct, frozen=True):
    """A model card that the services refuse."""

    model: str
    instance: str
    reason: str


class SharedWeightsRow(Struct, frozen=True):
    """The weights of one model in a memory service, as it shows them."""

    name: str
    state: str
    """written or committed."""
    size_bytes: int
    writer: int = 0
    """The process that makes them; 0 if there is none."""
    readers: tuple[int, ...] = ()
    """The processes that map them."""
    waiting: tuple[int, ...] = ()
    """The processes that wait for them."""


class Overview(Struct, frozen=True):
    """The state of one namespace."""

    namespace: str
    nats: str
    discovery: str
    """The back end and its address."""
    instances: tuple[InstanceRow, ...]
    models: tuple[ModelRow, ...]
    refused: tuple[RefusedRow, ...]
    unreadable: tuple[str, ...]
    """Keys whose value cannot be read, with the reason."""
    notes: tuple[str, ...]
    """Remarks, for instance which processes did not answer and which workers no router chooses."""
    routers: tuple[RouterState, ...] = ()
    """State of the routers that answered."""
    stores: tuple[KvbmState, ...] = ()
    """State of the block stores that answered."""
    turns: tuple[TurnsState, ...] = ()
    """The turns of the models on each device, by the processes that answered."""
    weights: tuple[SharedWeightsRow, ...] = ()
    """Weights that this machine's memory service keeps."""


class Look(Struct, frozen=True):
    """What one look at a fleet has found."""

    overview: Overview
    heard_s: Mapping[str, float] = {}
    """Worker → when its report in the overview came, on a clock that never goes back."""
    recent: tuple[RecentRequests, ...] = ()
    """The latest requests of the frontends that were asked for them."""
    asked: frozenset[str] = frozenset()
    """The processes that were asked, of all services but workers."""
    connected: bool = True
    """Whether NATS was reached: if not, nothing is known of load, routers and stores."""


def overview(
    namespace: str,
    nats: str,
    discovery: str,
    values: Mapping[str, bytes],
    reports: Mapping[str, LoadReport],
    states: Sequence[RouterState],
    stores: Sequence[KvbmState],
    notes: Sequence[str],
    now: float,
    pid_namespace: int = 0,
) -> Overview:
    """Return the overview of a namespace.

    `values` are discovery's keys and values, `reports` the last report of each worker, `states` and `stores` the
    answers of routers and block stores, `now` seconds since 1970, `pid_namespace` that of this process.
    """
    catalogue, unreadable = read_catalogue(namespace, values)
    cards = [card for _, card in sorted(catalogue.cards.items())]
    sleeping = _sleeping(catalogue)
    known = {card.instance: card for card in (*sleeping, *cards)}
    roles = {card.instance: card.role for card in catalogue.cards.values()}
    instances = [
        InstanceRow(
            service=each.service,
            instance=each.instance,
            epoch=each.epoch,
            pid=each.pid,
            pid_usable=each.pid_namespace in (0, MACHINES_OWN, pid_namespace),
            machine=each.machine,
            age_s=round(max(0.0, now - each.started), 1),
            version=each.version,
            http=each.http,
            device=known[each.instance].device if each.instance in known else each.device,
            model=known[each.instance].model if each.instance in known else each.model,
            role=roles.get(each.instance, each.role if each.service == "worker" else ""),
            state=each.state,
            load=reports.get(each.instance),
        )
        for each in sorted(catalogue.instances.values(), key=lambda each: (each.service, each.started, each.instance))
    ]
    return Overview(
        namespace=namespace,
        nats=nats,
        discovery=discovery,
        instances=tuple(instances),
        models=tuple(_model_rows(cards, sleeping, _asleep_by_hand(catalogue), reports)),
        refused=tuple(RefusedRow(*name, reason) for name, reason in sorted(catalogue.refused.items())),
        unreadable=tuple(unreadable),
        notes=(*notes, *_idle_notes(cards, catalogue), *_role_notes(cards, catalogue)),
        routers=tuple(states),
        stores=tuple(stores),
    )


def _sleeping(catalogue: Catalogue) -> list[ModelCard]:
    """Return the cards of workers whose models sleep until their turn."""
    awake = {instance for _, instance in catalogue.cards}
    takers = [each.turns for each in catalogue.instances.values() if each.instance not in awake]
    return [taker.card for taker in takers if taker is not None]


def _asleep_by_hand(catalogue: Catalogue) -> Counter[str]:
    """Return how many workers of each model sleep because they were asked to."""
    entries = catalogue.instances.values()
    return Counter(each.model for each in entries if each.state == ASLEEP and each.model and each.turns is None)


def _idle_notes(cards: Sequence[ModelCard], catalogue: Catalogue) -> list[str]:
    """Return how models are served again that none of their workers serves because they were asked not to."""
    workers = list(catalogue.instances.values())
    models = {each.model for each in workers} - {card.model for card in cards} - {""}
    return [f"no worker serves {model}: {idle}" for model in sorted(models) if (idle := idle_workers(workers, model))]


def _card_place(card: ModelCard) -> tuple[str, str]:
    return card.model, card.instance


def _role_notes(cards: Sequence[ModelCard], catalogue: Catalogue) -> list[str]:
    """Return what is wrong with the roles of workers."""
    decoded = {card.model for card in cards if card.decodes}
    undecoded = [
        f"worker {card.instance} has the role {card.role} for {card.model}, but no worker decodes for it"
        for card in cards
        if card.model not in decoded
    ]
    alone = [
        f"worker {card.instance} has the role {card.role}, but no kvbm, so it takes part in no hand-over; its log says"
        " why"
        for card in cards
        if card.role != "aggregated" and not card.kvbm
    ]
    apart = [
        f"worker {card.instance} has the role prefill, but no worker that decodes {card.model} can get its blocks: they"
        f" need {_lacking(card, cards)}"
        for card in cards
        if card.role == "prefill" and card.kvbm and card.model in decoded and not _reached(card, cards, catalogue)
    ]
    idle = [
        f"worker {card.instance} has the role encode, but no worker of {card.model} in its kvbm takes embeddings from"
        " there (kvbm.embeddings)"
        for card in cards
        if card.role == "encode" and card.kvbm and card.model in decoded and not _fed(card, cards)
    ]
    return [*undecoded, *alone, *apart, *idle]


def _fed(encode: ModelCard, cards: Sequence[ModelCard]) -> bool:
    """Return whether a worker takes the embeddings that this one makes."""
    return any(
        card.routed
        and (card.model, card.kvbm, card.embeddings_layout) == (encode.model, encode.kvbm, encode.embeddings_layout)
        for card in cards
    )


def _lacking(prefill: ModelCard, cards: Sequence[ModelCard]) -> str:
    """Return what this worker and those that decode need, if blocks of it come to none of them."""
    layouts = {card.kvbm_layout for card in cards if card.decodes and card.model == prefill.model and card.kvbm}
    if layouts and prefill.kvbm_layout not in layouts:
        return (
            f"one layout of blocks, not {prefill.kvbm_layout} here and {', '.join(sorted(layouts))} there: the same"
            " engine, version of vLLM, files of the model, type (dtype, kv_dtype) and number of vLLM's ranks"
        )
    return "one kvbm, or kvbms that read each other (peers.listen)"


def _reached(prefill: ModelCard, cards: Sequence[ModelCard], catalogue: Catalogue) -> bool:
    """Return whether blocks of this worker can come to one that decodes."""
    listening = {each.instance for each in catalogue.instances.values() if each.peers}
    return any(
        card.decodes
        and (card.model, card.kvbm_layout) == (prefill.model, prefill.kvbm_layout)
        and (card.kvbm == prefill.kvbm or {card.kvbm, prefill.kvbm} <= listening)
        for card in cards
    )


def _model_rows(
    awake: Sequence[ModelCard],
    asleep: Sequence[ModelCard],
    by_hand: Mapping[str, int],
    reports: Mapping[str, LoadReport],
) -> Iterator[ModelRow]:
    sleepers = {card.instance for card in asleep}
    by_model = groupby(sorted((*asleep, *awake), key=_card_place), attrgetter("model"))
    cards = {model: list(of_model) for model, of_model in by_model}
    for model in sorted(cards.keys() | by_hand.keys()):
        yield _model_row(model, cards.get(model, []), by_hand.get(model, 0), reports, sleepers)


def _model_row(
    model: str,
    of_model: Sequence[ModelCard],
    by_hand: int,
    reports: Mapping[str, LoadReport],
    sleeping: Collection[str],
) -> ModelRow:
    """Return the row of a model, from the cards of its workers, and the number of those that sleep without one. Those
    that sleep have no blocks."""
    cards = [card for card in of_model if card.instance not in sleeping]
    heard = [reports[card.instance] for card in cards if card.instance in reports]
    return ModelRow(
        model=model,
        instances=tuple(card.instance for card in cards),
        asleep=len(of_model) - len(cards) + by_hand,
        context_length=min((card.context_length for card in of_model), default=0),
        block_size=of_model[0].block_size if of_model else 0,
        total_blocks=sum(card.capacity_blocks * card.ranks for card in cards),
        held_blocks=sum(report.held_blocks for report in heard),
        cached_blocks=sum(report.cached_blocks for report in heard),
        makes=next((card.pictures.kind for card in cards if card.pictures is not None), ""),
        lora=dict(sorted(Counter(name for card in cards for name in card.lora).items())),
    )


def render(view: Overview, columns: int = sys.maxsize) -> str:
    """Return the overview as tables for people. Where `columns` are few, processes are shown with
    fewer of theirs."""
    head = [f"namespace {view.namespace}", f"NATS {view.nats}", view.discovery]
    parts = [", ".join(head) if len(", ".join(head)) <= columns else ",\n".join(head), ""]
    parts.append(
        narrowed(_INSTANCES, map(_instance, view.instances), columns, _SPARE)
        if view.instances
        else "no process is alive in this namespace"
    )
    if not all(row.pid_usable for row in view.instances):
        parts.append("PID -: the process runs in a container; MACHINE is the name of that container")
    if any(row.state == "gone" for row in view.instances):
        parts.append("gone: the process has ended; it is listed until its lease ends, about 10 s")
    if any(row.service == "worker" and row.load is None and row.state != "gone" for row in view.instances):
        parts.append("?: no load report arrived; a process that died is listed until its lease ends, about 10 s")
    if view.models:
        parts += ["", table(_MODELS, map(_model, view.models))]
        parts += [
            f"LoRA {name} of {row.model}: {count} of {len(row.instances)} instances"
            for row in view.models
            for name, count in row.lora.items()
        ]
    parts += [f"worker {row.instance} is {row.state}" for row in view.instances if row.state not in ("", "gone")]
    for row in view.instances:
        parts += [] if row.load is None else _engine(row.instance, row.load)
    parts += [
        f"encoder cache of worker {row.instance}: {cache.images} images, {size(cache.size_bytes)};"
        f" {cache.hits} found there, {cache.fetched} in kvbm, {cache.encoded} encoded"
        for row in view.instances
        if row.load is not None and (cache := row.load.encoder) is not None
    ]
    if view.routers:
        parts += ["", table(_ROUTERS, map(_router, view.routers))]
        parts += [
            f"events of {source.instance} at router {state.router}: {source.state}: {source.reason}"
            for state in view.routers
            for source in state.sources
            if source.reason
        ]
    left_out = {worker: why for state in view.routers for worker, why in state.left_out.items()}
    parts += [f"worker {worker} gets no requests: {why}" for worker, why in sorted(left_out.items())]
    for state in view.turns:
        parts += ["", *turn_table(state)]
    if view.stores:
        parts += ["", *block_stores(view.stores)]
    if view.weights:
        parts += ["", table(_WEIGHTS, map(_weights, view.weights))]
    parts += [f"refused: {row.model} at {row.instance}: {row.reason}" for row in view.refused]
    parts += [f"unreadable: {each}" for each in view.unreadable]
    parts += [f"note: {each}" for each in view.notes]
    return "\n".join(parts)


def _engine(worker: str, load: LoadReport) -> list[str]:
    """Return what is shown of a worker's engine: its ranks, its standby, and the engines before it that were lost."""
    lines = [f"worker {worker}: {load.tensor_ranks} processes compute each layer"] if load.tensor_ranks > 1 else []
    lines += [
        f"rank {rank.rank} of worker {worker}: {rank.running} running, {rank.waiting} waiting, {rank.held_blocks} held"
        for rank in load.ranks
    ]
    lines += [_standby(worker, load)] if load.standby else []
    if (lost := load.losses) is not None:
        took = f", and a standby took over {_times(lost.take_overs)}" if lost.take_overs else ""
        last = f"the last time {age(lost.age_s)} ago: {lost.reason}"
        lines.append(f"worker {worker} has lost its engine {_times(lost.count)}{took}; {last}")
    return lines


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _standby(worker: str, load: LoadReport) -> str:
    """Return what is shown of the engine that is to stand by at a worker."""
    match load.standby:
        case "ready" if load.standby_bytes:
            return f"worker {worker}: an engine stands by, with {load.standby_bytes / 1e6:.0f} MB of its own"
        case "ready":
            return f"worker {worker}: an engine stands by"
        case "starting":
            return f"worker {worker}: an engine that will stand by is starting"
        case _:
            return f"worker {worker}: no engine stands by"


_INSTANCES = "SERVICE  INSTANCE  EPOCH  PID  MACHINE  DEVICE  MODEL  AGE  RUNNING  WAITING  HELD  CACHED  BLOCKS"
_SPARE = ("EPOCH", "MACHINE", "DEVICE", "AGE", "MODEL")
"""Columns that a narrow terminal goes without, the first one first."""
_MODELS = "MODEL  INSTANCES  CONTEXT  BLOCK  HELD  CACHED  BLOCKS"
_WEIGHTS = "SHARED WEIGHTS  MEMORY  STATE  MADE BY  MAPPED BY  AWAITED BY"
_ROUTERS = "ROUTER  POLICY  RESERVED  INDEX BLOCKS  INDEX SIZE  EVENT SOURCES"


def _instance(row: InstanceRow) -> tuple[object, ...]:
    gone = row.state == "gone"
    load: tuple[object, ...] = ("?" if row.service == "worker" and not gone else "",) * 5
    if row.load is not None:
        load = (row.load.running, row.load.waiting, row.load.held_blocks, row.load.cached_blocks, row.load.total_blocks)
    pid = "gone" if gone else row.pid if row.pid_usable else "-"
    service = f"{row.service} ({row.role})" if row.role not in ("", "aggregated") else row.service
    return (service, row.instance, row.epoch, pid, row.machine, row.device, row.model, age(row.age_s), *load)


def _model(row: ModelRow) -> tuple[object, ...]:
    blocks = (row.block_size or "-", row.held_blocks, row.cached_blocks, row.total_blocks)
    count = f"{len(row.instances)}, {row.asleep} asleep" if row.asleep else len(row.instances)
    return (row.model, count, row.makes or row.context_length or "-", *blocks)


def _weights(row: SharedWeightsRow) -> tuple[object, ...]:
    def pids(processes: Sequence[int]) -> str:
        return " ".join(map(str, processes)) or "-"

    return row.name, size(row.size_bytes), row.state, row.writer or "-", pids(row.readers), pids(row.waiting)


def _router(row: RouterState) -> tuple[object, ...]:
    reserved = sum(model.reservations for model in row.models)
    blocks = sum(model.index_blocks for model in row.models)
    size_bytes = sum(model.index_bytes for model in row.models)
    policy = f"{row.policy} ({row.policy_trouble})" if row.policy_trouble else row.policy
    return (
        row.router,
        policy,
        reserved,
        blocks,
        size(size_bytes),
        "off" if row.events == "off" else event_sources(row.sources),
    )


def turn_table(state: TurnsState) -> list[str]:
    """Return the turns of one device's models as a table, and a line for each that is waited for or could not wake.

    TURNS ON cpu, 1 AT ONCE  STATE   FOR  WAITING  LONGEST
    a                        awake   12s  0
    b                        asleep  3m   2        4s
    """
    rows = [
        (each.model, each.stage, age(each.for_s), each.waiting, age(each.oldest_s) if each.waiting else "")
        for each in state.models
    ]
    said = [f"{each.model} is waited for: {each.why}" for each in state.models if each.why]
    said += [f"{each.model} could not wake: {each.failed}" for each in state.models if each.failed]
    return [table(f"TURNS ON {state.device}, {state.awake} AT ONCE  STATE  FOR  WAITING  LONGEST", rows), *said]


def event_sources(sources: Sequence[SourceState]) -> str:
    """Return how many event sources are in each state, and how many have which defect."""
    words = [source.state for source in sources]
    words += ["partial" for source in sources if source.partial]
    words += ["not exact" for source in sources if not source.exact]
    words += ["silent" for source in sources if source.silent]
    return ", ".join(f"{count} {word}" for word, count in Counter(words).items()) or "none"


def block_stores(states: Sequence[KvbmState]) -> list[str]:
    """Return two tables, and a line for each tier that gives a reason for its state.

    KVBM  POOL                    MEMORY   RESERVED  HITS OVER
    k1    /dev/shm/headrace-0-…   1.07 GB  100 %     5m

    KVBM  LAYOUT            MODEL  DTYPE    ENGINES  TICKETS          TIER  STATE  BLOCKS  OF    HITS
    k1    0011223344556677  m      float32  2        1 store 2 fetch  host  on     340     1386  41 %
                                                                      disk  off    0       9000  -
    """
    pools = [
        (each.instance, each.pool, size(each.pool_bytes), f"{int(100 * each.reserved)} %", age(each.window_s))
        for each in states
    ]
    tiers: list[tuple[object, ...]] = []
    reasons: list[str] = []
    for kvbm, layout in ((state.instance, layout) for state in states for layout in state.layouts):
        tickets = " ".join(f"{count} {kind}" for kind, count in layout.tickets.items() if count) or "0"
        whose: tuple[object, ...] = (kvbm, layout.layout, layout.model, layout.kv.dtype, layout.owners, tickets)
        for name, tier in (("host", layout.host), ("disk", layout.disk)):
            if tier is None:
                continue
            hits = "-" if tier.hit_rate is None else f"{100 * tier.hit_rate:.0f} %"
            tiers.append((*whose, name, tier.state, tier.blocks, tier.capacity_blocks, hits))
            whose = ("",) * len(whose)
            if tier.reason:
                reasons.append(f"{name} tier of {layout.layout} at kvbm {kvbm}: {tier.state}: {tier.reason}")
    return [table(_POOLS, pools), *(["", table(_TIERS, tiers)] if tiers else []), *reasons]
