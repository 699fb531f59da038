"""The grammars that output is held to, compiled for one tokenizer. The arithmetic is llguidance's.

A grammar that compiles may still fail later, in a state that is too large to follow; its matcher says so then. The same
text is compiled once: a request's continuation, and most applications' every request, brings one that is known.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from shared.errors import ModelError
from shared.model_file import TOKENIZER_LIMIT_BYTES, read_model_file

KEPT = 64
"""Compiled grammars, the latest used …"""
KEPT_CHARACTERS = 1 << 20
"""… and their texts; LIMITS bound what each is compiled to."""
LIMITS = LLParserLimits(
    initial_lexer_fuel=600_000,
    step_lexer_fuel=200_000,  # 15 ms
    step_max_items=50_000,  # 3 ms
    max_lexer_states=10_000,  # 2 kB each
    max_grammar_size=100_000,
    verbose_errors=False,
)
"""Of one grammar. Frontends let less through, so that what they let through compiles here."""

_log = logging.getLogger(__name__)


class GrammarCache:
    """Of one tokenizer. Not for two threads at once."""

    def __init__(self, tokenizer_json: str, vocab: int, eos_token_ids: Sequence[int]) -> None:
        """Takes 0.3 s and 50 MB for 50,000 tokens. `vocab`: logits of a row. Raises ModelError."""
        try:
            self._tokenizer = LLTokenizer(tokenizer_json, n_vocab=vocab, eos_token=list(eos_token_ids))
        except BaseException as wrong:  # noqa: BLE001  a tokenizer comes with the model; the package's panics are no Exceptions
            raise ModelError(f"llguidance cannot read it: {wrong}") from None
        self.vocab = vocab
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._characters = 0

    @staticmethod
    def from_directory(directory: Path, vocab: int, eos_token_ids: Sequence[int]) -> GrammarCache | None:
        """With the model's tokenizer.json; None, and logged, where that will not do: then nothing can be held to a
        grammar, and all else is served."""
        file = directory / "tokenizer.json"
        try:
            return GrammarCache(read_model_file(file, TOKENIZER_LIMIT_BYTES).decode(), vocab, eos_token_ids)
        except (ValueError, ModelError) as wrong:
            _log.warning("%s: no output can be held to a grammar: %s", file, wrong)
            return None

    def matcher(self, grammar: str) -> LLMatcher:
        """One that has taken no token; it is in error where the grammar is no good."""
        compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = self._compiled[grammar] = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
            self._characters += len(grammar)
            while len(self._compiled) > KEPT or (self._characters > KEPT_CHARACTERS and len(self._compiled) > 1):
                oldest, _ = self._compiled.popitem(last=False)
                self._characters -= len(oldest)
        else:
            self._compiled.move_to_end(grammar)
        return compiled.deep_copy()

    def validate(self) -> None:
        """Assert every invariant."""
        assert len(self._compiled) <= KEPT
        assert self._characters == sum(map(len, self._compiled))
        assert self._characters <= KEPT_CHARACTERS or len(self._compiled) == 1
