"""Tries a chat template before it is used. `python -m services.frontend.models.template_trial` reads one as JSON.

A template counts its steps (chat_template.py), but nothing bounds what one of them takes: a text of 10^9 characters, a
source that takes minutes to compile. In a frontend such a step would hold Python's lock, again with each request. So
each template is first compiled and rendered in a process of its own, with a few conversations. The process ends where
that takes more than CPU_LIMIT_S or MEMORY_LIMIT_BYTES, and the model is refused.

Not found is a template that is slow with other conversations only, or at another time.
"""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache

import msgspec
from msgspec import Struct

from services.frontend.models.chat_template import ChatTemplate, StepLimitReached
from shared.errors import InvalidRequest, ModelError

CPU_LIMIT_S = 2.0
"""To compile it, and again for each conversation; large ones of real models take some 20 ms."""
MEMORY_LIMIT_BYTES = 512 << 20
"""Of address space; Python and the libraries take 60 MB of it."""
WALL_LIMIT_S = 60.0
"""For all of it, where other processes leave it little of the machine."""
STEPS = 10_000
"""In each conversation; a template that takes more of them is one whose steps are counted."""
KNOWN = 32
"""Verdicts kept, the latest used."""
WHY_LIMIT_CHARACTERS = 200
"""Of the last line that a failed process wrote."""
_TOO_MUCH = f"compiling or rendering it takes more than {CPU_LIMIT_S:g} s or {MEMORY_LIMIT_BYTES >> 20} MiB"
_TOOL: dict[str, object] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
_TURN: list[dict[str, object]] = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello. How can I help?"},
]


class TrialInput(Struct, frozen=True):
    """What the process is given."""

    source: str
    tokens: dict[str, str]


def try_template(source: str, tokens: Mapping[str, str]) -> None:
    """Blocks while a process tries it. Raises ModelError where it takes too much, or where that cannot be found out."""
    if wrong := _verdict(source, tuple(sorted(tokens.items()))):
        raise ModelError(f"the chat template: {wrong}")


@lru_cache(KNOWN)
def _verdict(source: str, tokens: tuple[tuple[str, str], ...]) -> str:
    """Empty: it takes no more than it may. Raises ModelError where nothing can be said."""
    program = (sys.executable, "-m", "services.frontend.models.template_trial")
    given = msgspec.json.encode(TrialInput(source, dict(tokens)))
    try:
        ended = subprocess.run(program, input=given, capture_output=True, timeout=WALL_LIMIT_S, check=False)
    except OSError as wrong:  # no memory, or no files left
        raise ModelError(f"no process to try the chat template in: {wrong.strerror}") from None
    except subprocess.TimeoutExpired:
        raise ModelError(f"the chat template was not tried within {WALL_LIMIT_S:g} s") from None
    if ended.returncode in (-signal.SIGPROF, -signal.SIGSEGV):  # too long, or too deep for Python's compiler
        return _TOO_MUCH
    if ended.returncode:
        why = ": ".join(["", *ended.stderr.decode(errors="replace").splitlines()[-1:]])[:WHY_LIMIT_CHARACTERS]
        raise ModelError(f"the process that tried the chat template ended with status {ended.returncode}{why}")
    return msgspec.json.decode(ended.stdout, type=str)


def objection(tried: TrialInput) -> str:
    """Why it cannot be used; empty: nothing here speaks against it. The caller bounds time and memory."""
    try:
        _begin_step()
        template = ChatTemplate(tried.source, tried.tokens)
        for messages, tools in _conversations():
            _begin_step()
            try:
                template.render(messages, STEPS, tools=tools)
            except StepLimitReached:
                pass
            except InvalidRequest as wrong:  # it may refuse a conversation
                if isinstance(wrong.__context__, MemoryError):
                    return _TOO_MUCH
    except ModelError as wrong:  # its loading says so
        return _TOO_MUCH if isinstance(wrong.__context__, MemoryError) else ""
    return ""


def _begin_step() -> None:
    """What it takes is counted from here on; more than the limit ends the process."""
    signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)


def _conversations() -> Iterator[tuple[list[dict[str, object]], list[dict[str, object]]]]:
    """Messages and tools."""
    system: list[dict[str, object]] = [{"role": "system", "content": "You are brief."}]
    for tools in ([], [_TOOL]):
        yield _TURN[:1], tools
        yield [*system, *_TURN, *_TURN[:1]], tools
    yield [*_TURN * 50, {"role": "user", "content": "word " * 10_000}], []


def main() -> None:
    """Says what is wrong with the one that stands on standard input."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    wrong = objection(msgspec.json.decode(sys.stdin.buffer.read(), type=TrialInput))
    sys.stdout.buffer.write(msgspec.json.encode(wrong))


if __name__ == "__main__":
    main()
