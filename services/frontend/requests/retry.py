"""Counts what became of a request's attempts, and decides whether there is another one. Pure.

Four limits:

- An attempt that brought no new token is fruitless. After `attempts` fruitless ones in a row the request fails.
- A prompt that kills its engine, perhaps only after some tokens, must not kill all the others. So attempts that ended
  with their worker or its engine are counted in all: after `attempts` of them, the next one fails the request. (A
  request that only shares an engine with such a prompt counts the same, but rarely shares it each time.)
- An attempt whose whole worker is gone before it brought a token is in neither count. It most often stood in that
  worker's queue: a prompt ends its engine, but the worker outlives the engine and reports it. `GONE_EARLY` times
  `attempts` of these are allowed.
- If no worker can be chosen after a loss, the request waits and asks again for `rescue_s`: the restart of a single
  worker loses nothing. While it waits, the first failed offer to each worker is not counted. A request that has not
  lost an attempt fails at once, because its client may find room elsewhere. It waits too, however, while NATS is away
  or registered routers do not answer.

An attempt that its worker hands back unharmed is not fruitless, once for each worker, and is no death: a stream
outlives any number of rolling restarts.

A lost frame is asked for before an attempt is given up, since a new attempt computes again what the caches no longer
hold.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

ATTEMPTS = 3
RESCUE_S = 20.0
GONE_EARLY = 4
"""How many times `attempts` of a request may be lost with their whole worker before they brought a token."""
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
"""The longest pause, in seconds, between two questions of a request that waits. Each is twice the one before."""
LOSSES_LISTED = 8
"""The number of lost attempts that an error lists: the latest ones."""

Loss = Literal[
    "refused",  # the worker did not accept it
    "unreachable",  # the worker did not listen, or did not answer
    "gone",  # the worker's lease ended, or it no longer listens
    "frozen",  # the worker is silent, or its engine makes no progress
    "failed",  # the worker reports that its engine was lost
    "handed_back",  # the worker gave it up unharmed: it shuts down, or assumed that this frontend was gone
    "stalled",  # it streamed, then no token came for too long
    "unheard",  # it has ended, but its end was lost on the way
    "gap",  # tokens were lost on the way
    "senseless",  # its stream is inconsistent
]
"""Why an attempt was lost."""
DEADLY: frozenset[Loss] = frozenset(("gone", "frozen", "failed"))
"""The losses by which the worker or its engine ended, perhaps because of the attempt."""
NOTHING_DONE: frozenset[Loss] = frozenset(("refused", "unreachable"))
"""The losses of attempts that their worker did not take."""
NOT_ITS_FAULT: frozenset[Loss] = frozenset(("unheard", "gap"))
"""The losses after which the worker may be chosen again."""


class RetryBudget:
    """How often one request is tried. Times are seconds on one clock."""

    def __init__(self, attempts: int = ATTEMPTS, rescue_s: float = RESCUE_S) -> None:
        self._attempts = attempts
        self._rescue_s = rescue_s
        self.may_wait = False
        """Whether the request waits if no worker can be chosen."""
        self.excluded: dict[str, None] = {}
        """The workers that failed or refused it. Once it has all workers, it is cleared."""
        self.pause_s = FIRST_PAUSE_S
        """The pause before the next question of a request that waits."""
        self._fruitless = 0
        """The number of attempts since the last new token, the current one included."""
        self._has_token = False
        """Whether the current attempt has brought a token."""
        self._deaths = 0
        """The number of DEADLY losses without those in `_gone_early`."""
        self._gone_early = 0
        """The number of attempts that were gone with their worker before they brought a token."""
        self._losses: deque[str] = deque(maxlen=LOSSES_LISTED)
        self._rescue_from_s: float | None = None
        """When no worker could be chosen; None once a token has come after that."""

    def attempt_started(self) -> None:
        """Count a new attempt."""
        self._fruitless += 1
        self._has_token = False

    def token_received(self) -> None:
        """Record the first token of the current attempt."""
        self._fruitless = 0
        self._has_token = True
        self._rescue_from_s, self.pause_s = None, FIRST_PAUSE_S

    def turn_came(self) -> None:
        """Forget who refused the request, and how long no worker could be chosen: the model was asleep, and has woken
        now."""
        self.excluded.clear()
        self._rescue_from_s, self.pause_s = None, FIRST_PAUSE_S

    def attempt_failed(self, loss: Loss, attempt: int, instance: str, why: str, *, overloaded: bool = False) -> str:
        """Count a lost attempt. Return why there is no other one; empty if there may be one.

        `overloaded`: the worker refused because it is full, which is no reason to wait for a worker.
        """
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
        """Return whether to ask again, now that a pause is over."""
        if self._rescue_from_s is None:
            self._rescue_from_s = now_s - self.pause_s
        self.pause_s = min(2 * self.pause_s, LONGEST_PAUSE_S)
        return now_s - self._rescue_from_s < self._rescue_s

    def error_text(self, why: str) -> str:
        """Return `why` followed by what became of the latest attempts."""
        return "; ".join((why, *self._losses))

    def validate(self) -> None:
        """Assert the invariants."""
        assert 0 <= self._fruitless <= self._attempts
        assert 0 <= self._deaths <= self._attempts + 1
        assert 0 <= self._gone_early <= GONE_EARLY * self._attempts + 1
        assert len(self._losses) <= LOSSES_LISTED
        assert FIRST_PAUSE_S <= self.pause_s <= LONGEST_PAUSE_S
        assert self.may_wait or self._rescue_from_s is None
