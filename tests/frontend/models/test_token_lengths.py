from __future__ import annotations

import unicodedata
from typing import Any

import msgspec
import pytest

from services.frontend.models.token_lengths import COMPOSED_CHARACTERS, characters_of_a_token
from services.frontend.output.tokenizer_json import BYTE_OF_CHARACTER, parse_tokenizer_json

LONG = "abcdefgh"
BYTES = {"type": "ByteLevel", "add_prefix_space": False}
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(0x100)]


def longest(**parts: Any) -> int | None:
    words = [*BYTE_OF_CHARACTER, LONG]
    model = {"type": "BPE", "vocab": {word: at for at, word in enumerate(words)}}
    file = {"model": model, "pre_tokenizer": BYTES, **parts}
    return characters_of_a_token(parse_tokenizer_json(msgspec.json.encode(file)))


def with_model(kind: str, words: list[str], **more: Any) -> dict[str, Any]:
    listed = [(word, 0.0) for word in words]
    vocab: Any = listed if kind == "Unigram" else {word: at for at, word in enumerate(words)}
    return {"model": {"type": kind, "vocab": vocab, **more}, "pre_tokenizer": None}


def step(kind: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, **more}


@pytest.mark.parametrize(
    ("expected", "parts"),
    [
        (8, {}),
        (8 * COMPOSED_CHARACTERS, {"normalizer": step("NFC")}),
        (24, {"normalizer": step("Replace", pattern={"String": "abc"}, content="d")}),
        (8, {"normalizer": step("Sequence", normalizers=[step("Lowercase"), step("Prepend", prepend="▁")])}),
        (11, {"added_tokens": [{"id": 999, "content": "<|longest|>", "normalized": False}]}),
        (44, {"normalizer": step("NFC"), "added_tokens": [{"id": 999, "content": "<|longest|>"}]}),
        (8, with_model("BPE", [*BYTE_TOKENS, LONG, "a"], byte_fallback=True)),
        (8, with_model("Unigram", [*BYTE_TOKENS, LONG, "a"], byte_fallback=True)),
        (8, with_model("BPE", [LONG, "?"], unk_token="?")),
    ],
)
def test_a_token_stands_for_no_more_characters_than_it_has_and_normal_forms_join(
    expected: int, parts: dict[str, Any]
) -> None:
    assert longest(**parts) == expected


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": step("StripAccents")},
        {"normalizer": step("Replace", pattern={"String": " "}, content="")},
        {"normalizer": step("Replace", pattern={"Regex": " +"}, content=" ")},
        {"normalizer": {"type": "Sequence", "normalizers": [step("NFC"), step("BertNormalizer")]}},
        {"normalizer": step("Precompiled")},
        {"normalizer": {"type": "Odd", "pattern": 7}},
        {"pre_tokenizer": step("Sequence", pretokenizers=[step("WhitespaceSplit"), BYTES])},
        {"pre_tokenizer": step("Split", pattern={"Regex": " "}, behavior="Removed")},
        {"added_tokens": [{"id": 999, "content": "<mask>", "lstrip": True}]},
        with_model("BPE", [LONG, "a"]),
        with_model("BPE", [LONG, "?"], unk_token="?", fuse_unk=True),
        with_model("BPE", [*BYTE_TOKENS[1:], LONG], byte_fallback=True),
        with_model("Unigram", [LONG, "?"]),
        with_model("WordPiece", [LONG, "?"], unk_token="?"),
    ],
    ids=str,
)
def test_a_tokenizer_that_may_drop_or_join_any_number_of_characters_has_no_such_number(parts: dict[str, Any]) -> None:
    assert longest(**parts) is None


def test_no_normal_form_makes_one_character_of_more() -> None:
    assert max(len(unicodedata.normalize("NFD", chr(number))) for number in range(0x11_0000)) == COMPOSED_CHARACTERS
