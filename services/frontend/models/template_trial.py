"""Tries a chat template before it is used. `python -m services.frontend.models.template_trial` reads one as JSON.

A template counts its steps (chat_template.py), but nothing bounds what one of them takes: a text of 10^9 characters, a
source that takes minutes to compile. In a frontend such a step would hold Python's lock, again with each request. So
each template is first compiled and rendered in a process of its own, with a few conversations. The process ends where
that takes more than CPU_LIMIT_S or MEMORY_LIMIT_BYTES, and the model is refused.

A template that is slow only with other conversations, or at another time, is not found.
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
"""The processor time in seconds to compile a template, and again for each conversation. Large templates of real models
take some 20 ms."""
MEMORY_LIMIT_BYTES = 512 << 20
"""The address space of the process; Python and the libraries take 60 MB of it."""
WALL_LIMIT_S = 60.0
"""The time in seconds for the whole trial, on a machine that other processes keep busy."""
STEPS = 10_000
"""The number of steps in each conversation; a template with more of them is stopped by its own counter later."""
KNOWN = 32
"""The number of cached verdicts: the latest used."""
WHY_LIMIT_CHARACTERS = 200
"""The length to which the last line of a failed process is cut."""
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
    """The input of the process."""

    source: str
    tokens: dict[str, str]


def try_template(source: str, tokens: Mapping[str, str]) -> None:
    """Try a template in a process; blocks. Raise ModelError if it takes too much, or if the trial failed."""
    if wrong := _verdict(source, tuple(sorted(tokens.items()))):
        raise ModelError(f"the chat template: {wrong}")


@lru_cache(KNOWN)
def _verdict(source: str, tokens: tuple[tuple[str, str], ...]) -> str:
    """Return the objection to a template; empty if there is none. Raise ModelError if the trial failed."""
    program = (sys.executable, "-m", "services.frontend.models.template_trial")
    given = msgspec.json.encode(TrialInput(source, dict(tokens)))
    try:
        ended = subprocess.run(program, input=given, capture_output=True, timeout=WALL_LIMIT_S, check=False)
    except OSError as wrong:  # no memory, or no files left
        raise ModelError(f"no process to try the chat template in: {wrong.strerror}") from None
    except subprocess.TimeoutExpired:
        raise ModelError(f"the trial of the chat template did not end within {WALL_LIMIT_S:g} s") from None
    if ended.returncode in (-signal.SIGPROF, -signal.SIGSEGV):  # too long, or too deep for Python's compiler
        return _TOO_MUCH
    if ended.returncode:
        why = ": ".join(["", *ended.stderr.decode(errors="replace").splitlines()[-1:]])[:WHY_LIMIT_CHARACTERS]
        raise ModelError(f"the process that tried the chat template ended with status {ended.returncode}{why}")
    return msgspec.json.decode(ended.stdout, type=str)


def objection(tried: TrialInput) -> str:
    """Return why a template cannot be used; empty if no reason is found. The caller limits time and memory."""
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
    except ModelError as wrong:  # loading the model reports it
        return _TOO_MUCH if isinstance(wrong.__context__, MemoryError) else ""
    return ""


def _begin_step() -> None:
    """Count processor time from here on; more than the limit ends the process."""
    signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)


def _conversations() -> Iterator[tuple[list[dict[str, object]], list[dict[str, object]]]]:
    """Yield the messages and tools of each conversation."""
    system: list[dict[str, object]] = [{"role": "system", "content": "You are brief."}]
    for tools in ([], [_TOOL]):
        yield _TURN[:1], tools
        yield [*system, *_TURN, *_TURN[:1]], tools
    yield [*_TURN * 50, {"role": "user", "content": "word " * 10_000}], []


def main() -> None:
    """Read a TrialInput from standard input and write the objection to it."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    wrong = objection(msgspec.json.decode(sys.stdin.buffer.read(), type=TrialInput))
    sys.stdout.buffer.write(msgspec.json.encode(wrong))


if __name__ == "__main__":
    main()
