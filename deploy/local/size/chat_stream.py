"""Reads streams of chats and completions. Pure.

bytes ─▶ lines ─▶ `data: {…}` ─▶ text, usage, finish reason, error ─▶ [DONE]
"""

from __future__ import annotations

import msgspec
from msgspec import Raw, Struct

from shared.errors import ProtocolError

LINE_LIMIT_BYTES = 1 << 20
_FIELDS = (b":", b"event:", b"id:", b"retry:")
_BROKEN = ("abort", "error")
"""Finish reasons of answers that their engine gave up."""


class _Delta(Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The newer name of that."""
    tool_calls: list[Raw] | None = None

    @property
    def any(self) -> bool:
        """Output of the model is in it. The chunk that only names a role has none."""
        return bool(self.content or self.reasoning_content or self.reasoning or self.tool_calls)


class _Choice(Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Details(Struct):
    cached_tokens: int | None = None


class StreamUsage(Struct):
    """Token counts of the server."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None

    @property
    def cached_tokens(self) -> int | None:
        """The prompt's tokens that were found in a cache. None if the server does not say it."""
        return None if self.prompt_tokens_details is None else self.prompt_tokens_details.cached_tokens


class _Error(Struct):
    message: str = ""


class _Chunk(Struct):
    choices: list[_Choice] = []
    usage: StreamUsage | None = None
    error: _Error | str | None = None
    object: str = ""
    """`error` if the chunk is one itself."""
    message: str = ""


_CHUNK = msgspec.json.Decoder(_Chunk)


class ChatStream:
    """The parser of one stream, with what it has found so far. Its methods raise ProtocolError for a line that is not
    an SSE field and for data that is not a JSON object."""

    def __init__(self) -> None:
        self.pieces = 0
        """Number of events with a choice so far: its text may be empty, as that of a part of a character."""
        self.texts = 0
        """Number of events with text so far."""
        self.usage: StreamUsage | None = None
        self.finished = False
        """True once a finish reason or [DONE] has arrived."""
        self.error = ""
        self._rest = b""

    def feed(self, data: bytes) -> int:
        """Parse further bytes; return how many events with text they complete. Raise ProtocolError."""
        before = self.texts
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LINE_LIMIT_BYTES:
            raise ProtocolError(f"a line of the stream is longer than {LINE_LIMIT_BYTES} bytes")
        for line in whole:
            self._line(line.rstrip(b"\r"))
        return self.texts - before

    def _line(self, line: bytes) -> None:
        if line.startswith(b"data:"):
            self._data(line[5:].strip())
        elif line.startswith(b"event:") and line[6:].strip() == b"error":
            self.error = self.error or "an event named error"
        elif line and not line.startswith(_FIELDS):
            raise ProtocolError(f"not server-sent events: {line[:40]!r}")

    def _data(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.finished = True
            return
        try:
            chunk = _CHUNK.decode(data)
        except (ValueError, RecursionError) as wrong:
            raise ProtocolError(f"not a completion chunk: {wrong}") from None
        if chunk.error is not None:
            self.error = (chunk.error if isinstance(chunk.error, str) else chunk.error.message) or "an error"
        elif self.error or chunk.object == "error":
            self.error = chunk.message or self.error or "an error"
        self.usage = chunk.usage or self.usage
        self.pieces += bool(chunk.choices)
        for choice in chunk.choices:
            self.finished = self.finished or choice.finish_reason is not None
            if choice.finish_reason in _BROKEN:
                self.error = self.error or f"finish reason {choice.finish_reason}"
            if choice.text or (choice.delta is not None and choice.delta.any):
                self.texts += 1
