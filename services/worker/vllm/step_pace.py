"""StepPace: how many tokens the next step of vLLM may have, so that steps with prompts take `step_s`. Pure.

before a step: allow_tokens ──▶ vLLM schedules ──▶ scheduled … the step … processed ──▶ the speed is learned
"""

from __future__ import annotations

from collections import deque

from services.worker.scheduler.throughput import StepBudget

STEP_S = "HEADRACE_VLLM_STEP_S"
"""The environment variable with the seconds of a step; vLLM's processes inherit it."""
FIRST_TOKENS_PER_S = 256.0
"""Speed, in tokens a second, that is assumed before one was measured. It doubles at most with each step."""


class StepPace:
    """The pace of one core, whose steps end in the order in which they were scheduled."""

    def __init__(self, *, step_s: float, least_tokens: int, most_tokens: int) -> None:
        """`least_tokens` are those of prompts that each step has room for, however long it takes; `most_tokens` are
        those of all requests in vLLM's longest step."""
        self._least_tokens = least_tokens
        self._most_tokens = most_tokens
        self._budget = StepBudget(
            step_s=step_s,
            least_tokens=least_tokens,
            most_tokens=most_tokens,
            first_tokens_per_s=FIRST_TOKENS_PER_S,
        )
        self._scheduled_s: deque[float] = deque()
        """When each step that has not ended was scheduled. They are as many as vLLM has under way."""
        self._ended_s = 0.0

    def allow_tokens(self, decoding: int) -> int:
        """Return how many tokens the next step may have, of which `decoding` are those of answers at most."""
        return min(self._most_tokens, max(self._budget.tokens, decoding + self._least_tokens))

    def scheduled(self, now_s: float) -> None:
        """A step was scheduled. It begins now, or after the step before it."""
        self._scheduled_s.append(now_s)

    def processed(self, tokens: int, sequences: int, now_s: float) -> None:
        """The oldest step has ended: it had `tokens` tokens of `sequences` requests."""
        begun_s = max(self._scheduled_s.popleft(), self._ended_s)
        self._ended_s = now_s
        if tokens:
            self._budget.record_step(tokens, sequences, now_s - begun_s, now_s)
