from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.frontend.tool_parsers.json_text import DEPTH_LIMIT
from services.frontend.tool_parsers.parser import FORMATS, FormatName, ParsePlan, detect_format, detect_reasoning
from services.frontend.tool_parsers.reader import MARKED_LIMIT_CHARACTERS
from tests.frontend.tool_parsers.transcripts import NAMES, Answer, every_cut, read, text

ATOMS = st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False)
VALUES: st.SearchStrategy[Any] = st.recursive(
    ATOMS | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8
)
KEYWORDS = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
CALLS = st.lists(st.tuples(st.sampled_from(sorted(NAMES)), st.dictionaries(KEYWORDS, VALUES, max_size=3)), max_size=3)
FORMAT_NAMES: list[FormatName] = sorted(FORMATS)
PIECES = st.lists(
    st.sampled_from(
        (
            *(
                "<tool_call>",
                "</tool_call>",
                "<|python_tag|>",
                "[TOOL_CALLS]",
                "[ARGS]",
                "[CALL_ID]",
                "<think>",
                "</think>",
                "<function=",
                "<parameter=",
                "</parameter>",
                "</function>",
            ),
            *(
                "{",
                "}",
                "[",
                "]",
                "(",
                ")",
                '"',
                "'",
                ",",
                ":",
                ";",
                "=",
                "\\",
                "\\u00",
                " ",
                "\n",
                "1",
                "tru",
                "ü",
                "x",
            ),
            *("<function=weather>", "<parameter=a>"),
            *('"name":', '"arguments":', '"parameters":', '"weather"', "weather", "get_time(", '{"name": "weather", '),
        )
    ),
    max_size=25,
).map("".join)


def spell(name: FormatName, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """Return calls as a model would write them."""
    plain = json.dumps
    match name:
        case "qwen3_coder":
            bodies = [
                "".join(f"<parameter={key}>\n{plain(value)}\n</parameter>\n" for key, value in given.items())
                for _, given in calls
            ]
            named = zip((called for called, _ in calls), bodies, strict=True)
            return "\n".join(f"<tool_call>\n<function={one}>\n{body}</function>\n</tool_call>" for one, body in named)
        case "hermes":
            bodies = [f'{{"name": "{called}", "arguments": {plain(given)}}}' for called, given in calls]
            return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)
        case "llama3_json":
            return "; ".join(f'{{"name": "{called}", "parameters": {plain(given)}}}' for called, given in calls)
        case "mistral":
            return "".join(f"[TOOL_CALLS]{called}[ARGS]{plain(given)}" for called, given in calls)
        case "pythonic":
            bodies = [
                f"{called}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for called, given in calls
            ]
            return f"[{', '.join(bodies)}]" if bodies else ""  # fmt: skip


