"""DuePromptLogprobs: which log-probabilities of a prompt's tokens are to come. Each is passed on once and in order,
whichever attempts they come from. Pure.

    index of the prompt's token   | 0 | 1 … passed on     | `due` are to come          |
                                    └ has none     next ──┘                    count ──┘

All of them come before the first token of the output.
"""

from __future__ import annotations

from shared.messages.frames import Part, PromptLogprobs


class DuePromptLogprobs:
    """The log-probabilities of one request's prompt."""

    def __init__(self, count: int) -> None:
        """`count`: how many must come. 0 if none must."""
        self._count = count
        self.due = count
        """How many have not come, from any attempt."""

    @property
    def _next(self) -> int:
        """The index of the first prompt token whose log-probability has not come."""
        return 1 + self._count - self.due

    def is_sound(self, given: PromptLogprobs) -> bool:
        """Return whether they agree with themselves and with the prompt, so that reading them cannot fail."""
        return given.is_sound and given.first + given.count - 1 <= self._count

    def receive(self, given: PromptLogprobs) -> PromptLogprobs | None:
        """Take those that have not come yet, maybe from a worker that was lost. Return them; None if there are none, or
        if some before them are missing."""
        known = self._next - given.first
        if not 0 <= known < given.count:
            return None
        self.due -= given.count - known
        return given.after(known) if known else given

    def lacks(self, part: Part) -> bool:
        """Return whether some that are still due should have come before this part or in it."""
        given = part.prompt_logprobs
        late = given is not None and given.first > self._next
        return self.due > 0 and (bool(part.tokens) or part.finish in ("stop", "length") or late)

    def validate(self) -> None:
        """Assert the invariant."""
        assert 0 <= self.due <= self._count
