"""One model's routing: who can serve it, what they cache, how busy they are, and the choice among them. Pure.

Select ──▶ checked ──▶ who may serve ──▶ facts: overlap, load ──▶ policy ──▶ reserved ──▶ Selected
                                           ▲               ▲                    │
                         index, speculation, history      load ◀────────────────┘  in the same step, so that the
                                                                                   next question sees it

Of the candidates that have what is asked for and are not excluded, two kinds are passed over while others are there:

- instances that stand still (`load.py` says which);
- for a share of the questions, instances that joined a fleet which was serving already: idle and empty as they are,
  they would get everything at once. The share of questions in which one takes part grows in a straight line from none
  to all over `ramp_s`. Instances that come up together, or are found together by a new router, do not ramp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from random import Random
from typing import Literal, NamedTuple, assert_never

import msgspec
from msgspec import Struct

from services.router.chains import Chains, Clearing
from services.router.chooser import Chooser, Trouble, Verdict
from services.router.config import RouterConfig
from services.router.index import CandidateId, Index
from services.router.load import UNTOLD, Load
from services.router.policy import Policy, reason
from services.router.question import Facts, Question, Scored
from services.router.speculation import Run, Speculation
from shared.errors import ProtocolError
from shared.hashing import unpack_hashes
from shared.messages import (
    Candidate,
    Finished,
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

ROWS = 16
"""Candidates kept of a decision: the best, and the chosen one."""
_ID_LIMIT = 256
_EXCLUDED_LIMIT = 4096
_EXPIRED_A_TICK = 1000
_NOTHING = Overlap()

Refusal = Literal["no_instances", "all_excluded", "unknown_model"]


class Decision(Struct):
    """A choice, and what came of it; kept for `explain`."""

    selected: Selected
    at_s: float
    prompt_tokens: int
    predicted_cached_tokens: int
    actual_cached_tokens: int | None = None
    """As the worker counted; None: not told yet."""
    first_token_s: float | None = None
    """As the client saw it; None: not told yet, or an earlier attempt brought it."""
    ended_s: float | None = None
    """From the choice until its end was told; None: not yet."""


class Choice(Struct, frozen=True):
    """The answer to a Select, and what the other routers must hear."""

    reply: Selected | SelectRefused
    reserved: Reserved | None = None
    trouble: Trouble | None = None
    """What was wrong with the policy; the reply is right all the same."""


class Prediction(Struct, frozen=True):
    """What a first token told about a choice of ours."""

    prompt_tokens: int
    predicted_tokens: int
    actual_tokens: int
    instance: str
    chosen_s: float
    """When."""
    new_blocks: int
    """Full blocks that were computed, less one that may have been cached: a prompt's last token always is computed."""


class _Kept(Struct):
    """A decision, and what its rows are made of when somebody asks."""

    decision: Decision
    question: Question
    policy: Policy
    scored: Sequence[Scored]


class _Seat(NamedTuple):
    """One candidate that may be asked for."""

    candidate: CandidateId
    instance: str
    total_blocks: int
    since_s: float


