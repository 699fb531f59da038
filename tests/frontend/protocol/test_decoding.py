"""Bodies are decoded; fields that are not built are refused by name unless their value asks for nothing."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from typing import Any, Literal

import msgspec
import pytest
from msgspec import Struct

from services.frontend.protocol.chat import ChatRequest, decode_chat
from services.frontend.protocol.completions import CompletionRequest, decode_completion
from services.frontend.protocol.decoding import LARGE_BODY_BYTES, WORDS_SHOWN, decode_body, fields_not_built
from services.frontend.protocol.ignored_fields import IgnoredFields
from services.frontend.protocol.responses_request import (
    ReasoningConfig,
    ResponseRequest,
    StoredResponseRequest,
    decode_response,
    decode_stored,
)
from services.frontend.protocol.tokenize import TokenizeRequest, decode_tokenize
from shared.errors import InvalidRequest

Decode = Callable[[bytes], object]


def section(name: str) -> Decode:
    return lambda body: decode_response(b'{"input":"x","%b":%b}' % (name.encode(), body))


NOT_BUILT: list[tuple[type[Struct], Decode, dict[str, Any], str]] = [
    (ChatRequest, decode_chat, {"messages": [{"role": "user", "content": "x"}]}, ""),
    (CompletionRequest, decode_completion, {"prompt": "x"}, ""),
    (TokenizeRequest, decode_tokenize, {"prompt": "x"}, ""),
    (ResponseRequest, decode_response, {"input": "x"}, ""),
    (ReasoningConfig, section("reasoning"), {}, "reasoning."),
    (StoredResponseRequest, decode_stored, {"response_id": "r"}, ""),
]


@pytest.mark.parametrize("struct", [ChatRequest, CompletionRequest])
def test_no_client_sets_parameters_of_vllms_kv_transfer(struct: type[Struct]) -> None:
    assert fields_not_built(struct)["kv_transfer_params"] == ({},)  # so anything else is refused, as the next test says


@pytest.mark.parametrize(("struct", "decode", "body", "where"), NOT_BUILT)
def test_a_field_that_is_not_built_is_accepted_only_with_values_that_ask_for_nothing(
    struct: type[Struct], decode: Decode, body: dict[str, Any], where: str
) -> None:
    assert fields_not_built(struct)
    for field, harmless in fields_not_built(struct).items():
        for value in (None, *harmless):
            decode(json.dumps({**body, field: value}).encode())
        for value in ({"another": "value"}, True, "another", 2):
            if any(value is one for one in harmless):
                continue
            with pytest.raises(InvalidRequest) as refusal:
                decode(json.dumps({**body, field: value}).encode())
            assert refusal.value.param == where + field
            assert refusal.value.code == "unsupported_parameter"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"tool_choice": "always"},
            "tool_choice: Invalid enum value 'always'; it is one of auto, none, required or an object",
        ),
        (
            {"response_format": {"type": "json"}},
            "response_format.type: Invalid value 'json'; it is one of json_object, json_schema, text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "words", "text": "x"}]}]},
            "messages[0].content[0].type: Invalid value 'words'; it is one of "
            "input_text, output_text, refusal, text, thinking",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools[0].function.name: a name has 1 to 64 letters a-z and A-Z, digits, _ or -",
        ),
    ],
)
def test_a_wrong_word_is_refused_with_the_words_that_are_allowed(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        decode_chat(json.dumps({"messages": [{"role": "user", "content": "x"}], **fields}).encode())
    assert str(refusal.value) == said
    assert refusal.value.param == said.partition(":")[0]


def test_a_long_list_of_allowed_words_is_cut() -> None:
    words = [f"word{at}" for at in range(2 * WORDS_SHOWN)]
    struct = msgspec.defstruct("Wordy", [("word", Literal[tuple(words)])])
    with pytest.raises(InvalidRequest) as refusal:
        decode_body(struct, b'{"word":"x"}')
    listed = str(refusal.value).partition("one of ")[2].split(", ")
    assert len(listed) == WORDS_SHOWN + 1
    assert listed[-1] == "…"


@pytest.mark.parametrize("body", [b"", b" \n"])
def test_an_empty_body_is_refused_as_empty(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"^the body is empty; send JSON$"):
        decode_chat(body)


def test_a_flag_is_not_a_count() -> None:
    decode_completion(b'{"prompt":"x","best_of":1}')
    for body in (b'{"prompt":"x","best_of":true}', b'{"prompt":"x","best_of":false}'):
        with pytest.raises(InvalidRequest, match="best_of"):
            decode_completion(body)
    with pytest.raises(InvalidRequest, match="background"):
        decode_response(b'{"input":"x","background":0}')


@pytest.mark.parametrize("body", [b"[" * LARGE_BODY_BYTES, b'{"messages":[]}' + b" " * LARGE_BODY_BYTES])
def test_the_collector_works_again_after_a_large_body(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        decode_chat(body)
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("fields", "name", "number"),
    [
        ('"max_tokens":8.0,"temperature":1.0', "max_tokens", 8),
        ('"frobnicate":1,"n":2.0,"seed":-7.0', "seed", -7),
        ('"stop_token_ids":[1.0,2.0],"top_k":4e1', "top_k", 40),
    ],
)
def test_a_whole_number_may_be_written_as_a_float(fields: str, name: str, number: int) -> None:
    ignored = IgnoredFields()
    asked = decode_chat(b'{"messages":[{"role":"user","content":"x"}],%b}' % fields.encode(), ignored)
    assert getattr(asked, name) == number
    assert type(getattr(asked, name)) is int
    assert ignored.names == (("frobnicate",) if "frob" in fields else ())


def test_token_ids_of_several_prompts_may_be_written_as_floats() -> None:
    assert decode_completion(b'{"prompt":[[1.0,2.0],[3.0],"x"]}').prompt == [[1, 2], [3], "x"]


@pytest.mark.parametrize("number", ["8.5", "1e300", '"8"', "true"])
def test_another_number_or_text_for_an_integer_is_refused(number: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^max_tokens: Expected"):
        decode_chat(b'{"messages":[{"role":"user","content":"x"}],"max_tokens":%b}' % number.encode())


def test_a_byte_order_mark_before_the_body_is_skipped() -> None:
    body = b'\xef\xbb\xbf{"messages":[{"role":"user","content":"x"}]}'
    assert decode_chat(body) == decode_chat(body[3:])
    with pytest.raises(InvalidRequest, match="the body is empty"):
        decode_chat(body[:3])


TOLD: list[dict[str, Any]] = [
    *({"type": "web_search", "search_context_size": "low"}, {"server_label": "x", "type": "mcp"}),
    *({"type": "of_tomorrow", "function": 1}, {"function": {"name": "look"}}),
]


@pytest.mark.parametrize("decode", [decode_chat, decode_tokenize])
def test_tools_that_a_provider_runs_are_ignored_by_their_type(decode: Any) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "tools": TOLD}).encode()
    ignored = IgnoredFields()
    assert [tool.function.name for tool in decode(body, ignored).tools] == ["look"]
    assert ignored.names == ("tools[].web_search", "tools[].mcp", "tools[].of_tomorrow")
    with pytest.raises(InvalidRequest, match="tools of the server are not served") as wrong:
        decode(body)
    assert wrong.value.param == "tools[0].type"


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{"type": 5}], "tools[0].type"),
        ([{"type": "web_search"}, {"type": 5}], "tools[1].type"),
        ([{"type": "web_search"}, {"type": "x" * 65}], "tools[1].type"),
        ([{"type": "web_search"}, 5], "tools[1]"),
        ([{"type": "function"}], "tools[0].function"),
        ([{"type": "custom"}], "tools[0].custom"),
    ],
)
def test_a_tool_without_a_kind_or_a_name_is_refused(tools: Any, param: str) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "tools": tools}).encode()
    with pytest.raises(InvalidRequest) as wrong:
        decode_chat(body, IgnoredFields())
    assert wrong.value.param == param


def test_a_search_of_the_web_is_ignored_and_named() -> None:
    for asked in ({}, {"search_context_size": "low", "user_location": {"type": "approximate"}}):
        ignored = IgnoredFields()
        body = {"messages": [{"role": "user", "content": "x"}], "web_search_options": asked}
        decode_chat(json.dumps(body).encode(), ignored)
        assert ignored.names == ("web_search_options",)
