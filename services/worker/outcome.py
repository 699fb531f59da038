"""What a scheduler's steps came to."""

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

    def add(self, later: Outcome) -> None:
        """What happened after this."""
        for frontend, parts in later.parts.items():
            self.parts[frontend].extend(parts)
        self.notable.extend(later.notable)
        self.advanced.extend(later.advanced)
        self.events.extend(later.events)
