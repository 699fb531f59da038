from __future__ import annotations

from typing import Any

import pytest

from services.frontend.output.detokenize import TokenBytes
from services.frontend.output.output import Delta, Output
from services.frontend.output.parsed_output import ParsedOutput
from services.frontend.requests.stream import join_deltas
from services.frontend.tool_parsers.parse_result import CallPiece, ParseResult
from services.frontend.tool_parsers.parser import AnswerParser, ParsePlan
from shared.messages.frames import TokenLogprob

CALL = '[TOOL_CALLS]now[ARGS]{"zone": "é"}'
TABLE = [bytes([byte]) for byte in range(256)]
TOKENS = TokenBytes(TABLE, TABLE, False)
"""Every byte is a token."""


def parsed(*stops: str, plan: ParsePlan | None = None, **found: Any) -> ParsedOutput:
    return ParsedOutput(
        Output(TOKENS, stops),
        AnswerParser(plan or ParsePlan("mistral"), ParseResult(frozenset({"now"}), lambda: "id", **found)),
    )


def whole(output: ParsedOutput, text: str, *, step: int = 1) -> tuple[Delta, bool]:
    """All deltas as one, and whether the last one stopped it."""
    content = text.encode()
    deltas: list[Delta] = []
    for start in range(0, len(content), step):
        deltas.append(output.push(content[start : start + step]))
        output.validate()
        if deltas[-1].stopped:
            break
    else:
        deltas.append(output.finish())
    output.validate()
    return join_deltas(deltas), deltas[-1].stopped


@pytest.mark.parametrize("step", [1, 2, 7, 1000])
def test_calls_come_out_of_tokens_however_they_are_cut(step: int) -> None:
    output = parsed()
    delta, stopped = whole(output, "Well. " + CALL, step=step)
    assert delta == Delta("Well. ", calls=(CallPiece(0, '{"zone": "é"}', "id", "now", content_before=6),))
    assert not stopped
    assert output.calls == 1


@pytest.mark.parametrize("step", [1, 1000])
def test_a_stop_string_ends_it_with_all_that_lies_before(step: int) -> None:
    output = parsed("STOP")
    delta, stopped = whole(output, "[TOOL_CALLS]no STOP and more", step=step)
    assert delta == Delta("[TOOL_CALLS]no ")
    assert stopped
    assert output.counted == len("[TOOL_CALLS]no STOP")


def test_without_parallel_calls_the_token_that_completes_the_first_is_the_last() -> None:
    output = parsed(parallel=False)
    delta, stopped = whole(output, CALL + " and more")
    assert [piece.arguments for piece in delta.calls] == ['{"zone": "é"}']
    assert (delta.text, stopped, output.counted) == ("", True, len(CALL.encode()))


def test_a_call_that_the_end_completes_ends_it_too() -> None:
    output = parsed("}!", parallel=False)
    content = CALL.encode()
    assert not output.push(content).calls[-1].arguments.endswith("}"), "it could begin a stop string"
    assert output.finish() == Delta("", stopped=True, calls=(CallPiece(0, "}"),))


def test_log_probabilities_go_out_with_the_text_that_they_came_with() -> None:
    output = parsed()
    content = CALL.encode()
    deltas = [output.push([token], [TokenLogprob(-1.0)]) for token in content]
    assert sum(len(delta.entries) for delta in deltas) == len(content)
    assert (deltas[0].text, len(deltas[0].entries)) == ("", 1), "held back as a text, and told as a token"


def test_thinking_comes_apart_from_content() -> None:
    delta, _ = whole(parsed(plan=ParsePlan(reasoning=True)), "<think>hm</think>yes")
    assert delta == Delta("yes", reasoning="hm")


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_tokens_of_thinking_are_counted_however_many_come_at_once(size: int) -> None:
    output = parsed(plan=ParsePlan(None, reasoning=True))
    text = "<think>why</think>so"
    whole(output, text, step=size)
    assert output.thinking_tokens == text.index("</think>")


@pytest.mark.parametrize("step", [1, 5, 8, 1000])
def test_tokens_after_the_only_call_are_not_counted_however_many_come_at_once(step: int) -> None:
    call = '<tool_call>{"name": "now", "arguments": {}}'
    output = parsed(plan=ParsePlan("hermes"), parallel=False)
    delta, stopped = whole(output, f"Well. {call}</tool_call> and more", step=step)
    assert stopped
    assert len(delta.calls) == 1
    assert output.counted == len(f"Well. {call}")


def test_token_ids_are_those_of_all_the_text_calls_and_marks_too() -> None:
    for step in (1, 3, 1000):
        output = ParsedOutput(
            Output(TOKENS, (), with_ids=True),
            AnswerParser(ParsePlan("mistral"), ParseResult(frozenset({"now"}), lambda: "id")),
        )
        delta, _ = whole(output, "Well. " + CALL, step=step)
        assert bytes(delta.token_ids) == ("Well. " + CALL).encode()
    assert output.finish(stop_token=5).token_ids == (5,)
