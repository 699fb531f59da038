"""The table in docs/tools.md, "Calls that are not quite right": what models write, in every format."""

from __future__ import annotations

import pytest

from services.frontend.tool_parsers.parser import FormatName, ParsePlan
from tests.frontend.tool_parsers.transcripts import Answer, every_cut, one, text

OBJECTS: list[tuple[FormatName, str, str, str]] = [
    ("hermes", "<tool_call>\n", "\n</tool_call>", "arguments"),
    ("llama3_json", "", "", "parameters"),
    ("mistral", "[TOOL_CALLS] [", "]", "arguments"),
]
"""Formats whose calls are JSON objects: what comes before and after one, and the name of its arguments."""
ROME = '{"city": "Rome"}'
TABLE = [
    # written, the arguments of its call of get_time
    ('{"name": "get_time"}', "{}"),
    ('{"name": "get_time", "KEY": null}', "{}"),
    ('{"name": "get_time", "KEY": None}', "{}"),
    ('{"name": "get_time", "KEY": ""}', "{}"),
    ('{"name": "get_time", "KEY": " "}', "{}"),
    ('{"name": "get_time", "KEY": "{}"}', "{}"),
    ('{"name": "get_time", "KEY": "null"}', "{}"),
    ('{"name": "get_time", "KEY": []}', "{}"),
    ('{"KEY": null, "name": "get_time"}', "{}"),
    ('{"name": "get_time", "KEY": "{\\"city\\": \\"Rome\\"}"}', ROME),
    ('{"KEY": "{\\"city\\": \\"Rome\\"}", "name": "get_time"}', ROME),
    ('{"name": "get_time", "KEY": "{\'city\': \'Rome\',}"}', ROME),
    ('{"name": "get_time", "parameters": {"city": "Rome"}}', ROME),
    ('{"name": "get_time", "arguments": {"city": "Rome"}}', ROME),
    ('{"name": "get_time", "args": {"city": "Rome"}}', ROME),
    ('{"name": "get_time", "input": {"city": "Rome"}}', ROME),
    ('{"type": "function", "function": {"name": "get_time", "KEY": {"city": "Rome"}}}', ROME),
    ('{"type": "function", "function": "get_time", "KEY": {"city": "Rome"}}', ROME),
    ('{"name": " get_time ", "KEY": {"city": "Rome"}}', ROME),
    ('{"name": "functions.get_time", "KEY": {"city": "Rome"}}', ROME),
    ('{"name": "get_time", "KEY": {"city": "Rome",},}', ROME),
    ("{'name': 'get_time', 'KEY': {'city': 'Rome'}}", ROME),
    ('{"name": "get_time", "KEY": {"a": True, "b": [None, False,]}}', '{"a": true, "b": [null, false]}'),
    ('{"name": "get_time", "KEY": {"a": "it\\\'s"}}', '{"a": "it\'s"}'),
    ('{"name": "get_time", "KEY": {"a": "one\ntwo\t\\d"}}', '{"a": "one\\ntwo\\t\\\\d"}'),
    ('{"name": "get_time", "KEY": {"a": "C:\\users\\me \\u12 \\u00e4"}}', r'{"a": "C:\\users\\me \\u12 \u00e4"}'),
    ('{"name": "get_time", "city": "Rome"}', ROME),
    ('{"id": "1", "type": "function", "name": "get_time", "city": "Rome", "days": 1}', '{"city": "Rome", "days": 1}'),
    ('{"city": "Rome", "KEY": {"city": "Rome"}, "name": "get_time"}', ROME),
    ("{'name': 'get_time', 'KEY': {'a': 'say \"hi\"'}}", '{"a": "say \\"hi\\""}'),
    ('{"name": "get_time", "KEY": {"city": "Rome"}}}', ROME),
    ('{"name": "get_time", "KEY": {"city": "Rome"}}}}]', ROME),
    ('```json\n{"name": "get_time", "KEY": {"city": "Rome"}}\n```', ROME),
]  # fmt: skip


