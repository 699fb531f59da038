"""Checks that grammars compile, each once, before any part of its request is queued.

check ─▶ verdict known ─▶ accepted, or InvalidRequest
   └───▶ wait in line ─▶ structured/compiler_process.py ─▶ verdict known
                          └── it ended: the grammar takes too much; the next grammar gets a new process
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from services.frontend.protocol.errors import field_error
from services.frontend.protocol.structured import ConstraintPart
from services.frontend.structured.compiler_process import CPU_LIMIT_S, MEMORY_LIMIT_BYTES
from shared.errors import Overloaded, Unavailable

VERDICTS_LIMIT = 4096
"""Verdicts that are remembered; the least recently used one is dropped."""
WAITING_LIMIT = 64
"""Requests that may wait for a verdict; further ones are refused."""
VERDICT_LIMIT_CHARACTERS = 300
"""Characters of a verdict; the library's messages may repeat the whole grammar."""
SLOW_PARTS_LIMIT = 4
"""Parts of a grammar that takes too much that are compiled alone to find the one at fault; each may take as much again.
For other errors all parts are compiled, since the parts before the wrong one took less together."""
_TOO_MUCH = f"compiling its grammar takes more than {CPU_LIMIT_S} s or {MEMORY_LIMIT_BYTES >> 20} MiB"


class GrammarCompiler:
    """Compiles the grammars of one frontend in a process that starts when it is first needed."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, str] = OrderedDict()
        """Digest of a grammar → what is wrong with it; empty if nothing is."""
        self._lock = asyncio.Lock()
        self._waiting = 0
        self._process: Process | None = None

    async def check(self, grammar: str, param: str, parts: Sequence[ConstraintPart] = ()) -> None:
        """Check a grammar. `param` is the field that it comes from; an error names the first of its `parts` that does
        not compile alone. Raise InvalidRequest; Overloaded or Unavailable if it cannot be checked now."""
        digest = hashlib.sha256(grammar.encode()).digest()
        if digest not in self._known:
            if self._waiting >= WAITING_LIMIT:
                raise Overloaded(f"{WAITING_LIMIT} grammars already wait to be compiled")
            self._waiting += 1
            try:
                async with self._lock:
                    if digest not in self._known:
                        self._known[digest] = (await self._compiled(grammar))[:VERDICT_LIMIT_CHARACTERS]
            finally:
                self._waiting -= 1
        self._known.move_to_end(digest)
        wrong = self._known[digest]
        if len(self._known) > VERDICTS_LIMIT:
            self._known.popitem(last=False)
        if wrong:
            for part in parts[:SLOW_PARTS_LIMIT] if wrong == _TOO_MUCH else parts:
                await self.check(msgspec.json.encode({"grammars": [part.piece]}).decode(), part.param)
            raise field_error(param, wrong)

    async def aclose(self) -> None:
        """End the process and wait until it has ended."""
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def _compiled(self, grammar: str) -> str:
        """Return what is wrong with a grammar. Cancelling the call ends the process, so that no answer is left
        unread."""
        if self._process is None or self._process.returncode is not None:
            program = (sys.executable, "-m", "services.frontend.structured.compiler_process")
            try:
                self._process = await asyncio.create_subprocess_exec(*program, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)
            except OSError as wrong:  # no memory, or no files left
                raise Unavailable(f"cannot start a process to compile the grammar: {wrong.strerror}") from None
        process, answer = self._process, b""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(msgspec.json.encode(grammar) + b"\n")
            answer = await process.stdout.readline()
        finally:
            if not answer.endswith(b"\n"):
                await self.aclose()
        return msgspec.json.decode(answer, type=str) if answer.endswith(b"\n") else _TOO_MUCH

    def validate(self) -> None:
        """Assert every invariant."""
        assert len(self._known) <= VERDICTS_LIMIT
        assert 0 <= self._waiting <= WAITING_LIMIT
        assert all(len(verdict) <= VERDICT_LIMIT_CHARACTERS for verdict in self._known.values())
