"""What becomes of a broken call if the answer is sent whole; `test_rules.py` holds all other rules in streams."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.frontend.tool_parsers.parse_result import CallInput, ParseResult
from services.frontend.tool_parsers.parser import FORMATS, AnswerParser, FormatName, ParsePlan
from tests.frontend.pieces import ANSWERS, CALL

BROKEN: dict[FormatName, str] = {
    "hermes": 'I look. <tool_call>{"name": "weather", "arguments": {"city": Rome}}</tool_call>',
    "mistral": '[TOOL_CALLS]weather[ARGS]{"city": Rome} and more',
    "pythonic": "[weather(city=os.getcwd())]",
    "llama3_json": '{"name": "weather", "parameters": {"city": Rome}}',
    "qwen3_coder": "I look. <tool_call>\n<function=weather>\n<parameter=city>\nRome",
}


def read(
    plan: ParsePlan, pieces: list[str], *, whole: bool, short: bool = False
) -> tuple[str, str, list[tuple[str, str]]]:
    result = ParseResult(frozenset({"weather"}), lambda: "id", whole=whole)
    parser = AnswerParser(plan, result)
    content, reasoning, calls = "", "", list[tuple[str, str]]()
    for piece in (*pieces, None):
        if piece is None:
            parser.finish(short=short)
        else:
            parser.push(piece)
        parser.validate()
        more, thought, found = result.drain()
        content, reasoning = content + more, reasoning + thought
        for call in found:
            calls = [*calls, (call.name, "")] if call.id else calls
            calls[-1] = (calls[-1][0], calls[-1][1] + call.arguments)
    assert len(calls) == result.calls_begun
    return content, reasoning, calls


@pytest.mark.parametrize("form", BROKEN)
def test_a_broken_call_of_an_answer_that_is_sent_whole_is_text_to_the_letter(form: FormatName) -> None:
    assert read(ParsePlan(form), [*BROKEN[form]], whole=True) == (BROKEN[form], "", [])
    assert form in FORMATS
    _, _, streamed = read(ParsePlan(form), [*BROKEN[form]], whole=False)
    assert streamed, "in a stream it has begun to go out"


def test_calls_around_a_broken_one_stay_calls() -> None:
    text, _, calls = read(ParsePlan("hermes"), [CALL, "\n\n", BROKEN["hermes"], CALL], whole=True)
    assert (text.strip(), len(calls)) == (BROKEN["hermes"], 2)
    long = CALL.replace("Zürich", "x" * (1 << 17))
    assert read(ParsePlan("hermes"), [long], whole=True)[2][0][1].count("x") == 1 << 17


def test_a_call_that_is_cut_off_is_half_a_call_also_if_the_answer_is_sent_whole() -> None:
    cut = CALL.partition(" 🚰")[0]
    assert read(ParsePlan("hermes"), [cut], whole=True, short=True)[2] == [("weather", '{"city": "Zürich')]
    assert read(ParsePlan("hermes"), [cut], whole=True) == (cut, "", []), (
        "if the model ended its turn there, it is text"
    )


@given(st.sampled_from(ANSWERS), st.lists(st.integers(0, 99), max_size=4), st.booleans())
def test_an_answer_without_broken_calls_is_the_same_whole_and_streamed(text: str, cuts: list[int], short: bool) -> None:
    plan = ParsePlan("hermes", reasoning=True)
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    pieces = [text[start:end] for start, end in pairwise(edges)]
    whole, streamed = (read(plan, pieces, whole=one, short=short) for one in (True, False))
    if "broken" not in text and (short or "cut" not in text):
        assert whole == streamed


PATCH = '*** Begin Patch\n+say "hi" \\ 🚰 é\t\u2028\n*** End Patch\n'


def read_input(*pieces: str) -> str:
    call_input = CallInput()
    return "".join(map(call_input.push, pieces))


@pytest.mark.parametrize("escaped", [True, False])
def test_it_is_the_same_wherever_the_arguments_are_cut(escaped: bool) -> None:
    written = json.dumps({"input": PATCH}, ensure_ascii=escaped)
    assert read_input(written) == PATCH
    assert read_input(*written) == PATCH
    for cut in range(len(written)):
        assert read_input(written[:cut], written[cut:]) == PATCH


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
    assert read_input(*written) == text


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("hermes", '<tool_call>{"name": "patch", "arguments": {"input": "a\\nb"}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "patch", "arguments": "a\\nb"}</tool_call>'),
        ("llama3_json", '{"name": "patch", "parameters": {"input": "a\\nb"}}'),
        ("mistral", '[TOOL_CALLS]patch[ARGS]{"input": "a\\nb"}'),
        ("mistral", '[TOOL_CALLS]patch[ARGS]"a\\nb"'),
        ("pythonic", "[patch(input='a\\nb')]"),
        ("qwen3_coder", "<tool_call>\n<function=patch>\n<parameter=input>\na\nb\n</parameter>\n</function>"),
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
