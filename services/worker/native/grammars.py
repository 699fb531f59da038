"""Compiles the grammars that constrain output, for one tokenizer, with llguidance.

A grammar that compiles may still fail later, in a state that is too large to follow; its matcher reports that. A text
is compiled once, because most applications send the same grammar with every request, and so does a continued request.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from shared.errors import ModelError
from shared.model_file import TOKENIZER_LIMIT_BYTES, read_model_file
from shared.model_files.tokenizer import complete_tokenizer

KEPT = 64
"""The most compiled grammars that are kept; the least recently used goes first."""
KEPT_CHARACTERS = 1 << 20
"""The most characters of the kept grammars' texts. LIMITS bound the compiled form of each."""
LIMITS = LLParserLimits(
    initial_lexer_fuel=600_000,
    step_lexer_fuel=200_000,  # 15 ms
    step_max_items=50_000,  # 3 ms
    max_lexer_states=10_000,  # 2 kB each
    max_grammar_size=100_000,
    verbose_errors=False,
)
"""The limits of one grammar. Frontends have lower limits, so a grammar that they accept compiles here."""

_log = logging.getLogger(__name__)


class GrammarCache:
    """Compiled grammars for one tokenizer. Only one thread may use it at a time."""

    def __init__(self, tokenizer_json: str, vocab: int, eos_token_ids: Sequence[int]) -> None:
        """Read the tokenizer, which takes 0.3 s and 50 MB for 50,000 tokens. Raise ModelError.

        `vocab` is the number of logits in a row.
        """
        try:
            self._tokenizer = LLTokenizer(tokenizer_json, n_vocab=vocab, eos_token=list(eos_token_ids))
        except BaseException as wrong:  # noqa: BLE001  a tokenizer comes with the model; the package's panics are no Exceptions
            raise ModelError(f"llguidance cannot read the tokenizer: {wrong}") from None
        self.vocab = vocab
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._characters = 0

    @staticmethod
    def from_directory(directory: Path, vocab: int, eos_token_ids: Sequence[int]) -> GrammarCache | None:
        """Return a cache for the model's tokenizer.json.

        If the file cannot be used, this is logged and the result is None: then requests with a grammar are refused,
        and all others are served.
        """
        file = directory / "tokenizer.json"
        try:
            content = complete_tokenizer(directory, read_model_file(file, TOKENIZER_LIMIT_BYTES))
            return GrammarCache(content.decode(), vocab, eos_token_ids)
        except (ValueError, ModelError) as wrong:
            _log.warning("%s cannot be used for grammars, so requests with a grammar are refused: %s", file, wrong)
            return None

    def matcher(self, grammar: str) -> LLMatcher:
        """Return a matcher that has consumed no token. It is in an error state if the grammar is invalid."""
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
        """Raise AssertionError if the cache contradicts itself."""
        assert len(self._compiled) <= KEPT
        assert self._characters == sum(map(len, self._compiled))
        assert self._characters <= KEPT_CHARACTERS or len(self._compiled) == 1
