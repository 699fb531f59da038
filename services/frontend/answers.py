"""What clients get: OpenAI's response bodies and chunks for both operations. Pure.

A chunk is written for every step of every stream, so its bytes are put together from a prefix and a suffix made once a
request, with only the text encoded in between: 0.07 µs instead of 0.36 for a Struct.

    {"id":…,"choices":[{"index":0,"delta":{"content":   "text"   },"logprobs":null,"finish_reason":null}]}

Where the text was taken apart, "reasoning_content" (DeepSeek's word) and "tool_calls" stand beside "content".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
from msgspec import UNSET, Struct, UnsetType

from services.frontend.output import Delta, Entry
from services.frontend.tools.found import CallPiece

_encode = msgspec.json.Encoder().encode


class CachedTokensByTier(Struct, frozen=True):
    """Where the cached ones were."""

    device: int
    host: int
    disk: int

    @staticmethod
    def of(cached_tokens: int, host_tokens: int, disk_tokens: int) -> CachedTokensByTier:
        """What a worker counted, the two being parts of the first; from none less than 0, nor more than it all."""
        disk = max(0, min(disk_tokens, cached_tokens))
        host = max(0, min(host_tokens, cached_tokens - disk))
        return CachedTokensByTier(max(0, cached_tokens - host - disk), host, disk)


class PromptTokensDetails(Struct, frozen=True):
    """OpenAI's, and an addition of ours, which its clients pass over."""

    cached_tokens: int
    cached_tokens_by_tier: CachedTokensByTier


class Usage(Struct, frozen=True):
    """Tokens counted."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def usage_of(
    prompt_tokens: int, completion_tokens: int, cached_tokens: int, host_tokens: int = 0, disk_tokens: int = 0
) -> Usage:
    """`cached_tokens` of the prompt were found in a prefix cache; of these, some came from below the device."""
    cached_tokens = min(cached_tokens, prompt_tokens)
    by_tier = CachedTokensByTier.of(cached_tokens, host_tokens, disk_tokens)
    details = PromptTokensDetails(cached_tokens, by_tier)
    return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, details)


class Shape(Protocol):
    """Writes one request's answer; every result is one JSON object."""

    def opening(self) -> bytes | None:
        """A chunk before the first text, where the operation has one."""
        ...

    def chunk(self, delta: Delta) -> bytes: ...

    def closing(self, finish: str) -> bytes:
        """The chunk that says why the output ended."""
        ...

    def usage(self, usage: Usage) -> bytes:
        """The chunk after the closing one, without choices."""
        ...

    def whole(self, delta: Delta, finish: str, usage: Usage) -> bytes:
        """Everything at once."""
        ...


class _Frame:
    """The bytes around a chunk's choices."""

    def __init__(self, request: str, kind: str, created: int, model: str, *, with_usage: bool) -> None:
        head = _encode({"id": request, "object": kind, "created": created, "model": model})
        self._head = head[:-1] + b',"choices":'
        self.tail = b',"usage":null}' if with_usage else b"}"
        """With `include_usage`, all chunks but the last have a null usage."""
        self.choice = self._head + b'[{"index":0,'
        self.close = b"}]" + self.tail

    def usage(self, usage: Usage) -> bytes:
        return self._head + b'[],"usage":' + _encode(usage) + b"}"


# --- chat


