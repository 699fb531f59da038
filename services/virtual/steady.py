"""Steps of a worker that do nothing but draw one token for each running sequence: when each of them will end. Pure.

    ends_s   | 0          | 1          | 2          | 3          |
             begin        passed ──▶ the step under way           the last one ends as every step does

Most steps are of this kind where answers are long. A fleet computes the times of those that follow one another, at most
as many as `EngineCore.steady_steps` says: few where commands come often, more where they do not. It lets them pass in
the engine only once something depends on the worker's state: a command, a load report, the worker's end. After a
command, what follows the step under way is computed again.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from services.virtual.machine import StepTime
from services.worker.contracts.runner import Work
from services.worker.engine.core import REPORT_INTERVAL_S

FIRST_AHEAD = 8
"""How many steps' times are computed at once at first, and where commands come often: each makes the rest useless."""
MOST_AHEAD = 128
"""The most steps whose times are computed at once, where commands are seldom."""
LEAST_AHEAD = 3
"""The fewest steps for which this takes less time than to compute each by itself."""
_LEAST_S = 2 * REPORT_INTERVAL_S


@dataclass(slots=True, eq=False)
class SteadySteps:
    """Steps of one worker, the one under way included."""

    works: Sequence[Work]
    ends_s: Sequence[float]
    """When each of the steps ends; first, when the first of them began."""
    passed: int = 0
    """How many of them the engine has ended."""

    def due(self, now_s: float) -> int:
        """Return how many steps have ended by now that the engine has not ended. The last step is not among them."""
        return min(bisect_right(self.ends_s, now_s), len(self.ends_s) - 1) - 1 - self.passed

    @property
    def end_s(self) -> float:
        """When the step under way ends."""
        return self.ends_s[self.passed + 1]

    def elapsed_s(self, count: int) -> list[float]:
        """Return how long each of the next `count` steps takes."""
        return [end_s - began_s for began_s, end_s in pairwise(self.ends_s[self.passed : self.passed + count + 1])]


def steady_steps(
    works: Sequence[Work], most: int, step_s: StepTime, now_s: float, until_s: float | None
) -> SteadySteps | None:
    """Return the steps from the one that begins now on: at most `most`, all of which begin before `until_s`, if that
    is not None. Return None if they are too few to be worth it. Steps that share a report with others are not steady:
    their tokens come later than they end."""
    if most < LEAST_AHEAD:
        return None
    ahead = [
        Work(
            work.sequence, range(work.end + most), work.start, work.end, work.blocks, work.sampling, work.prompt_tokens
        )
        for work in works
    ]
    ends_s = array("d", [now_s])
    until_s = inf if until_s is None else until_s
    for _ in range(most):
        seconds = step_s(ahead)
        if seconds < _LEAST_S:
            break
        now_s += seconds
        ends_s.append(now_s)
        if now_s >= until_s:
            break
        for work in ahead:
            work.start = work.end
            work.end += 1
    return SteadySteps(works, ends_s) if len(ends_s) > LEAST_AHEAD else None
