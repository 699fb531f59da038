from __future__ import annotations

import pytest

from services.frontend.tool_parsers.parser import ParsePlan
from tests.frontend.tool_parsers.transcripts import Answer, every_cut, one, text

PLAN = ParsePlan("mistral")
TWO = Answer("", "", [("weather", '{"city": "Ré"}'), ("get_time", "{}")], ["complete", "complete"])


@pytest.mark.parametrize(
    ("written", "answer"),
    [
        ('[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Ré"}}, {"name": "get_time", "arguments": {}}]', TWO),
        (
            '[TOOL_CALLS][{"name":"weather","arguments":{"city": "Ré"},"id":"abcdefghi"}]',
            one("weather", '{"city": "Ré"}'),
        ),
        ('[TOOL_CALLS]{"name": "get_time", "arguments": {}}', one("get_time", "{}")),
        ('[TOOL_CALLS]weather[ARGS]{"city": "Ré"}[TOOL_CALLS]get_time[ARGS]{}', TWO),
        ('[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{"city": "Ré"}', one("weather", '{"city": "Ré"}')),
        ('[TOOL_CALLS]run-sql{"q": "select 1"}', one("run-sql", '{"q": "select 1"}')),
        ("Bien sûr. [TOOL_CALLS]get_time[ARGS]{}", one("get_time", "{}", "Bien sûr. ")),
        (
            '[TOOL_CALLS] [{"name": "get_time", "arguments": {}}, {"name": "wether", "arguments": {}}]',
            Answer('{"name": "wether", "arguments": {}}]', "", [("get_time", "{}")], ["complete", "unknown_tool"]),
        ),
        (
            '[TOOL_CALLS] [{"name": "get_time", "arguments": {}}, ',
            Answer("", "", [("get_time", "{}")], ["complete", "unfinished"]),
        ),
        (
            '[TOOL_CALLS]get_time[ARGS]{"a": tru}',
            Answer("tru}", "", [("get_time", '{"a": ')], ["broken"]),
        ),
    ],
)
def test_calls_are_read_wherever_the_text_is_cut(written: str, answer: Answer) -> None:
    assert every_cut(PLAN, written) == answer


@pytest.mark.parametrize(
    ("written", "outcomes"),
    [
        ("Bonjour [TOOL] [ARGS]", []),
        ("[TOOL_CALLS]wether[ARGS]{}", ["unknown_tool"]),
        ("[TOOL_CALLS]get_time[ARGS]1", ["malformed"]),
        ("[TOOL_CALLS][]", ["malformed"]),
        ("[TOOL_CALLS]get_time", ["unfinished"]),
        ("[TOOL_CALLS]" + "x" * 75 + "{}", ["malformed"]),
    ],
)
def test_what_is_no_call_is_text_to_the_letter(written: str, outcomes: list[str]) -> None:
    assert every_cut(PLAN, written) == text(written, *outcomes)
