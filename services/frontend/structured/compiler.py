"""Checks that grammars compile, each once, before any part of its request is queued.

check ─▶ verdict known ─▶ accepted, or InvalidRequest
   └───▶ child_processes.py: a turn of structured/compiler_process.py ─▶ verdict known

docs/decisions/0031 gives the reasons.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import msgspec

from services.frontend.child_processes import Ask, ChildProcesses
from services.frontend.protocol.errors import field_error
from services.frontend.protocol.structured import ConstraintPart
from services.frontend.structured.compile_limits import CPU_LIMIT_S, MEMORY_LIMIT_BYTES

VERDICTS_LIMIT = 4096
"""Verdicts that are remembered; the least recently used one is dropped."""
VERDICT_LIMIT_CHARACTERS = 300
"""Characters of a verdict; the library's messages may repeat the whole grammar."""
SLOW_PARTS_LIMIT = 4
"""Parts of a grammar that takes too much that are compiled alone to find the one at fault; each may take as much again.
For other errors all parts are compiled, since the parts before the wrong one took less together."""
_TOO_MUCH = f"compiling its grammar takes more than {CPU_LIMIT_S} s or {MEMORY_LIMIT_BYTES >> 20} MiB"


class GrammarCompiler:
    """Compiles the grammars of one frontend in processes that start when they are first needed."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, str] = OrderedDict()
        """Digest of a grammar → what is wrong with it; empty if nothing is."""
        self._processes = ChildProcesses("services.frontend.structured.compiler_process", "compiled the grammar")

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
                async with self._processes.turn(key) as ask:
                    if digest not in self._known:
                        self._known[digest] = (await _compiled(grammar, ask))[:VERDICT_LIMIT_CHARACTERS]
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
        await self._processes.aclose()

    def validate(self) -> None:
        """Assert every invariant."""
        assert len(self._known) <= VERDICTS_LIMIT
        self._processes.validate()
        assert all(len(verdict) <= VERDICT_LIMIT_CHARACTERS for verdict in self._known.values())


async def _compiled(grammar: str, ask: Ask) -> str:
    """Return what is wrong with a grammar. Raise Unavailable if it cannot be compiled now."""
    answer = await ask(grammar.encode())
    return _TOO_MUCH if answer is None else answer.decode()
