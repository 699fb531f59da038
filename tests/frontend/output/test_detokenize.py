from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from services.frontend.output.detokenize import Detokenizer, TokenBytes, read_token_bytes
from services.frontend.output.tokenizer_json import parse_tokenizer_json
from shared.errors import ModelError


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["grüße vom 水 wheel 🚰 the water finds its way"] * 4, trainer)
    tokenizer.add_tokens([AddedToken("an added token", special=False)])
    return tokenizer


def _byte_fallback() -> Tokenizer:
    """As Llama 2's: pieces with ▁ for a space, and a token for each byte."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁水", "a", "é", "▁▁"]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken(piece, special=True) for piece in pieces[:3]])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


BYTE_LEVEL, BYTE_FALLBACK = _byte_level(), _byte_fallback()
LEVEL_BYTES = read_token_bytes(parse_tokenizer_json(BYTE_LEVEL.to_str().encode()))
FALLBACK_BYTES = read_token_bytes(parse_tokenizer_json(BYTE_FALLBACK.to_str().encode()))


def decode(tokens: TokenBytes, pieces: list[list[int]]) -> str:
    detokenizer = Detokenizer(tokens)
    texts = [detokenizer.push(piece) for piece in pieces]
    return "".join(texts) + detokenizer.finish()


LEVEL_IDS = st.lists(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() + 3), max_size=4), max_size=12)


@given(LEVEL_IDS)
def test_byte_level_text_equals_the_full_decode_however_the_tokens_come(pieces: list[list[int]]) -> None:
    ids = [token for piece in pieces for token in piece]
    assert decode(LEVEL_BYTES, pieces) == BYTE_LEVEL.decode(ids, skip_special_tokens=True)


@given(st.text(max_size=40))
def test_byte_level_text_goes_round_without_half_a_character(text: str) -> None:
    detokenizer = Detokenizer(LEVEL_BYTES)
    got = ""
    for token in BYTE_LEVEL.encode(text, add_special_tokens=False).ids:
        got += detokenizer.push([token])
        assert text.startswith(got)
    assert got + detokenizer.finish() == text


@given(st.lists(st.sampled_from([0, 2, *range(259, 265)]) | st.characters(codec="utf-8"), max_size=12))
def test_byte_fallback_text_equals_the_full_decode_where_bytes_are_utf8(pieces: list[int | str]) -> None:
    ids: list[int] = []
    for piece in pieces:
        ids += [piece] if isinstance(piece, int) else [3 + byte for byte in piece.encode()]
    assert decode(FALLBACK_BYTES, [[token] for token in ids]) == BYTE_FALLBACK.decode(ids, skip_special_tokens=True)


@given(st.lists(st.integers(3, 264), max_size=12))
def test_byte_fallback_keeps_every_valid_character_next_to_invalid_bytes(ids: list[int]) -> None:
    whole = b"".join(FALLBACK_BYTES.bytes_of(token) for token in ids)
    assert decode(FALLBACK_BYTES, [[token] for token in ids]) == whole.decode("utf-8", "replace").removeprefix(" ")


def test_an_unfinished_character_waits_and_becomes_a_replacement_at_the_end() -> None:
    detokenizer = Detokenizer(FALLBACK_BYTES)
    assert [detokenizer.push([3 + byte]) for byte in "水".encode()[:2]] == ["", ""]
    assert detokenizer.finish() == "�"


def test_special_tokens_are_silent_but_have_names() -> None:
    assert LEVEL_BYTES.bytes_of(0) == b""
    assert Detokenizer(LEVEL_BYTES).name(0) == b"<s>"
    added = BYTE_LEVEL.token_to_id("an added token")
    assert added is not None
    assert LEVEL_BYTES.bytes_of(added) == b"an added token"
    assert LEVEL_BYTES.bytes_of(1 << 20) == b""


def test_special_tokens_can_be_shown() -> None:
    shown = LEVEL_BYTES.showing(["<s>", "not there"])
    assert shown.bytes_of(0) == b"<s>"
    assert LEVEL_BYTES.bytes_of(0) == b""
    assert [*shown.table[1:]] == [*LEVEL_BYTES.table[1:]]


def test_the_tiny_model_decodes_like_its_tokenizer(directory: Path) -> None:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokens = read_token_bytes(parse_tokenizer_json((directory / "tokenizer.json").read_bytes()))
    ids = list(range(tokenizer.get_vocab_size()))
    assert decode(tokens, [ids]) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("file", "why"),
    [
        (b"{", "truncated"),
        (b'{"model": {"vocab": {"a": "x"}}}', "vocab"),
        (b'{"model": {"vocab": {}}}', "no decoder"),
        (b'{"model": {"vocab": {}}, "decoder": {"type": "WordPiece"}}', "WordPiece"),
        (b'{"model": {"vocab": {"a": -1}}, "decoder": {"type": "ByteLevel"}}', "negative"),
        (b'{"model": {"vocab": {"a": 99999999999}}, "decoder": {"type": "ByteLevel"}}', "beyond"),
    ],
)
def test_a_file_that_cannot_be_read_says_why(file: bytes, why: str) -> None:
    with pytest.raises(ModelError, match=why):
        read_token_bytes(parse_tokenizer_json(file))


def test_a_unigram_vocabulary_is_a_list() -> None:
    file: dict[str, Any] = {
        "model": {"type": "Unigram", "vocab": [["<unk>", 0.0], ["▁a", -1.0]]},
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
    }
    assert read_token_bytes(parse_tokenizer_json(json.dumps(file).encode())).bytes_of(1) == b" a"
