"""A fleet in virtual time: our router's and engine's own parts, with a model of how long a step takes. One thread.

    arrival ─▶ ModelRouter.select ─▶ EngineCore.handle ─▶ begin ── step_s(works) later ──▶ finish ─┬▶ first token, end
                   ▲      ▲      ▲                                                                │  sent to the router
                   │      │      └── KV events, encoded and decoded as on the wire ◀──────────────┤
                   │      └───────── load reports, every 250 ms ◀─────────────────────────────────┘
                   └── its tick, every 100 ms

With a block store (`store.py`) the engines exchange blocks with it, and the router learns which blocks it holds.
Then workers may also have roles: where the router chooses a pair, the prompt is handed over through that store.

    Selected ─┬▶ attempt n, which only prefills ─▶ its blocks are stored ─▶ handed_over ─▶ attempt n + 1 at the decoder
              │              first token                                two messages later    computes the rest
              └▶ the decoder expects attempt n + 1, and loads each block that is stored

Steps that only decode are computed ahead (`steady.py`), unless the workers of a machine slow one another or there is a
block store. It changes no result.

Real: policies, index, chains, speculation, reservations, the comparison of pairs with single workers, engines as they
make themselves from a worker's settings (`workers.py`), messages. Modelled: the time of the arithmetic and of
each message (`HOP_S`). Left out: the frontend's tokenising, lost or late messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count, islice
from math import inf
from random import Random

from msgspec import Struct

from services.router.config import RouterConfig
from services.router.index.inheritance import store_id
from services.router.index.kv_events import decode
from services.router.selection.model_router import ModelRouter
from services.router.selection.pairs import SplitCosts
from services.router.selection.policies.kv import split_costs
from services.router.selection.policy import load_policy
from services.virtual.journeys import Journey, TokenGaps
from services.virtual.loads import LoadTrace, TracePrompts
from services.virtual.machine import SimulatedMachine, StepTime
from services.virtual.steady import FIRST_AHEAD, MOST_AHEAD, SteadySteps, steady_steps
from services.virtual.store import BlockStore, FleetClock, StoreSizes
from services.virtual.workers import (
    LONGEST_STEP_S,
    MAX_RUNNING,
    MODEL,
    UNBOUNDED,
    WEIGHTS,
    SimulatedWorker,
    drawn,
    drawn_ahead,
    engine_core,
    kv_layout,
    model_card,
)
from services.worker.config import OVERTAKING
from services.worker.contracts.messages import EngineOrder, KvbmLink, Prefetch, Stepped, Submit
from services.worker.contracts.runner import Work
from services.worker.engine.core import comes_meanwhile
from services.worker.engine.loop import SLICE_S
from services.worker.kv_connector.contract import KvbmAsk, KvbmNews, KvbmUp
from shared.kv_events import encode_batch
from shared.messages.cards import Role
from shared.messages.frames import Part
from shared.messages.generate import Sampling
from shared.messages.kvbm import StoreLayout
from shared.messages.select import Finished, LoadEvent, Prefilled, Select, Selected

HOP_S = 0.001
"""The time of one message, in seconds."""
REPORT_S = 0.25
TICK_S = 0.1
WINDOW_S = 60.0
"""The window over which each worker's work is summed."""
FRONTEND = "frontend"
_SLICE_BLOCKS = 1 << 16


class Late(Struct, frozen=True):
    """When a run is given up: more than `most` first tokens came later than after `after_s` seconds."""

    after_s: float
    most: int


