"""Makes the OpenAPI document of a frontend, which it serves at /openapi.json. Pure.

openapi/operations.py: request and answer of each operation ─▶ openapi/schemas.py: schemas of Structs ─▶ document

It is made of the types that decode and encode, since a file kept by hand would be wrong after the next field. Rules
between fields stay words: generators of clients do not read them as schemas.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import msgspec

from services.frontend.media.files import MEDIA_PATH
from services.frontend.openapi.operations import DESCRIPTIONS, ERRORS, Health, Version
from services.frontend.openapi.schemas import Schema, components, ref
from services.frontend.protocol.errors import ErrorBody
from services.frontend.protocol.ignored_fields import IGNORED_HEADER
from services.frontend.protocol.operations import (
    FOREIGN_PATHS,
    PATHS,
    STORED_METHODS,
    STORED_PATH,
    VIDEO_METHODS,
    VIDEO_PATH,
    ForeignOperation,
    ModelEntry,
    ModelList,
    Operation,
)
from services.frontend.protocol.responses_events import Response, ResponseDeleted
from services.frontend.protocol.videos import Video, VideoDeleted, VideoList
from shared.version import VERSION

PATH = "/openapi.json"
_ABOUT = """OpenAI's API, and some of vLLM's, served by Headrace. A field that is not named here is ignored and
named in X-Headrace-Ignored, or refused by name.
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
    "504": "The request's deadline has passed, or no token came in time",
}
_OK = "The answer"
_STATUSES_WITH_BODY = ("400", "404", "408", "413", "415", "417", "429", "503", "504")
"""What a request with a body may be refused with, in addition to 401 and 500."""
_REFUSAL_HEADERS = {
    "401": ("WWW-Authenticate",),
    "415": ("Accept-Encoding",),
    "429": ("Retry-After",),
    "503": ("Retry-After",),
}

