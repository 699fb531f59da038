"""Every message survives its codec; everything else is a ProtocolError."""

from __future__ import annotations

import json
import pkgutil
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import messages
from shared.errors import ProtocolError
from shared.messages.cards import INSTANCE, MODEL_CARD, EventSource, Instance, KvLayout, ModelCard
from shared.messages.codec import JSON_HEADER, Codec
from shared.messages.control import (
    CONTROL,
    FOUND_NOTES,
    LOG_LEVEL_CHANGED,
    PING,
    PONG,
    ChangeLogLevel,
    FindNotes,
    FoundNotes,
    LogLevelChanged,
    Note,
    Ping,
    Pong,
)
from shared.messages.encode import ENCODE, ENCODED, Encode, Encoded
from shared.messages.frames import (
    RESEND_REQUEST,
    RESENT,
    STEP_FRAME,
    Part,
    ResendRequest,
    Resent,
    StepFrame,
    StreamState,
    TokenLogprob,
)
from shared.messages.frontends import (
    RECALLED,
    RECENT_REQUESTS,
    RESPONSE_STORE_REQUEST,
    Forget,
    Recall,
    Recalled,
    RecentRequests,
    RequestWay,
)
from shared.messages.generate import CANCEL, GENERATE, GENERATE_REPLY, Accepted, Cancel, Generate, Refused, Sampling
from shared.messages.kv_events import (
    EVENT_BATCH,
    REPLAY_PAGE,
    REPLAY_REQUEST,
    SNAPSHOT_CHUNK,
    SNAPSHOT_REQUEST,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    ReplayPage,
    ReplayRequest,
    SnapshotBlock,
    SnapshotChunk,
    SnapshotRequest,
)
from shared.messages.load import LOAD_REPORT, EngineLosses, KvState, LoadReport
from shared.messages.model_files import MODEL_FILE_PART, READ_MODEL_FILE, ModelFilePart, ReadModelFile
from shared.messages.people import (
    EXPLANATIONS,
    HEAT,
    OPERATE_WORKER,
    ROUTER_STATE,
    WORKER_OPERATED,
    Explanation,
    Explanations,
    HeatState,
    ModelState,
    OperateWorker,
    PrefixHeat,
    RouterState,
    SourceState,
    WorkerOperated,
)
from shared.messages.select import (
    LOAD_EVENTS,
    RESERVATIONS,
    RESERVATIONS_REQUEST,
    SELECT,
    SELECT_REPLY,
    Candidate,
    Finished,
    LoadEvents,
    Overlap,
    Prefilled,
    Reservations,
    ReservationsRequest,
    Reserved,
    Select,
    Selected,
    SelectRefused,
)
from shared.messages.turns import MODEL_TURN, TURNS_STATE, WANT_MODEL, ModelTurn, TurnsState, WantModel

