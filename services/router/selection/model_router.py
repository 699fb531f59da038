"""One model's routing: who can serve it, what they cache, how busy they are, and the choice among them. Pure.

Select ──▶ checked ──▶ seats ──▶ facts: overlap, load ──▶ chooser: the policy ──▶ reserved ──▶ Selected
                                   ▲              ▲                                  │
                index, speculation, history      load ◀──────────────────────────────┘  in the same step, so that the
                                                                                        next question sees it

A question asked again, because its answer was late or lost, is answered with what is reserved for it, here or by
another router, as long as that may be chosen: so it runs where all routers count it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Literal, assert_never

import msgspec
from msgspec import Struct

from services.router.config import RouterConfig
from services.router.index.chains import Chains, Clearing
from services.router.index.index import CandidateId, Index
from services.router.index.store_ids import Store, same_worker, store_of
from services.router.selection.candidates import DISK_BYTES_PER_S, HOST_BYTES_PER_S, Facts, Fleet, Question, predicted_s
from services.router.selection.decision_log import Decision, Decisions, Prediction
from services.router.selection.eligibility import Nobody, Refusal, Seats
from services.router.selection.load import UNTOLD, Load
from services.router.selection.policy import Policy
from services.router.selection.policy_guard import Chooser, Trouble, Verdict
from services.router.selection.speculation import Run, Speculation
from shared.errors import ProtocolError
from shared.hashing import unpack_hashes
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

RETRY_MOST_S = 60.0
"""What those who are refused for the wait are told at most."""
_ID_LIMIT = 256
_EXCLUDED_LIMIT = 4096
_EXPIRED_A_TICK = 1000
_NOTHING = Overlap()


class Choice(Struct, frozen=True):
    """The answer to a Select, and what the other routers must hear."""

    reply: Selected | SelectRefused
    reserved: Reserved | None = None
    """None: nothing new is."""
    trouble: Trouble | None = None
    """What was wrong with the policy; the reply is right all the same."""


class ModelRouter:
    """State and decisions for one model. Times are seconds on a clock that only grows."""

    def __init__(
        self,
        model: str,
        router: str,
        config: RouterConfig,
        policy: Policy,
        draw: Random,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """`clock` times the policy, which is not timed without one."""
        self.model = model
        self.index = Index(limit_bytes=config.index.limit_bytes)
        self.load = Load(
            limit=config.load.limit,
            grace_s=config.load.grace_s,
            unknown_s=config.load.unknown_s,
            frozen_s=config.load.frozen_s,
        )
        self.chooser = Chooser(
            *(policy, draw),
            name=config.policy,
            clock=clock,
            budget_s=config.policy_budget_ms / 1000,
            strikes=config.policy_strikes,
        )
        self.seats = Seats(model, draw, ramp_s=config.load.ramp_s)
        self.cards = self.seats.cards
        self.chains: dict[CandidateId, Chains] = {}
        self.stores: dict[Store, Chains] = {}
        """What the kvbms hold that are followed: no candidates, but what they hold counts for those attached."""
        self.attached: dict[Store, set[str]] = {}
        """The instances whose cards name it, followed or not; none without any."""
        self.decisions = Decisions(limit=max(config.explained, 1))
        self._router = router
        self._config = config
        self._without_events: set[str] = set()
        limit_bytes = config.index.speculation_limit_bytes
        self.speculation = Speculation(ttl_s=config.index.speculation_s, limit_bytes=limit_bytes)
        self.history = Speculation(ttl_s=config.index.history_s, limit_bytes=limit_bytes)
        """The same for instances that send no events, kept longer and renewed by use."""

    # --- who is there

    def card_up(self, card: ModelCard, now_s: float = 0.0) -> None:
        """An instance serves the model now. One that did so in another way before goes down first, unless only what it
        is attached to is another."""
        before = self.cards.get(card.instance)
        if before is None:
            self.seats.up(card, now_s)
            for rank in range(max(card.ranks, 1)):
                candidate = card.instance, rank
                self.chains[candidate] = self._new_chains(candidate, card)
            self._attach(card.instance, None, store_of(card))
        else:
            assert same_worker(before, card)
            self.cards[card.instance] = card
            self._attach(card.instance, store_of(before), store_of(card))

    def _new_chains(self, candidate: CandidateId, card: ModelCard) -> Chains:
        return Chains(
            self.index,
            candidate,
            block_size=card.block_size,
            vocab_size=card.vocab_size,
            limit_blocks=max(self._config.index.lower_tier_limit_blocks, card.capacity_blocks),
            orphan_limit_blocks=self._config.index.orphan_limit_blocks,
        )

    def _attach(self, instance: str, before: Store | None, after: Store | None) -> None:
        """It gets blocks from another store, or from none."""
        if before == after:
            return
        if before is not None:
            self.attached[before].discard(instance)
            if not self.attached[before]:
                del self.attached[before]
        if after is not None:
            self.attached.setdefault(after, set()).add(instance)
        for rank in range(max(self.cards[instance].ranks, 1)):
            self.index.borrow((instance, rank), None if after is None else (after, 0))
            self.chains[instance, rank].attach(None if after is None else self.stores.get(after))

    def card_down(self, instance: str) -> list[Clearing]:
        """It serves the model no longer: its blocks and reservations are gone. Returns the clearing left to do."""
        if instance not in self.cards:
            return []
        self.load.instance_gone(instance)
        self._attach(instance, store_of(self.cards[instance]), None)
        self.seats.down(instance)
        self._without_events.discard(instance)
        gone = [candidate for candidate in self.chains if candidate[0] == instance]
        return [self.chains.pop(candidate).close() for candidate in gone]

    def store_up(self, name: Store) -> Chains:
        """What the store holds is told to these chains from now on. Somebody is attached to it."""
        assert name not in self.stores
        card = self.cards[next(iter(self.attached[name]))]
        chains = self.stores[name] = self._new_chains((name, 0), card)
        for worker in self._chains_attached(name):
            worker.attach(chains)
        return chains

    def store_down(self, name: Store) -> Clearing:
        """It is followed no longer. Returns the clearing left to do."""
        for worker in self._chains_attached(name):
            worker.attach(None)
        return self.stores.pop(name).close()

    def _chains_attached(self, name: Store) -> list[Chains]:
        instances = self.attached.get(name, ())
        return [
            self.chains[instance, rank] for instance in instances for rank in range(max(self.cards[instance].ranks, 1))
        ]

    def sends_events(self, instance: str, sends: bool) -> None:
        """Whether events tell what the instance caches; without, what was routed there is all we know."""
        (self._without_events.discard if sends else self._without_events.add)(instance)

    # --- select

    def select(self, ask: Select, now_s: float) -> Choice:
        """Choose and reserve."""
        try:
            hashes = self._checked(ask)
            seats = self.seats.asked(ask, now_s)
        except ProtocolError as wrong:
            return Choice(_refused(ask, "bad_request", str(wrong)))
        except Nobody as nobody:
            return Choice(_refused(ask, nobody.code, str(nobody)))
        attempt = ask.request, ask.attempt
        before = self.load.candidate_of(attempt)
        if before is not None:
            seats = [seat for seat in seats if seat.candidate == before] or seats
        card = self.cards[seats[0].instance]
        block_size = card.block_size
        # One token of a prompt is always computed, so its last block is never all cached.
        findable = hashes[: (ask.prompt_tokens - 1) // block_size]
        overlaps = self.index.find(findable)
        self.speculation.extend(overlaps, findable, ask.hashes, now_s)
        remembered = self.history.extend(overlaps, findable, ask.hashes, now_s)
        load, speed, priority = self.load.of, self.load.speeds.get, ask.priority
        facts = [
            Facts(
                candidate,
                overlaps.get(candidate, _NOTHING),
                load(candidate, priority),
                total_blocks,
                speed(instance, UNTOLD),
                now_s - since_s,
            )
            for candidate, instance, total_blocks, since_s, _ in seats
        ]
        block_bytes = _block_bytes(card.kv_layout)
        question = Question(
            *(ask.prompt_tokens, block_size, ask.session, priority, Fleet.of(facts)),
            host_s=block_bytes / HOST_BYTES_PER_S,
            disk_s=block_bytes / DISK_BYTES_PER_S,
        )
        verdict = self.chooser.choose(question, facts)
        if ask.wait_limit_s > 0 and before is None and not _in_time([verdict.chosen.facts], ask, question):
            in_time = _in_time(facts, ask, question)
            if not in_time:
                return Choice(_overloaded(ask, facts, question), trouble=verdict.trouble)
            verdict = self.chooser.choose(question, in_time)
        chosen = verdict.chosen.facts
        repeated = chosen.candidate == before
        reserved = None if repeated else self._reserve(ask, question, chosen, now_s)
        self._expect(ask, hashes, chosen, remembered, now_s)
        selected = self._answer(ask, verdict)
        if not (repeated and self.decisions.keeps(attempt, chosen.candidate)):
            self.decisions.add(selected, question, verdict, now_s)
        if ask.explain:
            selected = self.decisions.of(attempt).selected
        return Choice(selected, reserved, verdict.trouble)

    def _checked(self, ask: Select) -> list[int]:
        """The prompt's hashes. Raises ProtocolError, naming the field."""
        if max(len(ask.request), len(ask.frontend), len(ask.session), len(ask.lora)) > _ID_LIMIT or not ask.request:
            raise ProtocolError(f"request, frontend, session and lora have at most {_ID_LIMIT} characters")
        if len(ask.excluded) > _EXCLUDED_LIMIT:
            raise ProtocolError(f"excluded has at most {_EXCLUDED_LIMIT} instances")
        if ask.attempt < 0 or ask.prompt_tokens < 1 or ask.max_tokens < 0:
            raise ProtocolError("attempt and max_tokens are not negative, prompt_tokens is positive")
        if not (ask.time_left_s >= 0 and ask.wait_limit_s >= 0):  # NaN is not either
            raise ProtocolError("time_left_s and wait_limit_s are not negative: nobody waits for the answer any more")
        if len(ask.hashes) > 8 * self._config.most_hashes:
            raise ProtocolError(f"hashes of more than {self._config.most_hashes} blocks")
        try:
            hashes = unpack_hashes(ask.hashes)
        except ValueError as wrong:
            raise ProtocolError(f"hashes: {wrong}") from None
        card = next(iter(self.cards.values()), None)
        if card is not None:
            blocks = ask.prompt_tokens // card.block_size
            if blocks > self._config.most_hashes:
                raise ProtocolError(f"prompt_tokens of more than {self._config.most_hashes} blocks")
            if len(hashes) > blocks:
                raise ProtocolError(f"{len(hashes)} hashes for a prompt of {ask.prompt_tokens} tokens")
        if len(set(hashes)) != len(hashes):
            raise ProtocolError("hashes repeat: those of one prompt are all different")
        return hashes

    def _reserve(self, ask: Select, question: Question, chosen: Facts, now_s: float) -> Reserved | None:
        """What is reserved now; None for an attempt whose end was told."""
        size = question.block_size
        reserved = Reserved(
            request=ask.request,
            attempt=ask.attempt,
            frontend=ask.frontend,
            instance=chosen.candidate[0],
            rank=chosen.candidate[1],
            uncached_tokens=ask.prompt_tokens - chosen.overlap.blocks * size,
            blocks=-(-ask.prompt_tokens // size) - chosen.overlap.device,
            router=self._router,
            priority=ask.priority,
        )
        self.load.withdrawn((ask.request, ask.attempt))
        return reserved if self.load.reserved(reserved, now_s) else None

    def _expect(
        self, ask: Select, hashes: Sequence[int], chosen: Facts, remembered: Iterable[Run], now_s: float
    ) -> None:
        """The prompt's blocks will be where it was sent."""
        slot = self.chains[chosen.candidate].slot
        known = chosen.overlap.blocks
        if chosen.candidate[0] in self._without_events:
            self.history.renew([run for run in remembered if run.slot is slot], now_s)
            self.history.add(slot, ask.hashes[8 * known :], now_s)
        else:
            self.speculation.add(slot, ask.hashes[8 * known :], now_s)
        if self.index.crowded:
            self.index.touch(hashes[:known])

    def _answer(self, ask: Select, verdict: Verdict) -> Selected:
        chosen = verdict.chosen.facts
        return Selected(
            request=ask.request,
            attempt=ask.attempt,
            instance=chosen.candidate[0],
            rank=chosen.candidate[1],
            router=self._router,
            overlap=chosen.overlap,
            reason=verdict.reason,
        )

    # --- what happens afterwards

    def told(self, event: LoadEvent, now_s: float) -> Prediction | None:
        """A load event, of this router or another. Raises ProtocolError on numbers that cannot be."""
        match event:
            case Reserved():
                if min(event.attempt, event.rank, event.uncached_tokens, event.blocks) < 0:
                    raise ProtocolError("reserved: a negative number")
                # Of one that is not here nobody would release it; one that comes later reports what it runs.
                if event.router != self._router and (event.instance, event.rank) in self.chains:
                    self.load.reserved(event, now_s)
            case Prefilled():
                self.load.prefilled((event.request, event.attempt))
                return self.decisions.prefilled(event)
            case Finished():
                self.load.finished((event.request, event.attempt))
                self.decisions.ended((event.request, event.attempt), now_s)
            case _:
                assert_never(event)
        return None

    def reported(self, report: LoadReport, now_s: float) -> None:
        """A worker's own account; of one that does not serve this model nothing is taken."""
        card = self.cards.get(report.instance)
        if card is not None:
            self.load.reported(report, now_s, ranks=max(card.ranks, 1))

    def frontend_gone(self, frontend: str) -> None:
        """Its lease ended."""
        self.load.frontend_gone(frontend)

    def tick(self, now_s: float, *, listening: bool = True) -> None:
        """What time alone changes; some ten times a second. Not `listening`: messages may have been missed."""
        self.seats.standing_still = self.load.standing_still(now_s, listening=listening)
        self.speculation.expire(now_s, runs=_EXPIRED_A_TICK)
        self.history.expire(now_s, runs=_EXPIRED_A_TICK)

    def explain(self, request: str, latest: int = 20) -> list[Decision]:
        """The latest decisions kept of a request, or of all requests where it is empty; oldest first."""
        return self.decisions.explain(request, latest)

    def validate(self) -> None:
        """Assert every invariant of every part."""
        self.index.validate()
        self.load.validate()
        self.speculation.validate()
        self.history.validate()
        for candidate, chains in self.chains.items():
            assert candidate[0] in self.cards
            chains.validate()
        for chains in self.stores.values():
            chains.validate()
        named = {(store_of(card), instance) for instance, card in self.cards.items() if store_of(card) is not None}
        assert named == {(name, instance) for name, instances in self.attached.items() for instance in instances}
        assert all(self.attached.values())
        self.seats.validate()
        self.decisions.validate()


def _block_bytes(layout: KvLayout) -> int:
    """Of one block; 0: not known."""
    try:
        return layout.block_bytes
    except KeyError:  # a foreign engine's dtype
        return 0


def _in_time(facts: Sequence[Facts], ask: Select, question: Question) -> list[Facts]:
    """Those whose first token would come within the asker's limit, and those of which that is not known."""
    waits = [predicted_s(each, question) for each in facts]
    return [each for each, wait_s in zip(facts, waits, strict=True) if wait_s is None or wait_s <= ask.wait_limit_s]


def _overloaded(ask: Select, facts: Sequence[Facts], question: Question) -> SelectRefused:
    """Of `facts` none is in time; it is by the asker's limit sooner, once the soonest has caught up."""
    soonest_s = min(predicted_s(each, question) or 0.0 for each in facts)
    reason = f"the first token would come in {soonest_s:.0f} s at the soonest, the limit is {ask.wait_limit_s:g} s"
    retry_after_s = min(max(soonest_s - ask.wait_limit_s, 1.0), RETRY_MOST_S)
    return msgspec.structs.replace(_refused(ask, "overloaded", reason), retry_after_s=retry_after_s)


def _refused(ask: Select, code: Refusal | Literal["bad_request", "overloaded"], reason: str) -> SelectRefused:
    return SelectRefused(ask.request[:_ID_LIMIT], ask.attempt, code, reason)
