"""deploy/local/check/frames.py: messages there and back, and everything else refused."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.local.check import frames
from shared.errors import ProtocolError

QUESTIONS = [
    frames.ProbeHello(1, "0.1.0"),
    frames.ProbeJoin(1, "a" * 32),
    frames.ProbeEcho(7),
    frames.ProbeUpload(1 << 30),
    frames.ProbeDownload(1),
]
ANSWERS = [
    frames.ProbeWelcome(1, "0.1.0", "a" * 32, nixl=False),
    frames.ProbeBusy("later"),
    frames.ProbeEchoed(7, 1.8e9),
    frames.ProbeUploaded(5),
]


@pytest.mark.parametrize("message", QUESTIONS)
def test_a_question_comes_back_as_it_was(message: frames.Question) -> None:
    frame = frames.encode(message)
    assert frames.body_bytes(frame[:4]) == len(frame) - 4
    assert frames.question(frame[4:]) == message


@pytest.mark.parametrize("message", ANSWERS)
def test_an_answer_comes_back_as_it_was(message: frames.Answer) -> None:
    assert frames.answer(frames.encode(message)[4:]) == message


@pytest.mark.parametrize("length", [b"\0\0\0\0", b"\0\0\x10\x01", b"GET ", b"\xff\xff\xff\xff"])
def test_a_length_that_no_message_has_is_refused(length: bytes) -> None:
    with pytest.raises(ProtocolError):
        frames.body_bytes(length)


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "upload", "size_bytes": (1 << 30) + 1},
        {"type": "download", "size_bytes": 0},
        {"type": "download", "size_bytes": -1},
        {"type": "upload", "size_bytes": 1.5},
        {"type": "hello", "version": 1, "software": "x" * 257},
        {"type": "fly"},
        ["hello"],
    ],
)
def test_sizes_and_names_out_of_their_bounds_are_refused(fields: object) -> None:
    with pytest.raises(ProtocolError):
        frames.question(msgspec.msgpack.encode(fields))


@pytest.mark.parametrize("clock_s", [float("nan"), float("inf"), -1.0, 1e12])
def test_a_time_that_is_none_is_refused(clock_s: float) -> None:
    with pytest.raises(ProtocolError):
        frames.answer(msgspec.msgpack.encode({"type": "echoed", "number": 1, "clock_s": clock_s}))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_protocol_error(body: bytes) -> None:
    for decode in (frames.question, frames.answer):
        try:
            decode(body)
        except ProtocolError:
            continue
