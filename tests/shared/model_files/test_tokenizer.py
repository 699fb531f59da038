"""Added tokens that tokenizer.json lacks or describes otherwise than the files next to it, held to transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from shared.errors import ModelError
from shared.model_files.tokenizer import complete_tokenizer
from tests.tiny_model import SPECIAL_TOKENS, write_tiny_model

END = SPECIAL_TOKENS[2]
FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}


def token(content: str, **more: object) -> dict[str, object]:
    plain = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {"content": content, **plain, **more}


WHOLE, PIECES = [67, 2, 68], [67, 30, 94, 75, 79, 65, 71, 80, 70, 94, 32, 68]

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], str, list[int], str]] = {
    # changes of the token in tokenizer.json (empty: it is not there), tokenizer_config.json, special_tokens_map.json,
    # a text, its tokens, the text of these without special ones
    "in tokenizer.json": ({"special": True}, {}, {}, f"a{END}b", WHOLE, "ab"),
    "in no file": ({}, {}, {}, f"a{END}b", PIECES, f"a{END}b"),
    "in tokenizer_config.json": ({}, {"added_tokens_decoder": {"2": token(END)}}, {}, f"a{END}b", WHOLE, "ab"),
    "not special": (
        {},
        {"added_tokens_decoder": {"2": token(END, special=False)}},
        {},
        f"a{END}b",
        WHOLE,
        f"a{END}b",
    ),
    "special in tokenizer_config.json alone": (
        {"special": False},
        {"added_tokens_decoder": {"2": token(END)}},
        {},
        f"a{END}b",
        WHOLE,
        "ab",
    ),
    "with spaces in tokenizer_config.json alone": (
        {"special": True},
        {"added_tokens_decoder": {"2": token(END, rstrip=True)}},
        {},
        f"a{END} b",
        WHOLE,
        "ab",
    ),
    "named": ({}, {"eos_token": END}, {}, f"a{END}b", WHOLE, "ab"),
    "named in the map": ({}, {}, {"eos_token": token(END)}, f"a{END}b", WHOLE, "ab"),
    "additional": ({}, {"additional_special_tokens": [END]}, {}, f"a{END}b", WHOLE, "ab"),
    "additional in the map": ({}, {}, {"additional_special_tokens": [END]}, f"a{END}b", WHOLE, "ab"),
    "extra": ({}, {"extra_special_tokens": [END]}, {}, f"a{END}b", WHOLE, "ab"),
    "new": ({"special": True}, {"added_tokens_decoder": {"320": token("[X]")}}, {}, "a[X]b", [67, 320, 68], "ab"),
}


def written(directory: Path, of_token: dict[str, Any], of_config: dict[str, Any], of_map: dict[str, Any]) -> bytes:
    write_tiny_model(directory, layers=1)
    file = directory / "tokenizer.json"
    content = json.loads(file.read_text())
    added = [one for one in content["added_tokens"] if one["content"] != END]
    if of_token:
        added.append(next(one for one in content["added_tokens"] if one["content"] == END) | of_token)
    file.write_text(json.dumps({**content, "added_tokens": added}))
    (directory / "tokenizer_config.json").write_text(json.dumps(FAST | of_config))
    (directory / "special_tokens_map.json").write_text(json.dumps(of_map))
    return file.read_bytes()


@pytest.mark.parametrize("case", CASES)
def test_a_tokens_rules_are_those_that_transformers_finds(tmp_path: Path, case: str) -> None:
    *files, text, tokens, said = CASES[case]
    completed = Tokenizer.from_buffer(complete_tokenizer(tmp_path, written(tmp_path, *files)))
    assert completed.encode(text).ids == tokens
    assert completed.decode(tokens) == said
    try:
        from transformers import AutoTokenizer  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.encode(text, add_special_tokens=False) == tokens
    flags = {number: (str(one), one.special) for number, one in theirs.added_tokens_decoder.items()}
    assert flags == {number: (one.content, one.special) for number, one in completed.get_added_tokens_decoder().items()}


def test_a_tokenizer_that_lacks_nothing_is_left_as_it_is(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, layers=1)
    content = (tmp_path / "tokenizer.json").read_bytes()
    assert complete_tokenizer(tmp_path, content) is content
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|none|>", "added_tokens_decoder": {}}))
    assert Tokenizer.from_buffer(complete_tokenizer(tmp_path, content)).get_vocab_size() == 320


def test_a_token_with_another_id_than_the_file_says_is_left_out(tmp_path: Path) -> None:
    content = written(tmp_path, {}, {"added_tokens_decoder": {"7": token(END), "400": token("[X]")}}, {})
    assert END not in [str(one) for one in Tokenizer.from_buffer(content).get_added_tokens_decoder().values()]
    assert Tokenizer.from_buffer(complete_tokenizer(tmp_path, content)).encode(f"a{END}b").ids == PIECES


def test_added_tokens_that_are_none_are_named_with_their_file(tmp_path: Path) -> None:
    content = written(tmp_path, {}, {"added_tokens_decoder": {"2": "text"}}, {})
    with pytest.raises(ModelError, match=r"added_tokens_decoder of tokenizer_config\.json: Expected `object`"):
        complete_tokenizer(tmp_path, content)
    with pytest.raises(ModelError, match=r"tokenizer\.json: "):
        complete_tokenizer(tmp_path, b"{")
