from __future__ import annotations

import pytest

from services.frontend.tool_parsers.parser import ParsePlan
from tests.frontend.tool_parsers.transcripts import Answer, every_cut, one, text

PLAN = ParsePlan("hermes")
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich 🚰", "days": 3}}\n</tool_call>'
ARGUMENTS = '{"city": "Zürich 🚰", "days": 3}'


@pytest.mark.parametrize(
    ("written", "answer"),
    [
        (CALL, one("weather", ARGUMENTS)),
        ("\n\n" + CALL + "\n", one("weather", ARGUMENTS)),
        ("I look it up.\n" + CALL, one("weather", ARGUMENTS, "I look it up.\n")),
        (CALL.removesuffix("</tool_call>"), one("weather", ARGUMENTS)),
        (
            CALL + '\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>',
            Answer("", "", [("weather", ARGUMENTS), ("get_time", "{}")], ["complete", "complete"]),
        ),
        ('<tool_call>{"arguments": {"a": [1, {}]}, "name": "get_time"}</tool_call>', one("get_time", '{"a": [1, {}]}')),
        (
            '<tool_call>{"id": 7, "name": "run-sql", "type": 1, "arguments": {"q": "<tool_call>\\"\\u00e4"}, "x": []}',
            one("run-sql", '{"q": "<tool_call>\\"\\u00e4"}'),
        ),
        (CALL + " Done.", one("weather", ARGUMENTS, "Done.")),
    ],
)
def test_calls_are_read_wherever_the_text_is_cut(written: str, answer: Answer) -> None:
    assert every_cut(PLAN, written) == answer


@pytest.mark.parametrize(
    ("written", "outcome"),
    [
        ("<tool_call>weather(3)</tool_call>", "malformed"),
        ('<tool_call>{"name": "weather", "arguments": 3}</tool_call>', "malformed"),
        ('<tool_call>{"name": "weather", "arguments": "Rome"}</tool_call>', "malformed"),
        ('<tool_call>{"name": "weather"</tool_call>', "malformed"),
        ('<tool_call>{"arguments": {}}</tool_call>', "malformed"),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', "malformed"),
        ('<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', "malformed"),
        ('<tool_call>{"name": "' + "x" * 600 + '", "arguments": {}}</tool_call>', "malformed"),
        ('<tool_call>{"name": "wether", "arguments": {}}</tool_call>', "unknown_tool"),
        ('<tool_call>\n{"name": "wea', "unfinished"),
        ('<tool_call>{"arguments": {"a": 1}, ', "unfinished"),
        ("<tool_call>", "unfinished"),
    ],
)
def test_what_is_no_call_is_text_to_the_letter(written: str, outcome: str) -> None:
    assert every_cut(PLAN, "Well: " + written) == text("Well: " + written, outcome)


def test_a_call_that_has_begun_and_goes_wrong_ends_there_and_the_rest_is_text() -> None:
    broken = '<tool_call>{"name": "weather", "arguments": {"city": Rome}}</tool_call>'
    answer = every_cut(PLAN, broken + CALL)
    assert answer == Answer(
        "Rome}}</tool_call>", "", [("weather", '{"city": '), ("weather", ARGUMENTS)], ["broken", "complete"]
    )


def test_a_number_without_end_breaks_its_call_at_the_same_place_wherever_it_is_cut() -> None:
    answer = every_cut(PLAN, '<tool_call>{"name": "weather", "arguments": {"n": ' + "1" * 1000 + "}}")
    assert answer == Answer("1" * 1000 + "}}", "", [("weather", '{"n": ')], ["broken"])


def test_what_only_begins_like_a_tag_is_text() -> None:
    assert every_cut(PLAN, "a <tool <tool_cal </tool_call> <") == text("a <tool <tool_cal </tool_call> <")
