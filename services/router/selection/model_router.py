"""Routing for one model: the instances that serve it, their caches, their loads, and the choice among them. Pure.

Select ──▶ validated ──▶ eligible ──▶ states: overlap, load ──▶ guard: the policy ──▶ reserved ──▶ Selected
                                                 ▲      ▲                                │
               caches: index, speculation, history     load ◀────────────────────────────┘  in the same step, so that
                                                                                            the next request sees it

A frontend repeats a Select if the answer was late or lost. The repeated Select is answered with the reservation that
this or another router has for it, as long as that candidate is eligible: it runs where all routers count it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import assert_never

import msgspec
from msgspec import Struct

from services.router.config import RouterConfig
from services.router.index.chains import SlotCleanup
from services.router.index.index import Index, Slot
from services.router.index.inheritance import store_id_of
from services.router.selection.awaited import awaited, check_awaited
from services.router.selection.caches import FleetCaches
from services.router.selection.candidates import (
    DISK_BYTES_PER_S,
    HOST_BYTES_PER_S,
    CandidateState,
    FleetAverage,
    RoutingRequest,
    block_bytes_of,
)
from services.router.selection.decision_log import DecisionLog, Prediction
from services.router.selection.eligibility import Eligibility, Eligible, NoCandidate, ranks_of, same_worker
from services.router.selection.image_encoding import EncodePlan, ImageEncoding, check_images, encode_workers
from services.router.selection.load import UNKNOWN_SPEED, CandidateLoad, LoadTracker
from services.router.selection.pairs import SplitCosts, WorkerPair, choose_pair
from services.router.selection.peer_links import RemoteSearch
from services.router.selection.policies.kv import split_costs
from services.router.selection.policy import Policy
from services.router.selection.policy_guard import PolicyChoice, PolicyFault, PolicyGuard, worst_fault
from services.router.selection.refusal import in_time, overloaded, refused, validated_hashes
from services.router.selection.speculation import ExpectedRun, Speculation
from shared.errors import ProtocolError
from shared.messages.cards import ModelCard
from shared.messages.load import LoadReport
from shared.messages.select import Finished, LoadEvent, Overlap, Prefilled, Reserved, Select, Selected, SelectRefused

UNREPORTED_LIMIT_S = 86_400.0
"""The most seconds for which a router keeps the reservation of an attempt that no report has."""
HAND_OVER_LIMIT_S = 60.0
"""Longest time in seconds for which a worker that decodes keeps its reservation before it hears of the attempt."""
_EXPIRED_PER_TICK = 1000
_NOTHING = Overlap()


class Selection(Struct, frozen=True):
    """The answer to a Select, and the reservation that the other routers must hear of."""

    reply: Selected | SelectRefused
    reserved: Reserved | None = None
    """The new reservation; None if nothing new was reserved."""
    reserved_decode: Reserved | None = None
    """The new reservation at the worker that decodes, if that is another one."""
    fault: PolicyFault | None = None
    """What was wrong with the policy, if anything; the reply is valid all the same."""
    awaited: Reserved | None = None
    """`reserved` with the blocks that its prompt will leave, if that waits. The other routers should hear of them."""


class _Candidates(Struct, frozen=True):
    """All that the choice for one Select rests on, as of one moment."""

    select: Select
    now_s: float
    hashes: list[int]
    eligible: Eligible
    request: RoutingRequest
    whole: list[CandidateState]
    """The states of `eligible.candidates`."""
    prefilling: list[CandidateState]
    """The states of `eligible.prefilling`."""
    remote: RemoteSearch | None
    """Finds the prompt's blocks at other machines; None if no store reads another."""
    expected: list[ExpectedRun]
    """Runs that the prompt follows, of those expected now."""
    remembered: list[ExpectedRun]
    """Runs of `history` that it follows."""

    def in_time(self, states: Sequence[CandidateState]) -> Sequence[CandidateState]:
        """Return the candidates that would begin the prompt in time: all, if the frontend sets no limit, or if the
        attempt is reserved already."""
        if self.select.wait_limit_s <= 0 or self.eligible.reserved[0] is not None:
            return states
        return in_time(states, self.select)


