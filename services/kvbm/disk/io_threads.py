"""Threads that wait for disks, so that the event loop does not.

    loop: submit(kind, job, done) ──▶ reads ─────────────┐ reads first, since engines wait for them;
                                  └─▶ writes and upkeep ─┘ every fourth time the others ──▶ thread: job(page)
    loop: done(result or error) ◀── one wake-up for all that ended meanwhile ◀─────────────────────┘

Each thread has an aligned page of its own for headers. A job cannot be cancelled: its memory is in use until `done` was
called. So a job is not awaited. `done` is called in the loop, exactly once.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import mmap
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from msgspec import Struct

from services.kvbm.disk.format import PAGE_BYTES

T = TypeVar("T")
Kind = Literal["read", "write", "upkeep"]
OTHERS_FIRST_EVERY = 4
"""How often a thread takes a write or upkeep before the reads: every fourth time."""

_log = logging.getLogger(__name__)


class _Task(Struct, frozen=True):
    kind: Kind
    job: Callable[[memoryview], Any]
    done: Callable[[Any], None]


class DiskThreads:
    """Threads for disk requests. `limit` bounds the reads that are queued or running, and likewise the writes; the
    callers bound upkeep. Made within a running loop; ended by `close`."""

    def __init__(self, threads: int, limit: int) -> None:
        if threads < 1 or limit < 1:
            raise ValueError(f"{threads} disk threads with at most {limit} requests")
        self.limit = limit
        self._loop = asyncio.get_running_loop()
        self._outstanding: dict[Kind, int] = {"read": 0, "write": 0, "upkeep": 0}
        """Requests whose `done` was not called yet. Used by the loop alone."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._work = threading.Condition()
        """The lock that guards everything below."""
        self._reads: deque[_Task] = deque()
        self._others: deque[_Task] = deque()
        self._ended: list[tuple[_Task, Any]] = []
        self._closed = False
        self._threads = [
            # Daemons: a thread that hangs in a dead disk must not keep the process from ending.
            threading.Thread(target=self._run, name=f"disk-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, kind: Kind, job: Callable[[memoryview], T], done: Callable[[T | Exception], None]) -> bool:
        """Run `job` with an aligned page in a thread, then `done` in the loop with its result or its exception. Return
        False, and call neither, if the limit is reached or `close` has begun."""
        if self._closed or (kind != "upkeep" and self._outstanding[kind] >= self.limit):
            return False
        self._outstanding[kind] += 1
        self._idle.clear()
        with self._work:
            (self._reads if kind == "read" else self._others).append(_Task(kind, job, done))
            self._work.notify()
        return True

    async def upkeep(self, job: Callable[[memoryview], T], over: Callable[[], None]) -> T:
        """Run `job` in a thread and wait for it. Raise what it raises. If the wait is cancelled the job runs on;
        `over` is called when it has really ended."""
        ended: asyncio.Future[T] = self._loop.create_future()

        def done(result: T | Exception) -> None:
            over()
            if ended.cancelled():
                return
            if isinstance(result, Exception):
                ended.set_exception(result)
            else:
                ended.set_result(result)

        if not self.submit("upkeep", job, done):
            over()
            raise _closing()
        return await ended

    async def close(self, limit_s: float) -> bool:
        """End queued requests with ECANCELED, and wait for running ones. Return False if a disk has not answered after
        `limit_s`: its thread and memory stay in use until the process ends."""
        with self._work:
            self._closed = True
            left = [*self._reads, *self._others]
            self._reads.clear()
            self._others.clear()
            self._work.notify_all()
        for task in left:
            self._finish(task, _closing())
        try:
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        for thread in self._threads:
            thread.join()
        return True

    def _run(self) -> None:
        page = memoryview(mmap.mmap(-1, PAGE_BYTES))
        turn = 0
        while True:
            with self._work:
                while not (self._reads or self._others):
                    if self._closed:
                        return
                    self._work.wait()
                turn += 1
                others = self._others and (not self._reads or turn % OTHERS_FIRST_EVERY == 0)
                task = (self._others if others else self._reads).popleft()
            try:
                result = task.job(page)
            except OSError as error:
                result = error
            except Exception as error:  # noqa: BLE001 — a tier thread's edge: it must outlive any one request
                _log.exception("a disk request failed unexpectedly")
                result = error
            self._end(task, result)

    def _end(self, task: _Task, result: Any) -> None:
        with self._work:
            self._ended.append((task, result))
            if len(self._ended) > 1:
                return  # the loop is awake and will deliver this too
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:
            _log.warning("a disk request ended after the event loop had: its result is dropped")

    def _deliver(self) -> None:
        with self._work:
            ended, self._ended = self._ended, []
        for task, result in ended:
            self._finish(task, result)

    def _finish(self, task: _Task, result: Any) -> None:
        self._outstanding[task.kind] -= 1
        if not any(self._outstanding.values()):
            self._idle.set()
        task.done(result)


def _closing() -> OSError:
    return OSError(errno.ECANCELED, "the disk tier is closing")
