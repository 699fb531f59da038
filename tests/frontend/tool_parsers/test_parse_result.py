"""What becomes of a broken call if the answer is sent whole; `test_rules.py` holds all other rules in streams."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.frontend.tool_parsers.formats import FORMATS, FormatName
from services.frontend.tool_parsers.parse_result import ParseResult
from services.frontend.tool_parsers.parser import AnswerParser, ParsePlan
from tests.frontend.pieces import ANSWERS, CALL

BROKEN: dict[FormatName, str] = {
    "hermes": 'I look. <tool_call>{"name": "weather", "arguments": {"city": Rome}}</tool_call>',
    "mistral": '[TOOL_CALLS]weather[ARGS]{"city": Rome} and more',
    "pythonic": "[weather(city=os.getcwd())]",
    "llama3_json": '{"name": "weather", "parameters": {"city": Rome}}',
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
