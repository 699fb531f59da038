"""AttemptTable: the attempts that vLLM computes, and the parts that their outputs become. Pure.

    Submit ──add──▶ unbegun ──the first output──▶ begun ──the last output──▶ ended
                       │         │                  │                          ▲
                       │         └──▶ storing ──────┼── handed over ───────────┘
                       └── cancelled, too late, or not begun in time: ended at once, and vLLM aborts it

An attempt that another worker goes on with has its only token from vLLM, and waits here until its blocks are stored, no
longer than its prompt was computed, a second at most; then the other worker computes what it misses.

vLLM does not say which attempts it has begun before they have a token, only how many wait. It begins them by priority,
then in the order in which they came; so those that wait are the last ones in this order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from services.worker.contracts.messages import Begun, Submit
from services.worker.scheduler.hand_over import STORING_MOST_S
from services.worker.scheduler.outcome import Outcome
from shared.hashing import pack_tokens
from shared.messages.frames import NOT_BEGUN, FinishReason, Part, PromptLogprobs, TokenLogprob

FINISHES: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "cancelled"}
"""vLLM's reasons of an end, and ours; any other one is an error."""


class _VllmAttempt(Struct):
    submit: Submit
    deadline_s: float
    begin_by_s: float | None
    produced: int
    """Tokens of the request's whole output so far."""
    begun: bool = False
    cached_tokens: int = 0


