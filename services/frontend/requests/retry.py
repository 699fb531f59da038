"""What a request's attempts have come to, and whether there shall be another one. Pure.

What is lost is bounded four times:

- An attempt that brought no new token is fruitless: `attempts` fruitless ones in a row are enough.
- A prompt that kills its engine, also behind some tokens, must not go on to kill all others. So attempts that ended
  with their worker or its engine count in all: after `attempts` of them, the next one is enough. (Who only shared the
  engine with it counts the same, but is as a rule not beside it every time.)
- An attempt that its worker takes along as a whole, before it brought a token, is in neither count. It most often stood
  in that worker's queue, and a prompt ends its engine, which the worker outlives and tells of. `GONE_EARLY` times
  `attempts` of these are allowed, and the next one is enough.
- Where nobody can be chosen after a loss, the request waits and asks again, for `rescue_s`: a lone worker's new start
  loses nothing. An offer that comes to nothing meanwhile counts as nothing, once a worker. A request that lost nothing
  yet is told at once that there is nobody, for its client may put it elsewhere; but while NATS is away, or routers that
  are there do not answer, it waits too.

An attempt that its worker hands back unharmed is neither fruitless, once a worker, nor a death: a stream outlives any
number of rolling restarts.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

ATTEMPTS = 3
RESCUE_S = 20.0
GONE_EARLY = 4
"""So many times `attempts` may be lost with their whole worker before they brought a token."""
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
"""Between two questions of a request that waits; each pause is twice the one before."""
LOSSES_LISTED = 8
"""Lost attempts that an error tells of, the latest."""

Loss = Literal[
    "refused",  # by the worker, when it was offered
    "unreachable",  # the offer found nobody, or no answer came
    "gone",  # the worker's lease ended, or nobody answers for it
    "frozen",  # the worker is silent, or its engine stands still
    "failed",  # the worker says so: its engine was lost
    "handed_back",  # by the worker, unharmed: it shuts down, or took this frontend for gone
    "stalled",  # it streamed, and then no token came for too long
    "unheard",  # it has ended, and its end was lost on the way
    "gap",  # tokens were lost on the way
    "senseless",  # what it streams cannot be
]
"""Why an attempt was lost."""
DEADLY: frozenset[Loss] = frozenset(("gone", "frozen", "failed"))
"""The worker or its engine ended under the attempt, perhaps because of it."""
NOTHING_DONE: frozenset[Loss] = frozenset(("refused", "unreachable"))
"""An offer that came to nothing."""
NOT_ITS_FAULT: frozenset[Loss] = frozenset(("unheard", "gap"))
"""The worker may be chosen again."""


class RetryBudget:
    """Of one request. Times are seconds on one clock."""

    def __init__(self, attempts: int = ATTEMPTS, rescue_s: float = RESCUE_S) -> None:
        self._attempts = attempts
        self._rescue_s = rescue_s
        self.may_wait = False
        """Whether it waits where nobody can be chosen."""
        self.excluded: dict[str, None] = {}
        """Who failed or refused it; anybody may be asked again once all are in here."""
        self.pause_s = FIRST_PAUSE_S
        """Until the next question of a request that waits."""
        self._fruitless = 0
        """Attempts since the last new token, the present one included."""
        self._has_token = False
        """Whether the present attempt has brought a token."""
        self._deaths = 0
        """DEADLY losses, but for those in `_gone_early`."""
        self._gone_early = 0
        """Attempts that were gone with their worker before they brought a token."""
        self._losses: deque[str] = deque(maxlen=LOSSES_LISTED)
        self._rescue_from_s: float | None = None
        """When nobody could be chosen, and since then no token has come."""

    def attempt_started(self) -> None:
        """An attempt begins."""
        self._fruitless += 1
        self._has_token = False

    def token_received(self) -> None:
        """It has brought its first token."""
        self._fruitless = 0
        self._has_token = True
        self._rescue_from_s, self.pause_s = None, FIRST_PAUSE_S

    def attempt_failed(self, loss: Loss, attempt: int, instance: str, why: str, *, overloaded: bool = False) -> str:
        """The attempt was lost. Empty: there may be another one; else why not. A refusal may be for being
        `overloaded`, which is no reason to wait."""
        gone_early = loss == "gone" and not self._has_token
        excused = loss == "handed_back" or gone_early or (loss in NOTHING_DONE and self.may_wait)
        if excused and (gone_early or instance not in self.excluded):
            self._fruitless = max(0, self._fruitless - 1)
        self._losses.append(f"attempt {attempt} at {instance}: {why}")
        self.may_wait |= not overloaded
        self._deaths += loss in DEADLY and not gone_early
        self._gone_early += gone_early
        if loss not in NOT_ITS_FAULT:
            self.excluded[instance] = None
        if self._fruitless >= self._attempts:
            return self.error_text(f"{self._fruitless} attempts in a row brought no token")
        if self._deaths > self._attempts:
            return self.error_text(f"{self._deaths} attempts ended with their worker")
        if self._gone_early > GONE_EARLY * self._attempts:
            return self.error_text(f"{self._gone_early} attempts ended with their worker before they brought a token")
        return ""

    def pause_ended(self, now_s: float) -> bool:
        """A pause is over; whether to ask again."""
        if self._rescue_from_s is None:
            self._rescue_from_s = now_s - self.pause_s
        self.pause_s = min(2 * self.pause_s, LONGEST_PAUSE_S)
        return now_s - self._rescue_from_s < self._rescue_s

    def error_text(self, why: str) -> str:
        """`why`, and what became of the attempts so far."""
        return "; ".join((why, *self._losses))

    def validate(self) -> None:
        """Asserts the invariants."""
        assert 0 <= self._fruitless <= self._attempts
        assert 0 <= self._deaths <= self._attempts + 1
        assert 0 <= self._gone_early <= GONE_EARLY * self._attempts + 1
        assert len(self._losses) <= LOSSES_LISTED
        assert FIRST_PAUSE_S <= self.pause_s <= LONGEST_PAUSE_S
        assert self.may_wait or self._rescue_from_s is None
