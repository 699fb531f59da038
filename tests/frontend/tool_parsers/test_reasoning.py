from __future__ import annotations

import pytest

from services.frontend.tool_parsers.parser import ParsePlan
from services.frontend.tool_parsers.reasoning import is_begun, is_open, open_in
from tests.frontend.tool_parsers.transcripts import Answer, every_cut

OUTSIDE, INSIDE = ParsePlan(reasoning=True), ParsePlan(reasoning=True, reasoning_open=True)
CALL = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
ONE = ([("get_time", "{}")], ["complete"])
BEGUN = ParsePlan(reasoning=True, reasoning_open=True, reasoning_begun=True)


@pytest.mark.parametrize(
    ("plan", "written", "answer"),
    [
        (OUTSIDE, "<think>\nHm — ü.\n</think>\n\nYes.", Answer("Yes.", "Hm — ü.\n")),
        (OUTSIDE, "\n<think></think>Yes.", Answer("\nYes.")),
        (OUTSIDE, "Yes. <think>no</think>", Answer("Yes. <think>no</think>")),
        (OUTSIDE, "<thin", Answer("<thin")),
        (OUTSIDE, "<think>never done </thi", Answer("", "never done </thi")),
        (OUTSIDE, "  ", Answer("  ")),
        (OUTSIDE, "", Answer()),
        (INSIDE, "Hm.</think>\n\nYes. </think>", Answer("Yes. </think>", "Hm.")),
        (INSIDE, "\n<think>\nHm.</think>Yes.", Answer("Yes.", "Hm.")),
        (INSIDE, "never done", Answer("", "never done")),
        (BEGUN, " so on.\n</think>\n\nYes.", Answer("Yes.", " so on.\n")),
        (BEGUN, "\n", Answer("", "\n")),
        (
            ParsePlan("hermes", reasoning=True),
            '<think>I could <tool_call>.</think>\n\n<tool_call>{"name": "get_time", "arguments": {}}</tool_call>',
            Answer("", "I could <tool_call>.", [("get_time", "{}")], ["complete"]),
        ),
        *(
            (
                ParsePlan("hermes", reasoning=True, reasoning_open=True),
                f"Hm.\n{CALL}{after}",
                Answer(said, "Hm.\n", *ONE),
            )
            for after, said in (("", ""), ("\n</think>\n\nDone.", "Done."), (" and so on", "and so on"))
        ),
        (
            ParsePlan("hermes", reasoning=True, held=True),
            f"<think>{CALL}</think>{CALL}",
            Answer("", CALL, *ONE),
        ),
        (
            ParsePlan("hermes", reasoning=True),
            f'<think>Not {CALL.replace("get_time", "wether")}, nor <tool_call>{{"name": "get_ti',
            Answer("", f'Not {CALL.replace("get_time", "wether")}, nor <tool_call>{{"name": "get_ti'),
        ),
        (
            ParsePlan("pythonic", reasoning=True, reasoning_open=True),
            "Hm.</think>[get_time()]",
            Answer("", "Hm.", [("get_time", "{}")], ["complete"]),
        ),
    ],
)
def test_reasoning_is_separated_from_the_answer_wherever_the_text_is_cut(
    plan: ParsePlan, written: str, answer: Answer
) -> None:
    assert every_cut(plan, written) == answer


def test_a_prompt_shows_whether_it_ends_within_reasoning() -> None:
    assert open_in("<|assistant|><think>\n")
    assert not open_in("<|assistant|><think>\n\n</think>\n\n")
    assert not open_in("think")


@pytest.mark.parametrize(
    ("text", "begun"),
    [("<think>\nHm", True), ("<think>Hm</think>", False), ("<think>a</think><think>", True), ("", False)],
)
def test_a_text_that_is_continued_may_end_within_reasoning(text: str, begun: bool) -> None:
    assert is_open(text) == begun


def test_a_text_that_is_continued_may_have_some_of_its_reasoning_already() -> None:
    texts = ["<think>\nHm", "<think>a</think><think> b ", "<think>\n", "<think>Hm</think>", ""]
    assert [is_begun(text) for text in texts] == [True, True, False, False, False]