class SimulatedFleet:
    """One run of one load. What became of each request is in `journeys`, what was computed when in `prefilled`."""

    def __init__(
        self,
        load: LoadTrace,
        policy: str,
        *,
        capacity_blocks: int,
        seed: int = 0,
        sizes: StoreSizes | None = None,
        compare: SplitCosts = split_costs,
        gaps: TokenGaps | None = None,
        max_running: int = MAX_RUNNING,
        late: Late | None = None,
        overtaking: float = OVERTAKING,
    ) -> None:
        """Make the fleet. `sizes` are those of the block store that all workers share; None means no store. `compare`
        weighs pairs against single workers. `gaps` collects the times between tokens. `max_running` and `overtaking`
        are each worker's. A run ends early once `late` says so."""
        self.clock = FleetClock()
        self.load = load
        self.journeys = [Journey(request) for request in load.requests]
        self.prefilled: dict[tuple[int, str], int] = {}
        """The prompt tokens computed, by time window and worker."""
        self.late_requests = 0
        """How many first tokens came later than `late.after_s`."""
        self.workers: dict[str, SimulatedWorker] = {}
        draw = Random(seed)  # noqa: S311 - a simulation, no secret
        self.router = ModelRouter(MODEL, "router", RouterConfig(), load_policy(policy)(), draw, compare=compare)
        self.prompts = TracePrompts(load.block_size)
        self._gaps = gaps
        self._capacity_blocks = capacity_blocks
        self._max_running = max_running
        self._overtaking = overtaking
        self._late = late
        self._upcoming: Iterator[Journey] = iter(())
        """The requests that start when another one ends."""
        self._left = len(self.journeys)
        self._names = count()
        self.store: BlockStore | None = None
        if sizes is not None:
            layout = StoreLayout(MODEL, WEIGHTS, kv_layout(load.block_size))
            self.store = BlockStore(self.clock, layout, sizes, HOP_S, self._store_tells)

    # --- from outside

    def run(self) -> None:
        """Run an open loop: requests come at their arrival times. Returns after the last one has ended."""
        for journey in self.journeys:
            self.clock.at(journey.request.arrival_s, partial(self._route, journey))
        self._run()

    def run_closed(self, in_flight: int) -> None:
        """Run a closed loop with `in_flight` requests at any time, in order of arrival."""
        self._upcoming = iter(self.journeys)
        for journey in islice(self._upcoming, in_flight):
            self._route(journey)
        self._run()

    def _run(self) -> None:
        self._tick()
        most_late = len(self.journeys) if self._late is None else self._late.most
        while self._left and self.late_requests <= most_late:
            self.clock.step()
        for worker in self.workers.values():
            self._catch_up(worker)

    def join(
        self,
        step_s: StepTime,
        role: Role = "aggregated",
        *,
        longest_s: float = LONGEST_STEP_S,
        machine: SimulatedMachine | None = None,
    ) -> str:
        """Add a worker with an empty cache and return its name. Other roles than `aggregated` need a block store.
        `longest_s` is how long its steps that prefill should take at most, in seconds. `machine` None is its own."""
        assert self.store is not None or role == "aggregated", "prompts are handed over through the block store"
        name = f"worker{next(self._names):03}"
        size, blocks = self.load.block_size, self._capacity_blocks
        running, over = self._max_running, self._overtaking
        machine = machine or SimulatedMachine(self.clock)
        core = engine_core(name, role, longest_s, running, size, blocks, self.clock, self.store, over)
        worker = self.workers[name] = SimulatedWorker(name, core, machine, step_s, core.opening())
        card = model_card(name, role, size, blocks, self.store, running)
        self.router.add_card(card, self.clock.now_s)
        self.router.set_sends_events(name, True)
        if self.store is not None:
            store = store_id(card.kvbm, card.kvbm_layout)
            if store not in self.router.caches.stores:
                self.router.caches.add_store(store)
            self.clock.after(HOP_S, partial(self._take_news, worker, KvbmUp(card.kvbm)))
        self.clock.after(REPORT_S * (len(self.workers) % 8) / 8, partial(self._report, worker))
        return name

    def leave(self, name: str) -> None:
        """Remove a worker; its requests continue on other workers from their tokens so far."""
        worker = self.workers.pop(name)
        self._catch_up(worker)
        worker.gone, worker.steady = True, None
        for clearing in self.router.remove_instance(name):
            while clearing.step(_SLICE_BLOCKS):
                pass
        for request, _ in worker.attempts:
            self._lose(self.journeys[int(request)])

    # --- a request's life

    def _route(self, journey: Journey) -> None:
        """Ask the router, and send the request where it says."""
        request = journey.request
        journey.attempt = journey.last_attempt = journey.last_attempt + 1
        if not journey.attempt:
            journey.asked_s = self.clock.now_s
        name, left = str(request.number), request.output_tokens - journey.produced
        hashes, tokens = self.prompts.hashes(request), request.prompt_tokens + journey.produced
        ask = Select(name, journey.attempt, FRONTEND, MODEL, hashes, tokens, left)
        reply = self.router.select(ask, self.clock.now_s).reply
        if not isinstance(reply, Selected):
            self._end(journey, reply.reason)
            return
        journey.decoder = reply.decode
        self._dispatch(journey, self.workers[reply.instance])
        if reply.decode:
            journey.last_attempt += 1
            expected = Prefetch(self._submit(journey, journey.last_attempt))
            self.clock.after(HOP_S, partial(self._order, self.workers[reply.decode], expected))

    def _dispatch(self, journey: Journey, worker: SimulatedWorker) -> None:
        """Send the current attempt to a worker, with all tokens so far."""
        submit = self._submit(journey, journey.attempt, prefill_only=bool(journey.decoder))
        worker.attempts[submit.request, submit.attempt] = None
        self.clock.after(HOP_S, partial(self._order, worker, submit))

    def _submit(self, journey: Journey, attempt: int, *, prefill_only: bool = False) -> Submit:
        request = journey.request
        return Submit(
            str(request.number),
            attempt,
            FRONTEND,
            self.prompts.tokens(request) + journey.output,
            request.prompt_tokens,
            Sampling(request.output_tokens, temperature=0.0, ignore_eos=True),
            UNBOUNDED,
            prefill_only=prefill_only,
            number=request.number,
        )

    def _hand_over(self, journey: Journey) -> None:
        """Go on at the worker that decodes, as the frontend does; if it is gone, with another choice."""
        decoder, journey.decoder = self.workers.get(journey.decoder), ""
        if decoder is None:
            self._route(journey)
            return
        journey.hand_overs += 1
        journey.attempt = journey.last_attempt
        self._dispatch(journey, decoder)

    def _lose(self, journey: Journey) -> None:
        """Go on after the worker of the current attempt has gone."""
        if journey.decoder:  # it is given up: nothing of the request has come to it
            self._tell(Finished(str(journey.request.number), journey.last_attempt))
            journey.decoder = ""
        self._route(journey)

    def _order(self, worker: SimulatedWorker, order: EngineOrder) -> None:
        self._catch_up(worker)
        if worker.steady is not None:  # what follows the step under way is no longer known
            steady, worker.steady = worker.steady, None
            worker.ahead = max(FIRST_AHEAD, worker.ahead // 2)
            [elapsed_s] = steady.elapsed_s(1)
            self.clock.at(steady.end_s, partial(self._finish, worker, steady.works, elapsed_s))
        if worker.stepping and comes_meanwhile(order, after_others=bool(worker.arrived)):
            worker.core.handle(order, self.clock.now_s)
        else:
            worker.arrived.append(order)
        self._look(worker)

    def _take_news(self, worker: SimulatedWorker, news: KvbmNews) -> None:
        worker.core.handle(news, self.clock.now_s)
        self._look(worker)

    def _look(self, worker: SimulatedWorker) -> None:
        if worker.gone:
            return
        if worker.stepping:
            self._exchange(worker)
        else:
            self._begin(worker)

    def _exchange(self, worker: SimulatedWorker) -> None:
        """Exchange blocks while a step is computed, as an engine with a GPU does."""
        self._pass_on(worker, worker.core.exchange(self.clock.now_s))
        self._rest_in_step(worker)

    def _begin(self, worker: SimulatedWorker) -> None:
        core = worker.core
        for order in worker.arrived:
            core.handle(order, self.clock.now_s)
        worker.arrived.clear()
        told, works = core.begin(self.clock.now_s)
        if told:
            self._heard_of(worker, told)
        if self.store is not None:
            self._pass_on(worker, core.step_connector(self.clock.now_s))
        worker.stepping = works is not None
        if works is None:
            self._rest(worker, self.clock.now_s if core.busy else core.wait_until_s)
        elif not worker.machine.slows and (steps := core.steady_steps) and self._begin_steady(worker, works, steps):
            pass
        else:
            worker.machine.begin(works, worker.step_s, partial(self._finish, worker, works))
            if self.store is not None:
                self._rest_in_step(worker)

    def _pass_on(self, worker: SimulatedWorker, messages: Sequence[KvbmAsk | KvbmLink]) -> None:
        for message in messages:
            if isinstance(message, KvbmAsk) and self.store is not None:
                self.store.ask(message, partial(self._take_news, worker))

    def _rest_in_step(self, worker: SimulatedWorker) -> None:
        due_s = worker.core.exchange_due_s
        self._rest(worker, None if due_s is None else max(due_s, self.clock.now_s + SLICE_S))

    def _rest(self, worker: SimulatedWorker, until_s: float | None) -> None:
        """Rest until an order comes, a step ends, or the time that the engine names."""
        if until_s is not None and until_s < worker.wakes_s:
            worker.wakes_s = until_s
            self.clock.at(until_s, partial(self._wake, worker, until_s))

    def _wake(self, worker: SimulatedWorker, until_s: float) -> None:
        if until_s == worker.wakes_s:
            worker.wakes_s = inf
        self._look(worker)

    def _finish(self, worker: SimulatedWorker, works: Sequence[Work], elapsed_s: float) -> None:
        if worker.gone:
            return
        prompt_tokens = sum([work.end - work.start for work in works if work.start < work.prompt_tokens])
        told = worker.core.finish(list(map(drawn, works)), elapsed_s)
        if prompt_tokens:
            window = int(self.clock.now_s // WINDOW_S), worker.name
            self.prefilled[window] = self.prefilled.get(window, 0) + prompt_tokens
        self._heard_of(worker, told)
        self._begin(worker)

    # --- steps that only decode

    def _begin_steady(self, worker: SimulatedWorker, works: Sequence[Work], steps: int) -> bool:
        """Begin steps up to the first that may do something else. Return False if it is not worth it."""
        most, until_s = min(steps + 1, worker.ahead), worker.core.wait_until_s
        worker.steady = steady = steady_steps(works, most, worker.step_s, self.clock.now_s, until_s)
        if steady is not None:
            self.clock.at(steady.ends_s[-1], partial(self._end_steady, worker, steady))
        return steady is not None

    def _end_steady(self, worker: SimulatedWorker, steady: SteadySteps) -> None:
        """End the last of the steps as any other, unless a command has come before."""
        if worker.steady is steady:
            self._catch_up(worker)
            worker.steady = None
            worker.ahead = min(MOST_AHEAD, worker.ahead + len(steady.ends_s) - 1)
            [elapsed_s] = steady.elapsed_s(1)
            self._finish(worker, steady.works, elapsed_s)

    def _catch_up(self, worker: SimulatedWorker) -> None:
        """Let steps pass that have ended by now. Only the last of them makes a report."""
        steady = worker.steady
        if steady is None or (count := steady.due(self.clock.now_s)) < 1:
            return
        *before_s, elapsed_s = steady.elapsed_s(count)
        ends_s = steady.ends_s[steady.passed + 1 : steady.passed + count + 1]
        core = worker.core
        if before_s:
            core.pass_steps([drawn_ahead(work, count - 1) for work in steady.works], before_s, ends_s[-2])
        [worker.last] = core.finish(list(map(drawn, steady.works)), elapsed_s)
        for number in worker.last.one_token_attempts:
            journey = self.journeys[number]
            journey.produced += count
            if self._gaps is not None:
                for end_s in ends_s:
                    self._gaps.add(journey, end_s)
        core.begin(ends_s[-1])
        steady.passed += count

    # --- what steps report

    def _heard_of(self, worker: SimulatedWorker, told: Sequence[Stepped]) -> None:
        for report in told:
            worker.last = report
            if report.event_batch:
                payload = encode_batch(self.clock.now_s, report.event_batch)
                self.clock.after(HOP_S, partial(self._hear, worker, payload))
            # An attempt's first and last part come in the last step of a report.
            for number in report.one_token_attempts:
                journey = self.journeys[number]
                journey.produced += 1
                if self._gaps is not None:
                    self._gaps.add(journey, self.clock.now_s)
            for part in report.boundary_parts:
                self._take(worker, part)

    def _take(self, worker: SimulatedWorker, part: Part) -> None:
        journey = self.journeys[int(part.request)]
        if part.tokens and not journey.produced:
            journey.first_token_s = self.clock.now_s
            self.late_requests += self._late is not None and journey.ttft_s > self._late.after_s
            journey.cached_tokens = part.cached_tokens
            journey.cached_host_tokens, journey.cached_disk_tokens = part.cached_host_tokens, part.cached_disk_tokens
        new_worker = 0 <= journey.begun != part.attempt
        if part.tokens and self._gaps is not None:
            self._gaps.add(journey, self.clock.now_s, new_worker=new_worker)
        if part.tokens and journey.begun != part.attempt:
            journey.begun = part.attempt
            self._tell(Prefilled(part.request, part.attempt, part.cached_tokens, journey.ttft_s, worker.name))
        journey.produced += bool(part.tokens)
        if part.finish is not None:
            del worker.attempts[part.request, part.attempt]
            self._tell(Finished(part.request, part.attempt))
            if part.finish == "handed_over":
                self.clock.after(HOP_S, partial(self._hand_over, journey))
            else:
                if journey.decoder:  # the first token was the last one
                    self._tell(Finished(part.request, journey.last_attempt))
                self._end(journey, part.error)

    def _end(self, journey: Journey, failed: str) -> None:
        journey.end_s = self.clock.now_s
        journey.failed = failed
        self._left -= 1
        follower = next(self._upcoming, None)
        if follower is not None:
            self._route(follower)

    # --- what the router hears

    def _hear(self, worker: SimulatedWorker, payload: bytes) -> None:
        chains = self.router.caches.chains.get((worker.name, 0))
        if chains is not None:
            for event in decode(payload).events:
                chains.apply(event)

    def _store_tells(self, payload: bytes) -> None:
        self.clock.after(HOP_S, partial(self._hear_of_store, payload))

    def _hear_of_store(self, payload: bytes) -> None:
        for chains in self.router.caches.stores.values():
            for event in decode(payload).events:
                chains.apply(event)

    def _tell(self, event: LoadEvent) -> None:
        self.clock.after(HOP_S, lambda: self._told(event))

    def _told(self, event: LoadEvent) -> None:
        self.router.apply_load_event(event, self.clock.now_s)

    def _report(self, worker: SimulatedWorker) -> None:
        """Report the load, again and again."""
        if worker.gone:
            return
        self._catch_up(worker)
        report = worker.report(self._capacity_blocks)
        self.clock.after(HOP_S, lambda: self.router.apply_load_report(report, self.clock.now_s))
        self.clock.after(REPORT_S, partial(self._report, worker))

    def _tick(self) -> None:
        self.router.tick(self.clock.now_s)
        self.clock.after(TICK_S, self._tick)
