"""Tries a chat template before it is used. `python -m services.frontend.models.template_trial` reads one as JSON.

A template counts its steps (chat_template.py), but nothing bounds what one of them takes: a text of 10^9 characters, a
source that takes minutes to compile, a constant that Jinja computes then. In a frontend such a step would hold Python's
lock, again with each request. So each template is first compiled and rendered in a process of its own, with a few
conversations. The process ends where that takes more than CPU_LIMIT_S or MEMORY_LIMIT_BYTES, and the model is refused.
A frontend runs what the process has compiled: with more memory, Jinja would compute other constants.

A template that is slow only with other conversations, or at another time, is not found.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from services.frontend.models.chat_template import (
    ChatTemplate,
    CompiledTemplate,
    StepLimitReached,
    compile_template,
)
from services.frontend.models.trial import CPU_LIMIT_S, begin_step, limit_process, run_trial
from shared.errors import InvalidRequest, ModelError

MEMORY_LIMIT_BYTES = 512 << 20
"""The address space of the process; Python and the libraries take 60 MB of it."""
STEPS = 10_000
"""The number of steps in each conversation; a template with more of them is stopped by its own counter later."""
KNOWN = 32
"""The number of cached results: the latest used."""
_TOO_MUCH = (
    f"the chat template: compiling or rendering it takes more than {CPU_LIMIT_S:g} s or {MEMORY_LIMIT_BYTES >> 20} MiB"
)
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


def try_template(source: str, tokens: Mapping[str, str]) -> CompiledTemplate:
    """Compile and try a template in a process; blocks. Raise ModelError if it takes too much or does not compile, or if
    the trial failed."""
    found = _tried(source, tuple(sorted(tokens.items())))
    if isinstance(found, str):
        raise ModelError(found)
    return found


@lru_cache(KNOWN)
def _tried(source: str, tokens: tuple[tuple[str, str], ...]) -> CompiledTemplate | str:
    """Return the compiled template, or why it cannot be used. Raise ModelError if the trial failed."""
    given = msgspec.json.encode(TrialInput(source, dict(tokens)))
    output = run_trial("services.frontend.models.template_trial", given, "the chat template")
    return _TOO_MUCH if output is None else msgspec.json.decode(output, type=CompiledTemplate | str)


def compile_and_try(tried: TrialInput) -> CompiledTemplate | str:
    """Return the compiled template with its rules, or why it cannot be used. The caller limits time and memory."""
    try:
        begin_step()
        compiled = compile_template(tried.source)
        template = ChatTemplate(compiled, tried.tokens)
        for messages, tools in _conversations():
            begin_step()
            try:
                template.render(messages, STEPS, tools=tools)
            except StepLimitReached:
                pass
            except InvalidRequest as wrong:  # it may refuse a conversation
                if isinstance(wrong.__context__, MemoryError):
                    return _TOO_MUCH
        begin_step()
        return replace(compiled, rules=template.rules)
    except MemoryError:
        return _TOO_MUCH
    except ModelError as wrong:
        return _TOO_MUCH if isinstance(wrong.__context__, MemoryError) else str(wrong)


def _conversations() -> Iterator[tuple[list[dict[str, object]], list[dict[str, object]]]]:
    """Yield the messages and tools of each conversation."""
    system: list[dict[str, object]] = [{"role": "system", "content": "You are brief."}]
    for tools in ([], [_TOOL]):
        yield _TURN[:1], tools
        yield [*system, *_TURN, *_TURN[:1]], tools
    yield [*_TURN * 50, {"role": "user", "content": "word " * 10_000}], []


def main() -> None:
    """Read a TrialInput from standard input and write what it becomes."""
    limit_process(MEMORY_LIMIT_BYTES)
    found = compile_and_try(msgspec.json.decode(sys.stdin.buffer.read(), type=TrialInput))
    sys.stdout.buffer.write(msgspec.json.encode(found))


if __name__ == "__main__":
    main()
