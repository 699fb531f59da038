"""The shell's account of the attempts it has taken (pure).

              admit                       a part with a finish reason
    unknown ────────▶ living ──────────────────────────────────────────▶ ended (remembered for a while)
                        │  cancel ▲
                        ▼         │ (told to the engine once)
                     cancelled ───┘ ends by the engine's part, as the others do

Living attempts are bounded in number, and in tokens that wait for their first part: beyond, new ones are refused as
overloaded. Ended ones are remembered, the latest few thousand, so that a repeated Generate is accepted again and
computed once; so are cancelled ones that were unknown, so that a Generate which its Cancel overtook computes nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from services.worker.admission import objection
from services.worker.engine import Ready
from shared.messages import Accepted, Generate, GenerateReply, Part, Refused, StreamState

Name = tuple[str, int]
"""(request, attempt)."""


@dataclass(slots=True)
class _Living:
    frontend: str
    produced: int
    """Length of the request's whole output so far."""
    unbegun_tokens: int
    """Its tokens, until its first part has come."""
    cancelled: bool = False


class Attempts:
    """One decision per Generate, one finish per attempt."""

    def __init__(self, *, model: str, most_living: int, most_waiting_tokens: int, most_remembered: int = 4096) -> None:
        self._model = model
        self._most_waiting_tokens = most_waiting_tokens
        self._most_living = most_living
        self._most_remembered = most_remembered
        self._living: dict[Name, _Living] = {}
        self._waiting_tokens = 0
        """Of the attempts whose first part has not come."""
        self._ended: OrderedDict[Name, None] = OrderedDict()
        self.draining = False
        """New attempts are refused."""

    def admit(self, generate: Generate, facts: Ready | None) -> tuple[GenerateReply, bool]:
        """The answer, and whether the attempt is new and has to be computed. `facts` is None without an engine."""
        name = (generate.request, generate.attempt)
        living = self._living.get(name)
        if living is not None and living.frontend != generate.frontend:
            return Refused(*name, "bad_request", f"request: {generate.request} is computed for another frontend"), False
        if living is not None or name in self._ended:
            return Accepted(*name), False
        refused = self._refusal(generate, facts)
        if refused is not None:
            return refused, False
        count = len(generate.tokens) // 4
        self._living[name] = _Living(generate.frontend, count - generate.prompt_tokens, count)
        self._waiting_tokens += count
        return Accepted(*name), True

    def forget(self, name: Name) -> None:
        """It was admitted but could not be handed to the engine; its Generate is refused after all."""
        self._waiting_tokens -= self._living.pop(name).unbegun_tokens

    def cancel(self, name: Name) -> bool:
        """Whether the engine has to be told."""
        living = self._living.get(name)
        if living is None:
            self._remember(name)  # where it overtook its Generate, that one starts nothing
            return False
        if living.cancelled:
            return False
        living.cancelled = True
        return True

    def tell(self, part: Part) -> bool:
        """A part from the engine; whether it is for an attempt that lives here, and goes on to the frontend."""
        name = (part.request, part.attempt)
        living = self._living.get(name)
        if living is None:
            return False
        living.produced = part.first + len(part.tokens) // 4
        self._waiting_tokens -= living.unbegun_tokens
        living.unbegun_tokens = 0
        if part.finish is not None:
            self._end(name)
        return True

    def fail_all(self, reason: str) -> dict[str, list[Part]]:
        """Every living attempt ends with an error: frontend → parts."""
        parts: dict[str, list[Part]] = {}
        for name, living in list(self._living.items()):
            failed = Part(*name, first=living.produced, tokens=b"", finish="error", error=reason)
            parts.setdefault(living.frontend, []).append(failed)
            self._end(name)
        return parts

    @property
    def names(self) -> list[Name]:
        """All that live."""
        return list(self._living)

    def of(self, frontend: str) -> list[StreamState]:
        """How far each of a frontend's living attempts is."""
        return [
            StreamState(*name, produced=living.produced)
            for name, living in self._living.items()
            if living.frontend == frontend
        ]

    def _refusal(self, generate: Generate, facts: Ready | None) -> Refused | None:
        name = (generate.request, generate.attempt)
        if self.draining:
            return Refused(*name, "draining", "this worker is shutting down")
        if facts is None:
            return Refused(*name, "not_ready", "the engine is starting")
        if generate.model != self._model:
            return Refused(*name, "wrong_model", f"this worker serves {self._model}")
        wrong = objection(generate, facts)
        if wrong:
            return Refused(*name, "bad_request", wrong)
        if len(self._living) >= self._most_living:
            return Refused(*name, "overloaded", f"{len(self._living)} attempts are waiting or running")
        if self._waiting_tokens and self._waiting_tokens + len(generate.tokens) // 4 > self._most_waiting_tokens:
            return Refused(*name, "overloaded", f"{self._waiting_tokens} tokens are waiting")
        return None

    def _end(self, name: Name) -> None:
        self._waiting_tokens -= self._living.pop(name).unbegun_tokens
        self._remember(name)

    def _remember(self, name: Name) -> None:
        self._ended[name] = None
        if len(self._ended) > self._most_remembered:
            self._ended.popitem(last=False)

    def validate(self) -> None:
        """Raises AssertionError where the account contradicts itself."""
        assert len(self._living) <= self._most_living
        assert len(self._ended) <= self._most_remembered
        assert self._living.keys().isdisjoint(self._ended)
        assert self._waiting_tokens == sum(living.unbegun_tokens for living in self._living.values())
        assert all(living.produced >= 0 for living in self._living.values())
