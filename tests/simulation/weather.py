"""The seeded weather: what becomes of each message, decided when it is sent.

    calm      a fraction of a millisecond, in order
    storm     as the plan's Skies say: lost, twice, late, out of order
    parted    an endpoint that nothing comes from and nothing gets to, though it is connected

Two messages of one link arrive in the order they were sent, except where one overtakes. Watches and leases are
streams: only late.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context
from random import Random

from tests.simulation.clock import SimulatedLoop
from tests.simulation.plan import Skies

CALM_S = 0.0005
RELIABLE = ("watch", "lease")
ONCE = ".store"
"""NATS repeats nothing, and this alone would tell: a Store that came twice is granted twice, and the second grant lasts
until its engine, some time later, asks for more and has to attach again."""


class StormyWeather:
    """A `shared.bus.delivery.Delivery`. What arrives runs as the receiver's own."""

    def __init__(
        self, loop: SimulatedLoop, seed: int, skies: Skies, contexts: dict[str, Context], tell: Callable[[str], None]
    ) -> None:
        """`contexts`: endpoint → what its callbacks run in. `tell` gets a line for each message."""
        self._loop = loop
        self._draw = Random(f"weather {seed}").random
        self._skies = skies
        self._contexts = contexts
        self._tell = tell
        self._links: dict[tuple[str, str], float] = {}
        """(sender, receiver) → when the last message arrives."""
        self.stormy = True
        self.parted: set[str] = set()

    def __call__(self, sender: str, receiver: str, subject: str, deliver: Callable[[], None]) -> None:
        if subject.startswith("_INBOX"):
            subject = "an answer"
        if not self.stormy:
            self._carry(sender, receiver, subject, deliver, CALM_S * self._draw(), ordered=True)
        elif subject in RELIABLE:
            self._carry(sender, receiver, subject, deliver, self._delay_s(), ordered=True)
        elif sender in self.parted or receiver in self.parted:
            self._tell(f"{sender} ─x {receiver}: {subject} (parted)")
        elif self._draw() < self._skies.lost:
            self._tell(f"{sender} ─x {receiver}: {subject} (lost)")
        else:
            repeated = self._draw() < self._skies.repeated and not subject.endswith(ONCE)
            for _ in range(2 if repeated else 1):
                ordered = self._draw() >= self._skies.overtaken
                self._carry(sender, receiver, subject, deliver, self._delay_s(), ordered=ordered)

    def _delay_s(self) -> float:
        return self._draw() * (self._skies.delay_s if self._draw() < self._skies.slow else CALM_S)

    def _carry(
        self, sender: str, receiver: str, subject: str, deliver: Callable[[], None], delay_s: float, *, ordered: bool
    ) -> None:
        arrives_s = self._loop.time() + delay_s
        if ordered:
            arrives_s = max(arrives_s, self._links.get((sender, receiver), 0.0))
            self._links[sender, receiver] = arrives_s
        self._tell(f"{sender} ─▶ {receiver}: {subject} at {arrives_s:.6f}")
        self._loop.call_at(arrives_s, deliver, context=self._contexts.get(receiver))
