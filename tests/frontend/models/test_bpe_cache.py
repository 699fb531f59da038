from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from services.frontend.models.bpe_cache import (
    NEW_WORD_CHARACTERS,
    PLAIN,
    SECTION_CHARACTERS,
    SLICE_CHARACTERS,
    SPLITS,
    WORD_CHARACTERS,
    WORDS_LIMIT,
    WordCache,
    read_words,
)
from services.frontend.output.tokenizer_json import parse_tokenizer_json
from shared.hashing import pack_tokens

LESSONS = [
    "The quick brown fox doesn't jump over the lazy dog's 1234 bones,   does it?\r\n\r\n\tIt'll  'VE  x = y[0] + 42;",
    "Wasser, Feuer; Erde... Luft -- they've 'run', we're   done!  \n  indented\n\n",
] * 4
SPECIAL = ("<|end|>", "<|end|>x", "<|", "[go]")
STEPS: dict[str, Any] = {
    "gpt2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    **{
        f"split{number}": pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        for number, pattern in enumerate(SPLITS)
    },
}


def trained(step: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = step
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(LESSONS, trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    return tokenizer


TOKENIZERS = {name: trained(step) for name, step in STEPS.items()}


def table(tokenizer: Tokenizer) -> WordCache | None:
    return table_of(tokenizer.to_str(), tokenizer)


def table_of(content: str, tokenizer: Tokenizer) -> WordCache | None:
    model = tokenizer.model
    return read_words(
        parse_tokenizer_json(content.encode()),
        lambda word: [token.id for token in model.tokenize(word)],
        tokenizer.token_to_id,
    )


def expected(tokenizer: Tokenizer, text: str) -> bytes:
    return pack_tokens(tokenizer.encode(text, add_special_tokens=False).ids)


def encoded(words: WordCache, tokenizer: Tokenizer, text: str) -> bytes:
    """As a frontend does."""
    packed, left = b"", ""
    for piece in words.encode(text):
        if isinstance(piece, str):
            left += piece
        else:
            packed += expected(tokenizer, left) + piece
            left = ""
    return packed + expected(tokenizer, left)


def ids_of(words: WordCache, text: str) -> bytes:
    """Return the ids of a text with nothing that is left to `tokenizers`."""
    pieces = list(words.encode(text))
    assert all(isinstance(piece, bytes) for piece in pieces)
    return b"".join(piece for piece in pieces if isinstance(piece, bytes))


_ASCII = ["<", "|>", "'", "'s", "'LL", "'ve", " ", "  ", "\n", "\r\n", "\t", "\x0b", "\x1c", "\x00", "\x7f", " a"]
_WORDS = ["word", " Word", "1", "23", " 456", "!", " ?!", "...\n", "_"]
_OTHER = [
    "é",
    " Größe",
    "Жизнь",
    " ½",
    "²",
    "\u2019s",
    " \u2014 ",
    "\x85",
    "ª",
    "水",
    "e\u0301",
    "\u00a0",
    "\u2028",
    "'\u017f",
    "😀",
]
PIECES = st.sampled_from([*SPECIAL, *_ASCII, *_WORDS, *_OTHER])
_ANY = st.text(st.characters(max_codepoint=127), max_size=3) | st.text(st.characters(max_codepoint=0x2060), max_size=3)
TEXTS = st.lists(PIECES | _ANY, max_size=40).map("".join)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=300)
@given(text=TEXTS)
def test_any_text_has_the_ids_that_tokenizers_gives(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    words = table(tokenizer)
    assert words is not None
    for _ in range(2):  # new words, then known ones
        assert encoded(words, tokenizer, text) == expected(tokenizer, text)
    words.validate()


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=20)
@given(seam=TEXTS)
def test_a_long_text_is_cut_where_its_ids_do_not_change(name: str, seam: str) -> None:
    tokenizer = TOKENIZERS[name]
    words = table(tokenizer)
    assert words is not None
    text = f"they've run  1 of\n{seam}some more " * (1 + 4 * SLICE_CHARACTERS // 25)
    assert len(list(words.encode(text))) > 2
    assert encoded(words, tokenizer, text) == expected(tokenizer, text)


@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKC", "NFKD"])
def test_a_normal_form_leaves_ascii_alone_and_does_not_join_over_a_cut(form: str) -> None:
    tokenizer = Tokenizer.from_str(TOKENIZERS["gpt2"].to_str())
    tokenizer.normalizer = getattr(normalizers, form)()
    words = table(tokenizer)
    assert words is not None
    text = "cafe\u0301 and a \u0301b ﬁne ª² Größe and so on in plain words " * SLICE_CHARACTERS
    assert len(list(words.encode(text))) > 2
    assert encoded(words, tokenizer, text) == expected(tokenizer, text)


def words_of(file: dict[str, Any]) -> WordCache | None:
    parsed = parse_tokenizer_json(json.dumps(file).encode())
    return read_words(parsed, lambda _word: [], TOKENIZERS["gpt2"].token_to_id)


def test_a_tokenizer_whose_words_are_not_known_exactly_has_no_table() -> None:
    known = json.loads(TOKENIZERS["gpt2"].to_str())
    assert words_of(known) is not None
    changes: list[dict[str, Any]] = [
        {"model": {**known["model"], "dropout": 0.1}},
        {"model": {**known["model"], "type": "Unigram"}},
        {"normalizer": {"type": "Lowercase"}},
        {"normalizer": {"type": "Sequence", "normalizers": []}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": []},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": []}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": {**known["pre_tokenizer"], "add_prefix_space": True}},
        {"pre_tokenizer": {**known["pre_tokenizer"], "use_regex": False}},
        {"added_tokens": [{**known["added_tokens"][0], "lstrip": True}]},
        {"added_tokens": [{**known["added_tokens"][0], "normalized": True}]},
        {"added_tokens": [{**known["added_tokens"][0], "content": ""}]},
        {"added_tokens": [{**known["added_tokens"][0], "content": "unknown"}]},
    ]
    for change in changes:
        assert words_of({**known, **change}) is None, change
    split = json.loads(TOKENIZERS["split0"].to_str())
    split["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\s+|\S+"
    assert words_of(split) is None


def test_every_plain_character_is_a_word_as_tokenizers_sees_it() -> None:
    plain = [chr(number) for number in range(0x2060) if re.match(f"[{PLAIN}]", chr(number))]
    text = "".join(f"a{each}1 {each} {each}{each}\n" for each in plain)
    for form in (None, normalizers.NFC()):
        for tokenizer in TOKENIZERS.values():
            normalizing = Tokenizer.from_str(tokenizer.to_str())
            if form is not None:
                normalizing.normalizer = form
            words = table(normalizing)
            assert words is not None
            for start in range(0, len(text), SLICE_CHARACTERS):
                part = text[start : start + SLICE_CHARACTERS]
                assert ids_of(words, part) == expected(normalizing, part)


def test_the_table_is_bounded_and_long_words_stay_out() -> None:
    asked: list[str] = []

    def ids(word: str) -> list[int]:
        asked.append(word)
        return [len(asked)]

    words = WordCache(" ?[LN]+", {}, ids)
    long = "a" * (WORD_CHARACTERS + 1)
    assert ids_of(words, long) != ids_of(words, long)
    first = ids_of(words, "first")
    assert ids_of(words, "first") == first
    for number in range(WORDS_LIMIT):
        ids_of(words, f"w{number}")
    words.validate()
    assert ids_of(words, "first") != first, "forgotten at the limit, and asked for again"


def test_added_tokens_have_the_ids_that_tokenizers_gives_them_whatever_the_file_says() -> None:
    file = json.loads(TOKENIZERS["gpt2"].to_str())
    plain = file["added_tokens"][0]
    moved = [{**added, "id": added["id"] + 7} for added in file["added_tokens"]]
    word, twice = {**plain, "id": 998, "content": "run"}, {**plain, "id": 999, "content": "[go]"}
    for added in (moved, [*file["added_tokens"], word], [*file["added_tokens"], twice]):
        content = json.dumps({**file, "added_tokens": added})
        tokenizer = Tokenizer.from_str(content)
        words = table_of(content, tokenizer)
        assert words is not None
        text = "they run <|end|> and [go]<|end|>x"
        assert encoded(words, tokenizer, text) == expected(tokenizer, text)


def test_a_long_section_that_cannot_be_cut_is_left_to_tokenizers_as_one_text() -> None:
    tokenizer = TOKENIZERS["gpt2"]
    words = table(tokenizer)
    assert words is not None
    long = "xy" * SECTION_CHARACTERS + "z"
    pieces = list(words.encode(f"[go]{long} y and more[go]"))
    assert pieces[0] == pieces[-1] == expected(tokenizer, "[go]")
    left = [piece for piece in pieces if isinstance(piece, str)]
    assert "".join(left) == long
    assert pieces[1:-2] == left, "side by side"
    assert encoded(words, tokenizer, f"{long} y and more") == expected(tokenizer, f"{long} y and more")


@pytest.mark.parametrize("unit", ["水", "жизнь, ", "1 ", "<", "<|", "<|end|>", "x", " ", "é y ", "<|end|>水", "a b"])
def test_no_piece_of_any_text_takes_long(unit: str) -> None:
    tokenizer = TOKENIZERS["smollm"]
    words = table(tokenizer)
    assert words is not None
    text = unit * (20 * SLICE_CHARACTERS // len(unit))
    before, most = words.work, SECTION_CHARACTERS + SLICE_CHARACTERS + 16 * NEW_WORD_CHARACTERS
    for piece in words.encode(text):
        assert words.work - before <= most
        assert not isinstance(piece, str) or len(piece) <= SECTION_CHARACTERS + SLICE_CHARACTERS
        before = words.work
    assert encoded(words, tokenizer, text) == expected(tokenizer, text)


def test_new_words_count_for_more() -> None:
    words = table(TOKENIZERS["gpt2"])
    assert words is not None
    for known in (False, True):
        before = words.work
        ids_of(words, "over the hill")
        assert words.work - before == len("over the hill") + (0 if known else 3 * NEW_WORD_CHARACTERS)
