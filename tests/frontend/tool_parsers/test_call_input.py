"""The input of a custom tool's call: the text that its arguments hold, in whatever pieces they come."""

from __future__ import annotations

import json

import pytest

from services.frontend.tool_parsers.call_input import CallInput
from services.frontend.tool_parsers.formats import FormatName
from services.frontend.tool_parsers.parse_result import ParseResult
from services.frontend.tool_parsers.parser import AnswerParser, ParsePlan

PATCH = '*** Begin Patch\n+say "hi" \\ 🚰 é\t\u2028\n*** End Patch\n'


def read(*pieces: str) -> str:
    call_input = CallInput()
    return "".join(map(call_input.push, pieces))


@pytest.mark.parametrize("escaped", [True, False])
def test_it_is_the_same_wherever_the_arguments_are_cut(escaped: bool) -> None:
    written = json.dumps({"input": PATCH}, ensure_ascii=escaped)
    assert read(written) == PATCH
    assert read(*written) == PATCH
    for cut in range(len(written)):
        assert read(written[:cut], written[cut:]) == PATCH


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("{}", ""),
        ('{"why": {"input": "x"}, "input": "ls"}', "ls"),
        ('{"input": ["ls"]}', ""),
        ('{"input": null}', ""),
        ('{"input": "ls -', "ls -"),
        ('{"input": "a\\ud83d b\\udeb0"}', "a\ufffd b\ufffd"),
    ],
)
def test_arguments_of_another_form_have_what_there_is_of_it(written: str, text: str) -> None:
    assert read(*written) == text


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("hermes", '<tool_call>{"name": "patch", "arguments": {"input": "a\\nb"}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "patch", "arguments": "a\\nb"}</tool_call>'),
        ("llama3_json", '{"name": "patch", "parameters": {"input": "a\\nb"}}'),
        ("mistral", '[TOOL_CALLS]patch[ARGS]{"input": "a\\nb"}'),
        ("mistral", '[TOOL_CALLS]patch[ARGS]"a\\nb"'),
        ("pythonic", "[patch(input='a\\nb')]"),
    ],
)
def test_every_format_has_calls_of_custom_tools(name: FormatName, written: str) -> None:
    for pieces in ([written], list(written)):
        result = ParseResult(frozenset({"patch"}), lambda: "id", customs=frozenset({"patch"}))
        parser = AnswerParser(ParsePlan(name), result)
        for piece in pieces:
            parser.push(piece)
        parser.finish()
        content, _, [call] = result.drain()
        assert (content, call.name, call.arguments, call.custom) == ("", "patch", "a\nb", True)
