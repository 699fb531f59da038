"""Grammars as one Lark text, read by llguidance."""

from __future__ import annotations

import json

import pytest
from llguidance import LLMatcher

from services.worker.vllm.grammar_text import lark_text


def _grammars(*grammars: dict[str, object]) -> str:
    return json.dumps({"grammars": grammars})


def test_references_become_rules() -> None:
    text = lark_text(
        _grammars(
            {"lark_grammar": 'start: "@answer" /@answer/ @answer // @answer'},
            {"name": "answer", "lark_grammar": 'start: "x" @content'},
            {"name": "content", "json_schema": {"const": "@answer"}},
        )
    )
    assert text.startswith('start: "@answer" /@answer/ headrace_answer // @answer\nheadrace_answer: %lark {')
    assert LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(text), None) == ""


def test_plain_forms() -> None:
    assert lark_text("start: /a/") == "start: /a/"
    assert lark_text(_grammars({"json_schema": {"type": "null"}})) == 'start: %json {"type":"null"}'


@pytest.mark.parametrize(
    "grammar",
    [
        "{",
        "{}",
        '{"grammars": []}',
        '{"grammars": [{"regex": "a"}]}',
        _grammars({"lark_grammar": "start: @a"}, {"name": "a", "lark_grammar": "start: @a"}),
    ],
)
def test_other_forms_are_refused(grammar: str) -> None:
    with pytest.raises(ValueError, match="grammar"):
        lark_text(grammar)