class AttemptTable:
    """All attempts of one engine. An attempt's key, which vLLM knows it by, is its number as text."""

    def __init__(self) -> None:
        self._attempts: dict[str, _VllmAttempt] = {}
        self._keys: dict[tuple[str, int], str] = {}
        self._storing: dict[str, float] = {}
        """Key → when the attempt is handed over though its blocks are not stored."""
        self._outcome = Outcome()
        self._unbegun_tokens = 0

    def __len__(self) -> int:
        return len(self._attempts)

    @property
    def unbegun_tokens(self) -> int:
        """Tokens of all prompts whose first token has not come."""
        return self._unbegun_tokens

    def add(self, submit: Submit, now_s: float) -> str:
        """Add an attempt. Return its key."""
        key = str(submit.number)
        self._attempts[key] = _VllmAttempt(
            submit,
            deadline_s=now_s + submit.time_left_s,
            begin_by_s=None if submit.wait_left_s is None else now_s + submit.wait_left_s,
            produced=len(submit.tokens) // 4 - submit.prompt_tokens,
        )
        self._keys[submit.request, submit.attempt] = key
        self._unbegun_tokens += len(submit.tokens) // 4
        return key

    def find(self, request: str, attempt: int) -> str | None:
        """Return the key of a living attempt."""
        return self._keys.get((request, attempt))

    def has_begun(self, key: str) -> bool:
        """Return whether a living attempt has had an output."""
        return key in self._attempts and self._attempts[key].begun

    def uses_lora(self, name: str) -> bool:
        return any(attempt.submit.lora == name for attempt in self._attempts.values())

    def record_output(
        self,
        key: str,
        tokens: Sequence[int],
        *,
        finish: str | None = None,
        cached_tokens: int = 0,
        logprobs: tuple[TokenLogprob, ...] | None = None,
        embedding: bytes = b"",
        waited_s: tuple[float, float] | None = None,
        now_s: float = 0.0,
    ) -> None:
        """Record one output of vLLM; `finish` is its word for the end. `waited_s` are the seconds that it waited and
        that its prompt took, where they are known. Outputs of attempts that have ended are dropped."""
        attempt = self._attempts.get(key)
        if attempt is None:
            return
        first = not attempt.begun
        if first:
            attempt.cached_tokens = cached_tokens
            self._begin(attempt)
            if waited_s is not None and tokens:
                self._outcome.begun.append(Begun(attempt.submit.number, *waited_s))
        if finish is None or (finish == "length" and attempt.submit.prefill_only):
            self._record_part(attempt, tokens, logprobs=logprobs, boundary=first)
            if finish is not None:
                patience_s = STORING_MOST_S if waited_s is None else min(waited_s[1], STORING_MOST_S)
                self._storing[key] = now_s + patience_s
        else:
            reason = FINISHES.get(finish, "error")
            error = f"the engine ended the request: {finish}" if reason == "error" else ""
            self._end(key, attempt, reason, error, tokens, logprobs, embedding)

    def prompt_part(self, key: str, prompt: PromptLogprobs) -> Outcome:
        """Return an outcome that has nothing but some of an attempt's prompt log probabilities; it is empty if the
        attempt has ended."""
        outcome, attempt = Outcome(), self._attempts.get(key)
        if attempt is not None:
            submit = attempt.submit
            part = Part(submit.request, submit.attempt, attempt.produced, b"", prompt_logprobs=prompt)
            outcome.add_between(submit.frontend, part, submit.number, 0)
        return outcome

    def hand_over(self, keys: Iterable[str]) -> None:
        """The blocks of these attempts are stored, or never will be. Those that have no token yet, or have ended, are
        ignored."""
        for key in keys:
            if key in self._storing:
                self.end(key, "handed_over")

    @property
    def storing(self) -> list[str]:
        """The attempts that are handed over once their blocks are stored."""
        return list(self._storing)

    def end(self, key: str, finish: FinishReason, error: str = "") -> None:
        """End an attempt without an output of vLLM. Unknown keys are ignored."""
        attempt = self._attempts.get(key)
        if attempt is not None:
            self._begin(attempt)
            self._end(key, attempt, finish, error)

    def expire(self, now_s: float, waiting: int) -> list[str]:
        """End all attempts that are too late. `waiting` is the number of attempts that vLLM has not begun. Return the
        keys, for vLLM to abort. Attempts whose blocks were not stored in time are handed over."""
        self.hand_over([key for key, until_s in self._storing.items() if until_s <= now_s])
        late = [key for key, attempt in self._attempts.items() if attempt.deadline_s <= now_s]
        for key in late:
            self.end(key, "deadline")
        unbegun = [(key, attempt) for key, attempt in self._attempts.items() if not attempt.begun]
        unbegun.sort(key=lambda one: (-one[1].submit.priority, one[1].submit.number))
        for key, attempt in unbegun[max(0, len(unbegun) - waiting) :]:
            if attempt.begin_by_s is not None and attempt.begin_by_s <= now_s:
                self.end(key, "error", f"{NOT_BEGUN}: others that the engine computes: {len(self._attempts) - waiting}")
                late.append(key)
        return late

    def take_outcome(self) -> Outcome:
        """Return what happened since the last call."""
        outcome, self._outcome = self._outcome, Outcome()
        return outcome

    def _begin(self, attempt: _VllmAttempt) -> None:
        if not attempt.begun:
            attempt.begun = True
            self._unbegun_tokens -= len(attempt.submit.tokens) // 4

    def _end(
        self,
        key: str,
        attempt: _VllmAttempt,
        finish: FinishReason,
        error: str = "",
        tokens: Sequence[int] = (),
        logprobs: tuple[TokenLogprob, ...] | None = None,
        embedding: bytes = b"",
    ) -> None:
        del self._attempts[key]
        del self._keys[attempt.submit.request, attempt.submit.attempt]
        self._storing.pop(key, None)
        self._record_part(
            attempt, tokens, logprobs=logprobs, boundary=True, finish=finish, error=error, embedding=embedding
        )

    def _record_part(
        self,
        attempt: _VllmAttempt,
        tokens: Sequence[int],
        *,
        logprobs: tuple[TokenLogprob, ...] | None,
        boundary: bool,
        finish: FinishReason | None = None,
        error: str = "",
        embedding: bytes = b"",
    ) -> None:
        submit = attempt.submit
        part = Part(
            submit.request,
            submit.attempt,
            attempt.produced,
            pack_tokens(tokens),
            finish,
            attempt.cached_tokens,
            logprobs,
            error,
            embedding=embedding,
        )
        attempt.produced += len(tokens)
        if boundary:
            self._outcome.add_boundary(submit.frontend, part)
        else:
            self._outcome.add_between(submit.frontend, part, submit.number, len(tokens))

    def validate(self) -> None:
        """Raise AssertionError if the parts contradict each other."""
        unbegun: Iterable[_VllmAttempt] = (one for one in self._attempts.values() if not one.begun)
        assert self._unbegun_tokens == sum(len(one.submit.tokens) // 4 for one in unbegun)
        assert set(self._keys.values()) == set(self._attempts)
        assert all(self._attempts[key].submit.prefill_only and self._attempts[key].begun for key in self._storing)
