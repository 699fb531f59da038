"""What a request got, over all its choices and inputs, for its line in the log. Pure."""

from __future__ import annotations

from msgspec import Struct, field

INSTANCES_NAMED = 8
"""The number of workers that are named; a request with many choices may have more."""


class Served(Struct):
    """The sums of one request."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    first_token_s: float | None = None
    """The seconds from its arrival to the first token of any choice; None before."""
    instances: list[str] = field(default_factory=list)
    """The workers that had the last attempt of a choice, each once."""
    attempts: int = 0

    def add(self, *, prompt_tokens: int, output_tokens: int, cached_tokens: int, instance: str, attempts: int) -> None:
        """Add a choice or an input that has ended. `instance` is empty if no worker was found."""
        self.prompt_tokens += prompt_tokens
        self.output_tokens += output_tokens
        self.cached_tokens += cached_tokens
        self.attempts += attempts
        if instance and instance not in self.instances and len(self.instances) < INSTANCES_NAMED:
            self.instances.append(instance)

    def begun(self, after_s: float) -> None:
        """Note a first token."""
        if self.first_token_s is None:
            self.first_token_s = after_s
