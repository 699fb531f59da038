"""Makes the OpenAPI document of a frontend, which it serves at /openapi.json. Pure.

openapi/operations.py: request and answer of each operation ─▶ openapi/schemas.py: schemas of Structs ─▶ document
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec

from services.frontend.openapi.chunk_structs import Health, Version
from services.frontend.openapi.operations import DESCRIPTIONS, OperationDescription
from services.frontend.openapi.schemas import Schema, components, ref
from services.frontend.protocol.errors import ErrorBody
from services.frontend.protocol.model_list import ModelEntry, ModelList
from services.frontend.protocol.operations import PATHS, STORED_METHODS, STORED_PATH, Operation
from services.frontend.protocol.responses_events import Response, ResponseDeleted
from shared.version import VERSION

PATH = "/openapi.json"
_ABOUT = """OpenAI's API, and some of vLLM's, served by Headrace. A field that is not named here is refused by name.
Each operation's description lists the rules that its schema cannot express; a request that breaks one gets 400 too."""
_REFUSED = {
    "400": "The request is invalid; `param` names the field",
    "401": "No API key, or an unknown one",
    "404": "The model, or the response, is not there",
    "408": "The body did not arrive in time",
    "413": "The body is over 4 MiB",
    "415": "The body has a `Content-Encoding`, such as gzip; none is supported",
    "417": "`Expect` is something other than 100-continue",
    "429": "A limit of the server or of the key is reached; no work was done",
    "500": "The server failed",
    "503": "A service that the request needs is unavailable, or every worker refused",
    "504": "The request's deadline has passed",
}
_STATUSES_WITH_BODY = ("400", "404", "408", "413", "415", "417", "429", "500", "503", "504")
_RETRYABLE = ("429", "503")
"""Statuses with a Retry-After header."""
_EXTRA_HEADERS = {"401": ("WWW-Authenticate",), "415": ("Accept-Encoding",)}


