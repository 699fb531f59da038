"""How many characters of a text one token can stand for at most. Pure.

A text of more characters than a model's context has tokens times this number cannot fit, and is refused before anything
is done with it. The number is an upper bound: for tokenizers that can drop any number of characters there is none.
"""

from __future__ import annotations

import unicodedata
from math import ceil

from services.frontend.output.tokenizer_json import BYTE_OF_CHARACTER, FoundToken, TokenizerJson, TokenizerStep

COMPOSED_CHARACTERS = 4
"""The largest number of characters that NFC and NFKC make one of, such as a Greek letter and three accents."""


def characters_of_a_token(file: TokenizerJson) -> int | None:
    """Return the largest number of characters of a text that become one token; None if there is no such number."""
    steps = file.steps()
    if steps is None:
        return None
    normalizer, pre_tokenizer = steps
    joined = 1 if normalizer is None else _joined(normalizer)
    if joined is None or (pre_tokenizer is not None and _drops(pre_tokenizer)):
        return None
    if not _knows_all(file, [step for step in (normalizer, pre_tokenizer) if step is not None]):
        return None
    if any(token.lstrip or token.rstrip for token in file.added_tokens):  # it takes all white space around it
        return None
    vocabulary = file.model.vocab
    words = vocabulary if isinstance(vocabulary, dict) else (word for word, _ in vocabulary)
    longest = max(map(len, words), default=1)
    return max([longest * joined, *(_characters(token, joined) for token in file.added_tokens)])


def _characters(token: FoundToken, joined: int) -> int:
    if not token.normalized:
        return len(token.content)
    return len(unicodedata.normalize("NFKD", token.content)) * joined  # it is searched in its normal form


def _joined(step: TokenizerStep) -> int | None:
    """Return how many characters become one at most. None means any number."""
    match step.type:
        case "NFC" | "NFKC":
            return COMPOSED_CHARACTERS
        case "NFD" | "NFKD" | "Lowercase" | "Prepend" | "ByteLevel":
            return 1
        case "Replace":
            text = step.pattern.get("String", "")
            return max(1, ceil(len(text) / len(step.content))) if text and step.content else None
        case "Sequence":
            product = 1
            for one in step.normalizers:
                joined = _joined(one)
                if joined is None:
                    return None
                product *= joined
            return product
        case _:
            return None


def _drops(step: TokenizerStep) -> bool:
    """Return whether a pre-tokenizer may drop characters."""
    match step.type:
        case "ByteLevel" | "Digits" | "Metaspace" | "UnicodeScripts":
            return False
        case "Split" | "Punctuation":
            return step.behavior == "Removed"
        case "Sequence":
            return any(map(_drops, step.pretokenizers))
        case _:
            return True


def _knows_all(file: TokenizerJson, steps: list[TokenizerStep]) -> bool:
    """Return whether every character becomes tokens of its own, and none is dropped or joined with other unknown
    ones."""
    model, vocabulary = file.model, file.model.vocab
    words = vocabulary if isinstance(vocabulary, dict) else {word for word, _ in vocabulary}
    if model.byte_fallback and all(f"<0x{byte:02X}>" in words for byte in range(0x100)):
        return model.type in ("BPE", "Unigram")
    if model.type != "BPE":
        return False
    in_bytes = any(_has_bytes(step) for step in steps) and all(byte in words for byte in BYTE_OF_CHARACTER)
    return in_bytes or (model.unk_token is not None and not model.fuse_unk)


def _has_bytes(step: TokenizerStep) -> bool:
    return step.type == "ByteLevel" or any(map(_has_bytes, (*step.normalizers, *step.pretokenizers)))
