"""Tokenizers rebuilt from a vocabulary and the name of its splitting."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers

from services.worker.native.gguf_tokenizer import GgufVocabulary
from shared.errors import ModelError

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = ["<s>", "<|im_end|>", "[tool]", *BYTES, "he", "ll", "hell", "hello", "12", "123", "Ġhe"]
MERGES = ["h e", "l l", "he ll", "hell o", "1 2", "12 3", "Ġ he"]
VOCABULARY = GgufVocabulary(
    where="x.gguf",
    splitter="smollm",
    tokens=TOKENS,
    types=[3, 3, 4] + [1] * (len(TOKENS) - 3),
    merges=MERGES,
    bos=0,
    eos=1,
    adds_bos=False,
    chat_template="",
    tool_template="",
)


def tokenizer(vocabulary: GgufVocabulary) -> Tokenizer:
    return Tokenizer.from_str(vocabulary.tokenizer_json())


def pieces(splitter: str, text: str) -> list[str]:
    return tokenizer(replace(VOCABULARY, splitter=splitter)).encode(text).tokens


def test_smollm_takes_digits_one_by_one() -> None:
    assert pieces("smollm", "hello 123") == ["hello", "Ġ", "1", "2", "3"]


def test_llama_3_takes_up_to_three_digits_together() -> None:
    assert pieces("llama-bpe", "1234") == ["123", "4"]


def test_qwen2_takes_digits_one_by_one_and_composes_characters() -> None:
    assert pieces("qwen2", "123") == ["1", "2", "3"]
    assert pieces("qwen2", "e\u0301") == pieces("qwen2", "é")
    assert pieces("llama-bpe", "e\u0301") != pieces("llama-bpe", "é")


def test_control_tokens_are_found_whole_and_skipped_and_others_only_found() -> None:
    built = tokenizer(VOCABULARY)
    encoded = built.encode("hello<|im_end|>[tool]")
    assert encoded.tokens == ["hello", "<|im_end|>", "[tool]"]
    assert built.decode(encoded.ids) == "hello[tool]"


@pytest.mark.parametrize("splitter", ["smollm", "llama-bpe"])
@given(text=st.text())
def test_any_text_comes_back(splitter: str, text: str) -> None:
    built = tokenizer(replace(VOCABULARY, splitter=splitter))
    assert built.decode(built.encode(text).ids, skip_special_tokens=False) == text


def test_a_beginning_token_is_added_only_where_the_file_says_so() -> None:
    assert tokenizer(VOCABULARY).encode("he").tokens == ["he"]
    assert tokenizer(replace(VOCABULARY, adds_bos=True)).encode("he").tokens == ["<s>", "he"]


@pytest.mark.parametrize(
    ("names", "same"),
    [
        (("llama3", "llama-v3", "falcon3", "midm-2.0"), "llama-bpe"),
        (("deepseek-r1-qwen", "megrez", "kormo", "f2llmv2"), "qwen2"),
        (("starcoder", "refact", "codeshell", "minerva-7b"), "smollm"),
    ],
)
def test_names_that_llama_cpp_splits_alike_are_served(names: tuple[str, ...], same: str) -> None:
    expected = replace(VOCABULARY, splitter=same).tokenizer_json()
    assert [replace(VOCABULARY, splitter=name).tokenizer_json() for name in names] == [expected] * len(names)


@pytest.mark.parametrize(
    ("splitter", "adds"), [("llama-bpe", True), ("llama3", True), ("qwen2", False), ("smollm", False)]
)
def test_a_file_that_does_not_say_whether_bos_is_added_has_llama_cpps_default(splitter: str, adds: bool) -> None:
    vocabulary = replace(VOCABULARY, splitter=splitter, adds_bos=None)
    assert tokenizer(vocabulary).encode("he").tokens[:1] == (["<s>"] if adds else ["he"])
    assert tokenizer(replace(vocabulary, bos=None)).encode("he").tokens == ["he"]
    assert tokenizer(replace(vocabulary, adds_bos=False)).encode("he").tokens == ["he"]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"splitter": ""}, r"x\.gguf: tokenizer\.ggml\.pre is missing; take a newer file of the model"),
        ({"splitter": "gpt-5"}, r"x\.gguf: pre-tokenizer 'gpt-5' is not supported"),
        ({"tokens": ["he", *TOKENS[1:]]}, "names a token twice"),
        ({"tokens": [7, *TOKENS[1:]]}, "must be strings"),
        ({"types": [3]}, "not every token has a type"),
        ({"merges": ["x yz"]}, "the merge 'x yz' is not of tokens"),
        ({"merges": ["hello"]}, "the merge 'hello' is not of tokens"),
        ({"adds_bos": True, "bos": None}, "bos_token_id None is not in the vocabulary"),
    ],
)
def test_a_broken_vocabulary_is_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint):
        replace(VOCABULARY, **changes).tokenizer_json()