class _Nobody(Exception):
    """No candidate can serve a question."""

    def __init__(self, code: Refusal, reason: str) -> None:
        super().__init__(reason)
        self.code: Refusal = code


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
            policy, draw, clock=clock, budget_s=config.policy_budget_ms / 1000, strikes=config.policy_strikes
        )
        self.cards: dict[str, ModelCard] = {}
        self.chains: dict[CandidateId, Chains] = {}
        self.standing_still: frozenset[str] = frozenset()
        """Instances, as of the last tick."""
        self._router = router
        self._config = config
        self._draw = draw
        self._since_s: dict[str, float] = {}
        """When each instance's card came."""
        self._ramping: dict[str, float] = {}
        """The same, of those that joined others who were serving already and are not yet as good as they."""
        self._seats: dict[str, list[_Seat]] = {}
        """By LoRA, "" for any: a memo, emptied when cards change."""
        self._without_events: set[str] = set()
        limit_bytes = config.index.speculation_limit_bytes
        self.speculation = Speculation(ttl_s=config.index.speculation_s, limit_bytes=limit_bytes)
        self.history = Speculation(ttl_s=config.index.history_s, limit_bytes=limit_bytes)
        """The same for instances that send no events, kept longer and renewed by use."""
        self._kept: dict[tuple[str, int], _Kept] = {}
        """By request and attempt, oldest first."""

    # --- who is there

    def card_up(self, card: ModelCard, now_s: float = 0.0) -> list[Clearing]:
        """An instance serves the model now, or serves it in another way than before."""
        left: list[Clearing] = []
        if card.instance in self.cards:
            if self.cards[card.instance] == card:
                return []
            left = self._close(card.instance)
        ramp_s = self._config.load.ramp_s
        if any(now_s - since_s >= ramp_s for since_s in self._since_s.values()):
            self._ramping[card.instance] = now_s
        self._since_s[card.instance] = now_s
        self.cards[card.instance] = card
        self._seats.clear()
        limit = max(self._config.index.lower_tier_limit_blocks, card.capacity_blocks)
        for rank in range(max(card.ranks, 1)):
            candidate = card.instance, rank
            self.chains[candidate] = Chains(
                self.index,
                candidate,
                block_size=card.block_size,
                vocab_size=card.vocab_size,
                limit_blocks=limit,
                orphan_limit_blocks=self._config.index.orphan_limit_blocks,
            )
        return left

    def card_down(self, instance: str) -> list[Clearing]:
        """It serves the model no longer: its blocks and reservations are gone. Returns the clearing left to do."""
        if self.cards.pop(instance, None) is None:
            return []
        self.load.instance_gone(instance)
        return self._close(instance)

    def sends_events(self, instance: str, sends: bool) -> None:
        """Whether events tell what the instance caches; without, what was routed there is all we know."""
        (self._without_events.discard if sends else self._without_events.add)(instance)

    def _close(self, instance: str) -> list[Clearing]:
        self._seats.clear()
        self._without_events.discard(instance)
        self._ramping.pop(instance, None)
        self._since_s.pop(instance, None)
        gone = [candidate for candidate in self.chains if candidate[0] == instance]
        return [self.chains.pop(candidate).close() for candidate in gone]

    # --- select

    def select(self, ask: Select, now_s: float) -> Choice:
        """Choose and reserve."""
        try:
            hashes = self._checked(ask)
            seats = self._passed(self._who_may_serve(ask), now_s)
        except ProtocolError as wrong:
            return Choice(_refused(ask, "bad_request", str(wrong)))
        except _Nobody as nobody:
            return Choice(_refused(ask, nobody.code, str(nobody)))
        block_size = self.cards[seats[0].instance].block_size
        # One token of a prompt is always computed, so its last block is never all cached.
        findable = hashes[: (ask.prompt_tokens - 1) // block_size]
        overlaps = self.index.find(findable)
        expected = self.speculation.extend(overlaps, findable, ask.hashes, now_s)
        expected += self.history.extend(overlaps, findable, ask.hashes, now_s)
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
            for candidate, instance, total_blocks, since_s in seats
        ]
        question = Question(ask.prompt_tokens, block_size, ask.session, priority)
        verdict = self.chooser.choose(question, facts)
        chosen = verdict.chosen.facts
        reserved = self._reserve(ask, question, chosen, now_s)
        self._expect(ask, hashes, chosen, expected, now_s)
        selected = self._keep(ask, question, verdict, now_s)
        return Choice(selected, reserved, verdict.trouble)

    def _checked(self, ask: Select) -> list[int]:
        """The prompt's hashes. Raises ProtocolError, naming the field."""
        if max(len(ask.request), len(ask.frontend), len(ask.session), len(ask.lora)) > _ID_LIMIT or not ask.request:
            raise ProtocolError(f"request, frontend, session and lora have at most {_ID_LIMIT} characters")
        if len(ask.excluded) > _EXCLUDED_LIMIT:
            raise ProtocolError(f"excluded has at most {_EXCLUDED_LIMIT} instances")
        if ask.attempt < 0 or ask.prompt_tokens < 1 or ask.max_tokens < 0:
            raise ProtocolError("attempt and max_tokens are not negative, prompt_tokens is positive")
        if len(ask.hashes) > 8 * self._config.most_hashes:
            raise ProtocolError(f"hashes of more than {self._config.most_hashes} blocks")
        try:
            hashes = unpack_hashes(ask.hashes)
        except ValueError as wrong:
            raise ProtocolError(f"hashes: {wrong}") from None
        card = next(iter(self.cards.values()), None)
        if card is not None and len(hashes) > ask.prompt_tokens // card.block_size:
            raise ProtocolError(f"{len(hashes)} hashes for a prompt of {ask.prompt_tokens} tokens")
        if len(set(hashes)) != len(hashes):
            raise ProtocolError("hashes repeat: those of one prompt are all different")
        return hashes

    def _who_may_serve(self, ask: Select) -> list[_Seat]:
        """Those that have what is asked for and are not excluded. Raises _Nobody."""
        seats = self._seats.get(ask.lora)
        if seats is None:
            seats = [
                _Seat((card.instance, rank), card.instance, card.capacity_blocks, self._since_s[card.instance])
                for card in self.cards.values()
                if card.role == "aggregated" and (not ask.lora or ask.lora in card.lora)
                for rank in range(max(card.ranks, 1))
            ]
            if not seats and all(card.role != "aggregated" for card in self.cards.values()):
                raise _Nobody("no_instances", f"no instance serves {self.model}")
            if not seats:
                raise _Nobody("unknown_model", f"no instance of {self.model} has the LoRA {ask.lora}")
            self._seats[ask.lora] = seats
        if ask.excluded:
            excluded = set(ask.excluded)
            allowed = [seat for seat in seats if seat.instance not in excluded]
            if not allowed:
                raise _Nobody("all_excluded", f"all {len(seats)} candidates are excluded")
            return allowed
        return seats

    def _passed(self, seats: list[_Seat], now_s: float) -> list[_Seat]:
        """Without those that stand still, and without those that ramp up and were not drawn; never nobody."""
        still = self.standing_still
        if still:
            seats = [seat for seat in seats if seat.instance not in still] or seats
        if self._ramping:
            waiting = self._not_drawn(now_s)
            seats = [seat for seat in seats if seat.instance not in waiting] or seats
        return seats

    def _not_drawn(self, now_s: float) -> set[str]:
        """Instances that ramp up and take no part in this question."""
        ramp_s = self._config.load.ramp_s
        for instance in [each for each, since_s in self._ramping.items() if now_s - since_s >= ramp_s]:
            del self._ramping[instance]
        return {
            instance for instance, since_s in self._ramping.items() if self._draw.random() * ramp_s >= now_s - since_s
        }

    def _reserve(self, ask: Select, question: Question, chosen: Facts, now_s: float) -> Reserved:
        size = question.block_size
        reserved = Reserved(
            request=ask.request,
            attempt=ask.attempt,
            frontend=ask.frontend,
            instance=chosen.candidate[0],
            rank=chosen.candidate[1],
            uncached_tokens=ask.prompt_tokens - chosen.overlap.blocks * size,
            blocks=-(-ask.prompt_tokens // size),
            router=self._router,
            priority=ask.priority,
        )
        self.load.reserved(reserved, now_s)
        return reserved

    def _expect(self, ask: Select, hashes: Sequence[int], chosen: Facts, followed: Iterable[Run], now_s: float) -> None:
        """The prompt's blocks will be where it was sent."""
        slot = self.chains[chosen.candidate].slot
        known = chosen.overlap.blocks
        if chosen.candidate[0] in self._without_events:
            self.history.renew([run for run in followed if run.slot is slot], now_s)
            self.history.add(slot, ask.hashes[8 * known :], now_s)
        else:
            self.speculation.add(slot, ask.hashes[8 * known :], now_s)
        if self.index.crowded:
            self.index.touch(hashes[:known])

    def _keep(self, ask: Select, question: Question, verdict: Verdict, now_s: float) -> Selected:
        """The answer; what it rests on is kept, and put into words when somebody asks."""
        chosen = verdict.chosen.facts
        selected = Selected(
            request=ask.request,
            attempt=ask.attempt,
            instance=chosen.candidate[0],
            rank=chosen.candidate[1],
            router=self._router,
            overlap=chosen.overlap,
            reason=reason(verdict.policy, question, chosen),
        )
        if len(self._kept) >= self._config.explained:
            del self._kept[next(iter(self._kept))]
        decision = Decision(selected, now_s, ask.prompt_tokens, chosen.overlap.blocks * question.block_size)
        rows = tuple(islice(verdict.scored, ROWS))
        if verdict.chosen not in rows:  # a policy may pick what it does not score best
            rows = (*rows[: ROWS - 1], verdict.chosen)
        kept = _Kept(decision, question, verdict.policy, rows)
        self._kept[ask.request, ask.attempt] = kept
        return _told(kept).selected if ask.explain else selected

    # --- what happens afterwards

    def told(self, event: LoadEvent, now_s: float) -> Prediction | None:
        """A load event, of this router or another. Raises ProtocolError on numbers that cannot be."""
        match event:
            case Reserved():
                if min(event.attempt, event.rank, event.uncached_tokens, event.blocks) < 0:
                    raise ProtocolError("reserved: a negative number")
                # Of an instance that is gone here nobody would release it; one that comes later reports what it runs.
                if event.router != self._router and event.instance in self.cards:
                    self.load.reserved(event, now_s)
            case Prefilled():
                self.load.prefilled((event.request, event.attempt))
                return self._compared(event)
            case Finished():
                self.load.finished((event.request, event.attempt))
                kept = self._kept.get((event.request, event.attempt))
                if kept is not None and kept.decision.ended_s is None:
                    kept.decision.ended_s = now_s - kept.decision.at_s
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
        self.standing_still = self.load.standing_still(now_s, listening=listening)
        self.speculation.expire(now_s, runs=_EXPIRED_A_TICK)
        self.history.expire(now_s, runs=_EXPIRED_A_TICK)

    def _compared(self, event: Prefilled) -> Prediction | None:
        kept = self._kept.get((event.request, event.attempt))
        if kept is None or kept.decision.actual_cached_tokens is not None:
            return None
        decision = kept.decision
        decision.actual_cached_tokens = min(max(event.cached_tokens, 0), decision.prompt_tokens)
        decision.first_token_s = event.first_token_s if event.first_token_s > 0 else None
        instance, actual_tokens = decision.selected.instance, decision.actual_cached_tokens
        card = self.cards.get(instance)
        return Prediction(
            decision.prompt_tokens,
            decision.predicted_cached_tokens,
            actual_tokens,
            instance,
            decision.at_s,
            0 if card is None else (decision.prompt_tokens - 1) // card.block_size - actual_tokens // card.block_size,
        )

    def explain(self, request: str, latest: int = 20) -> list[Decision]:
        """The latest decisions kept of a request, or of all requests where it is empty; oldest first."""
        found = [kept for key, kept in self._kept.items() if not request or key[0] == request]
        return [_told(kept) for kept in found[-latest:]]

    def validate(self) -> None:
        """Assert every invariant of every part."""
        self.index.validate()
        self.load.validate()
        self.speculation.validate()
        self.history.validate()
        for candidate, chains in self.chains.items():
            assert candidate[0] in self.cards
            chains.validate()
        assert len(self._kept) <= self._config.explained
        assert all(len(kept.scored) <= ROWS for kept in self._kept.values())
        assert self._since_s.keys() == self.cards.keys() >= self._ramping.keys()
        for seats in self._seats.values():
            assert {seat.candidate for seat in seats} <= self.chains.keys()


def _told(kept: _Kept) -> Decision:
    """The decision with its rows."""
    rows = tuple(_row(kept, scored) for scored in kept.scored)
    selected = msgspec.structs.replace(kept.decision.selected, candidates=rows)
    return msgspec.structs.replace(kept.decision, selected=selected)


def _row(kept: _Kept, scored: Scored) -> Candidate:
    facts = scored.facts
    uncached_tokens = kept.question.prompt_tokens - facts.overlap.blocks * kept.question.block_size
    rate = facts.speed.prefill_tokens_per_s
    return Candidate(
        instance=facts.candidate[0],
        rank=facts.candidate[1],
        overlap=facts.overlap,
        score=float(scored.score),
        active_blocks=facts.load.active_blocks,
        queued_tokens=facts.load.queued_tokens,
        reason=reason(kept.policy, kept.question, facts),
        predicted_s=(facts.load.queued_tokens + uncached_tokens) / rate if rate else 0.0,
    )


def _refused(ask: Select, code: Refusal | Literal["bad_request"], reason: str) -> SelectRefused:
    return SelectRefused(ask.request[:_ID_LIMIT], ask.attempt, code, reason)
