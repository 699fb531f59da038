"""The threads of a frontend for long texts and long templates, shared by API keys in turns.

    job ──▶ wait for the key's turn ──▶ a thread ──▶ result        a large text: one job at a time in all

A thread cannot be ended. So a place is given back when its job ends, also if the request is gone before, and each job
is bounded (preprocess.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

from services.frontend.auth.turnstile import Turnstile

T = TypeVar("T")


class EncodePool:
    """The threads of one frontend."""

    def __init__(self, executor: Executor, threads: int) -> None:
        """Create it with an executor that has this many threads."""
        self.executor = executor
        self._any = Turnstile(threads, threads)
        self._large = Turnstile(1, 1)

    def of(self, key: str = "", made: Callable[[int], None] = lambda _: None) -> KeyPool:
        """Return the pool for one request of this API key. `made` is called with the tokens that were made of its texts
        or that a text has at least, as more become known; a negative number corrects the former ones."""
        return KeyPool(self, key, made)

    async def run(self, key: str, job: Callable[[], T], *, large: bool) -> T:
        """Run a job in a thread when it is the key's turn, and return what it returns."""
        places = self._large if large else self._any
        await places.enter(key)
        running = asyncio.get_running_loop().run_in_executor(self.executor, job)
        running.add_done_callback(lambda _: places.leave(key))
        return await asyncio.shield(running)


class KeyPool:
    """The pool as one request uses it."""

    __slots__ = ("_key", "_known", "_made", "_pool")

    def __init__(self, pool: EncodePool, key: str, made: Callable[[int], None]) -> None:
        self._pool = pool
        self._key = key
        self._made = made
        self._known = 0
        """The tokens that the text in work has at least."""

    def at_least(self, tokens: int) -> None:
        """Note the tokens that the text in work has at least; its request may end before there are all."""
        if tokens > self._known:
            self._made(tokens - self._known)
            self._known = tokens

    def made(self, tokens: int) -> None:
        """Note the tokens of the text in work, which ends."""
        self._made(tokens - self._known)
        self._known = 0

    async def run(self, job: Callable[[], T], *, large: bool = False) -> T:
        """Run a job in a thread when it is the key's turn; `large`: while no other large one runs."""
        return await self._pool.run(self._key, job, large=large)
