"""One model's routing: who can serve it, what they cache, how busy they are, and the choice among them. Pure.

Select ──▶ checked ──▶ candidates with overlap and load ──▶ policy ──▶ reserved ──▶ Selected
                                  ▲           ▲                           │
                       index, chains          load ◀──────────────────────┘  in the same step, so that the
                                                                             next question sees it
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Literal, assert_never

from msgspec import Struct

from services.router.chains import Chains, Clearing
from services.router.config import RouterConfig
from services.router.index import CandidateId, Index
from services.router.load import Load
from services.router.policies.kv import KvPolicy
from services.router.policy import Policy, reason
from services.router.question import Facts, Question, Scored
from services.router.speculation import Speculation
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
"""Candidates told in an answer."""
_ID_LIMIT = 256
_EXCLUDED_LIMIT = 4096
_NOTHING = Overlap()


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


class Prediction(Struct, frozen=True):
    """What a first token told about a choice of ours."""

    prompt_tokens: int
    predicted_tokens: int
    actual_tokens: int


class ModelRouter:
    """State and decisions for one model. Times are seconds on a clock that only grows."""

    def __init__(self, model: str, router: str, config: RouterConfig, policy: Policy, draw: Random) -> None:
        self.model = model
        self.index = Index(limit_bytes=config.index.limit_bytes)
        self.load = Load(limit=config.load.limit, grace_s=config.load.grace_s, unknown_s=config.load.unknown_s)
        self.cards: dict[str, ModelCard] = {}
        self.chains: dict[CandidateId, Chains] = {}
        self.policy_errors = 0
        """Times the configured policy failed and `kv` chose instead."""
        self.policy_error = ""
        self._router = router
        self._config = config
        self._policy = policy
        self._fallback = KvPolicy()
        self._draw = draw
        self._without_events: set[str] = set()
        limit_blocks = config.index.speculation_limit_blocks
        self.speculation = Speculation(self.index, ttl_s=config.index.speculation_s, limit_blocks=limit_blocks)
        self.history = Speculation(self.index, ttl_s=config.index.history_s, limit_blocks=limit_blocks)
        self._decisions: dict[tuple[str, int], Decision] = {}
        """Oldest first."""

    # --- who is there

    def card_up(self, card: ModelCard) -> list[Clearing]:
        """An instance serves the model now, or serves it in another way than before."""
        left: list[Clearing] = []
        if card.instance in self.cards:
            if self.cards[card.instance] == card:
                return []
            left = self._close(card.instance)
        self.cards[card.instance] = card
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
        self._without_events.discard(instance)
        gone = [candidate for candidate in self.chains if candidate[0] == instance]
        return [self.chains.pop(candidate).close() for candidate in gone]

    # --- select

    def select(self, ask: Select, now_s: float) -> Choice:
        """Choose and reserve."""
        try:
            hashes = self._checked(ask)
        except ProtocolError as wrong:
            return Choice(_refused(ask, "bad_request", str(wrong)))
        serving = [card for card in self.cards.values() if card.role == "aggregated"]
        if not serving:
            return Choice(_refused(ask, "no_instances", f"no instance serves {self.model}"))
        able = [card for card in serving if not ask.lora or ask.lora in card.lora]
        if not able:
            return Choice(_refused(ask, "unknown_model", f"no instance of {self.model} has the LoRA {ask.lora}"))
        allowed = [card for card in able if card.instance not in ask.excluded]
        if not allowed:
            return Choice(_refused(ask, "all_excluded", f"all {len(able)} instances are excluded"))
        block_size = allowed[0].block_size
        # One token of a prompt is always computed, so its last block is never all cached.
        findable = hashes[: (ask.prompt_tokens - 1) // block_size]
        overlaps = self.index.find(findable)
        facts = [
            Facts((card.instance, rank), overlaps.get((card.instance, rank), _NOTHING), load, card.capacity_blocks)
            for card in allowed
            for rank in range(max(card.ranks, 1))
            for load in (self.load.of((card.instance, rank)),)
        ]
        question = Question(ask.prompt_tokens, block_size, ask.session, ask.priority)
        policy, scored, chosen = self._decide(question, facts)
        return self._reserve(ask, hashes, question, policy, scored, chosen, now_s)

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

    def _decide(self, question: Question, facts: Sequence[Facts]) -> tuple[Policy, Sequence[Scored], Scored]:
        try:
            return self._policy, *_ask(self._policy, question, facts, self._draw)
        except Exception as wrong:  # noqa: BLE001 - a policy is a plug-in: whatever it does, the request is routed
            self.policy_errors += 1
            self.policy_error = f"{type(wrong).__name__}: {wrong}"[:200]
            return self._fallback, *_ask(self._fallback, question, facts, self._draw)

    def _reserve(
        self,
        ask: Select,
        hashes: Sequence[int],
        question: Question,
        policy: Policy,
        scored: Sequence[Scored],
        chosen: Scored,
        now_s: float,
    ) -> Choice:
        facts = chosen.facts
        instance, rank = facts.candidate
        size = question.block_size
        cached = facts.overlap.blocks * size
        reserved = Reserved(
            request=ask.request,
            attempt=ask.attempt,
            frontend=ask.frontend,
            instance=instance,
            rank=rank,
            uncached_tokens=ask.prompt_tokens - cached,
            blocks=-(-ask.prompt_tokens // size),
            router=self._router,
        )
        self.load.reserved(reserved, now_s)
        slot = self.chains[facts.candidate].slot
        (self.history if instance in self._without_events else self.speculation).add(
            slot, hashes[facts.overlap.blocks :], now_s
        )
        if self.index.crowded:
            self.index.touch(hashes[: facts.overlap.blocks])
        selected = Selected(
            request=ask.request,
            attempt=ask.attempt,
            instance=instance,
            rank=rank,
            router=self._router,
            overlap=facts.overlap,
            reason=reason(policy, question, chosen.facts),
            candidates=tuple(_row(each, reason(policy, question, each.facts)) for each in scored[:ROWS]),
        )
        self._keep(Decision(selected, now_s, ask.prompt_tokens, cached))
        return Choice(selected, reserved)

    def _keep(self, decision: Decision) -> None:
        if len(self._decisions) >= self._config.explained:
            del self._decisions[next(iter(self._decisions))]
        self._decisions[decision.selected.request, decision.selected.attempt] = decision

    # --- what happens afterwards

    def told(self, event: LoadEvent, now_s: float) -> Prediction | None:
        """A load event, of this router or another. Raises ProtocolError on numbers that cannot be."""
        match event:
            case Reserved():
                if min(event.attempt, event.rank, event.uncached_tokens, event.blocks) < 0:
                    raise ProtocolError("reserved: a negative number")
                if event.router != self._router:
                    self.load.reserved(event, now_s)
            case Prefilled():
                self.load.prefilled((event.request, event.attempt))
                return self._compared(event)
            case Finished():
                self.load.finished((event.request, event.attempt))
                decision = self._decisions.get((event.request, event.attempt))
                if decision is not None and decision.ended_s is None:
                    decision.ended_s = now_s - decision.at_s
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

    def _compared(self, event: Prefilled) -> Prediction | None:
        decision = self._decisions.get((event.request, event.attempt))
        if decision is None or decision.actual_cached_tokens is not None:
            return None
        decision.actual_cached_tokens = min(max(event.cached_tokens, 0), decision.prompt_tokens)
        decision.first_token_s = event.first_token_s if event.first_token_s > 0 else None
        return Prediction(decision.prompt_tokens, decision.predicted_cached_tokens, decision.actual_cached_tokens)

    def explain(self, request: str) -> list[Decision]:
        """The decisions kept of a request, the first attempt first; of all requests where it is empty."""
        return [decision for key, decision in self._decisions.items() if not request or key[0] == request]

    def validate(self) -> None:
        """Assert every invariant of every part."""
        self.index.validate()
        self.load.validate()
        self.speculation.validate()
        self.history.validate()
        for candidate, chains in self.chains.items():
            assert candidate[0] in self.cards
            chains.validate()
        assert len(self._decisions) <= self._config.explained


def _ask(policy: Policy, question: Question, facts: Sequence[Facts], draw: Random) -> tuple[Sequence[Scored], Scored]:
    """Those scored, best first, and the choice."""
    left = policy.filter(question, facts) or facts
    scored = [Scored(candidate, policy.score(question, candidate)) for candidate in left]
    chosen = policy.pick(question, scored, draw)
    if not any(chosen.facts.candidate == candidate.candidate for candidate in facts):
        raise ProtocolError(f"the policy picked {chosen.facts.candidate}, which is no candidate")
    return sorted(scored, key=lambda each: 0.0 + each.score), chosen  # a score that is no number fails here


def _row(scored: Scored, why: str) -> Candidate:
    facts = scored.facts
    return Candidate(
        instance=facts.candidate[0],
        rank=facts.candidate[1],
        overlap=facts.overlap,
        score=float(scored.score),
        active_blocks=facts.load.active_blocks,
        queued_tokens=facts.load.queued_tokens,
        reason=why,
    )


def _refused(
    ask: Select, code: Literal["no_instances", "all_excluded", "unknown_model", "bad_request"], reason: str
) -> SelectRefused:
    return SelectRefused(ask.request[:_ID_LIMIT], ask.attempt, code, reason)
