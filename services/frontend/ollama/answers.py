"""Ollama's answers: lines of a chat or a text, and what it says about models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from services.frontend.models.model import Model, ModelLimits
from services.frontend.output.output import Delta
from services.frontend.protocol.chat_chunks import Usage
from services.frontend.protocol.foreign import Ended, arguments_of
from services.frontend.tool_parsers.parse_result import CallPiece, join_pieces

API_VERSION = "0.13.0"
"""The version of Ollama whose API this is; clients refuse to work with an old one."""
_encode = msgspec.json.encode


def _now() -> datetime:
    return datetime.now(UTC)


def error_body(message: str) -> bytes:
    """Return the body of a failure, and the last line of an answer that failed."""
    return _encode({"error": message})


class OllamaWriter:
    """Writes one answer. Calls come whole, in a line of their own before the last one."""

    framing: Literal["line"] = "line"

    def __init__(self, model: str, *, is_chat: bool, now: Callable[[], datetime] = _now) -> None:
        """Create it. `model` is the name that the client gave."""
        self._model = model
        self._is_chat = is_chat
        self._now = now
        self._calls: list[CallPiece] = []

    def first_events(self, usage: Usage) -> list[bytes]:  # noqa: ARG002  other APIs have some
        """Return nothing; an answer begins with its text."""
        return []

    def silence_events(self) -> list[bytes]:
        """Return what can be sent while nothing comes: a line without text, since lines have no comments."""
        return [_encode(self._line("", ""))]

    def push(self, delta: Delta) -> list[bytes]:
        """Add a delta to the answer; return its line, if it has a text."""
        self._calls += delta.calls
        return [_encode(self._line(delta.text, delta.reasoning))] if delta.text or delta.reasoning else []

    def continuation(self, delta: Delta) -> bytes | None:
        """Return the line of a delta without calls."""
        return None if delta.calls else _encode(self._line(delta.text, delta.reasoning))

    def continued(self, delta: Delta) -> None:
        """Record nothing; a line depends on no other."""

    def last_events(self, ended: Ended) -> list[bytes]:
        """Return the line with the calls, if there are any, and the last line."""
        calls = _whole(join_pieces(self._calls))
        called = [_encode(self._line("", "", calls))] if calls else []
        return [*called, _encode(self._line("", "") | _end(ended))]

    def full_body(self, delta: Delta, ended: Ended) -> bytes:
        """Return the answer whose whole text is `delta`."""
        return _encode(self._line(delta.text, delta.reasoning, _whole(delta.calls)) | _end(ended))

    def loaded(self, reason: Literal["load", "unload"]) -> bytes:
        """Return the answer of a request that asks for none."""
        return _encode(self._line("", "") | {"done": True, "done_reason": reason})

    def error(self, status: int, message: str) -> bytes:  # noqa: ARG002  other APIs have classes of errors
        """Return the last line of an answer that failed."""
        return error_body(message)

    def _line(self, text: str, thinking: str, calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        more = ({"thinking": thinking} if thinking else {}) | ({"tool_calls": calls} if calls else {})
        said = (
            {"message": {"role": "assistant", "content": text, **more}} if self._is_chat else {"response": text, **more}
        )
        return {"model": self._model, "created_at": self._now(), **said, "done": False}


def _whole(calls: Sequence[CallPiece]) -> list[dict[str, Any]]:
    """Return calls in Ollama's form, without one that was cut off, whose arguments are not JSON."""
    return [
        {"id": call.id, "function": {"index": call.index, "name": call.name, "arguments": arguments}}
        for call in calls
        if (arguments := arguments_of(call.arguments)) is not None
    ]


def _end(ended: Ended) -> dict[str, Any]:
    prompt, generation = _nanoseconds(ended.first_token_s), _nanoseconds(ended.generation_s)
    return {
        "done": True,
        "done_reason": "length" if ended.finish == "length" else "stop",
        "total_duration": max(_nanoseconds(ended.total_s), prompt + generation),
        "load_duration": 0,  # no request loads a model
        "prompt_eval_count": ended.usage.prompt_tokens,
        "prompt_eval_duration": prompt,
        "eval_count": ended.usage.completion_tokens,
        "eval_duration": generation,
    }


def embedded(model: str, tokens: int, taken_s: float) -> dict[str, Any]:
    """Return what /api/embed answers in addition to the vectors."""
    times = {"total_duration": _nanoseconds(taken_s), "load_duration": 0}
    return {"model": model, "prompt_eval_count": tokens, **times}


def _nanoseconds(seconds: float) -> int:
    """Return a duration, at least 1: clients divide counts by it."""
    return max(1, round(seconds * 1e9))


# --- models

_STARTED = _now()
_DETAILS = {
    "format": "",
    "family": "",
    "families": [],
    "parameter_size": "",
    "quantization_level": "",
    "parent_model": "",
}
"""What Ollama knows about a model's file; a frontend does not."""


def _details(model: Model) -> dict[str, Any]:
    return {**_DETAILS, "parent_model": model.parent}


def listed(model: Model, limits: ModelLimits) -> dict[str, Any]:
    """Return the entry of a model in /api/tags and /api/ps. Its digest is that of its tokenizer, since a frontend has
    no other file of it; its size is not known."""
    known = {"digest": model.tokenizer_digest, "size": 0, "size_vram": 0, "context_length": limits.context_length}
    return {"name": model.name, "model": model.name, "modified_at": _STARTED, "details": _details(model), **known}


def shown(model: Model, limits: ModelLimits) -> bytes:
    """Return the answer of /api/show."""
    capabilities = {
        "completion": True,
        "tools": model.tool_template is not None and model.tool_format is not None,
        "thinking": model.thinks,
        "insert": model.fim is not None,
        "embedding": limits.embedding_size > 0,
    }
    info = {"general.architecture": "headrace", "headrace.context_length": limits.context_length}
    return _encode(
        {
            "modified_at": _STARTED,
            "template": "" if model.template is None else model.template.source,
            "details": _details(model),
            "model_info": info | {"headrace.embedding_length": limits.embedding_size},
            "capabilities": [name for name, there in capabilities.items() if there],
        }
    )
