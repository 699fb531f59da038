"""Routing for one model: the instances that serve it, their caches, their loads, and the choice among them. Pure.

Select ──▶ validated ──▶ eligible ──▶ states: overlap, load ──▶ guard: the policy ──▶ reserved ──▶ Selected
                                                 ▲      ▲                                │
               caches: index, speculation, history     load ◀────────────────────────────┘  in the same step, so that
                                                                                            the next request sees it

A frontend repeats a Select if the answer was late or lost. The repeated Select is answered with the reservation that
this or another router has for it, as long as that candidate is eligible: it runs where all routers count it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import assert_never

import msgspec
from msgspec import Struct

from services.router.config import RouterConfig
from services.router.index.chains import SlotCleanup
from services.router.index.index import Index
from services.router.index.shared_stores import store_id_of
from services.router.selection.caches import FleetCaches
from services.router.selection.candidates import (
    DISK_BYTES_PER_S,
    HOST_BYTES_PER_S,
    CandidateState,
    FleetAverage,
    RoutingRequest,
)
from services.router.selection.decision_log import DecisionLog, Prediction
from services.router.selection.eligibility import Eligibility, EligibleCandidate, NoCandidate, ranks_of, same_worker
from services.router.selection.load import UNKNOWN_SPEED, LoadTracker
from services.router.selection.pairs import SplitCosts, WorkerPair, choose_pair
from services.router.selection.policies.kv import split_costs
from services.router.selection.policy import Policy
from services.router.selection.policy_guard import PolicyFault, PolicyGuard, worst_fault
from services.router.selection.refusal import in_time, overloaded, refused
from services.router.selection.speculation import ExpectedRun, Speculation
from services.router.selection.validation import validated_hashes
from shared.errors import ProtocolError
from shared.messages import (
    Finished,
    KvLayout,
    LoadEvent,
    LoadReport,
    ModelCard,
    Overlap,
    Prefilled,
    Reserved,
    Select,
    Selected,
    SelectRefused,
)

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
        """Choose a candidate and reserve the load there."""
        try:
            card = next(iter(self.cards.values()), None)
            hashes = validated_hashes(select, self._config.most_hashes, 0 if card is None else card.block_size)
            eligible, passed_over = self.eligibility.eligible(select, now_s)
        except ProtocolError as wrong:
            return Selection(refused(select, "bad_request", str(wrong)))
        except NoCandidate as wrong:
            return Selection(refused(select, wrong.code, str(wrong)))
        attempt = select.request, select.attempt
        prefilling: list[EligibleCandidate] = []
        if not select.whole and select.max_tokens > 1:
            prefilling, without = self.eligibility.prefilling(select, now_s)
            passed_over |= without
        before, after = self.load.candidate_of(attempt), self.load.candidate_of((select.request, select.attempt + 1))
        if any(each.id == before for each in prefilling):
            prefilling = [each for each in prefilling if each.id == before]
            eligible = [each for each in eligible if each.id == after] or eligible
        elif before is not None:
            prefilling = []
            eligible = [each for each in eligible if each.id == before] or eligible
        card = self.cards[eligible[0].instance]
        block_size = card.block_size
        # One token of a prompt is always computed, so its last block is never fully cached.
        findable = hashes[: (select.prompt_tokens - 1) // block_size]
        overlaps = self.index.find(findable)
        self.speculation.extend_overlaps(overlaps, findable, select.hashes, now_s)
        remembered = self.history.extend_overlaps(overlaps, findable, select.hashes, now_s)
        load, speed, priority = self.load.load_of, self.load.speeds.get, select.priority
        block_bytes = _block_bytes(card.kv_layout)
        remote = self.caches.remote_search(findable, block_bytes)
        states = [
            CandidateState(
                candidate,
                overlaps.get(candidate, _NOTHING),
                load(candidate, priority),
                total_blocks,
                speed(instance, UNKNOWN_SPEED),
                now_s - since_s,
            )
            for candidate, instance, total_blocks, since_s, _, _ in (*eligible, *prefilling)
        ]
        if remote is not None:
            states = [remote.added_to(state, store_id_of(self.cards[state.id[0]])) for state in states]
        candidates = states[: len(eligible)]
        request = RoutingRequest(
            prompt_tokens=select.prompt_tokens,
            block_size=block_size,
            session=select.session,
            lora=select.lora,
            priority=priority,
            fleet=FleetAverage.of(candidates),
            host_s=block_bytes / HOST_BYTES_PER_S,
            disk_s=block_bytes / DISK_BYTES_PER_S,
            part="alone" if prefilling else "whole",
        )
        choice = self.guard.choose(request, candidates)
        pair: WorkerPair | None = None
        if prefilling:
            stored = [(each.store, state) for each, state in zip((*eligible, *prefilling), states, strict=True)]
            able = stored[len(eligible) :]
            if select.wait_limit_s > 0 and before is None:
                able = [each for each in able if in_time([each[1]], select)]
            whole, compare = choice.chosen.candidate, self._compare
            pair = choose_pair(self.guard, request, able, stored[: len(eligible)], whole, remote, compare=compare)
        fault = choice.fault if pair is None else worst_fault(choice.fault, pair.prefill.fault, pair.decode.fault)
        kept = pair is not None and pair.candidates == (before, after)
        if pair is not None and (pair.pays or kept):
            return self._select_pair(select, pair, hashes, now_s, fault, passed_over, repeated=kept)
        if select.wait_limit_s > 0 and before is None and not in_time([choice.chosen.candidate], select):
            soon = in_time(candidates, select)
            if not soon and pair is not None:
                limit = f"no single worker would begin within {select.wait_limit_s:g} s; "
                return self._select_pair(select, pair, hashes, now_s, fault, passed_over, because=limit)
            if not soon:
                return Selection(overloaded(select, candidates), fault=fault)
            choice = self.guard.choose(request, soon)
            fault = worst_fault(fault, choice.fault)
        if pair is not None:
            choice = msgspec.structs.replace(choice, reason=f"{choice.reason}; {pair.comparison}")
        chosen = choice.chosen.candidate
        repeated = chosen.id == before
        reserved = None if repeated else self._reserve(select, request, chosen, now_s)
        if reserved is not None and after is not None:  # an earlier answer was a pair
            self.load.withdraw((select.request, select.attempt + 1))
        self._speculate(select, hashes, chosen, remembered, now_s)
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
            self.decisions.add(selected, request, choice, now_s, passed_over)
        if select.explain:
            selected = self.decisions.get(attempt).selected
        return Selection(selected, reserved, fault=fault)

    def _select_pair(
        self,
        select: Select,
        pair: WorkerPair,
        hashes: Sequence[int],
        now_s: float,
        fault: PolicyFault | None,
        passed_over: dict[str, str],
        *,
        repeated: bool = False,
        because: str = "",
    ) -> Selection:
        """Answer with two workers, and reserve the load of both: that of the one that decodes as the next attempt.
        `because` says why, if the pair does not cost less."""
        prefill, decode = pair.prefill.chosen.candidate, pair.decode.chosen.candidate
        taken = msgspec.structs.replace(select, attempt=select.attempt + 1)
        delay_s = min(select.time_left_s or HAND_OVER_LIMIT_S, HAND_OVER_LIMIT_S)
        reserved = reserved_decode = None
        if not repeated:
            reserved = self._reserve(select, pair.prompt, prefill, now_s)
        if reserved is not None:  # else the attempt has ended, and perhaps the next one decodes already
            reserved_decode = self._reserve(taken, pair.rest, decode, now_s, delay_s=delay_s)
        for candidate in (prefill, decode):
            held = msgspec.structs.replace(candidate, overlap=Overlap(device=candidate.overlap.device))
            self._speculate(select, hashes, held, (), now_s)
        answers: list[Selected] = []
        for asked, request, choice, why in (
            (
                select,
                pair.prompt,
                pair.prefill,
                f"computes the prompt, {decode.id[0]} decodes: {because}{pair.comparison}",
            ),
            (taken, pair.rest, pair.decode, f"decodes what {prefill.id[0]} hands over"),
        ):
            chosen = choice.chosen.candidate
            answer = Selected(
                request=select.request,
                attempt=asked.attempt,
                instance=chosen.id[0],
                rank=chosen.id[1],
                router=self._router,
                overlap=chosen.overlap,
                reason=f"{choice.reason}; {why}",
            )
            if not (repeated and self.decisions.contains((select.request, asked.attempt), chosen.id)):
                self.decisions.add(answer, request, choice, now_s, passed_over)
            answers.append(answer)
        reply = self.decisions.get((select.request, select.attempt)).selected if select.explain else answers[0]
        reply = msgspec.structs.replace(reply, decode=decode.id[0], decode_rank=decode.id[1])
        return Selection(reply, reserved, reserved_decode, fault)

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
        )
        self.load.withdraw((select.request, select.attempt))
        return reserved if self.load.add_reservation(reserved, now_s) else None

    def _speculate(
        self,
        select: Select,
        hashes: Sequence[int],
        chosen: CandidateState,
        remembered: Iterable[ExpectedRun],
        now_s: float,
    ) -> None:
        """Expect the prompt's blocks where the prompt was sent."""
        slot = self.caches.chains[chosen.id].slot
        known = chosen.overlap.here
        if chosen.id[0] in self._without_events:
            self.history.renew([run for run in remembered if run.slot is slot], now_s)
            self.history.add(slot, select.hashes[8 * known :], now_s)
        else:
            self.speculation.add(slot, select.hashes[8 * known :], now_s)
        if self.index.nearly_full:
            self.index.touch(hashes[:known])

    # --- load events and reports

    def apply_load_event(self, event: LoadEvent, now_s: float) -> Prediction | None:
        """Apply a load event of this or another router. Raise ProtocolError if a number is negative."""
        match event:
            case Reserved():
                if not 0 <= event.delay_s <= HAND_OVER_LIMIT_S:
                    raise ProtocolError(f"Reserved: delay_s is {event.delay_s:g}")
                if min(event.attempt, event.rank, event.uncached_tokens, event.blocks) < 0:
                    raise ProtocolError("Reserved: a number is negative")
                # No event would release a reservation at an unknown instance; if it joins later, it reports its
                # attempts.
                if event.router != self._router and (event.instance, event.rank) in self.caches.chains:
                    self.load.add_reservation(event, now_s)
            case Prefilled():
                self.load.mark_prefilled((event.request, event.attempt))
                return self.decisions.record_first_token(event)
            case Finished():
                self.load.mark_finished((event.request, event.attempt))
                self.decisions.record_end((event.request, event.attempt), now_s)
            case _:
                assert_never(event)
        return None

    def apply_load_report(self, report: LoadReport, now_s: float) -> None:
        """Apply a worker's load report; ignore it if the worker does not serve this model."""
        card = self.cards.get(report.instance)
        if card is not None:
            self.load.apply_report(report, now_s, ranks=len(ranks_of(card)))

    def tick(self, now_s: float, *, listening: bool = True) -> None:
        """Update what depends on time; to be called some ten times a second. `listening` is False if messages may have
        been missed."""
        self.eligibility.frozen = self.load.frozen_instances(now_s, listening=listening)
        self.speculation.expire(now_s, runs=_EXPIRED_PER_TICK)
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


def _block_bytes(layout: KvLayout) -> int:
    """Return the bytes of one block; 0 if unknown."""
    try:
        return layout.block_bytes
    except KeyError:  # the dtype of a foreign engine
        return 0