class _Top(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class _TokenLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[_Top]


class _ChatLogprobs(Struct, frozen=True):
    content: list[_TokenLogprob]
    refusal: None = None


class _Function(Struct, frozen=True):
    name: str | UnsetType
    arguments: str


class _Call(Struct, frozen=True):
    """In a chunk only a call's first piece has its id, type and name."""

    index: int | UnsetType
    id: str | UnsetType
    type: str | UnsetType
    function: _Function

    @staticmethod
    def chunk(piece: CallPiece) -> _Call:
        if piece.name:
            return _Call(piece.index, piece.id, "function", _Function(piece.name, piece.arguments))
        return _Call(piece.index, UNSET, UNSET, _Function(UNSET, piece.arguments))

    @staticmethod
    def whole(call: CallPiece) -> _Call:
        return _Call(UNSET, call.id, "function", _Function(call.name, call.arguments))


class _ChatDelta(Struct, frozen=True):
    content: str | UnsetType
    reasoning_content: str | UnsetType
    tool_calls: list[_Call] | UnsetType

    @staticmethod
    def of(delta: Delta) -> _ChatDelta:
        calls = [_Call.chunk(piece) for piece in delta.calls]
        content = UNSET if not delta.text and (delta.reasoning or calls) else delta.text
        return _ChatDelta(content, delta.reasoning or UNSET, calls or UNSET)


class _Message(Struct, frozen=True):
    content: str | None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[_Call] | UnsetType = UNSET
    role: str = "assistant"
    refusal: None = None


class _ChatChoice(Struct, frozen=True):
    message: _Message
    logprobs: _ChatLogprobs | None
    finish_reason: str
    index: int = 0


class _Chat(Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[_ChatChoice]
    usage: Usage
    object: str = "chat.completion"


class ChatShape:
    """chat.completion and chat.completion.chunk."""

    def __init__(
        self,
        request: str,
        created: int,
        model: str,
        *,
        with_logprobs: bool,
        with_usage: bool,
        parsed: bool = False,
    ) -> None:
        """`parsed`: there may be more than content; where there is none, it is null."""
        self._identity = (f"chatcmpl-{request}", created, model)
        self._with_logprobs = with_logprobs
        self._parsed = parsed
        self._plain = not (with_logprobs or parsed)
        self._frame = _Frame(f"chatcmpl-{request}", "chat.completion.chunk", created, model, with_usage=with_usage)
        self._before_text = self._frame.choice + b'"delta":{"content":'
        self._after_text = b'},"logprobs":null,"finish_reason":null' + self._frame.close

    def opening(self) -> bytes:
        content = b"null" if self._parsed else b'""'
        return (
            self._frame.choice
            + (b'"delta":{"role":"assistant","content":' + content + b'},"logprobs":null,"finish_reason":null')
            + self._frame.close
        )

    def chunk(self, delta: Delta) -> bytes:
        if self._plain or not (self._with_logprobs or delta.reasoning or delta.calls):
            return self._before_text + _encode(delta.text) + self._after_text
        added = _encode(_ChatDelta.of(delta))
        logprobs = _encode(_chat_logprobs(delta.entries)) if self._with_logprobs else b"null"
        middle = b'"delta":' + added + b',"logprobs":' + logprobs + b',"finish_reason":null'
        return self._frame.choice + middle + self._frame.close

    def closing(self, finish: str) -> bytes:
        return self._frame.choice + b'"delta":{},"logprobs":null,"finish_reason":' + _encode(finish) + self._frame.close

    def usage(self, usage: Usage) -> bytes:
        return self._frame.usage(usage)

    def whole(self, delta: Delta, finish: str, usage: Usage) -> bytes:
        logprobs = _chat_logprobs(delta.entries) if self._with_logprobs else None
        calls = [_Call.whole(call) for call in delta.calls]
        content = None if self._parsed and not delta.text else delta.text
        message = _Message(content, delta.reasoning or UNSET, calls or UNSET)
        return _encode(_Chat(*self._identity, [_ChatChoice(message, logprobs, finish)], usage))


def _chat_logprobs(entries: Sequence[Entry]) -> _ChatLogprobs:
    return _ChatLogprobs(
        [
            _TokenLogprob(
                _text(entry.token),
                entry.logprob,
                list(entry.token),
                [_Top(_text(top.token), top.logprob, list(top.token)) for top in entry.top],
            )
            for entry in entries
        ]
    )


# --- completions


class _TextLogprobs(Struct, frozen=True):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class _TextChoice(Struct, frozen=True):
    text: str
    logprobs: _TextLogprobs | None
    finish_reason: str
    index: int = 0


class _Completion(Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[_TextChoice]
    usage: Usage
    object: str = "text_completion"


class CompletionShape:
    """text_completion, whole and in chunks."""

    def __init__(self, request: str, created: int, model: str, *, with_logprobs: bool, with_usage: bool) -> None:
        self._identity = (f"cmpl-{request}", created, model)
        self._with_logprobs = with_logprobs
        self._frame = _Frame(f"cmpl-{request}", "text_completion", created, model, with_usage=with_usage)
        self._before_text = self._frame.choice + b'"text":'
        self._after_text = b',"logprobs":null,"finish_reason":null' + self._frame.close

    def opening(self) -> None:
        return None

    def chunk(self, delta: Delta) -> bytes:
        text = _encode(delta.text)
        if not self._with_logprobs:
            return self._before_text + text + self._after_text
        logprobs = _encode(_text_logprobs(delta.entries))
        middle = b',"logprobs":' + logprobs + b',"finish_reason":null'
        return self._before_text + text + middle + self._frame.close

    def closing(self, finish: str) -> bytes:
        return self._before_text + b'"","logprobs":null,"finish_reason":' + _encode(finish) + self._frame.close

    def usage(self, usage: Usage) -> bytes:
        return self._frame.usage(usage)

    def whole(self, delta: Delta, finish: str, usage: Usage) -> bytes:
        logprobs = _text_logprobs(delta.entries) if self._with_logprobs else None
        return _encode(_Completion(*self._identity, [_TextChoice(delta.text, logprobs, finish)], usage))


def _text_logprobs(entries: Sequence[Entry]) -> _TextLogprobs:
    return _TextLogprobs(
        [_text(entry.token) for entry in entries],
        [entry.logprob for entry in entries],
        [_by_text(entry) for entry in entries],
        [entry.text_offset for entry in entries],
    )


def _by_text(entry: Entry) -> dict[str, float]:
    """The likeliest tokens and the drawn one; of two with the same text, the likelier."""
    likeliest: dict[str, float] = {}
    for top in entry.top:
        likeliest.setdefault(_text(top.token), top.logprob)
    likeliest.setdefault(_text(entry.token), entry.logprob)
    return likeliest


def _text(token: bytes) -> str:
    return token.decode("utf-8", "replace")