MODULES = {
    found.name: import_module(f"{messages.__name__}.{found.name}") for found in pkgutil.iter_modules(messages.__path__)
}
DOCUMENT = Path(__file__).parents[2] / "docs" / "protocol.md"
LAYOUT = KvLayout("float32", 2, 2, 16, 16)
EXAMPLES: list[tuple[Codec[Any], Any]] = [
    (
        INSTANCE,
        Instance(
            *("default", "worker", "0a", 2, "here", 7, 1.5, "0.1.0"),
            subjects={"control": "headrace.default.worker.0a.control"},
            events=EventSource("tcp://127.0.0.1:1", "tcp://127.0.0.1:2", epoch=True),
        ),
    ),
    (MODEL_CARD, ModelCard("m", "0a", "/m", "ff", "00", 2048, 320, 16, 64, LAYOUT, (2, 3))),
    (SELECT, Select("r", 1, "f", "m", b"\0\xff", 40, 16, excluded=("0a",))),
    (
        SELECT_REPLY,
        Selected(
            *("r", 1, "0a", 0, "0b", Overlap(3, 2, 1), "most cached"),
            (Candidate("0a", 0, Overlap(3), 1.5, 7, 80, "best"),),
        ),
    ),
    (SELECT_REPLY, SelectRefused("r", 1, "no_instances", "none is there", 2.5)),
    (
        LOAD_EVENTS,
        LoadEvents(
            "m",
            [
                Reserved("r", 1, "f", "0a", 0, 40, 3),
                Prefilled("r", 1, 16),
                Finished("r", 1),
            ],
        ),
    ),
    (RESERVATIONS_REQUEST, ReservationsRequest("m")),
    (
        RESERVATIONS,
        Reservations("m", [Reserved("r", 1, "f", "0a", 0, 40, 3, router="0b")], [("r", 1)]),
    ),
    (
        EXPLANATIONS,
        Explanations(
            "0b",
            [
                Explanation(
                    *("m", "0b", "r", 1, 12.5, "0a", 0, "most cached"),
                    candidates=(Candidate("0a", 0, Overlap(3), 1.5, 7, 80, "best", 0.25),),
                    prompt_tokens=64,
                    predicted_cached_tokens=48,
                    actual_cached_tokens=32,
                    first_token_s=0.5,
                )
            ],
        ),
    ),
    (
        ROUTER_STATE,
        RouterState(
            *("0b", "kv"),
            models=[ModelState("m", 2, 1, 10, 900)],
            sources=[SourceState("0a", "refused", "blocks of 8 tokens")],
        ),
    ),
    (HEAT, HeatState("0b", 9, 60.5, 7, 8, [PrefixHeat("m", "0f", 2, 32, 3, 1, 0.5, ["0a"], 1, 0)])),
    (GENERATE, Generate("r", 1, "m", "f", b"\1\0\0\0", 1, Sampling(8, seed=2**64 - 1), 9.5)),
    (
        GENERATE,
        Generate("r", 1, "m", "f", b"\1\0\0\0", 1, Sampling(8), 9.5, wait_left_s=4.5),
    ),
    (GENERATE_REPLY, Accepted("r", 1)),
    (GENERATE_REPLY, Refused("r", 1, "draining", "ends")),
    (CANCEL, Cancel("r", 1)),
    (ENCODE, Encode("m", b"\0\xff" * 16, b"\1\2\3", 2.5)),
    (ENCODED, Encoded("64 images wait already")),
    (RESEND_REQUEST, ResendRequest("f", 7)),
    (RESENT, Resent(1, 7, 9, [StreamState("r", 1, 12)])),
    (PING, Ping()),
    (CONTROL, ChangeLogLevel("debug", 2.5)),
    (CONTROL, FindNotes("r", "0a")),
    (FOUND_NOTES, FoundNotes("worker", "0a", [Note("r", 1.5, "lost", 2)], ["on disk"])),
    (LOG_LEVEL_CHANGED, LogLevelChanged("0a", "no")),
    (PONG, Pong("0a", 2, 3)),
    (READ_MODEL_FILE, ReadModelFile("tokenizer.json", 512)),
    (MODEL_FILE_PART, ModelFilePart(b"{}", 2, 9)),
    (OPERATE_WORKER, OperateWorker("load_lora", "sql", path="/loras/sql")),
    (WORKER_OPERATED, WorkerOperated("0a", failed="no", state="asleep", lora=("sql@0123",))),
    (
        STEP_FRAME,
        StepFrame(
            *("0a", 1, 7),
            [
                Part("r", 1, 0, b"\1\0\0\0", None, 16, (TokenLogprob(-0.5, b"\1\0\0\0", (-0.5,)),)),
                Part("s", 2, 5, b"", "error", error="why"),
            ],
        ),
    ),
    (
        LOAD_REPORT,
        LoadReport(
            *("0a", 1, 5, 0, 1, 0, 64, 2, 3),
            kv=[KvState(0, 1, 8, 2**64 - 1)],
            frames={"f": 3},
            attempts=[("r", 1)],
            losses=EngineLosses(2, 1.5, "killed", 1),
        ),
    ),
    (RESPONSE_STORE_REQUEST, Recall("resp_f.r", "alice", "conversation")),
    (WANT_MODEL, WantModel("0f", "m", 2, 0.5)),
    (MODEL_TURN, ModelTurn("m", "waking", 1.5, 2, 0.5, "b serves", "")),
    (TURNS_STATE, TurnsState("0d", "cpu", 1, [ModelTurn("m", "asleep", failed="no memory")])),
    (RESPONSE_STORE_REQUEST, Forget("resp_f.r", "")),
    (RECALLED, Recalled(True, b"[]")),
    (
        RECENT_REQUESTS,
        RecentRequests("0a", 1, 2, 3, [RequestWay("0123456789ab", "m", 1.5, 40, instances=("0b",))]),
    ),
    (SNAPSHOT_REQUEST, SnapshotRequest()),
    (REPLAY_REQUEST, ReplayRequest(7)),
    (REPLAY_PAGE, ReplayPage([(7, b"\0\xff"), (9, b"")], last=True)),
    (SNAPSHOT_CHUNK, SnapshotChunk(1, 8, [SnapshotBlock(5, None, b"\1\0\0\0")], True)),
    (
        EVENT_BATCH,
        EventBatch(
            1.5,
            [
                BlockStored([2**64 - 1, b"\xff" * 32], None, [1, 2], 2, medium="GPU", extra_keys=[["salt"], None]),
                BlockRemoved([1], "GPU"),
                AllBlocksCleared(),
            ],
            0,
        ),
    ),
]
CODECS = list({id(codec): codec for codec, _ in EXAMPLES}.values())


def test_every_codec_has_an_example() -> None:
    modules = [module for name, module in MODULES.items() if name != "kvbm"]
    codecs = [each for module in modules for each in vars(module).values() if isinstance(each, Codec)]
    assert {id(each) for each in codecs} == {id(each) for each in CODECS}


@pytest.mark.parametrize(("codec", "message"), EXAMPLES)
def test_a_message_comes_back_from_msgpack(codec: Codec[Any], message: Any) -> None:
    assert codec.decode(codec.encode(message)) == message


@pytest.mark.parametrize(("codec", "message"), [each for each in EXAMPLES if each[0] is not EVENT_BATCH])
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
            CANCEL.decode(payload, JSON_HEADER)


def test_the_error_names_the_channel() -> None:
    with pytest.raises(ProtocolError, match="generate reply"):
        GENERATE_REPLY.decode(b"\xc1")


def test_an_older_vllms_events_as_arrays_are_refused_not_misread() -> None:
    payload = msgspec.msgpack.encode([1.5, [["AllBlocksCleared"]], 0])
    with pytest.raises(ProtocolError):
        EVENT_BATCH.decode(payload)


def test_a_blocks_size_is_that_of_keys_and_values_of_all_layers() -> None:
    assert LAYOUT.block_bytes == 2 * 2 * 2 * 16 * 16 * 4
    assert len(LAYOUT.digest) == 16
    assert LAYOUT.digest != msgspec.structs.replace(LAYOUT, layers=3).digest


def test_the_document_names_the_structs_that_are_arrays() -> None:
    (said,) = re.findall(r"Structs are maps, but (.*) are arrays", DOCUMENT.read_text())
    names = [name for module in MODULES.values() for name in vars(module).values()]
    structs = (each for each in names if isinstance(each, type) and issubclass(each, msgspec.Struct))
    assert set(re.findall(r"`(\w+)`", said)) == {each.__name__ for each in structs if each.__struct_config__.array_like}
