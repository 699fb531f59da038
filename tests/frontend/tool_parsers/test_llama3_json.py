from __future__ import annotations

import pytest

from services.frontend.tool_parsers.parser import ParsePlan
from tests.frontend.tool_parsers.transcripts import Answer, every_cut, one, text

PLAN = ParsePlan("llama3_json")
CALL = '{"name": "weather", "parameters": {"city": "Köln", "days": "3"}}'
ARGUMENTS = '{"city": "Köln", "days": "3"}'


@pytest.mark.parametrize(
    ("written", "answer"),
    [
        (CALL, one("weather", ARGUMENTS)),
        ("\n\n" + CALL, one("weather", ARGUMENTS)),
        ("<|python_tag|>" + CALL, one("weather", ARGUMENTS)),
        ("Let me see. <|python_tag|>" + CALL, one("weather", ARGUMENTS, "Let me see. ")),
        ('{"type": "function", "name": "get_time", "parameters": {}}', one("get_time", "{}")),
        ('{"name": "get_time", "arguments": {}}', one("get_time", "{}")),
        (
            CALL + '; {"name": "get_time", "parameters": {}}',
            Answer("", "", [("weather", ARGUMENTS), ("get_time", "{}")], ["complete", "complete"]),
        ),
        (
            CALL + '\n{"name": "wether", "parameters": {}}',
            Answer('{"name": "wether", "parameters": {}}', "", [("weather", ARGUMENTS)], ["complete", "unknown_tool"]),
        ),
    ],
)
def test_calls_are_read_wherever_the_text_is_cut(written: str, answer: Answer) -> None:
    assert every_cut(PLAN, written) == answer


@pytest.mark.parametrize(
    ("written", "outcomes"),
    [
        ("It is warm in Köln.", []),
        ("As JSON: " + CALL, []),
        ('{"city": "Köln", "temperature": 21.5e1}', ["malformed"]),
        ('{"name": "Bob", "parameters": {}}', ["unknown_tool"]),
        ("{{not json}}", ["malformed"]),
        ("<|python_tag|>print(1)", ["malformed"]),
        ('{"name": "wea', ["unfinished"]),
    ],
)
def test_what_is_no_call_is_text_to_the_letter(written: str, outcomes: list[str]) -> None:
    assert every_cut(PLAN, written) == text(written, *outcomes)
