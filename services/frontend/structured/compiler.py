"""Checks that grammars compile, each once, before any part of its request is queued.

check ─▶ verdict known ─▶ accepted, or InvalidRequest
   └───▶ wait for the key's turn ─▶ structured/compiler_process.py ─▶ verdict known
                                     ├── it ended: the grammar takes too much; the next grammar gets a new process
                                     └── it was killed: no verdict, Unavailable

There are two processes if the machine has several cores. API keys take turns (auth/turns.py), and none has both
processes.

docs/decisions/0031 gives the reasons.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress

import msgspec

from services.frontend.auth.turnstile import Turnstile
from services.frontend.protocol.errors import field_error
from services.frontend.protocol.structured import ConstraintPart
from services.frontend.structured.compile_limits import CPU_LIMIT_S, MEMORY_LIMIT_BYTES
from shared.errors import Unavailable
from shared.processors import usable_processors

VERDICTS_LIMIT = 4096
"""Verdicts that are remembered; the least recently used one is dropped."""
PROCESSES_LIMIT = 2
"""The largest number of processes; a machine with one core has one."""
VERDICT_LIMIT_CHARACTERS = 300
"""Characters of a verdict; the library's messages may repeat the whole grammar."""
SLOW_PARTS_LIMIT = 4
"""Parts of a grammar that takes too much that are compiled alone to find the one at fault; each may take as much again.
For other errors all parts are compiled, since the parts before the wrong one took less together."""
_TOO_MUCH = f"compiling its grammar takes more than {CPU_LIMIT_S} s or {MEMORY_LIMIT_BYTES >> 20} MiB"

_KILLED = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT)
"""Exit statuses of a process that another program ended, such as the kernel without memory."""


class GrammarCompiler:
    """Compiles the grammars of one frontend in processes that start when they are first needed."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, str] = OrderedDict()
        """Digest of a grammar → what is wrong with it; empty if nothing is."""
        processes = min(PROCESSES_LIMIT, usable_processors())
        self._places = Turnstile(processes, max(1, processes - 1))
        self._idle: list[Process] = []
        """The processes that compile nothing now; one that has ended may be among them."""

    async def check(
        self,
        grammar: str,
        param: str,
        parts: Sequence[ConstraintPart] = (),
        *,
        key: str = "",
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Check a grammar. `param` is the field that it comes from; an error names the first of its `parts` that does
        not compile alone. `key` is the name of its API key. `waiting` counts it while it waits, and raises Overloaded
        at a limit. Raise InvalidRequest; Unavailable if it cannot be checked now."""
        digest = hashlib.sha256(grammar.encode()).digest()
        if digest not in self._known:
            with waiting():
                await self._places.enter(key)
                too_much = False
                try:
                    if digest not in self._known:
                        verdict = await self._compiled(grammar, fresh=self._places.is_slow(key))
                        too_much = verdict == _TOO_MUCH
                        self._known[digest] = verdict[:VERDICT_LIMIT_CHARACTERS]
                finally:
                    self._places.leave(key, too_much=too_much)
        self._known.move_to_end(digest)
        wrong = self._known[digest]
        if len(self._known) > VERDICTS_LIMIT:
            self._known.popitem(last=False)
        if wrong:
            for part in parts[:SLOW_PARTS_LIMIT] if wrong == _TOO_MUCH else parts:
                piece = msgspec.json.encode({"grammars": [part.piece]}).decode()
                await self.check(piece, part.param, key=key, waiting=waiting)
            raise field_error(param, wrong)

    async def aclose(self) -> None:
        """End the processes and wait until they have ended."""
        while self._idle:
            await _end(self._idle.pop())

    async def _compiled(self, grammar: str, *, fresh: bool) -> str:
        """Return what is wrong with a grammar; `fresh`: a new process compiles it, since that may have to end.
        Cancelling the call ends the process, so that no answer is left unread."""
        process, answer = await self._process(fresh=fresh), b""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(msgspec.json.encode(grammar) + b"\n")
            answer = await process.stdout.readline()
        finally:
            if answer.endswith(b"\n") and len(self._idle) < PROCESSES_LIMIT:
                self._idle.append(process)
            else:
                await _end(process)
        if answer.endswith(b"\n"):
            return msgspec.json.decode(answer, type=str)
        if process.returncode in _KILLED:
            raise Unavailable("the process that compiled the grammar was killed; ask again")
        return _TOO_MUCH

    async def _process(self, *, fresh: bool) -> Process:
        """Return a process that compiles nothing. Raise Unavailable if none can be started."""
        while self._idle and not fresh:
            process = self._idle.pop()
            if process.returncode is None:
                return process
        program = (sys.executable, "-m", "services.frontend.structured.compiler_process")
        try:
            return await asyncio.create_subprocess_exec(*program, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)
        except OSError as wrong:  # no memory, or no files left
            raise Unavailable(f"cannot start a process to compile the grammar: {wrong.strerror}") from None

    def validate(self) -> None:
        """Assert every invariant."""
        assert len(self._known) <= VERDICTS_LIMIT
        assert len(self._idle) <= PROCESSES_LIMIT
        assert all(len(verdict) <= VERDICT_LIMIT_CHARACTERS for verdict in self._known.values())


async def _end(process: Process) -> None:
    """End a process, unless it has just ended. Its status is kept: `process.kill()` would take it from asyncio, which
    then says 255."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    await process.wait()