_MEANINGS = {"limit": "The limit", "remaining": "What is left", "reset": "The time until all is available again"}
_HEADERS: dict[str, Schema] = {
    "X-Request-Id": {
        "description": "The request's id: the client's, if it is short and plain, or one of ours. Only a request that"
        " was not read has none",
        "schema": {"type": "string", "pattern": "^[0-9A-Za-z._:-]{1,64}$"},
    },
    IGNORED_HEADER: {
        "description": "The fields of the request that had no effect, if there are any",
        "schema": {"type": "string"},
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


def _parameter(name: str, place: str, schema: Schema, **more: Any) -> Schema:
    return {"name": name, "in": place, **more, "schema": {"type": "string", **schema}}


_PARAMETERS: dict[str, Schema] = {
    "RequestId": _parameter(
        "X-Request-Id",
        "header",
        {},
        description="An id for the request; it is ignored unless it is 1 to 64 of 0-9, A-Z, a-z and ._:-",
    ),
    "Deadline": _parameter(
        "Headrace-Deadline-S",
        "header",
        {"pattern": "^[0-9]{1,9}(\\.[0-9]{1,9})?$"},
        description="Seconds that the request may take, more than 0; the server has a limit",
    ),
    "Session": _parameter(
        "X-Session-Id",
        "header",
        {"maxLength": 256},
        description="The name of the conversation, in printable characters; its requests prefer the same worker, as"
        " with the body's prompt_cache_key",
    ),
    "CacheSalt": _parameter(
        "X-Cache-Salt",
        "header",
        {"maxLength": 256},
        description="In printable characters; prompts share cached blocks only with prompts that have the same, as with"
        " the body's cache_salt",
    ),
}
_SHARED: list[Schema] = [{"$ref": f"#/components/parameters/{name}"} for name in _PARAMETERS]
_STORED: dict[Operation, tuple[str, type[msgspec.Struct]]] = {
    "retrieve_response": ("Return a stored response", Response),
    "delete_response": ("Delete a stored response", ResponseDeleted),
    "list_videos": ("List the videos of a key", VideoList),
    "retrieve_video": ("Return a video's job", Video),
    "delete_video": ("Cancel a video's job, and delete it", VideoDeleted),
    "cancel_video": ("Cancel a video's job", Video),
    "video_events": ("Follow a video's job as events", Video),
}


@lru_cache
def document(*, keys: bool, closed: bool = False) -> bytes:
    """Return the document as JSON. `keys`: API keys are required; `closed`: unknown fields are refused, not ignored."""
    paths = _Paths(keys)
    requests = [struct for one in DESCRIPTIONS.values() for struct in (one.request, *one.items)]
    answers = [struct for one in DESCRIPTIONS.values() for struct in (one.answer, *one.events) if struct is not None]
    parts: dict[str, Any] = {
        "schemas": components(
            requests,
            [
                *answers,
                ResponseDeleted,
                Video,
                VideoDeleted,
                VideoList,
                ModelEntry,
                ModelList,
                Health,
                Version,
                ErrorBody,
            ],
            closed=closed,
        ),
        "responses": {
            f"{provider}Refused{status}": paths.refusal(status, error)
            for provider, error in (("", ref(ErrorBody)), *ERRORS.items())
            for status in _REFUSED
        },
        "headers": _HEADERS,
        "parameters": _PARAMETERS,
    }
    whole: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Headrace", "version": VERSION, "description": _ABOUT},
        "paths": paths.all(),
        "components": parts,
    }
    if keys:
        parts["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        whole["security"] = [{"key": []}]
    return msgspec.json.encode(whole)


class _Paths:
    """Describes the paths. If keys are required, a request may get 401, and answers have headers about the key."""

    def __init__(self, keys: bool) -> None:
        self._keys = keys

    def all(self) -> dict[str, Schema]:
        """Return the description of each path."""
        open_ = _Paths(keys=False)  # paths that need no key
        health = open_._endpoint("health", "Tell whether a request would be served", _json(ref(Health)))
        health["responses"]["503"] = open_._answer(_json(ref(Health)), "No request would be served")
        live = open_._endpoint("live", "Tell that the process is alive", _TEXT)
        security: Schema = {"security": []} if self._keys else {}
        model = _parameter("model", "path", {"minLength": 1}, required=True)
        stored = _parameter("response_id", "path", {"minLength": 1, "maxLength": 256}, required=True)
        posted: dict[str, Schema] = {
            path: {"post": self._operation(each)} for each, path in (PATHS | FOREIGN_PATHS).items()
        }
        paths: dict[str, Schema] = {
            **self._with_videos(posted),
            "/v1/models": {"get": self._endpoint("models", "List the models that are served", _json(ref(ModelList)))},
            "/v1/models/{model}": {
                "parameters": [model],
                "get": self._endpoint("model", "Describe one model", _json(ref(ModelEntry)), ("400", "404", "503")),
            },
            PATH: {"get": self._endpoint("openapi", "Return this document", _json({"type": "object"}))},
            "/version": {"get": self._endpoint("version", "Return the version of this frontend", _json(ref(Version)))},
            "/live": {"get": live | security},
            "/health": {"get": health | security},
            STORED_PATH: {"parameters": [stored]}
            | {method.lower(): self._stored(one) for one, method in STORED_METHODS.items()},
        }
        if not self._keys:  # with keys, metrics are on another port
            metrics = self._endpoint("metrics", "Return metrics in Prometheus' text format", _TEXT)
            paths["/metrics"] = {"get": metrics}
        return paths

    def _with_videos(self, paths: dict[str, Schema]) -> dict[str, Schema]:
        """Return paths with those of videos that have no body, and of files."""
        video = _parameter("video_id", "path", {"minLength": 1, "maxLength": 64}, required=True)
        for operation, (method, path) in VIDEO_METHODS.items():
            described = self._stored(operation)
            if operation == "list_videos":
                described = {**described, "parameters": [*_SHARED, *_PAGE]}
            if operation == "video_events":
                described["responses"]["200"] = self._answer({"text/event-stream": {"schema": _event((Video,))}})
            mine = paths.setdefault(path, {"parameters": [video]} if VIDEO_PATH in path else {})
            mine[method.lower()] = described
        for name, path, parameter in (
            ("video_content", f"{VIDEO_PATH}/content", video),
            ("media_file", f"{MEDIA_PATH}/{{name}}", _parameter("name", "path", {"minLength": 1}, required=True)),
        ):
            described = self._endpoint(name, "Return a file that was made for this key", _FILE, ("400", "404"))
            paths[path] = {"parameters": [parameter], "get": described}
        return paths

    def refusal(self, status: str, error: Schema) -> Schema:
        """Return the description of an error response."""
        public = self if status != "401" else _Paths(keys=False)
        return public._answer(_json(error), _REFUSED[status], _REFUSAL_HEADERS.get(status, ()))

    def _operation(self, operation: Operation | ForeignOperation) -> Schema:
        one = DESCRIPTIONS[operation]
        content = _json({"type": "object"} if one.answer is None else ref(one.answer)) | one.streamed
        if one.events:
            content["text/event-stream"] = {"schema": _event(one.events)}
        endpoint = self._endpoint(
            operation,
            one.summary,
            content,
            _STATUSES_WITH_BODY,
            ok="The answer; as events with `stream: true`" if one.events else _OK,
            provider=one.provider,
            description="\n".join(f"- {rule}" for rule in one.rules()),
            parameters=_SHARED,
            requestBody={"required": True, "content": _json(ref(one.request))},
        )
        endpoint["responses"]["200"]["headers"][IGNORED_HEADER] = {"$ref": f"#/components/headers/{IGNORED_HEADER}"}
        return endpoint

    def _stored(self, operation: Operation) -> Schema:
        summary, answer = _STORED[operation]
        return self._endpoint(operation, summary, _json(ref(answer)), _STATUSES_WITH_BODY, parameters=_SHARED)

    def _endpoint(
        self,
        operation: str,
        summary: str,
        content: Schema,
        refused: Iterable[str] = (),
        ok: str = _OK,
        provider: str = "",
        **request: Any,
    ) -> Schema:
        statuses = sorted({*refused, "500", *(("401",) if self._keys else ())})
        refusals = {status: {"$ref": f"#/components/responses/{provider}Refused{status}"} for status in statuses}
        responses = {"200": self._answer(content, ok), **refusals}
        return {"operationId": operation, "summary": summary, **request, "responses": responses}

    def _answer(self, content: Schema, description: str = _OK, headers: tuple[str, ...] = ()) -> Schema:
        limits = [name for name in _HEADERS if name.startswith("x-ratelimit")] if self._keys else []
        found = {name: {"$ref": f"#/components/headers/{name}"} for name in ("X-Request-Id", *headers, *limits)}
        return {"description": description, "headers": found, "content": content}


_FILE: Schema = {"*/*": {"schema": {"type": "string", "format": "binary"}}}
_PAGE = [
    _parameter("limit", "query", {"pattern": "^([1-9][0-9]?|100)$"}),
    _parameter("after", "query", {"maxLength": 64}),
    _parameter("order", "query", {"enum": ["asc", "desc"]}),
]
_TEXT: Schema = {"text/plain": {"schema": {"type": "string"}}}


def _json(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}


def _event(structs: tuple[type[msgspec.Struct], ...]) -> Schema:
    """Return the schema of an event as OpenAPI 3.2 describes it; tools read it in 3.1 too."""
    names = [one.__struct_config__.tag for one in structs if one.__struct_config__.tag is not None]
    payload = {"anyOf": [ref(one) for one in structs] + ([] if names else [ref(ErrorBody)])}
    data: Schema = {"type": "string", "contentMediaType": "application/json", "contentSchema": payload}
    if names:
        return {"type": "object", "properties": {"event": {"enum": names}, "data": data}, "required": ["event", "data"]}
    return {
        "description": "The last event is `[DONE]`, or a failure",
        "type": "object",
        "properties": {"data": {"anyOf": [{"const": "[DONE]"}, data]}},
        "required": ["data"],
    }
