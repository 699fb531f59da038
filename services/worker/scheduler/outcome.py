"""What a scheduler's steps came to. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from shared.blocks import PoolEvent
from shared.messages import Part


@dataclass(frozen=True, slots=True)
class Outcome:
    """What happened since the last one."""

    parts: defaultdict[str, list[Part]] = field(default_factory=lambda: defaultdict(list))
    """Frontend → parts, in order."""
    notable: list[Part] = field(default_factory=list)
    """Those of the parts that are the first or the last of their attempt."""
    advanced: list[int] = field(default_factory=list)
    """`Submit.number` of the attempts that the others bring one token further."""
    events: list[PoolEvent] = field(default_factory=list)

    def apart(self, most_bytes: int) -> list[Outcome]:
        """The same in several, each with at most so many bytes of embeddings, or with one; all else is in the first."""
        if sum([len(part.embedding) for part in self.notable]) <= most_bytes:
            return [self]
        first = Outcome(advanced=self.advanced, events=self.events)
        outcomes, left = [first], most_bytes
        for frontend, parts in self.parts.items():
            for part in parts:
                size = len(part.embedding)
                if size > left:
                    outcomes.append(Outcome())
                    left = most_bytes
                left -= size
                (outcomes[-1] if size else first).parts[frontend].append(part)
        told = {id(part): outcome for outcome in outcomes for parts in outcome.parts.values() for part in parts}
        for part in self.notable:
            told[id(part)].notable.append(part)
        return outcomes

    def add(self, later: Outcome) -> None:
        """What happened after this."""
        for frontend, parts in later.parts.items():
            self.parts[frontend].extend(parts)
        self.notable.extend(later.notable)
        self.advanced.extend(later.advanced)
        self.events.extend(later.events)