@pytest.mark.parametrize(("name", "before", "after", "key"), OBJECTS, ids=lambda one: one.strip())
@pytest.mark.parametrize(("written", "arguments"), TABLE)
def test_a_call_that_is_not_quite_right_is_read_wherever_the_text_is_cut(
    name: FormatName, before: str, after: str, key: str, written: str, arguments: str
) -> None:
    if name == "mistral" and written.startswith("```"):
        before, after = "[TOOL_CALLS]", ""
    answer = every_cut(ParsePlan(name), before + written.replace("KEY", key) + after)
    assert answer == one("get_time", arguments)


@pytest.mark.parametrize(
    ("name", "written", "arguments"),
    [
        ("hermes", '<tool_call>{"name": "get_time", "arguments": {"city": "Rome"}</tool_call>', ROME),
        ("mistral", "[TOOL_CALLS]get_time[ARGS]", "{}"),
        ("mistral", "[TOOL_CALLS]get_time[ARGS]null", "{}"),
        ("mistral", '[TOOL_CALLS]get_time[ARGS]""', "{}"),
        ("mistral", '[TOOL_CALLS]functions.get_time[ARGS]"{\\"city\\": \\"Rome\\"}"', ROME),
        ("mistral", "[TOOL_CALLS]get_time[ARGS]{'city': 'Rome',}", ROME),
        ("pythonic", "[get_time()]", "{}"),
        ("pythonic", "[get_time({})]", "{}"),
        ("pythonic", "[get_time({'city': 'Rome',})]", ROME),
        ("pythonic", "[functions.get_time(city='Rome',),]", ROME),
        ("pythonic", "```python\n[get_time(city='Rome')]\n```", ROME),
        ("pythonic", "[get_time(city='Rome')]]", ROME),
        ("pythonic", r"[get_time(a='C:\users\x \u12')]", r'{"a": "C:\\users\\x \\u12"}'),
    ],
)
def test_so_is_one_of_a_form_of_its_own(name: FormatName, written: str, arguments: str) -> None:
    assert every_cut(ParsePlan(name), written) == one("get_time", arguments)


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("hermes", '<tool_call>[{"name": "weather"}, {"name": "get_time", "arguments": {}}]</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "weather"}\n{"name": "get_time", "arguments": {}}\n</tool_call>'),
        ("llama3_json", '[{"name": "weather"}, {"name": "get_time", "parameters": null}]'),
        ("llama3_json", '```json\n[{"name": "weather"},\n{"name": "get_time"},]\n```'),
        ("llama3_json", '{"name": "weather"}\n{"name": "get_time"}'),
        ("mistral", '[TOOL_CALLS] [{"name": "weather"}, {"name": "get_time"},]'),
        ("mistral", "[TOOL_CALLS]weather[ARGS][TOOL_CALLS]get_time[ARGS]{}"),
    ],
)
def test_several_calls_are_read_from_a_list_and_one_after_another(name: FormatName, written: str) -> None:
    both = [("weather", "{}"), ("get_time", "{}")]
    assert every_cut(ParsePlan(name), written) == Answer("", "", both, ["complete", "complete"])


@pytest.mark.parametrize(
    ("name", "written", "outcome"),
    [
        ("hermes", '<tool_call>{"name": "get_time", "arguments": [1]}</tool_call>', "malformed"),
        ("hermes", '<tool_call>{"name": "get_time", "arguments": "{} x"}</tool_call>', "malformed"),
        ("hermes", '<tool_call>{"name": "get_time", "arguments": "[1]"}</tool_call>', "malformed"),
        ("hermes", '<tool_call>{"function": {"arguments": {}}}</tool_call>', "malformed"),
        ("llama3_json", '```json\n{"city": "Rome"}\n```', "malformed"),
        ("llama3_json", "[1, 2]", "malformed"),
        ("pythonic", "```python\nprint(1)\n```", "malformed"),
        ("pythonic", "[get_time('Rome')]", "malformed"),
    ],
)
def test_what_is_no_call_is_text_to_the_letter(name: FormatName, written: str, outcome: str) -> None:
    assert every_cut(ParsePlan(name), written) == text(written, outcome)


def test_a_name_without_its_arguments_is_no_call_if_the_answer_was_cut() -> None:
    assert every_cut(ParsePlan("mistral"), "[TOOL_CALLS]get_time[ARGS]", short=True).calls == []
    assert every_cut(ParsePlan("hermes"), '<tool_call>{"name": "get_time"', short=True).calls == []
