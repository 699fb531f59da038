"""Writes the answer of /v1/messages: content blocks from the parts of a model's text, and events about them. Pure.

One block is open at a time; text, thinking and calls follow one another as the model wrote them. So the way in which
the text was cut into deltas changes no block, and an answer that is not streamed is one delta that is written like
others. Thinking has an empty signature, since it is not signed.

    message_start ping  (content_block_start content_block_delta … content_block_stop) …  message_delta message_stop
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from services.frontend.output.output import Delta
from services.frontend.protocol.chat_chunks import Usage
from services.frontend.protocol.foreign import Ended, arguments_of

_encode = msgspec.json.Encoder().encode
_PING = b'{"type":"ping"}'
_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""For each type of block the type of its delta, and the delta's field."""
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(status: int, message: str) -> bytes:
    """Return the body of a failure with this HTTP status, which is also the last event of a message that failed."""
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return _encode({"type": "error", "error": {"type": kind, "message": message}})


class _OpenBlock:
    """The open block."""

    def __init__(self, index: int, block: dict[str, Any]) -> None:
        self.block = block
        """The block as it begins."""
        self.pieces: list[str] = []
        kind, field = _DELTAS[block["type"]]
        event = {"type": "content_block_delta", "index": index, "delta": {"type": kind, field: ""}}
        self.head = _encode(event)[: -len('""}}')]
        """An event of its growth, up to the text."""

    def event(self, text: str) -> bytes:
        return self.head + _encode(text) + b"}}"

    def whole(self) -> dict[str, Any] | None:
        """Return the block; None for a call that was cut off."""
        text = "".join(self.pieces)
        if self.block["type"] != "tool_use":
            return self.block | {self.block["type"]: text}
        arguments = arguments_of(text)
        return None if arguments is None else self.block | {"input": arguments}


class MessageWriter:
    """Writes one message."""

    framing: Literal["event"] = "event"

    def __init__(self, message_id: str, model: str) -> None:
        self._identity = {"id": message_id, "type": "message", "role": "assistant", "model": model}
        self._blocks: list[_OpenBlock] = []
        """All blocks; the last one is open."""
        self._content = 0
        """The count of characters in all texts."""
        self._events: list[bytes] = []

    def first_events(self, usage: Usage) -> list[bytes]:
        """Return the events before the first block."""
        end: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(usage)}
        return [_encode({"type": "message_start", "message": self._identity | end}), _PING]

    def silence_events(self) -> list[bytes]:
        """Return what can be sent while nothing comes, also before the first events: they have counts of cached tokens,
        which are not known yet."""
        return [_PING]

    def push(self, delta: Delta) -> list[bytes]:
        """Add a delta to the message; return the events that follow."""
        self._grow("thinking", delta.reasoning)
        text = delta.text
        for piece in delta.calls:
            if piece.name:
                before = piece.content_before - self._content
                self._grow("text", text[:before])
                text = text[before:]
                self._begin({"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}})
            self._grow("tool_use", piece.arguments)
        self._grow("text", text)
        events, self._events = self._events, []
        return events

    def last_events(self, ended: Ended) -> list[bytes]:
        """Return the events that end the message."""
        self._close()
        end = {"type": "message_delta", "delta": self._reason(ended), "usage": _usage(ended.usage)}
        return [*self._events, _encode(end), b'{"type":"message_stop"}']

    def full_body(self, delta: Delta, ended: Ended) -> bytes:
        """Return the message whose whole text is `delta`, without a call that was cut off."""
        self.push(delta)
        blocks = [block for one in self._blocks if (block := one.whole()) is not None]
        return _encode({**self._identity, "content": blocks, **self._reason(ended), "usage": _usage(ended.usage)})

    def error(self, status: int, message: str) -> bytes:
        """Return the last event of a message that failed."""
        return error_body(status, message)

    # --- the fast path

    def continuation(self, delta: Delta) -> bytes | None:
        """Return the event of a delta that only continues the open block; None for others, which are to be pushed.
        `continued` follows if it was sent."""
        grown = self._blocks[-1]
        calls = "".join(piece.arguments for piece in delta.calls)
        parts = {"text": delta.text, "thinking": delta.reasoning, "tool_use": calls}
        text = parts.pop(grown.block["type"])
        begins = any(piece.name for piece in delta.calls)
        return None if begins or not text or any(parts.values()) else grown.event(text)

    def continued(self, delta: Delta) -> None:
        """Record that the `continuation` of a delta was sent."""
        self._content += len(delta.text)
        self._blocks[-1].pieces += [piece.arguments for piece in delta.calls]

    # --- blocks

    def _grow(self, kind: str, text: str) -> None:
        """Let the open block grow if it is of that type; else begin one."""
        if not text:
            return
        if not self._blocks or self._blocks[-1].block["type"] != kind:
            self._begin({"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})})
        self._blocks[-1].pieces.append(text)
        self._events.append(self._blocks[-1].event(text))
        self._content += len(text) if kind == "text" else 0

    def _begin(self, block: dict[str, Any]) -> None:
        self._close()
        index = len(self._blocks)
        self._blocks.append(_OpenBlock(index, block))
        self._events.append(_encode({"type": "content_block_start", "index": index, "content_block": block}))

    def _close(self) -> None:
        if self._blocks:
            self._events.append(b'{"type":"content_block_stop","index":%d}' % (len(self._blocks) - 1))

    def _reason(self, ended: Ended) -> dict[str, str | None]:
        """Return why the message ended. If the model finished none of its calls, none asks for a result."""
        calls = [block.whole() for block in self._blocks if block.block["type"] == "tool_use"]
        finish = "stop" if ended.finish == "tool_calls" and calls and not any(calls) else ended.finish
        stopped = ended.stop_string if finish == "stop" else ""
        reason = {"tool_calls": "tool_use", "length": "max_tokens"}.get(finish, "end_turn")
        return {"stop_reason": "stop_sequence" if stopped else reason, "stop_sequence": stopped or None}


def _usage(usage: Usage) -> dict[str, int]:
    """Return the counts of tokens. Those of the prompt that were in a cache count apart; what is written to a cache is
    not counted."""
    cached = usage.prompt_tokens_details.cached_tokens
    counts = {"input_tokens": usage.prompt_tokens - cached, "output_tokens": usage.completion_tokens}
    return {**counts, "cache_read_input_tokens": cached, "cache_creation_input_tokens": 0}
