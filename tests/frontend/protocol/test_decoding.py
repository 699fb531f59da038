"""Bodies are decoded; fields that are not built are refused by name unless their value asks for nothing."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec import Struct

from services.frontend.protocol.chat import ChatMessage, ChatRequest, decode_chat
from services.frontend.protocol.completions import CompletionRequest, decode_completion
from services.frontend.protocol.decoding import LARGE_BODY_BYTES, fields_not_built
from services.frontend.protocol.responses_items import CallOutput, InputMessage, PastCall, decode_items
from services.frontend.protocol.responses_request import (
    ReasoningConfig,
    ResponseRequest,
    StoredResponseRequest,
    decode_response,
    decode_stored,
)
from services.frontend.protocol.tokenize import TokenizeRequest, decode_tokenize
from shared.errors import InvalidRequest

CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "x"}
Decode = Callable[[bytes], object]


def message(body: bytes) -> object:
    return decode_chat(b'{"messages":[%b]}' % body)


def item(body: bytes) -> object:
    return decode_items([msgspec.Raw(body)])


def section(name: str) -> Decode:
    return lambda body: decode_response(b'{"input":"x","%b":%b}' % (name.encode(), body))


NOT_BUILT: list[tuple[type[Struct], Decode, dict[str, Any], str]] = [
    (ChatRequest, decode_chat, {"messages": [{"role": "user", "content": "x"}]}, ""),
    (ChatMessage, message, {"role": "user", "content": "x"}, "messages[0]."),
    (CompletionRequest, decode_completion, {"prompt": "x"}, ""),
    (TokenizeRequest, decode_tokenize, {"prompt": "x"}, ""),
    (ResponseRequest, decode_response, {"input": "x"}, ""),
    (ReasoningConfig, section("reasoning"), {}, "reasoning."),
    (StoredResponseRequest, decode_stored, {"response_id": "r"}, ""),
    (InputMessage, item, {"role": "user", "content": "x"}, "input[0]."),
    (PastCall, item, CALL, "input[0]."),
    (CallOutput, item, OUTPUT, "input[0]."),
]


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
