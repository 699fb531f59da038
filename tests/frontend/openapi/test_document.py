"""The OpenAPI document describes the paths, the requests and the answers that there are.

tests/clients/test_openapi.py asks a real frontend everything that the document allows, and what it does not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.frontend.config import AccessConfig
from services.frontend.openapi.document import document
from services.frontend.openapi.operations import DESCRIPTIONS
from services.frontend.protocol.chat import decode_chat
from services.frontend.protocol.completions import decode_completion
from services.frontend.protocol.embeddings import decode_embeddings
from services.frontend.protocol.ignored_fields import IgnoredFields
from services.frontend.protocol.operations import FOREIGN_PATHS, PATHS, Operation
from services.frontend.protocol.pictures import decode_edit, decode_pictures
from services.frontend.protocol.responses_request import decode_response
from services.frontend.protocol.tokenize import decode_detokenize, decode_tokenize
from services.frontend.protocol.videos import decode_video
from shared.errors import InvalidRequest
from tests.frontend.json_schemas import misfit, pointed, values
from tests.frontend.peers import MODEL, clients, world
from tests.frontend.unsaid import said_elsewhere

DECODE: dict[Operation, Callable[[bytes, IgnoredFields], object]] = {
    "chat": decode_chat,
    "completions": decode_completion,
    "responses": decode_response,
    "embeddings": decode_embeddings,
    "pictures": decode_pictures,
    "picture_edits": decode_edit,
    "videos": decode_video,
    "tokenize": decode_tokenize,
    "detokenize": decode_detokenize,
}
DOCUMENT: dict[str, Any] = json.loads(document(keys=False))
MESSAGES = [{"role": "user", "content": "hello"}]


def refs(one: Any) -> Iterator[str]:
    if isinstance(one, dict):
        if "$ref" in one:
            yield one["$ref"]
        for inner in one.values():
            yield from refs(inner)
    elif isinstance(one, list):
        for inner in one:
            yield from refs(inner)


def body_schema(operation: Operation) -> Any:
    return DOCUMENT["paths"][PATHS[operation]]["post"]["requestBody"]["content"]["application/json"]["schema"]


def refusal(operation: Operation, body: Any) -> InvalidRequest | None:
    try:
        DECODE[operation](msgspec.json.encode(body), IgnoredFields())
    except InvalidRequest as wrong:
        return wrong
    return None


def schema_of(path: str, status: int = 200, method: str = "post", media: str = "application/json") -> Any:
    answer = DOCUMENT["paths"][path][method]["responses"][str(status)]
    if "$ref" in answer:
        answer = pointed(DOCUMENT, answer["$ref"])
    return answer["content"][media]["schema"]


def test_every_operation_is_described_and_nothing_else() -> None:
    assert PATHS.keys() == DECODE.keys()
    assert DESCRIPTIONS.keys() == PATHS.keys() | FOREIGN_PATHS.keys()
    assert set(PATHS.values()) < DOCUMENT["paths"].keys()


@pytest.mark.parametrize("keys", [False, True])
def test_every_reference_points_at_something_with_a_plain_name(keys: bool) -> None:
    told = json.loads(document(keys=keys))
    assert {ref for ref in refs(told) if not pointed(told, ref)} == set()
    assert all(re.fullmatch(r"[A-Za-z0-9]+", name) for name in told["components"]["schemas"])
    assert all(re.fullmatch(r"[A-Za-z0-9-]+", name) for part in told["components"].values() for name in part)


def test_fields_that_are_only_refused_are_left_out() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    assert {"messages", "tools"} < schemas["ChatRequest"]["properties"].keys()
    assert not {"audio", "functions", "moderation"} & schemas["ChatRequest"]["properties"].keys()


@pytest.mark.parametrize("operation", PATHS)
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data())
def test_what_the_schema_allows_is_refused_only_for_what_it_cannot_say(operation: Operation, data: Any) -> None:
    body = data.draw(values(body_schema(operation), DOCUMENT))
    assert misfit(body, body_schema(operation), DOCUMENT, closed=True) is None
    refused = refusal(operation, body)
    assert refused is None or said_elsewhere(refused.param, str(refused)), (refused.param, str(refused))


async def test_what_is_answered_fits_and_has_nothing_more(directory: Path) -> None:
    asked: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2},
        "/v1/completions": {"prompt": "x", "logprobs": 2},
        "/tokenize": {"prompt": "x", "return_token_strs": True},
        "/detokenize": {"tokens": [5, 6]},
    }
    async with world(directory) as w, clients(w) as (_, http):
        w.say("a mill")
        for path, body in asked.items():
            async with http.post(path, json=body) as response:
                assert response.status == 200, await response.text()
                assert misfit(await response.json(), schema_of(path), DOCUMENT, closed=True) is None
            async with http.post(path, json={"model": "nobody", **body}) as response:
                assert misfit(await response.json(), schema_of(path, 404), DOCUMENT, closed=True) is None
        for path in ("/v1/models", "/v1/models/{model}", "/version", "/health", "/openapi.json"):
            async with http.get(path.replace("{model}", MODEL)) as response:
                assert (
                    misfit(await response.json(), schema_of(path, 200, "get"), DOCUMENT, closed=path[1] != "o") is None
                )


@pytest.mark.parametrize("usage", [False, True])
async def test_what_is_streamed_fits_and_has_nothing_more(directory: Path, usage: bool) -> None:
    more = {"stream": True, "stream_options": {"include_usage": usage}}
    asked: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": MESSAGES, **more},
        "/v1/completions": {"prompt": "x", "logprobs": 2, **more},
    }
    async with world(directory) as w, clients(w) as (_, http):
        w.say("a mill")
        for path, body in asked.items():
            async with http.post(path, json=body) as response:
                assert response.content_type == "text/event-stream"
                events = (await response.text()).split("\n\n")
            data = schema_of(path, media="text/event-stream")["properties"]["data"]
            event = data["anyOf"][1]["contentSchema"]
            assert events[-2:] == ["data: [DONE]", ""]
            for one in events[:-2]:
                assert misfit(json.loads(one.removeprefix("data: ")), event, DOCUMENT, closed=True) is None


async def test_if_keys_are_required_the_document_needs_one_and_describes_that(directory: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text("")
    access = AccessConfig(keys_file=str(keys))
    async with (
        world(directory, access=access, ready=False) as w,
        clients(w) as (_, http),
        http.get("/openapi.json") as response,
    ):
        assert response.status == 401
    told = json.loads(document(keys=True))
    assert told["security"] == [{"key": []}]
    assert told["paths"]["/health"]["get"]["security"] == []
    assert "/metrics" not in told["paths"]
    assert "401" in told["paths"]["/v1/models"]["get"]["responses"]
    assert "security" not in DOCUMENT


def test_requests_are_closed_only_where_unknown_fields_are_refused() -> None:
    closed = json.loads(document(keys=False, closed=True))["components"]["schemas"]
    for name in ("ChatRequest", "ChatMessage", "ResponseRequest", "InputMessage"):
        assert closed[name]["additionalProperties"] is False
        assert "additionalProperties" not in DOCUMENT["components"]["schemas"][name]
