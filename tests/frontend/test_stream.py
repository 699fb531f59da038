from __future__ import annotations

import asyncio

import pytest

from services.frontend.detokenize import TokenBytes
from services.frontend.output import Delta, Output
from services.frontend.sessions import Fail, Finish, Session
from services.frontend.stream import Job, Stream
from shared.errors import Unavailable
from shared.messages import Sampling

TOKENS = TokenBytes([b"a", b"b", b"c"], [b"a", b"b", b"c"], False)


def opened(*stops: str) -> Stream:
    job = Job("r", "m", b"", 3, b"", Sampling(10), "", "")
    return Stream(job, Session("r", 10), Output(TOKENS, stops))


async def test_what_a_slow_reader_left_comes_as_one_delta() -> None:
    stream = opened()
    for token in range(3):
        stream.take([token], None)
    stream.end(Finish("length"))
    assert [delta async for delta in stream] == [Delta("abc")]
    assert stream.finish == "length"


async def test_what_comes_while_the_reader_works_is_not_lost_at_the_end() -> None:
    stream = opened()
    stream.take([0], None)
    got = []
    async for delta in stream:
        got.append(delta.text)
        if len(got) == 1:
            stream.take([1], None)
            stream.end(Finish("stop"))
    assert got == ["a", "b"]


async def test_a_reader_that_waits_is_woken() -> None:
    stream = opened()

    async def read() -> list[str]:
        return [delta.text async for delta in stream]

    reading = asyncio.create_task(read())
    await asyncio.sleep(0)
    stream.take([2], None)
    await asyncio.sleep(0)
    stream.end(Finish("length"))
    assert await reading == ["c"]


async def test_an_error_comes_after_the_text_before_it() -> None:
    stream = opened()
    stream.take([0], None)
    stream.end(Fail(Unavailable("gone")))
    deltas = aiter(stream)
    assert (await anext(deltas)).text == "a"
    with pytest.raises(Unavailable, match="gone"):
        await anext(deltas)


async def test_a_stop_string_goes_before_the_workers_end_and_its_error() -> None:
    for last in (Finish("length"), Fail(Unavailable("gone"))):
        stream = opened("b")
        assert stream.take([0, 1, 2], None)
        stream.end(last)
        assert [delta.text async for delta in stream] == ["a"]
        assert stream.finish == "stop"
        assert stream.usage.completion_tokens == 2
