"""Processes that work for a frontend on what might take too much: each answers one question at a time.

turn ─▶ wait for a place, as its API key's turn comes ─▶ ask ─▶ the answer
                                                          ├── it ended: the question takes too much
                                                          └── it was killed, or says nothing: Unavailable

They start when they are first needed, and a question that takes too much costs its process. API keys take turns
(auth/turns.py), and none has all places. child_program.py is what they run.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from services.frontend.auth.turnstile import Turnstile
from services.frontend.child_program import FRAME
from shared.errors import Unavailable
from shared.processors import usable_processors

PROCESSES_LIMIT = 2
"""The largest number of processes of one program; a machine with one core has one."""
SILENT_S = 60.0
"""Seconds after which a process that has not answered is ended: it was stopped, or gets no processor. One that computes
is ended by its own limit of processor time, long before."""
_KILLED = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT)
"""Exit statuses of a process that another program ended, such as the kernel without memory."""

Ask = Callable[[bytes], Awaitable[bytes | None]]
"""Asks a process; None if the question takes too much."""


class ChildProcesses:
    """The processes of one program."""

    def __init__(self, module: str, work: str) -> None:
        """Create it. `module` is what they run, `work` is what one does, for errors: `decoded the image`."""
        self._module = module
        self._work = work
        processes = min(PROCESSES_LIMIT, usable_processors())
        self._places = Turnstile(processes, max(1, processes - 1))
        self.idle: list[Process] = []
        """The processes that do nothing now; one that has ended may be among them."""

    @asynccontextmanager
    async def turn(self, key: str) -> AsyncIterator[Ask]:
        """Wait for a place, and hold it while the context is open. `key` is the name of the API key."""
        await self._places.enter(key)
        too_much = False

        async def ask(question: bytes) -> bytes | None:
            nonlocal too_much
            # One that may have to end works in a process of its own.
            answer = await self._ask(question, fresh=self._places.is_slow(key))
            too_much = answer is None
            return answer

        try:
            yield ask
        finally:
            self._places.leave(key, too_much=too_much)

    async def aclose(self) -> None:
        """End the processes and wait until they have ended."""
        while self.idle:
            await end_process(self.idle.pop())

    async def _ask(self, question: bytes, *, fresh: bool) -> bytes | None:
        """Ask one process. Cancelling the call ends it, so that no answer is left unread. Raise Unavailable."""
        process, answer = await self._process(fresh=fresh), None
        try:
            async with asyncio.timeout(SILENT_S):
                answer = await _exchange(process, question)
        except TimeoutError:
            raise Unavailable(f"the process that {self._work} said nothing for {SILENT_S:g} s; ask again") from None
        finally:
            if answer is not None and len(self.idle) < PROCESSES_LIMIT:
                self.idle.append(process)
            else:
                await end_process(process)
        if answer is None and process.returncode in _KILLED:
            raise Unavailable(f"the process that {self._work} was killed; ask again")
        return answer

    async def _process(self, *, fresh: bool) -> Process:
        """Return a process that does nothing. Raise Unavailable if none can be started."""
        while self.idle and not fresh:
            process = self.idle.pop()
            if process.returncode is None:
                return process
        try:
            return await asyncio.create_subprocess_exec(
                sys.executable, "-m", self._module, stdin=PIPE, stdout=PIPE, stderr=DEVNULL
            )
        except OSError as wrong:  # no memory, or no files left
            raise Unavailable(f"no process can be started that {self._work}: {wrong.strerror}") from None

    def validate(self) -> None:
        """Assert every invariant."""
        assert len(self.idle) <= PROCESSES_LIMIT


async def _exchange(process: Process, question: bytes) -> bytes | None:
    """Return the answer of a process; None if it ends before."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(FRAME.pack(len(question)))
        process.stdin.write(question)
        await process.stdin.drain()
        [size] = FRAME.unpack(await process.stdout.readexactly(FRAME.size))
        return await process.stdout.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


async def end_process(process: Process) -> None:
    """End a process, unless it has just ended. Its status is kept: `process.kill()` would take it from asyncio, which
    then says 255."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    await process.wait()
