"""Compiles grammars for a frontend, one per line as JSON: `python -m services.frontend.structured.compiler_process`.

Each answer is a line too: why the grammar does not compile, or an empty text. A grammar that takes more than
CPU_LIMIT_S or MEMORY_LIMIT_BYTES ends the process. Ten lines of schema can do that, despite the library's own limits.
"""

from __future__ import annotations

import resource
import signal
import sys

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from services.frontend.structured.compile_limits import CPU_LIMIT_S, MEMORY_LIMIT_BYTES

_LIMITS = LLParserLimits(
    initial_lexer_fuel=300_000,
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_lexer_states=5_000,
    max_grammar_size=50_000,
    verbose_errors=False,
)
"""Half of what engines allow (services/worker/native/grammars.py), so that no accepted grammar fails there."""
_EOS = 256
_ERROR_LIMIT_CHARACTERS = 1000


class ByteVocabulary:
    """A vocabulary of all bytes and an end token, since whether a grammar compiles does not depend on a model's
    tokens."""

    eos_token_id = _EOS
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(_EOS)), b"<eos>")
    special_token_ids = (_EOS,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def compile_error(tokenizer: LLTokenizer, grammar: str) -> str:
    """Return why a grammar does not compile, or an empty text."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if not matcher.is_error():
        return ""
    wrong = matcher.get_error()[:_ERROR_LIMIT_CHARACTERS]
    if "coerce_one_of" in wrong:  # an option that no request can set
        return "oneOf: a value may fit more than one of its schemas, which cannot be excluded; use anyOf"
    return "no text can ever match it" if wrong.startswith("NoExtension") else wrong


def main() -> None:
    """Compile grammars from standard input until it ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer = LLTokenizer(TokenizerWrapper(ByteVocabulary()))
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)  # its signal ends the process
        reason = compile_error(tokenizer, msgspec.json.decode(line, type=str))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(msgspec.json.encode(reason) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
