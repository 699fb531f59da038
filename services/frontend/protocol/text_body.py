"""Reads what must be known of bodies that pass through unchanged: of a request's, of an answer's. Pure.

    request  ─▶ its fields, found in one pass ─▶ model
                                               ─▶ stream, how much it may generate, and the bytes of its prompt, which
                                                  are hashed in blocks
    answer   ─▶ WholeLines: its lines, if it is a stream, once they are whole
             ─▶ AnswerMeter: the `usage` in its last bytes, or else the number of its events. Anthropic's streams
                have the prompt's part of it in their first event

What makes a prompt is taken in the order in which templates mostly have it, without whitespace between values. So a
conversation's next question begins with the bytes of the one before, whichever program of a kind wrote it. A closing
bracket or quotation mark at the end is left out, since a longer prompt has something else there.

A field with another value than OpenAI's counts as missing: the server says what is wrong with it. A `usage` is
believed. Servers are the operator's, and no text of an answer can hold the bytes that are looked for, as quotation
marks within JSON's strings are escaped.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice

import msgspec
from msgspec import Raw, Struct

from services.frontend.protocol.decoding import decode_body
from services.frontend.protocol.errors import field_error
from shared.errors import MALFORMED
from shared.hashing import pack_hashes, sequence_hashes

BYTES_A_TOKEN = 4
"""Bytes of text that count as a token, if nothing counts better."""
HASHED_BYTES = 1 << 20
"""Most bytes of a prompt that are hashed, from its beginning."""
COUNT_LIMIT = 1 << 31
"""What a count of tokens is below."""
TAIL_BYTES = 64 << 10
"""Last bytes of a whole answer in which its usage is looked for: servers write it near the end."""
STREAM_TAIL_BYTES = 4 << 10
"""Last bytes of a stream in which its usage is looked for. There are many streams at once."""
STREAM_HEAD_BYTES = 4 << 10
"""First bytes of a stream in which the usage of its prompt is looked for."""
USAGES_READ = 16
"""How many usages are looked at, from the last one on, until one has counts."""
LINE_BYTES = 64 << 10
"""Most bytes of a line that are held back until it is whole. A longer one passes as it comes."""
_EVENT = b"data:"
_LINE_ENDS = (b"\n", b"\r")
_USAGE = b'"usage"'
_STARTS = b'"message_start"'


Fields = Mapping[str, Raw]
"""The fields of an object, each as it is written."""


class _Options(Struct):
    num_predict: Raw = Raw(b"")


_PROMPT = ("tools", "system", "instructions", "messages", "prompt", "input")
"""The fields that make a prompt, in order."""
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_READ = frozenset(("model", "stream", "n", "prompt_cache_key", "cache_salt", "options", *_PROMPT, *_LIMITS))
_NOTHING = Raw(b"")
_STREAM = {b"true": True, b"false": False}
_OLLAMA = re.compile(rb'"(prompt_eval_count|eval_count)"\s*:\s*(\d{1,10})\b')
"""The counts of Ollama's own paths, which have no `usage`."""
_TEXT = msgspec.json.Decoder(str)
_COUNT = msgspec.json.Decoder(int)


class TextBody(Struct, frozen=True):
    """What is known of a request that passes through."""

    prompt: bytes
    """The beginning of the prompt, as it is hashed."""
    prompt_tokens: int
    """An estimate, at least 1."""
    max_tokens: int
    """Most tokens of all its choices together. 0 if it does not say."""
    choices: int
    """The number of its choices."""
    stream: bool | None
    """Whether the answer is to come in parts. None if it does not say."""
    session: str
    """The field `prompt_cache_key`. Empty if it is missing."""
    salt: str
    """The field `cache_salt`. Empty if it is missing."""

    def hashes(self, block_units: int, seed: int) -> bytes:
        """Return the packed hashes of the prompt's full blocks, each of `block_units` times four bytes."""
        return pack_hashes(sequence_hashes(self.prompt, block_units, seed))


def read_fields(body: bytes) -> Fields:
    """Return the fields of a body, which they keep in memory. Raise InvalidRequest if it is no JSON object, or too
    large."""
    return decode_body(dict[str, Raw], body)