def json_only(calls: list[tuple[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return schemas of which no argument is a text, so that all of them are written as JSON."""
    keys = {key for _, given in calls for key in given}
    return {name: {"properties": {key: {"type": "object"} for key in keys}} for name in NAMES}


@given(st.sampled_from(FORMAT_NAMES), CALLS, st.lists(st.integers(0, 500), max_size=6))
@settings(max_examples=200)
def test_any_call_comes_back_as_it_was_written(
    name: FormatName, calls: list[tuple[str, dict[str, Any]]], cuts: list[int]
) -> None:
    written = spell(name, calls)
    answer = read(ParsePlan(name), cut(written, cuts), schemas=json_only(calls))
    assert [(called, json.loads(arguments)) for called, arguments in answer.calls] == calls
    assert answer.content.strip() == ""
    assert answer.outcomes == ["complete"] * len(calls)


@given(st.sampled_from([*FORMAT_NAMES, None]), st.booleans(), st.booleans(), PIECES, st.lists(st.integers(0, 99)))
@settings(max_examples=500)
def test_any_text_says_the_same_however_it_is_cut(
    name: FormatName | None, thinks: bool, begun: bool, written: str, cuts: list[int]
) -> None:
    plan = ParsePlan(name, thinks, begun)
    whole = read(plan, [written])
    assert read(plan, cut(written, cuts)) == whole
    assert read(plan, list(written)) == whole
    if not whole.calls and not thinks:
        assert whole.content == written, "what is no call is text to the letter"


def cut(written: str, cuts: list[int]) -> list[str]:
    at = sorted(min(one, len(written)) for one in cuts)
    return [written[start:end] for start, end in zip([0, *at], [*at, len(written)], strict=True)]


@pytest.mark.parametrize("size", [MARKED_LIMIT_CHARACTERS - 100, MARKED_LIMIT_CHARACTERS, 3 * MARKED_LIMIT_CHARACTERS])
def test_arguments_that_wait_for_their_name_are_bounded(size: int) -> None:
    written = '<tool_call>{"arguments": {"a": "' + "x" * size + '"}, "name": "weather"}</tool_call>'
    waited = size < MARKED_LIMIT_CHARACTERS - 50
    for pieces in ([written], cut(written, list(range(0, len(written), 997)))):
        answer = read(ParsePlan("hermes"), pieces)
        assert answer.outcomes == (["complete"] if waited else ["too_long"])
        assert answer.content == ("" if waited else written)


def test_arguments_after_their_name_may_be_long_and_are_not_kept() -> None:
    arguments = '{"a": "' + "x" * (3 * MARKED_LIMIT_CHARACTERS) + '"}'
    written = '<tool_call>{"name": "weather", "arguments": ' + arguments + "}</tool_call>"
    assert read(ParsePlan("hermes"), [written]).calls == [("weather", arguments)]


@pytest.mark.parametrize(
    ("depth", "outcome"), [(DEPTH_LIMIT - 1, "complete"), (DEPTH_LIMIT, "broken"), (9999, "broken")]
)
def test_nesting_is_bounded(depth: int, outcome: str) -> None:
    nested = "[" * depth + "]" * depth
    assert read(ParsePlan("mistral"), ['[TOOL_CALLS]weather[ARGS]{"a":' + nested + "}"]).outcomes == [outcome]
    assert read(ParsePlan("pythonic"), [f"[weather(a={nested})]"]).outcomes in ([outcome], ["complete"])


def test_without_parallel_calls_the_answer_ends_with_its_first() -> None:
    two = '<tool_call>{"name": "weather", "arguments": {}}</tool_call><tool_call>{"name": "get_time", "arguments": {}}'
    for pieces in ([two], list(two)):
        answer = read(ParsePlan("hermes"), pieces, parallel=False)
        assert answer == Answer("", "", [("weather", "{}")], ["complete"])


def test_white_space_before_a_call_is_dropped_unless_there_is_much_of_it() -> None:
    call = "<tool_call>" + '{"name": "weather", "arguments": {}}'
    assert read(ParsePlan("hermes"), [" " * 64 + call]).content == ""
    assert read(ParsePlan("hermes"), [" " * 65 + call]).content == " " * 65
    assert read(ParsePlan("hermes"), [*" " * 65, call]).content == " " * 65
    assert read(ParsePlan("hermes"), [" ", "\n"]) == text(" \n")


# --- an answer that max_tokens cuts


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_wherever_an_answer_is_cut_short_no_piece_of_a_mark_is_content(name: FormatName) -> None:
    calls: list[tuple[str, dict[str, Any]]] = [("weather", {"city": "Rome", "days": 12}), ("get_time", {})]
    begun = {"hermes": "Well. ", "mistral": "Well. ", "qwen3_coder": "Well. "}.get(name, "")
    written = begun + spell(name, calls)
    marked = {"pythonic": "<|python_start|>" + written + "<|python_end|>", "llama3_json": "<|python_tag|>" + written}
    written = marked.get(name, written)
    for end in range(len(written)):
        answer = read(ParsePlan(name), [written[:end]], short=True, schemas=json_only(calls))
        single = answer.content.removeprefix(begun) in ("<", "[") and not answer.calls
        assert begun.startswith(answer.content) or single, written[:end]
        assert [called for called, _ in answer.calls] == [called for called, _ in calls][: len(answer.calls)]
        for (_, arguments), (_, meant) in zip(answer.calls, calls, strict=False):
            assert json.dumps(meant).startswith(arguments)


@pytest.mark.parametrize(
    ("plan", "written", "content"),
    [
        (ParsePlan("hermes"), "if a <", "if a <"),
        (ParsePlan("hermes"), "see [TOOL", "see [TOOL"),
        (ParsePlan("hermes"), 'say {"name": "wea', 'say {"name": "wea'),
        (ParsePlan("llama3_json"), '{"name": "wea', '{"name": "wea'),
        (ParsePlan("pythonic"), "[weath", "[weath"),
        (ParsePlan("mistral"), "a list [", "a list ["),
        (ParsePlan("hermes"), "<tool_call>weather(3)</tool_call> and", "<tool_call>weather(3)</tool_call> and"),
        (ParsePlan(), "<tool_ca", "<tool_ca"),
        (ParsePlan("hermes", reasoning=True), "</thi", "</thi"),
    ],
)
def test_what_may_be_a_users_text_stays_where_an_answer_is_cut_short(
    plan: ParsePlan, written: str, content: str
) -> None:
    assert every_cut(plan, written, short=True).content == content


def test_reasoning_that_is_cut_short_ends_without_a_piece_of_its_tag() -> None:
    plan = ParsePlan("hermes", reasoning=True)
    assert every_cut(plan, "<thi", short=True) == Answer()
    assert every_cut(plan, "<think>\nhm </thi", short=True) == Answer("", "hm ")
    assert every_cut(plan, "<think>a <", short=True) == Answer("", "a <")


def test_a_call_that_is_cut_short_counts_as_unfinished() -> None:
    for written in ("<tool_call>", '<tool_call>{"name": "wea', '<tool_call>{"name": "weather", "arguments": {"a": 1'):
        assert read(ParsePlan("hermes"), [written], short=True).outcomes == ["unfinished"]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        # as in the templates of Qwen 2.5, Hermes 2 Pro, Llama 3.1, Mistral v0.3 and Small 3.2, Llama 4
        (r"""{{- "<tool_call>\n{\"name\": <function-name>, \"arguments\": <args>}\n</tool_call>" }}""", "hermes"),
        ("""{{ '<tool_call>\n{"name": <function-name>, "arguments": <args-dict>}\n</tool_call>' }}""", "hermes"),
        ("""{{- "<tool_call>\\n" }}\n    {{- '{"name": <function-name>, "arguments": <args-dict>}\\n' }}""", "hermes"),
        ("""{{- 'Respond in the format {"name": function name, "parameters": dictionary' }}""", "llama3_json"),
        ("""{{- "[TOOL_CALLS] [" }}""", "mistral"),
        ("""{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}""", "mistral"),
        ("""{{- "Example Format: [func_name1(params_name1=params_value1), func_name2(params)]" }}""", "pythonic"),
        # GLM 4.5's calls are in another format between the same tags
        ("<tool_call>\n<function=example_function_name>\n<parameter=p>", "qwen3_coder"),
        (r"{{- '\n<tool_call>\n<function=' + tool_call.name + '>\n' }}", "qwen3_coder"),
        ("<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>", None),
        ("{{ '<function_calls>' + message['function_calls'] + '</function_calls>' }}", "pythonic"),
        (r"{{ '<function_calls>\n<invoke name=' }}", None),
        ("[TOOL_CALLS] or [func_name1(a=1)]", None),
        ("{{ messages }}", None),
    ],
)
def test_a_template_shows_the_format_that_its_model_writes(template: str, name: FormatName | None) -> None:
    assert detect_format(template) == name


def test_a_template_shows_whether_its_model_reasons() -> None:
    assert detect_reasoning("{% set content = content.split('</think>')[-1] %}") == "think"
    assert detect_reasoning("{{ messages }}") is None


def test_ids_are_as_the_formats_templates_take_them() -> None:
    assert (FORMATS["mistral"].id_prefix, FORMATS["mistral"].id_digits) == ("", 9)


def test_the_document_has_every_format_and_no_other() -> None:
    document = (Path(__file__).parents[3] / "docs" / "tools.md").read_text(encoding="utf-8")
    table = document.partition("## What models write")[2].partition("Thinking is")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == ["tool_parser", *FORMATS]
