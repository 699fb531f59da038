"""Every message survives its codec; everything else is a ProtocolError."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import kvbm_messages, messages
from shared.errors import ProtocolError
from shared.messages import JSON_HEADER, Codec

DOCUMENT = Path(__file__).parents[2] / "docs" / "protocol.md"
LAYOUT = messages.KvLayout("float32", 2, 2, 16, 16)
EXAMPLES: list[tuple[Codec[Any], Any]] = [
    (
        messages.INSTANCE,
        messages.Instance(
            *("default", "worker", "0a", 2, "here", 7, 1.5, "0.1.0"),
            subjects={"control": "headrace.default.worker.0a.control"},
            events=messages.EventSource("tcp://127.0.0.1:1", "tcp://127.0.0.1:2", epoch=True),
        ),
    ),
    (messages.MODEL_CARD, messages.ModelCard("m", "0a", "/m", "ff", "00", 2048, 320, 16, 64, LAYOUT, (2, 3))),
    (messages.SELECT, messages.Select("r", 1, "f", "m", b"\0\xff", 40, 16, excluded=("0a",))),
    (
        messages.SELECT_REPLY,
        messages.Selected(
            *("r", 1, "0a", 0, "0b", messages.Overlap(3, 2, 1), "most cached"),
            (messages.Candidate("0a", 0, messages.Overlap(3), 1.5, 7, 80, "best"),),
        ),
    ),
    (messages.SELECT_REPLY, messages.SelectRefused("r", 1, "no_instances", "none is there", 2.5)),
    (
        messages.LOAD_EVENTS,
        messages.LoadEvents(
            "m",
            [
                messages.Reserved("r", 1, "f", "0a", 0, 40, 3),
                messages.Prefilled("r", 1, 16),
                messages.Finished("r", 1),
            ],
        ),
    ),
    (messages.RESERVATIONS_REQUEST, messages.ReservationsRequest("m")),
    (
        messages.RESERVATIONS,
        messages.Reservations("m", [messages.Reserved("r", 1, "f", "0a", 0, 40, 3, router="0b")], [("r", 1)]),
    ),
    (
        messages.EXPLANATIONS,
        messages.Explanations(
            "0b",
            [
                messages.Explanation(
                    *("m", "0b", "r", 1, 12.5, "0a", 0, "most cached"),
                    candidates=(messages.Candidate("0a", 0, messages.Overlap(3), 1.5, 7, 80, "best", 0.25),),
                    prompt_tokens=64,
                    predicted_cached_tokens=48,
                    actual_cached_tokens=32,
                    first_token_s=0.5,
                )
            ],
        ),
    ),
    (
        messages.ROUTER_STATE,
        messages.RouterState(
            *("0b", "kv"),
            models=[messages.ModelState("m", 2, 1, 10, 900)],
            sources=[messages.SourceState("0a", "refused", "blocks of 8 tokens")],
        ),
    ),
    (messages.GENERATE, messages.Generate("r", 1, "m", "f", b"\1\0\0\0", 1, messages.Sampling(8, seed=2**64 - 1), 9.5)),
    (
        messages.GENERATE,
        messages.Generate("r", 1, "m", "f", b"\1\0\0\0", 1, messages.Sampling(8), 9.5, wait_left_s=4.5),
    ),
    (messages.GENERATE_REPLY, messages.Accepted("r", 1)),
    (messages.GENERATE_REPLY, messages.Refused("r", 1, "draining", "ends")),
    (messages.CANCEL, messages.Cancel("r", 1)),
    (messages.RESEND_REQUEST, messages.ResendRequest("f", 7)),
    (messages.RESENT, messages.Resent(1, 7, 9, [messages.StreamState("r", 1, 12)])),
    (messages.PING, messages.Ping()),
    (messages.CONTROL, messages.ChangeLogLevel("debug", 2.5)),
    (messages.CONTROL, messages.FindNotes("r", "0a")),
    (messages.FOUND_NOTES, messages.FoundNotes("worker", "0a", [messages.Note("r", 1.5, "lost", 2)], ["on disk"])),
    (messages.LOG_LEVEL_CHANGED, messages.LogLevelChanged("0a", "no")),
    (messages.PONG, messages.Pong("0a", 2, 3)),
    (messages.OPERATE_WORKER, messages.OperateWorker("load_lora", "sql", path="/loras/sql")),
    (messages.WORKER_OPERATED, messages.WorkerOperated("0a", failed="no", state="asleep", lora=("sql@0123",))),
    (
        messages.STEP_FRAME,
        messages.StepFrame(
            *("0a", 1, 7),
            [
                messages.Part("r", 1, 0, b"\1\0\0\0", None, 16, (messages.TokenLogprob(-0.5, b"\1\0\0\0", (-0.5,)),)),
                messages.Part("s", 2, 5, b"", "error", error="why"),
            ],
        ),
    ),
    (
        messages.LOAD_REPORT,
        messages.LoadReport(
            *("0a", 1, 5, 0, 1, 0, 64, 2, 3),
            kv=[messages.KvState(0, 1, 8, 2**64 - 1)],
            frames={"f": 3},
            attempts=[("r", 1)],
        ),
    ),
    (messages.RESPONSE_STORE_REQUEST, messages.Recall("resp_f.r", "alice", "conversation")),
    (messages.RESPONSE_STORE_REQUEST, messages.Forget("resp_f.r", "")),
    (messages.RECALLED, messages.Recalled(True, b"[]")),
    (
        messages.RECENT_REQUESTS,
        messages.RecentRequests("0a", 1, 2, 3, [messages.RequestWay("0123456789ab", "m", 1.5, 40, instances=("0b",))]),
    ),
    (messages.SNAPSHOT_REQUEST, messages.SnapshotRequest()),
    (messages.SNAPSHOT_CHUNK, messages.SnapshotChunk(1, 8, [messages.SnapshotBlock(5, None, b"\1\0\0\0")], True)),
    (
        messages.EVENT_BATCH,
        messages.EventBatch(
            1.5,
            [
                messages.BlockStored(
                    [2**64 - 1, b"\xff" * 32], None, [1, 2], 2, medium="GPU", extra_keys=[["salt"], None]
                ),
                messages.BlockRemoved([1], "GPU"),
                messages.AllBlocksCleared(),
            ],
            0,
        ),
    ),
]
CODECS = list({id(codec): codec for codec, _ in EXAMPLES}.values())


def test_every_codec_has_an_example() -> None:
    assert {id(each) for each in vars(messages).values() if isinstance(each, Codec)} == {id(each) for each in CODECS}


@pytest.mark.parametrize(("codec", "message"), EXAMPLES)
def test_a_message_comes_back_from_msgpack(codec: Codec[Any], message: Any) -> None:
    assert codec.decode(codec.encode(message)) == message


@pytest.mark.parametrize(("codec", "message"), [each for each in EXAMPLES if each[0] is not messages.EVENT_BATCH])
def test_a_message_comes_back_from_json(codec: Codec[Any], message: Any) -> None:
    payload = codec.encode(message, JSON_HEADER)
    json.loads(payload)
    assert codec.decode(payload, JSON_HEADER) == message
    assert codec.decode(payload, {"Content-Type": "application/json; charset=utf-8"}) == message


@pytest.mark.parametrize(("codec", "message"), EXAMPLES)
def test_fields_of_a_later_protocol_are_ignored(codec: Codec[Any], message: Any) -> None:
    raw = msgspec.msgpack.decode(codec.encode(message))
    if isinstance(raw, dict):
        raw["a_later_field"] = {"with": ["anything"]}
    else:
        raw.append({"with": ["anything"]})
    assert codec.decode(msgspec.msgpack.encode(raw)) == message


@pytest.mark.parametrize(("codec", "message"), EXAMPLES)
def test_a_torn_message_is_a_protocol_error(codec: Codec[Any], message: Any) -> None:
    payload = codec.encode(message)
    for end in range(len(payload)):
        with pytest.raises(ProtocolError):
            codec.decode(payload[:end])


@given(st.sampled_from(CODECS), st.binary(max_size=64), st.booleans())
def test_any_other_bytes_are_a_protocol_error_or_a_message(codec: Codec[Any], payload: bytes, as_json: bool) -> None:
    try:
        message = codec.decode(payload, JSON_HEADER if as_json else None)
    except ProtocolError:
        return
    assert codec.decode(codec.encode(message)) == message


@pytest.mark.parametrize("codec", CODECS)
def test_a_payload_nested_without_end_is_a_protocol_error(codec: Codec[Any]) -> None:
    with pytest.raises(ProtocolError):
        codec.decode(b'{"later":' + b"[" * 100_000, JSON_HEADER)
    with pytest.raises(ProtocolError):
        codec.decode(b"\x81\xa5later" + b"\x91" * 100_000)


def test_an_integer_that_msgpack_cannot_carry_on_is_a_protocol_error() -> None:
    for attempt in (1 << 64, -(1 << 63) - 1):
        payload = b'{"type": "cancel", "request": "r", "attempt": %d}' % attempt
        with pytest.raises(ProtocolError, match="cancel"):
            messages.CANCEL.decode(payload, JSON_HEADER)


def test_the_error_names_the_channel() -> None:
    with pytest.raises(ProtocolError, match="generate reply"):
        messages.GENERATE_REPLY.decode(b"\xc1")


def test_an_older_vllms_events_as_arrays_are_refused_not_misread() -> None:
    payload = msgspec.msgpack.encode([1.5, [["AllBlocksCleared"]], 0])
    with pytest.raises(ProtocolError):
        messages.EVENT_BATCH.decode(payload)


def test_a_blocks_size_is_that_of_keys_and_values_of_all_layers() -> None:
    assert LAYOUT.block_bytes == 2 * 2 * 2 * 16 * 16 * 4
    assert len(LAYOUT.digest) == 16
    assert LAYOUT.digest != msgspec.structs.replace(LAYOUT, layers=3).digest


def test_the_document_names_the_structs_that_are_arrays() -> None:
    (said,) = re.findall(r"Structs are maps, but (.*) are arrays", DOCUMENT.read_text())
    names = [*vars(messages).values(), *vars(kvbm_messages).values()]
    structs = (each for each in names if isinstance(each, type) and issubclass(each, msgspec.Struct))
    assert set(re.findall(r"`(\w+)`", said)) == {each.__name__ for each in structs if each.__struct_config__.array_like}
