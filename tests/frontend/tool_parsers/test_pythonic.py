from __future__ import annotations

import pytest
from msgspec.structs import replace

from services.frontend.tool_parsers.parser import ParsePlan
from tests.frontend.tool_parsers.transcripts import Answer, every_cut, one, text

PLAN = ParsePlan("pythonic")
LINES = "<function_calls>"
TWO = Answer("", "", [("get_time", '{"a": 1}'), ("get_time", "{}")], ["complete", "complete"])


@pytest.mark.parametrize(
    ("written", "answer"),
    [
        ("[weather(city='Malmö', days=3)]", one("weather", '{"city": "Malmö", "days": 3}')),
        ("\n[get_time()]\n", one("get_time", "{}")),
        ("[ run-sql ( a = -1.5e3 , b = 2, ) ]", one("run-sql", '{"a": -1.5e3, "b": 2}')),
        (
            '[weather(city="Rome", tags=["a", \'b\',], more={\'x\': None, "y": [True, False]}), get_time(),]',
            Answer(
                *("", ""),
                [
                    ("weather", '{"city": "Rome", "tags": ["a", "b"], "more": {"x": null, "y": [true, false]}}'),
                    ("get_time", "{}"),
                ],
                ["complete", "complete"],
            ),
        ),
        ("<|python_start|>[get_time()]<|python_end|>", one("get_time", "{}")),
        (
            r"""[run-sql(q='it\'s "x"\n\d\x41\u00e4\U0001F6B0', r="a'b")]""",
            one("run-sql", r"""{"q": "it's \"x\"\n\\d\u0041\u00e4🚰", "r": "a'b"}"""),
        ),
        ("[run-sql(q='two\nlines\\\n')]", one("run-sql", r'{"q": "two\nlines"}')),
        ("[get_time(a=null, b=true)] ok", one("get_time", '{"a": null, "b": true}', "ok")),
        (
            "[get_time(), wether(a=1)]",
            Answer("wether(a=1)]", "", [("get_time", "{}")], ["complete", "unknown_tool"]),
        ),
        ("[get_time(a=1, 2)]", Answer(", 2)]", "", [("get_time", '{"a": 1')], ["broken"])),
        ("[get_time(a=os.getcwd())]", Answer("os.getcwd())]", "", [("get_time", '{"a": ')], ["broken"])),
        (r"[get_time(a='\U99999999')]", one("get_time", r'{"a": "\\U99999999"}')),
        (f"{LINES}\nget_time(a=1)\nget_time()\n</function_calls>", TWO),
        (f"I look.\n{LINES}get_time(a=1)\nget_time()", replace(TWO, content="I look.\n")),
        (f"{LINES}[get_time(a=1), get_time()]</function_calls>", TWO),
        (f"{LINES}get_time(a=1)</function_calls> {LINES}get_time()</function_calls>", TWO),
        (
            f"{LINES}wether(a=1)</function_calls>",
            Answer(f"{LINES}wether(a=1)</function_calls>", "", [], ["unknown_tool"]),
        ),
    ],
)
def test_calls_are_read_wherever_the_text_is_cut(written: str, answer: Answer) -> None:
    assert every_cut(PLAN, written) == answer


@pytest.mark.parametrize(
    ("written", "outcomes"),
    [
        ("It is [weather(city='Rome')]", []),
        ("[1] Rome, [2] Milan", ["unknown_tool"]),
        ("[]", ["unknown_tool"]),
        ("[weather('Rome')]", ["malformed"]),
        ("[weather(city)]", ["malformed"]),
        ("<b>bold</b>", ["malformed"]),
        ("[weather(city", ["unfinished"]),
    ],
)
def test_what_is_no_call_is_text_to_the_letter(written: str, outcomes: list[str]) -> None:
    assert every_cut(PLAN, written) == text(written, *outcomes)
