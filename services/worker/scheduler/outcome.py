"""What happened in a scheduler's steps. Pure."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial

import msgspec

from services.worker.contracts.messages import KV_EVENTS, PARTS, AttemptNote, Begun, EngineLoad, Exchanged, Stepped
from shared.blocks import PoolEvent
from shared.messages.frames import Part
from shared.messages.kv_events import KvEvent


@dataclass(slots=True)
class Outcome:
    """What happened since the outcome before it."""

    parts: defaultdict[str, list[Part]] = field(default_factory=partial(defaultdict, list))
    """Frontend → its attempts' parts, in order."""
    boundary_parts: list[Part] = field(default_factory=list)
    """The parts among them that are the first or the last of their attempt."""
    one_token_attempts: list[int] = field(default_factory=list)
    """`Submit.number` of the attempt of each other part, which brings the attempt one token further."""
    begun: list[Begun] = field(default_factory=list)
    """The attempts that had their first token."""
    notes: list[AttemptNote] = field(default_factory=list)
    """What else happened to attempts, in words."""
    events: list[PoolEvent] = field(default_factory=list)
    """Blocks that were stored and evicted, in order."""
    prompt_parts: list[tuple[str, Part]] = field(default_factory=list)
    """Frontends, and parts that have log-probabilities of prompts and nothing else. They come before `parts`."""

    def add_boundary(self, frontend: str, part: Part) -> None:
        """Add a part that is the first or the last of its attempt."""
        self.parts[frontend].append(part)
        self.boundary_parts.append(part)

    def add_between(self, frontend: str, part: Part, number: int, tokens: int = 1) -> None:
        """Add a part that is neither. It has `tokens` tokens of the attempt `number`."""
        self.parts[frontend].append(part)
        if tokens == 1:
            self.one_token_attempts.append(number)
        else:
            self.one_token_attempts.extend([number] * tokens)

    def add_note(self, number: int, text: str) -> None:
        """Add what happened to the attempt `number`, in words."""
        self.notes.append(AttemptNote(number, text))

    def split(self, most_bytes: int) -> list[Outcome]:
        """Return several outcomes that are together as this one, without `prompt_parts`: their log-probabilities are in
        `parts`, in pieces. Each has at most `most_bytes` of log-probabilities of prompts and as much of embeddings, or
        one embedding. Everything else is in one of them, after the prompts and before the embeddings that follow."""
        if not self.prompt_parts:
            return self._split_embeddings(most_bytes)
        first, *others = dataclasses.replace(self, prompt_parts=[])._split_embeddings(most_bytes)
        outcomes, left = list[Outcome](), 0
        for frontend, part in self.prompt_parts:
            assert part.prompt_logprobs is not None
            for piece in part.prompt_logprobs.pieces(most_bytes):
                if piece.size_bytes > left:
                    outcomes.append(Outcome())
                    left = most_bytes
                left -= piece.size_bytes
                outcomes[-1].parts[frontend].append(msgspec.structs.replace(part, prompt_logprobs=piece))
        outcomes[-1].extend(first)
        return [*outcomes, *others]

    def _split_embeddings(self, most_bytes: int) -> list[Outcome]:
        if sum([len(part.embedding) for part in self.boundary_parts]) <= most_bytes:
            return [self]
        first = Outcome(
            one_token_attempts=self.one_token_attempts, begun=self.begun, notes=self.notes, events=self.events
        )
        outcomes, left = [first], most_bytes
        for frontend, parts in self.parts.items():
            for part in parts:
                size = len(part.embedding)
                if size > left:
                    outcomes.append(Outcome())
                    left = most_bytes
                left -= size
                (outcomes[-1] if size else first).parts[frontend].append(part)
        holders = {id(part): outcome for outcome in outcomes for parts in outcome.parts.values() for part in parts}
        for part in self.boundary_parts:
            holders[id(part)].boundary_parts.append(part)
        return outcomes

    def to_stepped(
        self,
        events: list[KvEvent],
        *,
        progress: int,
        event_sequence: int,
        digest: int,
        load: EngineLoad,
        steps: int = 0,
        tokens: int = 0,
        elapsed_s: float = 0.0,
        exchanged: Exchanged | None = None,
        rank: int = 0,
    ) -> Stepped:
        """Return this outcome as the report of a rank. `events` are the blocks' events as routers get them; the other
        arguments are the report's fields. Parts of prompts were split off before."""
        return Stepped(
            progress=progress,
            encoded_parts={frontend: PARTS.encode(parts) for frontend, parts in self.parts.items()},
            boundary_parts=self.boundary_parts,
            one_token_attempts=self.one_token_attempts,
            event_batch=KV_EVENTS.encode(events) if events else b"",
            event_sequence=event_sequence,
            digest=digest,
            load=load,
            steps=steps,
            tokens=tokens,
            elapsed_s=elapsed_s,
            exchanged=exchanged,
            rank=rank,
            begun=self.begun,
            notes=self.notes,
        )

    def extend(self, later: Outcome) -> None:
        """Append what happened after this outcome."""
        for frontend, parts in later.parts.items():
            self.parts[frontend].extend(parts)
        self.boundary_parts.extend(later.boundary_parts)
        self.one_token_attempts.extend(later.one_token_attempts)
        self.begun.extend(later.begun)
        self.notes.extend(later.notes)
        self.events.extend(later.events)
        self.prompt_parts.extend(later.prompt_parts)
