"""What holds once it is quiet: no request waits, nothing is held, and every router knows what every worker caches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from services.frontend.requests.service import RequestService
from services.router.index.inheritance import store_id
from services.router.index.kv_events import ENGINE_HASH_BITS
from services.router.selection.model_router import ModelRouter
from services.worker.scheduler.scheduler import Scheduler
from shared.hashing import ContentKey, block_hash, event_hash, next_sequence_hash, seed_of
from shared.messages.select import Overlap
from tests.simulation.process import MODEL, Process


def violations(processes: Sequence[Process]) -> Iterator[str]:
    """Yield what is wrong with the living processes, one line each."""
    living = [process for process in processes if process.state == "running"]
    everyone = {process.instance for process in living}
    workers = {process.instance: process for process in living if process.service == "worker"}
    kvbms = [process for process in living if process.service == "kvbm"]
    for process in living:
        if set(process.directory.instances) != everyone:
            yield f"{process.instance} believes in {sorted(process.directory.instances)}, not {sorted(everyone)}"
        if {instance for _, instance in process.directory.cards} != workers.keys():
            yield f"{process.instance} knows the cards {sorted(process.directory.cards)}"
        if process.frontend is not None:
            yield from _frontend(process)
        if process.service == "worker":
            yield from _worker(process)
            yield from _link(process, kvbms)
        if process.service == "kvbm":
            yield from _kvbm(process, len(workers))
        if process.service == "router":
            yield from _router(process, workers, kvbms)


def troubles(processes: Sequence[Process]) -> Iterator[str]:
    """What had to heal, though nothing went wrong."""
    crowded = any(process.scheduler and process.scheduler.load().preemptions for process in processes)
    for process in processes:
        for model in () if process.router is None else process.router.models.values():
            forgotten = model.load.statistics().forgotten
            if forgotten:
                yield f"{process.instance} gave up {forgotten} reservations that nobody ended"
        lost = 0 if process.frontend is None else sum(_lost(process.frontend, crowded=crowded))
        if lost:
            yield f"{process.instance} lost {lost:g} attempts"
        for worker, feed in () if process.router is None else process.router.feeds.items():
            if feed.source.gaps or feed.source.resyncs > 1:
                yield f"{process.instance} had {feed.source.gaps} gaps and {feed.source.resyncs} resyncs with {worker}"


def _lost(frontend: RequestService, *, crowded: bool) -> Iterator[float]:
    """The attempts that a frontend has lost, by cause. In a `crowded` fleet, a preempted one may wait for as long as
    makes it stall."""
    for metric in frontend._metrics.lost.collect():
        for sample in metric.samples:
            if sample.name.endswith("_total") and not (crowded and "stalled" in sample.labels.values()):
                yield sample.value


def _frontend(process: Process) -> Iterator[str]:
    assert process.frontend is not None
    process.frontend._watchdog.validate()
    if process.frontend._running:
        yield f"{process.instance} runs {sorted(process.frontend._running)}"


def _worker(process: Process) -> Iterator[str]:
    if process.worker is None or process.scheduler is None or process.worker.engine.facts is None:
        yield f"{process.instance} has no engine"
        return
    process.scheduler.validate()
    load = process.scheduler.load()
    if load.waiting or load.running or load.held_blocks:
        yield f"{process.instance}'s engine has {load}"
    if process.scheduler.hand_overs.names:
        yield f"{process.instance}'s engine has not handed over {sorted(process.scheduler.hand_overs.names)}"
    attempts = process.worker._attempts
    attempts.validate()
    process.worker._sender.log.validate()
    if attempts.names:
        yield f"{process.instance} has the attempts {attempts.names}"


def _link(process: Process, kvbms: Sequence[Process]) -> Iterator[str]:
    """Who is attached to the kvbm."""
    there = kvbms[0].instance if kvbms else ""
    linked = "" if process.worker is None else process.worker._kvbm.shown_link.kvbm
    if linked != there:
        yield f"{process.instance} is attached to {linked!r}, not to {there!r}"


def _kvbm(process: Process, workers: int) -> Iterator[str]:
    if process.kvbm is None:
        yield f"{process.instance} has not started"
        return
    process.kvbm.validate()
    for layout in process.kvbm.layouts.open.values():
        statistics = layout.tickets.statistics()
        if statistics.owners != workers or statistics.stores + statistics.fetches + statistics.expired:
            yield f"{process.instance} has {statistics}"
        if statistics.tiers.host.quarantined:
            yield f"{process.instance} keeps {statistics.tiers.host.quarantined} slots in quarantine"


def _router(process: Process, workers: dict[str, Process], kvbms: Sequence[Process]) -> Iterator[str]:
    model = None if process.router is None else process.router.models.get(MODEL)
    if model is None or process.router is None:
        yield f"{process.instance} does not know the model"
        return
    model.validate()
    if model.cards.keys() != workers.keys():
        yield f"{process.instance} routes to {sorted(model.cards)}"
        return
    if {instance for instance, _ in model.caches.chains} != workers.keys():
        yield f"{process.instance} keeps the chains of {sorted(model.caches.chains)}"
    if model.speculation.bytes:
        yield f"{process.instance} still expects {model.speculation.bytes} bytes of blocks"
    cached = sum(model.index.blocks_of(chains.slot) for chains in model.caches.chains.values())
    cached += sum(model.index.blocks_of(chains.slot) for chains in model.caches.stores.values())
    indexed = sum(model.index.statistics().pairs.values())
    if indexed != cached:
        yield f"{process.instance}'s index has {indexed} blocks, {cached} of the living"
    living = model.load.reservations()
    if living:
        yield f"{process.instance} keeps the reservations {[one.reserved for one in living]}"
    stores = {
        store_id(one.instance, digest): layout
        for one in kvbms
        if one.kvbm is not None
        for digest, layout in one.kvbm.layouts.open.items()
    }
    if process.router.feeds.keys() != workers.keys() | stores.keys():
        yield f"{process.instance} follows {sorted(process.router.feeds)}"
        return
    for name, layout in stores.items():
        source = process.router.feeds[name].source
        source.validate()
        if source.state != "live":
            yield f"{process.instance} is {source.state} with {name}"
        elif model.caches.stores[name].digest(1) != layout.tiers.digest("host") & ENGINE_HASH_BITS:
            yield f"{process.instance} has other blocks of {name} than are there"
    for name, worker in workers.items():
        source = process.router.feeds[name].source
        source.validate()
        if source.state != "live":
            yield f"{process.instance} is {source.state} with {name}"
        elif worker.scheduler is not None:
            yield from _picture(process.instance, name, model, worker.scheduler)


def _picture(router: str, name: str, model: ModelRouter, scheduler: Scheduler) -> Iterator[str]:
    """Whether the router's chains are what the worker's pool holds, and its index as far as its limit lets it."""
    truth = {key & ENGINE_HASH_BITS: sequence for key, sequence in held(scheduler).items()}
    chains = model.caches.chains[name, 0]
    told = chains.blocks_in(0)
    more = told.keys() - truth.keys()
    less = {key for key, sequence in truth.items() if sequence not in (None, told.get(key))}
    if more or less:
        yield f"{router} has {len(more)} blocks of {name} too many and {len(less)} too few, of {len(truth)}"
        return
    if chains.digest(0) != scheduler.kv_cache.digest & ENGINE_HASH_BITS:
        yield f"{router} has another digest of {name}"
    indexed = model.index.blocks_of(chains.slot)
    found = sum(model.index.find([sequence]).get((name, 0), Overlap()).device for sequence in told.values() if sequence)
    whole = indexed == len(told) or model.index.statistics().dropped_blocks  # at its limit it lacks some
    if found != indexed or not whole:
        yield f"{router}'s index finds {found} of {len(told)} blocks of {name}, and has {indexed}"


def held(scheduler: Scheduler) -> dict[int, int | None]:
    """Engine hash → sequence hash of everything a worker's prefix cache holds. None if a block before it has left,
    while it was held for a copy; it leaves next."""
    sequences: dict[ContentKey, int | None] = {}
    for content in scheduler.kv_cache.snapshot():
        seed = seed_of(content.lora, content.salt)
        above = None if content.parent is None else sequences.get(content.parent)
        known = content.parent is None or above is not None
        sequences[content.key] = next_sequence_hash(above, block_hash(content.tokens, seed), seed) if known else None
    return {event_hash(key): sequence for key, sequence in sequences.items()}
