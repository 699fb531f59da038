"""A machine in a fleet's virtual time: a step takes longer while other workers of its machine compute too.

    seconds of a step = alone + (busy - alone) x others ÷ (all - 1)

`alone` and `busy` are measured: while no other worker of the machine computes, and while all of them do. When others
begin or end, what is left of a step goes on in the new time. A step in which nothing is computed takes none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from services.virtual.store import FleetClock
from services.worker.contracts.runner import Work

StepTime = Callable[[Sequence[Work]], float]
"""A function that returns how long a worker takes for a step, in seconds."""


@dataclass(slots=True, eq=False)
class _Step:
    alone_s: float
    busy_s: float
    end: Callable[[float], None]
    began_s: float
    seconds: float = -1.0
    """How long the whole step would take as it goes on now. -1 before it goes on."""
    since_s: float = 0.0
    """Since when it goes on so."""
    left: float = 1.0
    """The part of the step that was left then."""
    due_s: float = -1.0


class SimulatedMachine:
    """One machine, and the steps that its workers compute."""

    def __init__(self, clock: FleetClock, workers: int = 1, busy_s: StepTime | None = None) -> None:
        """`busy_s` is how long a step takes while `workers` compute. None if they do not slow one another."""
        self._clock = clock
        self._most_others = max(1, workers - 1)
        self._busy_s = busy_s
        self._steps: list[_Step] = []

    @property
    def slows(self) -> bool:
        """Whether its workers slow one another."""
        return self._busy_s is not None

    def begin(self, works: Sequence[Work], step_s: StepTime, end: Callable[[float], None]) -> None:
        """Begin a step that takes `step_s` alone; `end` is called at its end with the seconds that it took."""
        if not works:
            self._clock.after(0.0, partial(end, 0.0))
            return
        alone_s = step_s(works)
        busy_s = alone_s if self._busy_s is None else self._busy_s(works)
        self._steps.append(_Step(alone_s, busy_s, end, self._clock.now_s))
        self._go_on()

    def _go_on(self) -> None:
        """Go on with each step in the time that it takes next to the others that there are now."""
        now_s, others = self._clock.now_s, min(1.0, (len(self._steps) - 1) / self._most_others)
        for step in self._steps:
            seconds = step.alone_s + (step.busy_s - step.alone_s) * others
            if seconds == step.seconds:
                continue
            if step.seconds > 0:
                step.left = max(0.0, step.left - (now_s - step.since_s) / step.seconds)
            step.seconds, step.since_s, step.due_s = seconds, now_s, now_s + step.left * seconds
            self._clock.at(step.due_s, partial(self._end, step, step.due_s))

    def _end(self, step: _Step, due_s: float) -> None:
        if due_s != step.due_s:
            return  # others have begun or ended since
        step.due_s = -1.0
        self._steps.remove(step)
        step.end(self._clock.now_s - step.began_s)
        self._go_on()
