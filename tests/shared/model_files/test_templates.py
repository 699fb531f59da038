"""Which of a model's files has its chat template: each file alone, and each pair. Where transformers is installed, its
answers are compared with those that are written down here."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from shared.chat_templates import template_file
from shared.errors import ModelError
from shared.model_file import PROCESSOR_TEMPLATE, TEMPLATE, TOKENIZER_CONFIG, TOOL_TEMPLATE
from shared.model_files.templates import pick_templates, read_templates
from tests.tiny_model import write_tiny_model

FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
TWO = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]

CASES: dict[str, tuple[dict[str, Any], tuple[str, str]]] = {
    # files, the templates for requests without and with tools
    "none": ({}, ("", "")),
    "a text": ({TOKENIZER_CONFIG: "x"}, ("x", "x")),
    "an empty text": ({TOKENIZER_CONFIG: ""}, ("", "")),
    "null": ({TOKENIZER_CONFIG: None}, ("", "")),
    "several with names": ({TOKENIZER_CONFIG: TWO}, ("d", "t")),
    "one with the name default": ({TOKENIZER_CONFIG: TWO[1:]}, ("d", "d")),
    "several as an object": ({TOKENIZER_CONFIG: {"default": "d", "tool_use": "t", "rag": "r"}}, ("d", "t")),
    "a file of its own": ({TEMPLATE: "j"}, ("j", "j")),
    "a file counts before a text": ({TEMPLATE: "j", TOKENIZER_CONFIG: "x"}, ("j", "j")),
    "a file counts before several": ({TEMPLATE: "j", TOKENIZER_CONFIG: TWO}, ("j", "j")),
    "a file for tools": ({TEMPLATE: "j", TOOL_TEMPLATE: "k"}, ("j", "k")),
    "files count before several": ({TEMPLATE: "j", TOOL_TEMPLATE: "k", TOKENIZER_CONFIG: TWO}, ("j", "k")),
}
OF_OURS: dict[str, tuple[dict[str, Any], tuple[str, str]]] = {
    # what transformers' tokenizers do not read, or refuse
    "a text and a file for tools": ({TOOL_TEMPLATE: "k", TOKENIZER_CONFIG: "x"}, ("x", "k")),
    "a file for tools alone": ({TOOL_TEMPLATE: "k"}, ("", "k")),
    "a processor's": ({PROCESSOR_TEMPLATE: "p"}, ("p", "p")),
    "a text counts before a processor's": ({PROCESSOR_TEMPLATE: "p", TOKENIZER_CONFIG: "x"}, ("x", "x")),
    "null and a processor's": ({PROCESSOR_TEMPLATE: "p", TOKENIZER_CONFIG: None}, ("p", "p")),
    "a file counts before a processor's": ({PROCESSOR_TEMPLATE: "p", TEMPLATE: "j"}, ("j", "j")),
}


def written(directory: Path, files: dict[str, Any]) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / TOKENIZER_CONFIG).write_text(json.dumps(FAST))
    for name, content in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        of_object = {**(FAST if name == TOKENIZER_CONFIG else {}), "chat_template": content}
        (directory / name).write_text(content if name.endswith(".jinja") else json.dumps(of_object))
    return directory


@pytest.mark.parametrize("case", [*CASES, *OF_OURS])
def test_the_template_is_that_of_the_file_that_counts_first(tmp_path: Path, case: str) -> None:
    files, expected = (CASES | OF_OURS)[case]
    write_tiny_model(tmp_path, layers=1)
    found = read_templates(written(tmp_path, files))
    assert (found.chat, found.tools) == expected
    try:
        from transformers import AutoTokenizer  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return
    if case in CASES:
        theirs = AutoTokenizer.from_pretrained(tmp_path)
        given: tuple[Any, ...] = (None, [{}])
        asked = [theirs.get_chat_template(tools=tools) if theirs.chat_template else "" for tools in given]
        assert tuple(asked) == expected


def test_the_digest_is_that_of_the_files_with_the_templates(tmp_path: Path) -> None:
    plain = read_templates(written(tmp_path, {TOKENIZER_CONFIG: "x"})).digest
    assert plain == hashlib.sha256((tmp_path / TOKENIZER_CONFIG).read_bytes()).hexdigest()
    files = read_templates(written(tmp_path, {TEMPLATE: "j", TOOL_TEMPLATE: "k"})).digest
    assert files == hashlib.sha256(b"jk").hexdigest()
    assert read_templates(tmp_path / "missing").digest == hashlib.sha256(b"").hexdigest()


def test_a_given_template_takes_the_place_of_all_files(tmp_path: Path) -> None:
    directory = written(tmp_path / "model", {TEMPLATE: "j", TOOL_TEMPLATE: "k"})
    (tmp_path / "other").write_text("o")
    found = read_templates(directory, str(tmp_path / "other"))
    assert (found.chat, found.tools, found.digest) == ("o", "o", hashlib.sha256(b"o").hexdigest())
    assert read_templates(directory, "hermes").chat == template_file("hermes").read_text()
    with pytest.raises(ModelError, match="neither a file nor one of"):
        read_templates(directory, "hermse")


@pytest.mark.parametrize("wrong", [7, [], TWO[:1], [7], {"tool_use": "t"}, {"default": 7}])
def test_templates_without_a_default_are_refused_with_their_file(wrong: object) -> None:
    with pytest.raises(ModelError, match="file: chat_template is neither a text nor a list with one named default"):
        pick_templates(wrong, "file")


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (written(tmp_path, {}) / TEMPLATE).write_bytes(b"\xff")
    with pytest.raises(ModelError, match=r"chat_template\.jinja: 'utf-8' codec"):
        read_templates(tmp_path)
