from __future__ import annotations

import asyncio
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from services.frontend.metrics import Metrics
from services.frontend.output.detokenize import TokenBytes
from services.frontend.output.output import Delta, Output
from services.frontend.output.parsed_output import ParsedOutput
from services.frontend.requests.actions import EmitStep, Fail, Finish
from services.frontend.requests.session import Session
from services.frontend.requests.stream import InferenceRequest, Stream
from services.frontend.tool_parsers.parse_result import CallPiece, ParseResult
from services.frontend.tool_parsers.parser import AnswerParser, ParsePlan
from shared.errors import Unavailable
from shared.messages.generate import Sampling

METRICS = Metrics(CollectorRegistry()).of_model("m")
TOKENS = TokenBytes([b"a", b"b", b"c"], [b"a", b"b", b"c"], False)


def request(output: Output | ParsedOutput, max_tokens: int) -> InferenceRequest:
    return InferenceRequest("r", "m", b"", 3, b"", Sampling(max_tokens), "", "", 0.0, output)


def opened(*stops: str, max_tokens: int = 10) -> Stream:
    return Stream(request(Output(TOKENS, stops), max_tokens), Session("r", max_tokens), METRICS)


def text_of(delta: Delta) -> bytes:
    return delta.text.encode()


async def test_deltas_that_a_slow_reader_left_come_as_one() -> None:
    stream = opened()
    for token in range(3):
        stream.add_tokens([token], None)
    stream.end(Finish("length"))
    assert [delta async for delta in stream] == [Delta("abc")]
    assert stream.finish == "length"


async def test_what_comes_while_the_reader_works_is_not_lost_at_the_end() -> None:
    stream = opened()
    stream.add_tokens([0], None)
    got = []
    async for delta in stream:
        got.append(delta.text)
        if len(got) == 1:
            stream.add_tokens([1], None)
            stream.end(Finish("stop"))
    assert got == ["a", "b"]


async def test_a_reader_that_waits_is_woken() -> None:
    stream = opened()

    async def read() -> list[str]:
        return [delta.text async for delta in stream]

    reading = asyncio.create_task(read())
    await asyncio.sleep(0)
    stream.add_tokens([2], None)
    await asyncio.sleep(0)
    stream.end(Finish("length"))
    assert await reading == ["c"]


@settings(max_examples=200)
@given(st.lists(st.sampled_from(["token", "token", "turn", "behind", "ready"]), max_size=40))
def test_sent_or_read_everything_comes_once_and_in_order(happenings: list[str]) -> None:
    asyncio.run(_send_and_read(happenings))


async def _send_and_read(happenings: list[str]) -> None:
    stream, ready, got = opened(max_tokens=50), True, ""

    def send(text: bytes) -> bool:
        nonlocal got
        if ready:
            got += text.decode()
        return ready

    async def read() -> None:
        nonlocal got
        async for delta in stream:
            await asyncio.sleep(0)  # as if the client were behind
            got += delta.text
            stream.send_directly(text_of, send)

    reading = asyncio.create_task(read())
    said = ""
    for happening in happenings:
        if happening == "token":
            said += "abc"[len(said) % 3]
            stream.add_tokens([(len(said) - 1) % 3], None)
        elif happening == "turn":
            await asyncio.sleep(0)
        else:
            ready = happening == "ready"
    stream.end(Finish("length"))
    await reading
    assert got == said


async def test_a_reader_whose_deltas_are_sent_wakes_for_what_is_refused_and_for_the_end() -> None:
    stream = opened()
    sent: list[bytes] = []

    def send(text: bytes) -> bool:
        sent.append(text)
        return len(sent) < 3

    stream.send_directly(text_of, send)
    deltas = aiter(stream)
    waiting = asyncio.ensure_future(anext(deltas, None))
    await asyncio.sleep(0)
    for token in range(3):
        stream.add_tokens([token], None)
    await asyncio.sleep(0)
    assert sent == [b"a", b"b", b"c"]
    assert await waiting == Delta("c")
    stream.end(Finish("length"))
    assert await anext(deltas, None) is None


async def test_an_error_comes_after_the_text_before_it() -> None:
    stream = opened()
    stream.add_tokens([0], None)
    stream.end(Fail(Unavailable("gone")))
    deltas = aiter(stream)
    assert (await anext(deltas)).text == "a"
    with pytest.raises(Unavailable, match="gone"):
        await anext(deltas)


async def test_a_stop_string_goes_before_the_workers_end_and_its_error() -> None:
    for last in (Finish("length"), Fail(Unavailable("gone"))):
        stream = opened("b")
        assert stream.add_tokens([0, 1, 2], None)
        stream.end(last)
        assert [delta.text async for delta in stream] == ["a"]
        assert stream.finish == "stop"
        assert stream.usage.completion_tokens == 2


@pytest.mark.parametrize(("reason", "told"), [("stop", "tool_calls"), ("length", "length")])
async def test_a_turn_with_calls_ends_for_them_and_what_piled_up_is_joined(
    reason: Literal["stop", "length"], told: str
) -> None:
    table = [bytes([byte]) for byte in range(256)]
    found = ParseResult(frozenset({"f"}), lambda: "id")
    output = ParsedOutput(Output(TokenBytes(table, table, False), ()), AnswerParser(ParsePlan("mistral"), found))
    stream = Stream(request(output, 99), Session("r", 99), METRICS)
    for token in b"[TOOL_CALLS]f{}":
        stream.add_tokens([token], None)
    stream.end(Finish(reason))
    assert [delta async for delta in stream] == [Delta("", calls=(CallPiece(0, "{}", "id", "f"),))]
    assert stream.finish == told


async def test_token_ids_come_without_text_and_with_the_token_that_ended_the_output() -> None:
    output = Output(TOKENS, ["ab!"], with_ids=True)
    stream = Stream(request(output, 10), Session("r", 10), METRICS)
    stream.add_tokens([0], None)
    assert stream.pop_delta() == Delta("", token_ids=(0,))
    stream.add_tokens([1], None)
    stream.end(Finish("stop", stop_token=2))
    assert [delta async for delta in stream] == [Delta("ab", token_ids=(1, 2))]


def test_a_file_is_taken_as_it_comes_and_begins_again_with_the_next_attempt() -> None:
    stream = opened()
    for first, content in ((0, b"one"), (3, b"two")):
        stream.show_step(EmitStep(1, b"", first, content))
    assert stream.take_file() == (0, b"onetwo")
    stream.show_step(EmitStep(1, b"", 6, b"three"))
    assert stream.take_file() == (6, b"three")
    assert stream.take_file() == (11, b"")
    for first, content in ((11, b"lost"), (0, b"again"), (5, b", whole")):
        stream.show_step(EmitStep(1, b"", first, content))
    assert stream.take_file() == (0, b"again, whole")