def known_fields(fields: Fields) -> Fields:
    """Return those that `read_text` reads, and the first one that it refuses. A body may have half a million others,
    which take fifteen times its memory."""
    refused = islice(filter(_is_other_case, fields), 1)
    return {name: fields[name] for name in (*_READ, *refused) if name in fields}


def read_model(fields: Fields) -> str | None:
    """Return the model that a body names; None if it names none."""
    return _text(fields.get("model", _NOTHING)) or None


def read_text(fields: Fields) -> TextBody:
    """Return what a body says. Raise InvalidRequest for a field that is written otherwise."""
    _check_names(fields)
    given = {name: fields.get(name, _NOTHING) for name in _READ}
    parts = [bytes(given[name]) for name in _PROMPT]
    prompt = b"".join(map(_compact, filter(None, parts)))[:HASHED_BYTES]
    choices = max(1, _count(given["n"]))
    return TextBody(
        prompt=prompt,
        prompt_tokens=max(1, sum(map(len, parts)) // BYTES_A_TOKEN),
        max_tokens=min(COUNT_LIMIT - 1, choices * max(_count(limit) for limit in _limits(given))),
        choices=choices,
        stream=_STREAM.get(bytes(given["stream"])),
        session=_text(given["prompt_cache_key"]),
        salt=_text(given["cache_salt"]),
    )


def _check_names(fields: Fields) -> None:
    """Raise InvalidRequest for a field that is one of those read here but for the case of its letters. Servers in Go
    take them for the same field, and would run another model than the one that was routed."""
    for name in fields:
        if _is_other_case(name):
            raise field_error(name[:64], f"is written {name.lower()}")


def _is_other_case(name: str) -> bool:
    return name not in _READ and name.lower() in _READ


def _limits(given: Fields) -> Iterator[Raw]:
    """Yield what bounds an answer; `options.num_predict` is Ollama's."""
    for name in _LIMITS:
        yield given[name]
    with suppress(*MALFORMED):
        yield msgspec.json.decode(given["options"], type=_Options).num_predict


def _compact(value: bytes) -> bytes:
    """Return a JSON value without whitespace between its parts, and without the last byte."""
    if len(value) > HASHED_BYTES:
        return value[:HASHED_BYTES]
    return msgspec.json.format(value, indent=-1)[:-1]


def _text(raw: Raw) -> str:
    try:
        return _TEXT.decode(raw) if raw else ""
    except MALFORMED:
        return ""


def _count(raw: Raw) -> int:
    try:
        found = _COUNT.decode(raw) if raw else 0
    except MALFORMED:
        return 0
    return found if 0 < found < COUNT_LIMIT else 0


class TextUsage(Struct, frozen=True):
    """The tokens of an answer."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0


class WholeLines:
    """Holds back the end of a stream until its line is whole. So a stream that breaks off ends between two lines, and
    what is said of that is not taken for a part of the last one."""

    __slots__ = ("_passed_end", "held")

    def __init__(self) -> None:
        self.held = b""
        """The line that is not whole."""
        self._passed_end = True
        """Whether what has passed ends with a line."""

    def take(self, part: bytes) -> bytes:
        """Take a part, and return what passes."""
        if self.held:
            part = self.held + part
        if part.endswith(_LINE_ENDS):  # as servers send events
            self.held = b""
            self._passed_end = True
            return part
        end = 1 + max(part.rfind(b"\n"), part.rfind(b"\r"))
        if len(part) - end > LINE_BYTES:
            end = len(part)
        self.held = part[end:]
        if end:
            self._passed_end = bool(self.held)
        return part[:end]

    @property
    def ends_line(self) -> bool:
        """Whether another line can follow what has passed."""
        return self._passed_end

    def validate(self) -> None:
        """Assert the invariants."""
        assert len(self.held) <= LINE_BYTES
        assert not self.held.endswith(_LINE_ENDS)


class AnswerMeter:
    """Counts an answer while it passes. What it keeps of it is bounded."""

    __slots__ = ("_events", "_head", "_kept_bytes", "_most_bytes", "_size_bytes", "_streamed", "_tail")

    def __init__(self, *, streamed: bool) -> None:
        """`streamed`: whether the answer is server-sent events."""
        self._streamed = streamed
        self._most_bytes = STREAM_TAIL_BYTES if streamed else TAIL_BYTES
        self._tail: deque[bytes] = deque()
        self._head = b""
        """The first bytes of a stream of Anthropic's API, whose usage has the prompt's tokens."""
        self._events = self._kept_bytes = self._size_bytes = 0

    @property
    def size_bytes(self) -> int:
        """The bytes that have passed."""
        return self._size_bytes

    @property
    def events(self) -> int:
        """The events that have passed, for a stream."""
        return self._events

    @property
    def ends_event(self) -> bool:
        """Whether an event of a stream can follow what has passed."""
        return not self._tail or b"".join(list(self._tail)[-2:]).replace(b"\r", b"").endswith(b"\n\n")

    def add(self, chunk: bytes) -> None:
        """Count a part."""
        size = len(chunk)
        if self._streamed and not self._size_bytes and _STARTS in chunk:
            self._head = chunk[:STREAM_HEAD_BYTES]
        self._size_bytes += size
        if self._streamed:
            self._events += chunk.count(_EVENT)
        self._tail.append(chunk)
        self._kept_bytes += size
        while self._kept_bytes - len(self._tail[0]) >= self._most_bytes:
            self._kept_bytes -= len(self._tail.popleft())

    def usage(self, prompt_tokens: int, *, generates: bool = True) -> TextUsage:
        """Return the tokens that the answer says it had; what it does not say is estimated, and `prompt_tokens` is the
        estimate for the prompt. Servers send an event for each token. Not `generates`: the answer is no text, such as
        an embedding."""
        tail, started = b"".join(self._tail), _find_usage(self._head)
        found = _find_usage(tail) or _find_counts(tail)
        written = self._events if self._streamed else -(-self._size_bytes // BYTES_A_TOKEN)
        written *= generates
        if started:  # its count of output is that of the beginning
            found = {**started, "output_tokens": written, **(found if found != started else {})}
        prompt = _named(found, "prompt_tokens", "input_tokens")
        output = _named(found, "completion_tokens", "output_tokens")
        if output is None:  # an embedding has a usage without any
            output = written if prompt is None else 0
        details = found.get("prompt_tokens_details") or found.get("input_tokens_details")
        cached = _named(details, "cached_tokens") if isinstance(details, Mapping) else None
        if "input_tokens" in found and cached is None and prompt is not None:  # Anthropic's, without what was cached
            cached = _named(found, "cache_read_input_tokens") or 0
            prompt += cached + (_named(found, "cache_creation_input_tokens") or 0)
        prompt = prompt_tokens if prompt is None else min(prompt, COUNT_LIMIT - 1)
        return TextUsage(prompt, output, min(cached or 0, prompt))

    def validate(self) -> None:
        """Assert the invariants."""
        assert self._kept_bytes == sum(map(len, self._tail)) <= self._size_bytes
        assert len(self._head) <= STREAM_HEAD_BYTES
        assert len(self._tail) <= 1 or self._kept_bytes - len(self._tail[0]) < self._most_bytes


def _find_counts(tail: bytes) -> Mapping[str, object]:
    """Return the last counts of Ollama in the last bytes of an answer, as a usage. Empty if there are none."""
    names = {b"prompt_eval_count": "prompt_tokens", b"eval_count": "completion_tokens"}
    return {names[name]: int(count) for name, count in _OLLAMA.findall(tail)}


def _find_usage(part: bytes) -> Mapping[str, object]:
    """Return the last usage in a part of an answer that is not null. Empty if there is none."""
    end = len(part)
    for _ in range(USAGES_READ):
        end = part.rfind(_USAGE, 0, end)
        if end < 0:
            break
        _, colon, rest = part[end:].partition(b":")
        try:
            found, _ = json.JSONDecoder().raw_decode(rest.decode("utf-8", "replace").lstrip()) if colon else ({}, 0)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict) and found:
            return found
    return {}


def _named(found: Mapping[str, object], *names: str) -> int | None:
    for name in names:
        value = found.get(name)
        if type(value) is int and 0 <= value < COUNT_LIMIT:
            return value
    return None
