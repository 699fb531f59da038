"""Follows grammars token by token, over a vocabulary of all bytes and of the marks that are tokens."""

from __future__ import annotations

import random

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from services.frontend.tool_parsers import lark, reasoning
from services.frontend.tool_parsers.parser import FORMATS

MOST_TOKENS = 3000
EOS = 256
MARKS = sorted({*reasoning.MARKS, *(mark for form in FORMATS.values() for mark in form.marks)})
TOKENS = {mark: EOS + 1 + at for at, mark in enumerate(MARKS)}


class Vocabulary:
    """Return a grammar as llguidance reads it."""

    eos_token_id = EOS
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<eos>", *(mark.encode() for mark in MARKS))
    special_token_ids = (EOS, *TOKENS.values())

    def __call__(self, given: bytes) -> list[int]:
        return list(given)


TOKENIZER = LLTokenizer(TokenizerWrapper(Vocabulary()))


def ids(written: str, tokens: lark.Tokens) -> list[int]:
    """Return the tokens of a text; marks that are tokens become one each."""
    for mark, token in tokens.items():
        before, found, behind = written.partition(mark)
        if found:
            return [*ids(before, tokens), token, *ids(behind, tokens)]
    return list(written.encode())


def follows(held: str, written: str, tokens: lark.Tokens) -> LLMatcher | None:
    """Return the matcher after that text; None if no answer may begin with it."""
    matcher = LLMatcher(TOKENIZER, held, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    wanted = ids(written, tokens)
    return matcher if matcher.try_consume_tokens(wanted) == len(wanted) else None


def fits(held: str, written: str, tokens: lark.Tokens) -> bool:
    """Tell whether the grammar allows this answer."""
    matcher = follows(held, written, tokens)
    return matcher is not None and matcher.is_accepting()


def allowed(matcher: LLMatcher) -> list[int]:
    """Return the tokens that may come next."""
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return [int(token) for token in np.flatnonzero(np.unpackbits(bits, bitorder="little"))]


def walk(held: str, seed: int, begun: str, tokens: lark.Tokens) -> str:
    """Draw an answer that begins with a text from the allowed tokens. Where it may end, it does so half of the time."""
    drawn = random.Random(seed)
    matcher = LLMatcher(TOKENIZER, held, log_level=0)
    output = ids(begun, tokens)
    assert matcher.consume_tokens(output), matcher.get_error()
    while len(output) < MOST_TOKENS:
        possible = allowed(matcher)
        assert possible, matcher.get_error()
        if EOS in possible and (len(possible) == 1 or drawn.random() < 0.5):
            return b"".join(Vocabulary.tokens[token] for token in output).decode()
        output.append(drawn.choice([token for token in possible if token != EOS]))
        assert matcher.consume_token(output[-1]), matcher.get_error()
    raise AssertionError("the walk has no end")
