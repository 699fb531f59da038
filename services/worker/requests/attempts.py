"""Attempts: the attempts that the shell has accepted. Pure.

              admit                       a part with a finish reason
    unknown ────────▶ living ──────────────────────────────────────────▶ ended (remembered for a while)
                        │  cancel ▲
                        ▼         │ (sent to the engine once)
                     cancelled ───┘ ends by the engine's part, as the others do

Living attempts are bounded in number, and in tokens that wait for their first part; if there are more, new ones are
refused as overloaded. The latest few thousand ended attempts are remembered, so that a repeated Generate is accepted
again and computed once. So are unknown attempts that were cancelled, so that a Generate which its Cancel overtook
computes nothing.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from services.worker.contracts.messages import Ready
from services.worker.requests.validation import find_fault
from shared.messages.frames import Part, StreamState
from shared.messages.generate import Accepted, Generate, GenerateReply, Refused

Name = tuple[str, int]
"""An attempt's name: (request, attempt)."""


@dataclass(slots=True)
class _Living:
    number: int
    """Short name of the attempt between shell and engine; never used twice."""
    frontend: str
    lora: str
    unbegun_tokens: int
    """Number of its tokens, until its first part has come; then 0."""
    admitted_s: float
    cancelled: bool = False


class Attempts:
    """The attempts of one worker: one decision for each Generate, one finish for each attempt."""

    def __init__(self, *, model: str, most_living: int, most_waiting_tokens: int, most_remembered: int = 4096) -> None:
        self._model = model
        self._most_waiting_tokens = most_waiting_tokens
        self._most_living = most_living
        self._most_remembered = most_remembered
        self._living: dict[Name, _Living] = {}
        self._produced: Counter[int] = Counter()
        """Number of a living attempt → length of its request's whole output so far."""
        self._names: dict[int, Name] = {}
        """Number of a living attempt → its name."""
        self._admitted = 0
        self._waiting_tokens = 0
        """Number of tokens of the attempts whose first part has not come."""
        self._ended: OrderedDict[Name, None] = OrderedDict()
        self.draining = False
        """Whether new attempts are refused because the worker shuts down."""
        self.closed = ""
        """Why new attempts are refused at an operator's wish. Empty if they are not."""
        self.loras: tuple[str, ...] = ()
        """The LoRAs that attempts may ask for."""

    def admit(self, generate: Generate, facts: Ready | None, now_s: float = 0.0) -> tuple[GenerateReply, int]:
        """Return the answer and, where the attempt is new and must be computed, its number; else 0. `facts` is None
        without an engine."""
        name = (generate.request, generate.attempt)
        living = self._living.get(name)
        if living is not None and living.frontend != generate.frontend:
            return Refused(*name, "bad_request", f"request: {generate.request} is computed for another frontend"), 0
        if living is not None or name in self._ended:
            return Accepted(*name), 0
        refused = self._refusal(generate, facts)
        if refused is not None:
            return refused, 0
        count = len(generate.tokens) // 4
        self._admitted += 1
        self._living[name] = _Living(self._admitted, generate.frontend, generate.lora, count, now_s)
        self._names[self._admitted] = name
        self._produced[self._admitted] = count - generate.prompt_tokens
        self._waiting_tokens += count
        return Accepted(*name), self._admitted

    def expects(self, generate: Generate, facts: Ready | None) -> bool:
        """Return whether an attempt that was announced is new, and would be admitted if it came now."""
        name = (generate.request, generate.attempt)
        return name not in self._living and name not in self._ended and self._refusal(generate, facts) is None

    def forget(self, name: Name) -> None:
        """Forget an attempt, such as one that was admitted but could not be sent to the engine."""
        living = self._living.pop(name)
        del self._names[living.number]
        del self._produced[living.number]
        self._waiting_tokens -= living.unbegun_tokens

    def cancel(self, name: Name) -> bool:
        """Cancel an attempt. Return whether the engine must cancel it."""
        living = self._living.get(name)
        if living is None:
            self._remember(name)  # if it overtook its Generate, that Generate starts nothing
            return False
        if living.cancelled:
            return False
        living.cancelled = True
        return True

    def name_of(self, number: int) -> Name | None:
        """Return the name of the living attempt with this number."""
        return self._names.get(number)

    def count_tokens(self, numbers: Iterable[int]) -> None:
        """Count one more token for each of these numbers of living attempts. This is done in C: 0.03 µs a token."""
        self._produced.update(numbers)

    def record_part(self, part: Part) -> None:
        """Take up the first or the last part of a living attempt, from the engine."""
        name = (part.request, part.attempt)
        living = self._living[name]
        self._produced[living.number] = part.first + len(part.tokens) // 4
        self._waiting_tokens -= living.unbegun_tokens
        living.unbegun_tokens = 0
        if part.finish is not None:
            self._end(name)

    def fail_all(self, reason: str) -> dict[str, list[Part]]:
        """End every living attempt with an error; return frontend → parts."""
        parts: dict[str, list[Part]] = {}
        for name, living in list(self._living.items()):
            parts.setdefault(living.frontend, []).append(self._failed_part(name, living, reason))
            self._end(name)
        return parts

    def oldest_unbegun_s(self, now_s: float) -> float:
        """Return the age of the attempt that has waited longest for its first part; 0 if none waits."""
        waiting = (living.admitted_s for living in self._living.values() if living.unbegun_tokens)
        return max(0.0, now_s - next(waiting, now_s))

    def running_with(self, lora: str = "") -> list[Name]:
        """Return the living attempts with a LoRA; without a name all of them."""
        return [name for name, living in self._living.items() if not lora or living.lora == lora]

    def hand_back(self, names: Iterable[Name], reason: str) -> dict[str, list[Part]]:
        """Cancel living attempts, and return frontend → parts that end them with an error there. Here they live until
        the engine has ended them. The engine must cancel each attempt that a part is returned for."""
        parts: dict[str, list[Part]] = {}
        for name in names:
            living = self._living[name]
            if self.cancel(name):
                parts.setdefault(living.frontend, []).append(self._failed_part(name, living, reason))
        return parts

    def _failed_part(self, name: Name, living: _Living, reason: str) -> Part:
        return Part(*name, first=self._produced[living.number], tokens=b"", finish="error", error=reason)

    @property
    def names(self) -> list[Name]:
        """Names of all living attempts."""
        return list(self._living)

    def __len__(self) -> int:
        """Return the number of living attempts."""
        return len(self._living)

    def streams_of(self, frontend: str) -> list[StreamState]:
        """Return how far each of a frontend's living attempts is."""
        return [
            StreamState(*name, produced=self._produced[living.number])
            for name, living in self._living.items()
            if living.frontend == frontend
        ]

    def _refusal(self, generate: Generate, facts: Ready | None) -> Refused | None:
        name = (generate.request, generate.attempt)
        if self.draining:
            return Refused(*name, "draining", "this worker is shutting down")
        if self.closed:
            return Refused(*name, "draining", self.closed)
        if facts is None:
            return Refused(*name, "not_ready", "the engine is starting")
        if generate.model != self._model:
            return Refused(*name, "wrong_model", f"this worker serves {self._model}")
        if generate.lora and generate.lora not in self.loras:
            return Refused(*name, "wrong_model", "this worker has not loaded that LoRA")
        wrong = find_fault(generate, facts)
        if wrong:
            return Refused(*name, "bad_request", wrong)
        if len(self._living) >= self._most_living:
            return Refused(*name, "overloaded", f"{len(self._living)} attempts are waiting or running")
        if self._waiting_tokens and self._waiting_tokens + len(generate.tokens) // 4 > self._most_waiting_tokens:
            return Refused(*name, "overloaded", f"{self._waiting_tokens} tokens are waiting")
        return None

    def _end(self, name: Name) -> None:
        self.forget(name)
        self._remember(name)

    def _remember(self, name: Name) -> None:
        self._ended[name] = None
        if len(self._ended) > self._most_remembered:
            self._ended.popitem(last=False)

    def validate(self) -> None:
        """Raise AssertionError if the attempts contradict themselves."""
        assert len(self._living) <= self._most_living
        assert len(self._ended) <= self._most_remembered
        assert self._living.keys().isdisjoint(self._ended)
        assert self._waiting_tokens == sum(living.unbegun_tokens for living in self._living.values())
        assert self._names == {living.number: name for name, living in self._living.items()}
        assert self._produced.keys() == {living.number for living in self._living.values()}
        assert all(produced >= 0 for produced in self._produced.values())
