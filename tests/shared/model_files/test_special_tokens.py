"""Each file alone, and each pair that disagrees. What is written down here is what transformers 5 answers; where it is
installed, it is asked again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shared.errors import ModelError
from shared.model_files.config_json import read_config_json
from shared.model_files.special_tokens import end_of_turn_ids, read_end_tokens, read_named_tokens, read_tokenizer_ends
from tests.tiny_model import SPECIAL_TOKENS, write_tiny_model

TEXT, START, END = SPECIAL_TOKENS  # of ids 0, 1 and 2
FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
OF_QWEN = {"unk_token": TEXT, "pad_token": TEXT}


def token(content: str, **more: object) -> dict[str, object]:
    return {"content": content, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, **more}


DECODER = {"2": token(END, special=True)}

NAMED: dict[str, tuple[dict[str, Any] | None, dict[str, Any] | None, dict[str, str]]] = {
    # tokenizer_config.json, special_tokens_map.json, the named tokens
    "nothing": (FAST, None, {}),
    "a text": ({**FAST, "eos_token": END}, None, {"eos_token": END}),
    "an added token": ({**FAST, "eos_token": {**token(END), "__type": "AddedToken"}}, None, {"eos_token": END}),
    "null": ({**FAST, "bos_token": None, "eos_token": END}, None, {"eos_token": END}),
    "the map alone": (FAST, {"bos_token": token(TEXT), "eos_token": END}, {"bos_token": TEXT, "eos_token": END}),
    "no other file": (None, {"eos_token": END}, {"eos_token": END}),
    "the map counts first": ({**FAST, "eos_token": TEXT}, {"eos_token": token(END)}, {"eos_token": END}),
    "null in the map": ({**FAST, "eos_token": END}, {"eos_token": None}, {}),
    "null and the map": ({**FAST, "eos_token": None}, {"eos_token": END}, {"eos_token": END}),
    "a complete file is read alone": ({**FAST, "added_tokens_decoder": DECODER}, {"bos_token": TEXT}, {}),
    "names of its own": ({**FAST, "image_token": END, "x_token": None}, None, {"image_token": END}),
    "names in an object": ({**FAST, "extra_special_tokens": {"image_token": END}}, None, {"image_token": END}),
    "settings that are no tokens": ({**FAST, "add_bos_token": True, "bos_token": TEXT}, None, {"bos_token": TEXT}),
    "not in the vocabulary": ({**FAST, "eos_token": "<|none|>"}, None, {"eos_token": "<|none|>"}),
    "defaults of a class": ({"tokenizer_class": "Qwen2TokenizerFast"}, None, {**OF_QWEN, "eos_token": TEXT}),
    "a class and the file": (
        {"tokenizer_class": "Qwen2Tokenizer", "bos_token": None, "eos_token": END},
        None,
        {**OF_QWEN, "eos_token": END},
    ),
    "null against a class": (
        {"tokenizer_class": "Qwen2Tokenizer", "pad_token": None, "unk_token": None},
        None,
        {"eos_token": TEXT},
    ),
    "GPT-2's class": (
        {"tokenizer_class": "GPT2Tokenizer"},
        None,
        dict.fromkeys(("bos_token", "eos_token", "unk_token"), TEXT),
    ),
}


def written(directory: Path, **files: dict[str, Any] | None) -> Path:
    """Write a tiny model with these JSON files in place of its own; None leaves a file out."""
    write_tiny_model(directory, vocab=320, layers=1)
    for name, content in files.items():
        (directory / f"{name}.json").unlink(missing_ok=True)
        if content is not None:
            (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


@pytest.mark.parametrize("case", NAMED)
def test_the_names_of_special_tokens_are_those_that_transformers_gives_to_templates(tmp_path: Path, case: str) -> None:
    of_tokenizer, of_map, expected = NAMED[case]
    directory = written(tmp_path, tokenizer_config=of_tokenizer, special_tokens_map=of_map)
    assert read_named_tokens(directory) == expected
    try:
        from transformers import AutoTokenizer  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return
    assert dict(AutoTokenizer.from_pretrained(directory).special_tokens_map) == expected


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [("qwen2", TEXT), ("qwen3", TEXT), ("gemma3_text", "<eos>"), ("llama", None), ("new", None)],
)
def test_without_a_class_of_the_tokenizer_that_of_the_architecture_counts(
    tmp_path: Path, model_type: str, expected: str | None
) -> None:
    directory = written(tmp_path, tokenizer_config={}, config={"model_type": model_type})
    assert read_named_tokens(directory).get("eos_token") == expected


NO_TOKENS = {"added_tokens_decoder": {}, **FAST}

ENDS: dict[str, tuple[dict[str, Any], dict[str, Any] | None, dict[str, Any] | None, tuple[int, ...]]] = {
    # config.json, generation_config.json, tokenizer_config.json, the tokens that end an answer
    "config.json alone": ({"eos_token_id": 9}, None, None, (9,)),
    "several": ({"eos_token_id": [9, 7, 9]}, None, None, (9, 7)),
    "null": ({"eos_token_id": None}, {"eos_token_id": None}, FAST, ()),
    "generation_config.json alone": ({}, {"eos_token_id": [8]}, None, (8,)),
    "both": ({"eos_token_id": 9}, {"eos_token_id": [8, 9]}, None, (9, 8)),
    "null in one of them": ({"eos_token_id": 9}, {"eos_token_id": None}, None, (9,)),
    "null in the other": ({"eos_token_id": None}, {"eos_token_id": 8}, None, (8,)),
    "the text part": ({"text_config": {"eos_token_id": 7}}, None, None, (7,)),
    "the whole and its text part": ({"eos_token_id": 9, "text_config": {"eos_token_id": 7}}, None, None, (9, 7)),
    "the tokenizer alone": ({}, None, {**FAST, "eos_token": END}, (2,)),
    "the tokenizer as an object": ({}, None, {**FAST, "eos_token": token(END)}, (2,)),
    "the tokenizer too": ({"eos_token_id": 0}, {"eos_token_id": 8}, {**FAST, "eos_token": END}, (0, 8, 2)),
    "a token of the vocabulary": ({"eos_token_id": 0}, None, {**FAST, "eos_token": "a"}, (0, 67)),
    "a token in no vocabulary": ({"eos_token_id": 0}, None, {**FAST, "eos_token": "<|none|>"}, (0,)),
    "a token beyond the model": (
        {"eos_token_id": 0},
        None,
        {**FAST, "eos_token": "<|x|>", "added_tokens_decoder": {"320": token("<|x|>")}},
        (0,),
    ),
    "the default of the class": ({}, None, None, (5,)),
}


@pytest.mark.parametrize("case", ENDS)
def test_an_answer_ends_at_each_token_that_a_file_names(tmp_path: Path, case: str) -> None:
    of_config, of_generation, of_tokenizer, expected = ENDS[case]
    directory = written(
        tmp_path, config=of_config, generation_config=of_generation, tokenizer_config=of_tokenizer or FAST
    )
    file = directory / "tokenizer.json"
    plain = [one for one in json.loads(file.read_text())["added_tokens"] if of_tokenizer]
    file.write_text(json.dumps({**json.loads(file.read_text()), "added_tokens": plain}))
    ends = read_end_tokens(directory, read_config_json(directory), 320, 5)
    by_text = (2, 0) if plain else ()
    assert ends == tuple(dict.fromkeys((*expected, *by_text)))


@pytest.mark.parametrize(
    ("file", "content", "complaint"),
    [
        ("config", {"eos_token_id": 320}, r"config\.json: eos_token_id \(320,\) is outside the vocabulary of 320"),
        ("config", {"eos_token_id": [-1]}, r"config\.json: eos_token_id \(-1,\) is outside"),
        ("config", {"eos_token_id": "2"}, r"config\.json: eos_token_id is '2'; expected a token id or a list"),
        ("config", {"eos_token_id": {"id": 2}}, r"config\.json: eos_token_id is \{'id': 2\}"),
        ("config", {"eos_token_id": [True]}, r"config\.json: eos_token_id is \[True\]"),
        (
            "generation_config",
            {"eos_token_id": [2, 320]},
            r"generation_config\.json: eos_token_id \(2, 320\) is outside",
        ),
        ("generation_config", [], r"generation_config\.json: Expected `object`"),
        ("tokenizer_config", [], r"tokenizer_config\.json: Expected `object`"),
        ("tokenizer", {"model": {"vocab": 7}}, r"tokenizer\.json: .*Expected"),
    ],
)
def test_an_end_that_is_no_token_is_named_with_its_file(
    tmp_path: Path, file: str, content: Any, complaint: str
) -> None:
    directory = written(tmp_path, **{"special_tokens_map": {"eos_token": "a"}, "config": {}, file: content})
    with pytest.raises(ModelError, match=complaint):
        read_end_tokens(directory, read_config_json(directory), 320)


def test_texts_of_added_tokens_end_an_answer_in_each_family_that_has_them() -> None:
    assert list(end_of_turn_ids({"<|im_start|>": 1, "<|im_end|>": 2, "hello": 3})) == [2]
    assert list(end_of_turn_ids({"<start_of_turn>": 105, "<end_of_turn>": 106})) == [106]
    assert list(end_of_turn_ids({"<|eom_id|>": 8, "<|eot_id|>": 9})) == [9, 8]
    assert list(end_of_turn_ids({"<|end|>": 7})) == [7]
    assert list(end_of_turn_ids({"<|end|>": 7, "<|return|>": 8, "<|endoftext|>": 9})) == [9]


def test_added_tokens_that_only_tokenizer_config_has_count_too(tmp_path: Path) -> None:
    directory = written(
        tmp_path, tokenizer_config={"added_tokens_decoder": {"300": token("<|eot_id|>")}}, tokenizer=None
    )
    assert read_tokenizer_ends(directory, 320) == (300,)
    assert read_tokenizer_ends(directory, 300) == ()
    (directory / "tokenizer_config.json").write_text('{"added_tokens_decoder": ["<|eot_id|>"]}')
    assert read_tokenizer_ends(directory, 320) == ()
