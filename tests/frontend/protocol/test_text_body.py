"""services/frontend/protocol/text_body.py: what is read of bodies that pass through."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.frontend.protocol.text_body import (
    HASHED_BYTES,
    LINE_BYTES,
    STREAM_TAIL_BYTES,
    TAIL_BYTES,
    AnswerMeter,
    TextUsage,
    WholeLines,
    known_fields,
    read_fields,
    read_model,
    read_text,
)
from shared.errors import InvalidRequest
from shared.hashing import SEED, seed_of, unpack_hashes

UNITS = 64
SYSTEM = {"role": "system", "content": "You know all of this: " + "word " * 200}
ASK, SAY, AGAIN = (
    {"role": role, "content": text * 40} for role, text in (("user", "why? "), ("assistant", "so. "), ("user", "oh? "))
)
USAGE = b'"usage": {"prompt_tokens": 7, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 3}}'


def hashes(body: dict[str, Any], seed: int = SEED, **style: Any) -> list[int]:
    return unpack_hashes(read_text(read_fields(json.dumps(body, **style).encode())).hashes(UNITS, seed))


def test_a_conversation_that_goes_on_begins_with_the_blocks_that_it_had() -> None:
    before = hashes({"model": "m", "messages": [SYSTEM, ASK]})
    after = hashes({"temperature": 1, "messages": [SYSTEM, ASK, SAY, AGAIN], "model": "other"})
    assert len(before) >= 4
    assert after[: len(before)] == before
    other = hashes({"messages": [{**SYSTEM, "role": "user"}, ASK]})
    assert not set(other).intersection(before)
    assert not set(hashes({"messages": [SYSTEM, ASK]}, seed_of(salt="mine"))).intersection(before)


def test_of_very_many_fields_those_that_count_are_kept_and_one_that_is_refused() -> None:
    known = {"model": "m", "messages": [SYSTEM, ASK], "max_tokens": 7, "cache_salt": "s"}
    others = {f"x{number}": 0 for number in range(200_000)}
    fields = read_fields(json.dumps({**others, **known}).encode())
    kept = known_fields(fields)
    assert set(kept) == set(known)
    assert read_text(kept) == read_text(fields)
    wrong = known_fields(read_fields(json.dumps({**others, **known, "MODEL": "n", "Model": "n"}).encode()))
    assert len(wrong) == len(known) + 1
    with pytest.raises(InvalidRequest, match="MODEL: is written model"):
        read_text(wrong)


def test_whitespace_between_values_makes_no_difference_and_within_texts_it_does() -> None:
    body = {"messages": [SYSTEM, ASK]}
    assert hashes(body) == hashes(body, separators=(",", ":")) == hashes(body, indent=3)
    assert hashes(body) != hashes({"messages": [{**SYSTEM, "content": "  " + SYSTEM["content"]}, ASK]})


@pytest.mark.parametrize("field", ["prompt", "input", "system", "instructions"])
def test_a_longer_text_begins_with_the_blocks_of_the_shorter_one(field: str) -> None:
    short = hashes({field: "x" * 2047})
    assert len(short) == 8
    assert hashes({field: "x" * 4000})[:8] == short


def test_tools_come_before_the_messages() -> None:
    tools = [{"type": "function", "function": {"name": "find", "description": "d" * 500}}]
    with_tools = hashes({"messages": [SYSTEM], "tools": tools})
    assert with_tools[:2] == hashes({"messages": [ASK], "tools": tools})[:2]


@pytest.mark.parametrize(
    ("body", "most"),
    [
        ({"max_tokens": 7}, 7),
        ({"max_completion_tokens": 9, "max_tokens": 7}, 9),
        ({"max_output_tokens": 3, "n": 4}, 12),
        ({"max_tokens": 1 << 30, "n": 1 << 30}, (1 << 31) - 1),
        ({"max_tokens": 2, "options": {"num_predict": 8}}, 8),
        ({"options": {"num_predict": -1}}, 0),
        ({"options": []}, 0),
        ({"max_tokens": "7"}, 0),
        ({"max_tokens": -7}, 0),
        ({"max_tokens": 7.5}, 0),
        ({"max_tokens": 1 << 90}, 0),
        ({"max_tokens": None, "n": None}, 0),
    ],
)
def test_limits_are_counted_and_what_is_none_is_left_to_the_server(body: dict[str, Any], most: int) -> None:
    assert read_text(read_fields(json.dumps(body).encode())).max_tokens == most


def test_a_prompt_counts_by_its_bytes_and_is_at_least_a_token() -> None:
    assert read_text(read_fields(b"{}")).prompt_tokens == 1
    assert read_text(read_fields(json.dumps({"prompt": "x" * 398}).encode())).prompt_tokens == 100
    large = read_text(read_fields(json.dumps({"prompt": "x" * 3_000_000}).encode()))
    assert (len(large.prompt), large.prompt_tokens) == (HASHED_BYTES, 750_000)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "the body is empty; send JSON"),
        (b"what", "the body is not JSON"),
        (b"[]", "Expected `object`"),
        (b'{"prompt": ' + b"[" * 200_000, ""),
        (b'{"prompt": "' + b"x" * (4 << 20) + b'"}', "over the limit"),
        (b'{"model": "served", "Model": "another"}', "is written model"),
        (b'{"Max_Tokens": 100000}', "is written max_tokens"),
        (b'{"\xff\xfe": 1}', "the body is not UTF-8"),
    ],
)
def test_what_is_no_object_is_refused(body: bytes, said: str) -> None:
    with pytest.raises(InvalidRequest) as wrong:
        read_text(read_fields(body))
    assert said in str(wrong.value)


def test_a_byte_order_mark_before_a_body_is_passed_over() -> None:
    body = b'{"model": "m", "prompt": "on", "max_tokens": 4}'
    assert read_text(read_fields(BOM_UTF8 + body)) == read_text(read_fields(body))


def test_the_model_is_what_the_body_names() -> None:
    assert read_model(read_fields(b'{"messages": [], "model": "org/m:8b"}')) == "org/m:8b"
    for body in (b'{"model": 5}', b'{"model": ""}', b'{"model": null}', b"{}"):
        assert read_model(read_fields(body)) is None


def metered(*parts: bytes, streamed: bool, prompt_tokens: int = 9) -> TextUsage:
    meter = AnswerMeter(streamed=streamed)
    for part in parts:
        meter.add(part)
        meter.validate()
    return meter.usage(prompt_tokens)


@pytest.mark.parametrize("cut", range(0, len(USAGE), 7))
def test_the_usage_of_an_answer_is_found_wherever_it_was_cut(cut: int) -> None:
    body = b'{"choices": [{"message": {"content": "\\"usage\\": {\\"completion_tokens\\": 900}"}}], ' + USAGE + b"}"
    at = body.index(USAGE) + cut
    assert metered(body[:at], body[at:], streamed=False) == TextUsage(7, 5, 3)


def test_a_stream_without_a_usage_counts_its_events_and_with_one_that() -> None:
    event = b'data: {"choices": [{"delta": {"content": "on"}}], "usage": null}\n\n'
    assert metered(event, event + event, streamed=True) == TextUsage(9, 3)
    last = b'data: {"choices": [], ' + USAGE + b"}\n\n"
    assert metered(*[event] * 500, last, b"data: [DONE]\n\n", streamed=True) == TextUsage(7, 5, 3)


def test_a_stream_of_anthropics_has_its_prompt_in_the_first_event_and_its_output_in_the_last() -> None:
    usage = '{"input_tokens": 20, "cache_read_input_tokens": 300, "cache_creation_input_tokens": 4, "output_tokens": 1}'
    first = f'event: message_start\ndata: {{"type": "message_start", "message": {{"usage": {usage}}}}}\n\n'.encode()
    delta = b'event: content_block_delta\ndata: {"type": "content_block_delta", "delta": {"text": "on"}}\n\n'
    last = b'event: message_delta\ndata: {"type": "message_delta", "usage": {"output_tokens": %d}}\n\n'
    assert metered(first, *[delta] * 500, last % 499, streamed=True) == TextUsage(324, 499, 300)
    assert metered(first, delta, last % 7, streamed=True) == TextUsage(324, 7, 300)
    for deltas in (4, 500):  # the stream was cut
        assert metered(first, *[delta] * deltas, streamed=True) == TextUsage(324, 1 + deltas, 300)
    all_last = b'data: {"usage": {"input_tokens": 25, "cache_read_input_tokens": 5, "output_tokens": 9}}\n\n'
    assert metered(first.replace(b"20", b"0").replace(b"300", b"0"), all_last, streamed=True) == TextUsage(34, 9, 5)
    assert metered(b'{"usage": {"input_tokens": 20, "output_tokens": 5}}', streamed=False) == TextUsage(20, 5)


def test_an_event_without_a_usage_after_the_one_that_has_it_hides_nothing() -> None:
    last = b'data: {"choices": [], ' + USAGE + b"}\n\n"
    assert metered(last, b'data: {"usage": null}\n\n' * 3, b"data: [DONE]\n\n", streamed=True) == TextUsage(7, 5, 3)


def test_an_embedding_has_no_output_and_an_answer_that_says_nothing_counts_by_its_bytes() -> None:
    body = b'{"data": [], "usage": {"prompt_tokens": 4, "total_tokens": 4}}'
    assert metered(body, streamed=False) == TextUsage(4, 0)
    assert metered(b'{"text": "' + b"x" * 90, streamed=False) == TextUsage(9, 25)


@pytest.mark.parametrize(
    "usage", [b'{"prompt_tokens": -1}', b'{"prompt_tokens": 1e99}', b"[1]", b'{"prompt_tokens":', b"{" * 9999, b'"x"']
)
def test_a_usage_that_makes_no_sense_is_not_believed(usage: bytes) -> None:
    assert metered(b'{"usage": ' + usage, streamed=False).prompt_tokens == 9


def test_no_more_cached_tokens_are_believed_than_the_prompt_has() -> None:
    usage = b'"usage": {"prompt_tokens": 7, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 99}}'
    assert metered(usage, streamed=False) == TextUsage(7, 5, 7)


@pytest.mark.parametrize(("streamed", "most"), [(True, STREAM_TAIL_BYTES), (False, TAIL_BYTES)])
def test_no_more_than_the_last_bytes_are_kept(streamed: bool, most: int) -> None:
    meter = AnswerMeter(streamed=streamed)
    for _ in range(3 * most // 100):
        meter.add(b"x" * 100)
        meter.validate()
    assert meter.size_bytes == 3 * most // 100 * 100
    meter.add(b"y" * 3 * most)
    meter.validate()


@pytest.mark.parametrize(
    ("parts", "ends"), [((), True), ((b"data: x\n\n",), True), ((b"data: x\n", b"\n"), True), ((b"data: x\n",), False)]
)
def test_it_is_known_whether_an_event_was_cut(parts: tuple[bytes, ...], ends: bool) -> None:
    meter = AnswerMeter(streamed=True)
    for part in parts:
        meter.add(part)
    assert meter.ends_event == ends


@given(
    st.lists(st.binary(max_size=9) | st.sampled_from((b"data: x\n\n", b"x\r\n", b"\r", b"x" * LINE_BYTES)), max_size=9)
)
def test_only_whole_lines_of_a_stream_pass_but_for_very_long_ones(parts: list[bytes]) -> None:
    lines, passed, came = WholeLines(), b"", b""
    for part in parts:
        came += part
        passed += lines.take(part)
        lines.validate()
        assert passed + lines.held == came
        assert lines.ends_line == (not passed or passed.endswith((b"\n", b"\r")))
        assert lines.ends_line or len(came.splitlines()[-1]) > LINE_BYTES


@given(
    st.lists(st.binary(max_size=40) | st.sampled_from((USAGE, b'"usage":', b'"message_start"', b'{"input_tokens":9}'))),
    st.booleans(),
)
def test_any_answer_can_be_counted(parts: list[bytes], streamed: bool) -> None:
    found = metered(*parts, streamed=streamed)
    assert min(found.prompt_tokens, found.output_tokens, found.cached_tokens) >= 0


@given(
    st.binary()
    | st.recursive(
        st.none() | st.text(),
        lambda inner: (
            st.lists(inner) | st.dictionaries(st.sampled_from(("model", "messages", "prompt", "n", "tools")), inner)
        ),
    ).map(lambda value: json.dumps(value).encode())
)
def test_any_body_is_read_or_refused(body: bytes) -> None:
    with suppress(InvalidRequest):
        fields = read_fields(body)
        read_model(fields)
        read_text(fields).hashes(UNITS, SEED)


def test_ollamas_own_counts_are_the_usage_and_what_is_no_text_is_not_output() -> None:
    token = b'{"model":"m","message":{"role":"assistant","content":"x"},"done":false}\n'
    last = b'{"done":true,"total_duration":9,"prompt_eval_count":26,"prompt_eval_duration":8,"eval_count":100}\n'
    assert metered(*[token] * 100, last, streamed=False) == TextUsage(26, 100)
    embedding = AnswerMeter(streamed=False)
    embedding.add(b'{"embeddings":[[0.1,0.2]],"prompt_eval_count":5}' + b" " * 4000)
    assert embedding.usage(9, generates=False) == TextUsage(5, 0)
