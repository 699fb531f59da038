"""An event loop that owns time and knows whose turn it is.

    ready ──▶ run, one callback at a time            Nothing is ready: time jumps to the next timer. Nothing is
      ▲  └──▶ held, while its owner is frozen        scheduled either: Deadlock, for nothing could ever happen again.
    timers

There is no I/O and there are no threads: what is sent to an executor runs at once. So the order of everything follows
from the program alone.

The owner of a callback is what OWNER is in its context, so a task and all that it starts belong to one simulated
process. Freezing an owner is what SIGSTOP does to a process: not one of its callbacks runs, its timers pass, and what
others send waits. A process that is never thawed has died.

docs/decisions/0017 gives the reasons.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from contextvars import Context, ContextVar
from typing import TypeVar, TypeVarTuple, Unpack

OWNER: ContextVar[str] = ContextVar("owner", default="")
CALLBACKS_LIMIT = 200_000
"""Callbacks that may run without time moving on; more mean that a process spins."""


Ts = TypeVarTuple("Ts")
T = TypeVar("T")


class Deadlock(Exception):
    """Nothing is ready and nothing is scheduled."""


class Livelock(Exception):
    """Callbacks follow callbacks, and time stands still."""


class _Nothing:
    """The selector of a loop without I/O."""

    def select(self, timeout: float | None) -> list[object]:
        return []


class _Turn(asyncio.Handle):
    """A callback with its owner."""

    _context: Context

    @property
    def owner(self) -> str:
        return self._context.get(OWNER, "")


class _Timer(asyncio.TimerHandle):
    """A callback with its time and its owner."""

    _context: Context

    @property
    def owner(self) -> str:
        return self._context.get(OWNER, "")


class SimulatedLoop(asyncio.BaseEventLoop):
    """Time begins at 0 seconds."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = _Nothing()
        self._now_s = 0.0
        self._turns: deque[_Turn | _Timer] = deque()
        self._timers: list[tuple[float, int, _Timer]] = []
        """With their time, and their number for those of the same time."""
        self._timer_count = 0
        self._held: dict[str, list[_Turn | _Timer]] = {}
        """Frozen owner → callbacks whose turn it was."""
        self._still = 0
        """Callbacks since time moved."""
        self.callbacks = 0
        """Callbacks run so far."""

    def time(self) -> float:
        return self._now_s

    def freeze(self, owner: str) -> None:
        """None of its callbacks run until `thaw`. Idempotent."""
        self._held.setdefault(owner, [])

    def thaw(self, owner: str) -> None:
        """What was held has its turn, in order, before what came later. Idempotent."""
        self._turns.extendleft(reversed(self._held.pop(owner, ())))

    def thaw_all(self) -> None:
        """Thaw everything."""
        for owner in list(self._held):
            self.thaw(owner)

    # --- what asyncio calls

    def call_soon(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        handle = _Turn(callback, args, self, context)
        self._turns.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_at(
        self, when: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = _Timer(when, callback, args, self, context)
        self._timer_count += 1
        heapq.heappush(self._timers, (when, self._timer_count, timer))
        return timer

    def call_later(
        self, delay: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        done: asyncio.Future[T] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as wrong:  # noqa: BLE001 - it belongs to whoever awaits the future
            done.set_exception(wrong)
        return done

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Cancelled timers are dropped when their time comes."""

    def _process_events(self, event_list: list[object]) -> None:
        """There are none."""

    def _run_once(self) -> None:
        while not self._turns:
            self._jump()
        if self._still > CALLBACKS_LIMIT:
            self._still = 0
            raise Livelock(f"{CALLBACKS_LIMIT} callbacks at {self._now_s:.6f} s; the next is {self._turns[0]!r}")
        handle = self._turns.popleft()
        if handle.cancelled():
            return
        held = self._held.get(handle.owner)
        if held is not None:
            held.append(handle)
            return
        self.callbacks += 1
        self._still += 1
        handle._run()

    def _jump(self) -> None:
        """To the next timer, and make ready what is due then."""
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        if not self._timers:
            raise Deadlock(f"nothing can happen any more at {self._now_s:.6f} s")
        when = self._timers[0][0]
        if when > self._now_s:
            self._now_s = when
            self._still = 0
        while self._timers and self._timers[0][0] <= self._now_s:
            self._turns.append(heapq.heappop(self._timers)[2])