@lru_cache
def document(*, keys: bool) -> bytes:
    """Return the document as JSON. `keys`: API keys are required."""
    requests = [struct for one in DESCRIPTIONS.values() for struct in (one.request, *one.items)]
    answers = [struct for one in DESCRIPTIONS.values() for struct in (one.answer, *one.events)]
    parts: dict[str, Any] = {
        "schemas": components(requests, [*answers, ResponseDeleted, ModelEntry, ModelList, Health, Version, ErrorBody]),
        "responses": {f"Refused{status}": _refusal(status, keys=keys) for status in _REFUSED},
        "headers": _HEADERS,
        "parameters": _PARAMETERS,
    }
    whole: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Headrace", "version": VERSION, "description": _ABOUT},
        "paths": {
            **{PATHS[operation]: {"post": _operation(operation, one, keys)} for operation, one in DESCRIPTIONS.items()},
            **_others(keys=keys),
        },
        "components": parts,
    }
    if keys:
        parts["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        whole["security"] = [{"key": []}]
    return msgspec.json.encode(whole)


_MEANINGS = {"limit": "The limit", "remaining": "What is left", "reset": "The time until all is available again"}
_HEADERS: dict[str, Schema] = {
    "X-Request-Id": {
        "description": "The request's id: the client's, if it is short and plain, or one of ours. Only a request that"
        " was not read has none",
        "schema": {"type": "string", "pattern": "^[0-9A-Za-z._:-]{1,64}$"},
    },
    "Retry-After": {
        "description": "Seconds until a retry makes sense",
        "required": True,
        "schema": {"type": "integer", "minimum": 1},
    },
    "WWW-Authenticate": {"required": True, "schema": {"const": "Bearer"}},
    "Accept-Encoding": {"required": True, "schema": {"const": "identity"}},
    **{
        f"x-ratelimit-{what}-{of}": {
            "description": f"{_MEANINGS[what]} of the key's {of} per minute, if it has such a limit",
            "schema": {"type": "string"} if what == "reset" else {"type": "integer"},
        }
        for of in ("requests", "tokens")
        for what in ("limit", "remaining", "reset")
    },
}
_PARAMETERS: dict[str, Schema] = {
    "RequestId": {
        "name": "X-Request-Id",
        "in": "header",
        "description": "An id for the request; it is ignored unless it is 1 to 64 of 0-9, A-Z, a-z and ._:-",
        "schema": {"type": "string"},
    },
    "Deadline": {
        "name": "Headrace-Deadline-S",
        "in": "header",
        "description": "Seconds that the request may take, more than 0; the server has a limit",
        "schema": {"type": "string", "pattern": "^[0-9]{1,9}(\\.[0-9]{1,9})?$"},
    },
}


_SHARED: list[Schema] = [{"$ref": f"#/components/parameters/{name}"} for name in _PARAMETERS]


def _operation(operation: Operation, one: OperationDescription, keys: bool) -> Schema:
    rules = "\n".join(f"- {rule}" for rule in one.rules)
    return {
        "operationId": operation,
        "summary": one.summary,
        "description": rules,
        "parameters": _SHARED,
        "requestBody": {"required": True, "content": {"application/json": {"schema": ref(one.request)}}},
        "responses": {"200": _answer(one, keys=keys), **_refusals(_STATUSES_WITH_BODY, keys=keys)},
    }


def _answer(one: OperationDescription, *, keys: bool) -> Schema:
    content: Schema = {"application/json": {"schema": ref(one.answer)}}
    description = "The answer"
    if one.events:
        content["text/event-stream"] = {"schema": _event(one.events)}
        description = "The answer; as events with `stream: true`"
    return {"description": description, "headers": _headers((), keys=keys), "content": content}


def _event(structs: tuple[type[msgspec.Struct], ...]) -> Schema:
    """Return the schema of an event as OpenAPI 3.2 describes it; tools read it in 3.1 too."""
    names = [one.__struct_config__.tag for one in structs if one.__struct_config__.tag is not None]
    payload = {"anyOf": [ref(one) for one in structs] + ([] if names else [ref(ErrorBody)])}
    data: Schema = {"type": "string", "contentMediaType": "application/json", "contentSchema": payload}
    if names:
        return {
            "type": "object",
            "properties": {"event": {"enum": names}, "data": data},
            "required": ["event", "data"],
        }
    return {
        "description": "The last event is `[DONE]`, or a failure",
        "type": "object",
        "properties": {"data": {"anyOf": [{"const": "[DONE]"}, data]}},
        "required": ["data"],
    }


def _others(*, keys: bool) -> dict[str, Schema]:
    """Return the paths whose requests have no body."""
    open_: Schema = {"security": []} if keys else {}
    model: Schema = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    paths = {
        "/v1/models": _read("models", "List the models that are served", _json(ModelList, keys=keys), (), keys=keys),
        "/v1/models/{model}": {
            "parameters": [model],
            **_read("model", "Describe one model", _json(ModelEntry, keys=keys), ("400", "404", "503"), keys=keys),
        },
        PATH: _read("openapi", "Return this document", _json(None, keys=keys), (), keys=keys),
        "/version": _read("version", "Return the version of this frontend", _json(Version, keys=keys), (), keys=keys),
        "/live": _read("live", "Tell that the process is alive", _text("text/plain", keys=False), (), keys=False),
        "/health": _read("health", "Tell whether a request would be served", _json(Health, keys=False), (), keys=False),
    }
    for operation, method in STORED_METHODS.items():
        paths.setdefault(STORED_PATH, {"parameters": [_RESPONSE_ID]})[method.lower()] = _stored(operation, keys=keys)
    paths["/health"]["get"]["responses"]["503"] = {
        **_json(Health, keys=False),
        "description": "No request would be served",
    }
    for path in ("/live", "/health"):
        paths[path]["get"] |= open_
    if not keys:  # with keys, metrics are on another port
        answer = _text("text/plain", keys=False)
        paths["/metrics"] = _read("metrics", "Return metrics in Prometheus' text format", answer, (), keys=False)
    return paths


_RESPONSE_ID: Schema = {
    "name": "response_id",
    "in": "path",
    "required": True,
    "schema": {"type": "string", "minLength": 1, "maxLength": 256},
}


def _stored(operation: Operation, *, keys: bool) -> Schema:
    summary, answer = _STORED[operation]
    return {
        "operationId": operation,
        "summary": summary,
        "parameters": _SHARED,
        "responses": {"200": _json(answer, keys=keys), **_refusals(_STATUSES_WITH_BODY, keys=keys)},
    }


_STORED: dict[Operation, tuple[str, type[msgspec.Struct]]] = {
    "retrieve_response": ("Return a stored response", Response),
    "delete_response": ("Delete a stored response", ResponseDeleted),
}


def _read(operation: str, summary: str, answer: Schema, refused: tuple[str, ...], *, keys: bool) -> Schema:
    responses = {"200": answer, **_refusals((*refused, "500"), keys=keys)}
    return {"get": {"operationId": operation, "summary": summary, "responses": responses}}


def _json(struct: type[msgspec.Struct] | None, *, keys: bool) -> Schema:
    schema: Schema = {"type": "object"} if struct is None else ref(struct)
    content = {"application/json": {"schema": schema}}
    return {"description": "The answer", "headers": _headers((), keys=keys), "content": content}


def _text(media: str, *, keys: bool) -> Schema:
    content = {media: {"schema": {"type": "string"}}}
    return {"description": "The answer", "headers": _headers((), keys=keys), "content": content}


def _refusals(statuses: tuple[str, ...], *, keys: bool) -> dict[str, Schema]:
    answered = sorted({*statuses, "401"} if keys else statuses)
    return {status: {"$ref": f"#/components/responses/Refused{status}"} for status in answered}


def _refusal(status: str, *, keys: bool) -> Schema:
    names = ("Retry-After",) if status in _RETRYABLE else _EXTRA_HEADERS.get(status, ())
    return {
        "description": _REFUSED[status],
        "headers": _headers(names, keys=keys and status != "401"),
        "content": {"application/json": {"schema": ref(ErrorBody)}},
    }


def _headers(names: tuple[str, ...], *, keys: bool) -> Schema:
    limits = [name for name in _HEADERS if name.startswith("x-ratelimit")] if keys else []
    return {name: {"$ref": f"#/components/headers/{name}"} for name in ("X-Request-Id", *names, *limits)}
