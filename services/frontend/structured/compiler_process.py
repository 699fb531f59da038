"""Compiles grammars for a frontend: `python -m services.frontend.structured.compiler_process`.

Each answer says why the grammar does not compile, or is empty. A grammar that takes more than CPU_LIMIT_S or
MEMORY_LIMIT_BYTES ends the process. Ten lines of schema can do that, despite the library's own limits.
"""

from __future__ import annotations

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from services.frontend.child_program import run_program
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
    tokenizer = LLTokenizer(TokenizerWrapper(ByteVocabulary()))
    run_program(
        lambda grammar: compile_error(tokenizer, grammar.decode()).encode(),
        cpu_limit_s=CPU_LIMIT_S,
        memory_limit_bytes=MEMORY_LIMIT_BYTES,
    )


if __name__ == "__main__":
    main()
