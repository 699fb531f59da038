"""Our grammars as vLLM's structured output takes them."""

from __future__ import annotations

import json

import pytest
from llguidance import LLMatcher

from services.worker.vllm.grammar import UnknownGrammar, to_structured_output


def test_a_schema_stays_a_schema() -> None:
    schema = {"type": "object"}
    kind, text = to_structured_output(json.dumps({"grammars": [{"json_schema": schema}]}))
    assert (kind, json.loads(text)) == ("json", schema)


@pytest.mark.parametrize("text", ['start: "a"', json.dumps({"grammars": [{"lark_grammar": 'start: "a"'}]})])
def test_lark_stays_lark(text: str) -> None:
    assert to_structured_output(text) == ("grammar", 'start: "a"')


def test_grammars_that_are_referred_to_become_rules() -> None:
    grammars = [
        {"lark_grammar": 'start: "<" @content ">" | @content-2'},
        {"name": "content", "json_schema": {"type": "integer"}},
        {"name": "content-2", "lark_grammar": 'start: "b" rest\nrest: "c"'},
    ]
    kind, text = to_structured_output(json.dumps({"grammars": grammars}))
    assert kind == "grammar"
    assert LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(text)) == ""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "must have the form"),
        ('{"grammars": []}', "must have the form"),
        ('{"grammar": [{}]}', "must have the form"),
        ('{"grammars": [{"regex": "a"}]}', "no Lark grammar"),
        ('{"grammars": [{"lark_grammar": "start: @x"}]}', "refers to one that is not there"),
        ('{"grammars": [{"lark_grammar": "start: @x"}, {"name": "x", "regex": "a"}]}', "neither"),
    ],
)
def test_what_vllm_cannot_hold_is_refused(text: str, reason: str) -> None:
    with pytest.raises(UnknownGrammar, match=reason):
        to_structured_output(text)
