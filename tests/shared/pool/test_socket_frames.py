from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import PayloadTooLarge, ProtocolError
from shared.pool.socket_frames import (
    FROM_KVBM,
    MOST_FRAME_BYTES,
    PROTOCOL,
    TO_KVBM,
    Answered,
    Asked,
    FrameReader,
    Hello,
    encode_frame,
)

ANSWERS = st.one_of(
    st.builds(Hello, st.integers(0, 9), st.text(), st.booleans(), st.text()),
    st.builds(Answered, st.integers(0, 2**63), st.binary(max_size=300), st.booleans()),
)


@given(st.lists(ANSWERS, max_size=8), st.data())
def test_frames_arrive_whole_however_their_bytes_are_split(sent: list[Hello | Answered], data: st.DataObject) -> None:
    stream = b"".join(map(encode_frame, sent))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    reader = FrameReader()
    arrived: list[bytes] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        arrived += reader.feed(stream[start:end])
    assert [FROM_KVBM.decode(body) for body in arrived] == sent


@given(st.integers(0, 2**63), st.text(), st.binary(max_size=300))
def test_a_request_comes_back_from_its_frame(number: int, operation: str, payload: bytes) -> None:
    asked = Asked(number, operation, payload)
    (body,) = FrameReader().feed(encode_frame(asked))
    assert TO_KVBM.decode(body) == asked


def test_a_kvbm_of_before_namespaces_were_said_is_understood() -> None:
    old = {"type": "hello", "protocol": PROTOCOL, "kvbm": "k1", "ready": True}
    assert FROM_KVBM.decode(msgspec.msgpack.encode(old)) == Hello(PROTOCOL, "k1", namespace="")


@given(st.binary(max_size=300))
def test_nonsense_is_a_protocol_error_and_nothing_else(nonsense: bytes) -> None:
    try:
        for body in FrameReader().feed(nonsense):
            TO_KVBM.decode(body)
    except ProtocolError:
        pass


@pytest.mark.parametrize("size_bytes", [0, MOST_FRAME_BYTES + 1, 2**32 - 1])
def test_a_length_that_no_frame_has_is_refused_before_its_bytes_come(size_bytes: int) -> None:
    with pytest.raises(ProtocolError, match=str(size_bytes)):
        FrameReader().feed(size_bytes.to_bytes(4, "little"))


def test_a_reader_keeps_one_unfinished_frame_at_most() -> None:
    reader = FrameReader()
    whole = encode_frame(Asked(1, "store", bytes(MOST_FRAME_BYTES - 100)))
    assert reader.feed(whole[:-1]) == []
    assert len(reader.feed(whole[-1:] + whole[:-1])) == 1
    assert len(reader._buffer) == len(whole) - 1


def test_a_message_that_is_too_long_for_a_frame_is_not_encoded() -> None:
    with pytest.raises(PayloadTooLarge):
        encode_frame(Asked(1, "store", bytes(MOST_FRAME_BYTES)))
