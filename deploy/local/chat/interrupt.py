"""Ctrl-C is noticed while a program waits, whenever it comes.

Python looks at signals before it waits for bytes or keys, and again when a signal ends the wait. One that comes between
that look and the wait ends nothing: the program would stop only with the next bytes. A timer's signal ends every wait
soon, Python looks again, and goes on waiting if there is nothing to do (PEP 475).
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

TICK_S = 0.25


@contextmanager
def noticed_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt at most TICK_S after Ctrl-C. For the main thread of a program without other timers."""
    before = signal.signal(signal.SIGALRM, _look)
    signal.setitimer(signal.ITIMER_REAL, TICK_S, TICK_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _look(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: that Python looks at its signals is enough."""