class ModelRouter:
    """State and decisions for one model. Times are seconds on a monotonic clock."""

    def __init__(
        self,
        model: str,
        router: str,
        config: RouterConfig,
        policy: Policy,
        draw: Random,
        clock: Callable[[], float] | None = None,
        compare: SplitCosts = split_costs,
    ) -> None:
        """Create the router of a model without instances. `clock` times the policy; without it the policy is not
        timed. `compare` weighs pairs against single workers."""
        self.model = model
        self.index = Index(limit_bytes=config.index.limit_bytes)
        self.load = LoadTracker(config.load)
        self.guard = PolicyGuard(policy, draw, config, clock)
        self.eligibility = Eligibility(model, draw, ramp_s=config.load.ramp_s)
        self.cards = self.eligibility.cards
        self.caches = FleetCaches(self.index, config.index, self.cards)
        self.encoding = ImageEncoding()
        self.decisions = DecisionLog(limit=max(config.explained, 1))
        self._router = router
        self._config = config
        self._compare = compare
        self._without_events: set[str] = set()
        limit_bytes = config.index.speculation_limit_bytes
        self.speculation = Speculation(ttl_s=config.index.speculation_s, limit_bytes=limit_bytes)
        self.history = Speculation(ttl_s=config.index.history_s, limit_bytes=limit_bytes)
        """Speculation for instances that send no events: kept longer, and renewed by use."""

    # --- instances

    def add_card(self, card: ModelCard, now_s: float = 0.0) -> None:
        """Add an instance that serves the model, or update its card. If more than its store and its LoRAs differ from
        the card before, the instance must be removed first (`same_worker`)."""
        before = self.cards.get(card.instance)
        if before is None:
            self.eligibility.add_card(card, now_s)
            self.caches.add_instance(card)
        else:
            assert same_worker(before, card)
            self.eligibility.update_card(card)
            self.caches.link_store(card.instance, store_id_of(before), store_id_of(card))

    def remove_instance(self, instance: str) -> list[SlotCleanup]:
        """Remove the blocks and reservations of an instance that no longer serves the model, and return the cleanup
        left to do."""
        card = self.cards.get(instance)
        if card is None:
            return []
        self.load.remove_instance(instance)
        self.encoding.remove_instance(instance)
        cleanups = self.caches.remove_instance(card)
        self.eligibility.remove_card(instance)
        self._without_events.discard(instance)
        return cleanups

    def set_sends_events(self, instance: str, sends: bool) -> None:
        """Set whether the instance sends events. Without events, the prompts routed there are all that is known of its
        cache."""
        (self._without_events.discard if sends else self._without_events.add)(instance)

    # --- select

    def select(self, select: Select, now_s: float) -> Selection:
        """Choose a candidate, or two that share the work, and reserve the load there."""
        name, attempt = select.request, select.attempt
        reserved = self.load.candidate_of((name, attempt)), self.load.candidate_of((name, attempt + 1))
        card = next(iter(self.cards.values()), None)
        try:
            hashes = validated_hashes(select, self._config.most_hashes, 0 if card is None else card.block_size)
            check_images(select)
            eligible = self.eligibility.eligible(select, now_s, reserved)
        except ProtocolError as wrong:
            return Selection(refused(select, "bad_request", str(wrong)))
        except NoCandidate as wrong:
            return Selection(refused(select, wrong.code, str(wrong)))
        candidates = self._candidates(select, now_s, hashes, eligible)
        choice = self.guard.choose(candidates.request, candidates.whole)
        pair = self._pair(candidates, choice.chosen.candidate) if candidates.prefilling else None
        return self._settle(candidates, choice, pair)

    def _candidates(self, select: Select, now_s: float, hashes: list[int], eligible: Eligible) -> _Candidates:
        """Return the states of the eligible candidates: what each has of the prompt, and how busy it is."""
        whole, prefilling = eligible.candidates, eligible.prefilling
        card = self.cards[whole[0].instance]
        block_size = card.block_size
        # One token of a prompt is always computed, so its last block is never fully cached.
        findable = hashes[: (select.prompt_tokens - 1) // block_size]
        overlaps = self.index.find(findable)
        expected = self.speculation.extend_overlaps(overlaps, findable, select.hashes, now_s)
        remembered = self.history.extend_overlaps(overlaps, findable, select.hashes, now_s)
        load, speed, priority = self.load.load_of, self.load.speeds.get, select.priority
        block_bytes = block_bytes_of(card.kv_layout)
        remote = self.caches.remote_search(findable, block_bytes)
        states = [
            CandidateState(
                candidate,
                overlaps.get(candidate, _NOTHING),
                load(candidate, priority),
                total_blocks,
                speed(instance, UNKNOWN_SPEED),
                now_s - since_s,
                places,
            )
            for candidate, instance, total_blocks, since_s, _, places, _ in (*whole, *prefilling)
        ]
        if remote is not None:
            states = [remote.added_to(state, store_id_of(self.cards[state.id[0]])) for state in states]
        request = RoutingRequest(
            prompt_tokens=select.prompt_tokens,
            block_size=block_size,
            session=select.session,
            lora=select.lora,
            images=select.images,
            image_tokens=select.image_tokens,
            priority=priority,
            fleet=FleetAverage.of(states[: len(whole)]),
            host_s=block_bytes / HOST_BYTES_PER_S,
            disk_s=block_bytes / DISK_BYTES_PER_S,
            part="alone" if prefilling else "whole",
        )
        return _Candidates(
            select=select,
            now_s=now_s,
            hashes=hashes,
            eligible=eligible,
            request=request,
            whole=states[: len(whole)],
            prefilling=states[len(whole) :],
            remote=remote,
            expected=expected,
            remembered=remembered,
        )

    def _pair(self, candidates: _Candidates, whole: CandidateState) -> WorkerPair | None:
        """Return the best pair, to be compared with the worker `whole` alone; None if no two candidates can make one.
        A prompt is computed where it is in time, if there is a limit."""
        stores = {each.id: each.store for each in (*candidates.eligible.candidates, *candidates.eligible.prefilling)}
        able = [(stores[each.id], each) for each in candidates.in_time(candidates.prefilling)]
        decoding = [(stores[each.id], each) for each in candidates.whole]
        request, remote = candidates.request, candidates.remote
        return choose_pair(self.guard, request, able, decoding, whole, remote, compare=self._compare)

    def _settle(self, candidates: _Candidates, choice: PolicyChoice, pair: WorkerPair | None) -> Selection:
        """Answer with the pair, if it costs less or is reserved already, else with a single candidate that is in time.
        If there is none, a pair is better than a refusal."""
        fault = choice.fault
        if pair is not None:
            fault = worst_fault(fault, pair.fault)
            if pair.pays or pair.candidates == candidates.eligible.reserved:
                return self._select_pair(candidates, pair, fault)
        if not candidates.in_time([choice.chosen.candidate]):
            soon = candidates.in_time(candidates.whole)
            if not soon and pair is not None:
                limit = f"no single worker would begin within {candidates.select.wait_limit_s:g} s; "
                return self._select_pair(candidates, pair, fault, because=limit)
            if not soon:
                return Selection(overloaded(candidates.select, candidates.whole), fault=fault)
            choice = self.guard.choose(candidates.request, soon)
            fault = worst_fault(fault, choice.fault)
        if pair is not None:
            choice = choice.with_reason(pair.comparison)
        return self._select_one(candidates, choice, fault)

    def _select_one(self, candidates: _Candidates, choice: PolicyChoice, fault: PolicyFault | None) -> Selection:
        """Answer with one candidate for the whole request, and reserve the load there."""
        select, chosen = candidates.select, choice.chosen.candidate
        this, following = candidates.eligible.reserved
        repeated = chosen.id == this
        encode = self._plan_images(candidates, chosen)
        delay_s = 0.0 if encode is None else encode.wait_s
        reserved = None
        if not repeated:
            reserved = self._reserve(select, candidates.request, chosen, candidates.now_s, delay_s=delay_s)
        if reserved is not None and following is not None:  # an earlier answer was a pair
            self.load.withdraw((select.request, select.attempt + 1))
        self._speculate(candidates, select, chosen, chosen.overlap.here, candidates.remembered)
        choice = choice if encode is None else choice.with_reason(encode.reason)
        selected = self._decide(candidates, select, candidates.request, choice, repeated=repeated)
        selected = _with_images(selected, encode)
        told = None
        if reserved is not None and chosen.id[0] not in self._without_events:
            told = awaited(select, reserved, chosen)
        return Selection(selected, reserved, fault=fault, awaited=told)

    def _select_pair(
        self, candidates: _Candidates, pair: WorkerPair, fault: PolicyFault | None, *, because: str = ""
    ) -> Selection:
        """Answer with two workers, and reserve the load of both: that of the one that decodes as the next attempt.
        `because` says why, if the pair does not cost less."""
        select, now_s = candidates.select, candidates.now_s
        prefill, decode = pair.prefill.chosen.candidate, pair.decode.chosen.candidate
        taken = msgspec.structs.replace(select, attempt=select.attempt + 1)
        repeated = pair.candidates == candidates.eligible.reserved
        encode = self._plan_images(candidates, prefill)
        wait_s = 0.0 if encode is None else encode.wait_s
        reserved = None if repeated else self._reserve(select, pair.prompt, prefill, now_s, delay_s=wait_s)
        reserved_decode = None
        if reserved is not None:  # else the attempt has ended, and perhaps the next one decodes already
            delay_s = min(select.time_left_s or HAND_OVER_LIMIT_S, HAND_OVER_LIMIT_S)
            reserved_decode = self._reserve(taken, pair.rest, decode, now_s, delay_s=delay_s)
        for asked, candidate in ((select, prefill), (taken, decode)):
            self._speculate(candidates, asked, candidate, candidate.overlap.device)
        choice = pair.prefill.with_reason(f"computes the prompt, {decode.id[0]} decodes: {because}{pair.comparison}")
        choice = choice if encode is None else choice.with_reason(encode.reason)
        selected = self._decide(candidates, select, pair.prompt, choice, repeated=repeated)
        choice = pair.decode.with_reason(f"decodes what {prefill.id[0]} hands over")
        self._decide(candidates, taken, pair.rest, choice, repeated=repeated)
        reply = msgspec.structs.replace(_with_images(selected, encode), decode=decode.id[0], decode_rank=decode.id[1])
        return Selection(reply, reserved, reserved_decode, fault)

    def _plan_images(self, candidates: _Candidates, chosen: CandidateState) -> EncodePlan | None:
        """Return which of the prompt's images are encoded by another worker than the one that computes it."""
        select = candidates.select
        if not select.image_ends:
            return None
        able = encode_workers(self.cards, chosen.id[0], self.eligibility.frozen)
        return self.encoding.plan(select, chosen, candidates.request.block_size, able, candidates.now_s)

    def _decide(
        self, candidates: _Candidates, select: Select, request: RoutingRequest, choice: PolicyChoice, *, repeated: bool
    ) -> Selected:
        """Record the choice for the attempt of `select`, and return the answer, with rows if they were asked for. What
        is recorded already is not recorded again for a repeated answer."""
        attempt, chosen = (select.request, select.attempt), choice.chosen.candidate
        selected = Selected(
            request=select.request,
            attempt=select.attempt,
            instance=chosen.id[0],
            rank=chosen.id[1],
            router=self._router,
            overlap=chosen.overlap,
            reason=choice.reason,
        )
        if not (repeated and self.decisions.contains(attempt, chosen.id)):
            passed_over = candidates.eligible.passed_over
            self.decisions.add(selected, request, choice, candidates.now_s, passed_over, candidates.select.hashes)
        return self.decisions.get(attempt).selected if select.explain else selected

    def _reserve(
        self, select: Select, request: RoutingRequest, chosen: CandidateState, now_s: float, *, delay_s: float = 0.0
    ) -> Reserved | None:
        """Reserve the attempt; return None for an attempt that has ended already. `delay_s` is `Reserved.delay_s`."""
        size = request.block_size
        reserved = Reserved(
            request=select.request,
            attempt=select.attempt,
            frontend=select.frontend,
            instance=chosen.id[0],
            rank=chosen.id[1],
            uncached_tokens=select.prompt_tokens - chosen.overlap.blocks * size,
            blocks=-(-select.prompt_tokens // size) - chosen.overlap.device,
            router=self._router,
            priority=select.priority,
            delay_s=delay_s,
            unreported=select.unreported,
            lasts_s=min(select.time_left_s, UNREPORTED_LIMIT_S) if select.unreported else 0.0,
        )
        self.load.withdraw((select.request, select.attempt))
        return reserved if self.load.add_reservation(reserved, now_s) else None

    def _speculate(
        self,
        candidates: _Candidates,
        select: Select,
        chosen: CandidateState,
        known: int,
        remembered: Sequence[ExpectedRun] = (),
    ) -> None:
        """Expect the prompt's blocks where the attempt of `select` was sent, except the `known` leading ones that are
        there. Renew what is expected there of `remembered`."""
        now_s, rest = candidates.now_s, select.hashes[8 * known :]
        slot = self.caches.chains[chosen.id].slot
        if chosen.id[0] in self._without_events:
            self.history.renew([run for run in remembered if run.slot is slot], now_s)
            self.history.add(slot, rest, now_s)
        else:
            attempt = select.request, select.attempt
            self.speculation.follow([run for run in candidates.expected if run.slot is slot], attempt)
            self.speculation.add(slot, rest, now_s, attempt)
        if self.index.nearly_full:
            self.index.touch(candidates.hashes[:known])

    # --- load events and reports

    def apply_load_event(self, event: LoadEvent, now_s: float) -> Prediction | None:
        """Apply a load event of this or another router. Raise ProtocolError if a number is negative."""
        match event:
            case Reserved():
                if not 0 <= event.delay_s <= HAND_OVER_LIMIT_S:
                    raise ProtocolError(f"Reserved: delay_s is {event.delay_s:g}")
                if min(event.attempt, event.rank, event.uncached_tokens, event.blocks) < 0:
                    raise ProtocolError("Reserved: a number is negative")
                check_awaited(event)
                # No event would release a reservation at an unknown instance; if it joins later, it reports its
                # attempts.
                chains = self.caches.chains.get((event.instance, event.rank))
                if event.router != self._router and chains is not None:
                    self._add_reservation_of_another(event, chains.slot, now_s)
            case Prefilled():
                self.load.mark_prefilled((event.request, event.attempt))
                return self.decisions.record_first_token(event)
            case Finished():
                self.load.mark_finished((event.request, event.attempt))
                self.decisions.record_end((event.request, event.attempt), now_s)
            case _:
                assert_never(event)
        return None

    def _add_reservation_of_another(self, event: Reserved, slot: Slot, now_s: float) -> None:
        self.load.add_reservation(msgspec.structs.replace(event, awaited=b"") if event.awaited else event, now_s)
        attempt = event.request, event.attempt
        if event.awaited and self.load.waits(attempt) and event.instance not in self._without_events:
            self.speculation.add(slot, event.awaited, now_s, attempt)

    def apply_load_report(self, report: LoadReport, now_s: float) -> None:
        """Apply a worker's load report; ignore it if the worker does not serve this model."""
        card = self.cards.get(report.instance)
        if card is not None:
            self.load.apply_report(report, now_s, ranks=len(ranks_of(card)))
            self.encoding.apply_report(report.instance, report.encoder)

    def loads(self) -> dict[str, CandidateLoad]:
        """Return the load of each worker that may be chosen for a prompt, over its ranks. Frozen ones are left out."""
        found = {}
        for instance, card in self.cards.items():
            if card.routed and card.role != "decode" and instance not in self.eligibility.frozen:
                ranks = [self.load.load_of((instance, rank)) for rank in range(card.ranks)]
                found[instance] = CandidateLoad(
                    sum(each.requests for each in ranks), sum(each.queued_tokens for each in ranks)
                )
        return found

    def tick(self, now_s: float, *, listening: bool = True) -> None:
        """Update what depends on time; to be called some ten times a second. `listening` is False if messages may have
        been missed."""
        self.eligibility.frozen = self.load.frozen_instances(now_s, listening=listening)
        self.speculation.expire(now_s, runs=_EXPIRED_PER_TICK, waits=self.load.waits)
        self.history.expire(now_s, runs=_EXPIRED_PER_TICK)

    def validate(self) -> None:
        """Assert every invariant of every part."""
        self.index.validate()
        self.load.validate()
        self.speculation.validate()
        self.history.validate()
        self.caches.validate()
        self.eligibility.validate()
        self.decisions.validate()
        self.encoding.validate()


def _with_images(selected: Selected, encode: EncodePlan | None) -> Selected:
    """Return the answer with the worker that encodes images of the prompt, if there is one."""
    if encode is None:
        return selected
    return msgspec.structs.replace(
        selected, encode=encode.instance, encode_images=encode.images, encode_wait_s=encode.wait_s
    )
