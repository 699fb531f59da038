"""A server with vLLM's API and the timing of an engine, but no arithmetic, for `benchmarks/gateways.py`.

With several ports it is as many servers, which share the process.

All streams get a token at each step; a request's first one comes with the first step that begins after it. Answers to
chats and to completions of text have pieces of text, and those to completions that ask for them have token ids, as
vLLM's have. It prints `ready` when it listens.

    python -m benchmarks.gateways_server --port 8001 --model DIR --name tiny --step-s 0.02
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import uvloop
from msgspec import Struct
from tokenizers import Tokenizer

from services.worker.attached.server import TEXT

BLOCK_SIZE = 16
BLOCKS = 65_536
CONTEXT_LENGTH = 131_072
WORDS = 64
"""Most tokens that answers repeat."""


class Body(Struct, frozen=True):
    """What is read of a request."""

    max_tokens: int = 16
    max_completion_tokens: int | None = None
    stream: bool = False
    return_token_ids: bool = False

    @property
    def tokens(self) -> int:
        """The tokens of the answer."""
        return self.max_completion_tokens or self.max_tokens


_BODY = msgspec.json.Decoder(Body)


class Answers:
    """The bytes of answers, made once."""

    def __init__(self, model: Path, name: str) -> None:
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        vocabulary = tokenizer.get_vocab(with_added_tokens=False)
        words = sorted(word for word in vocabulary if word[0] == "Ġ" and word[1:].isascii() and word[1:].isalpha())
        ids = [vocabulary[word] for word in words[:WORDS]]
        texts = [f" {word[1:]}" for word in words[:WORDS]]
        common = {"id": "x", "created": 1, "model": name}
        self.name = name
        self.chat = [_line(common | {"object": "chat.completion.chunk", "choices": [_chat(text)]}) for text in texts]
        self.text = [_line(common | {"object": "text_completion", "choices": [_text(text)]}) for text in texts]
        self.ids = [
            _line(common | {"object": "text_completion", "choices": [_text(text) | {"token_ids": [token]}]})
            for text, token in zip(texts, ids, strict=True)
        ]
        self.chat_end = _line(common | {"object": "chat.completion.chunk", "choices": [_chat("", "length")]})
        self.text_end = _line(common | {"object": "text_completion", "choices": [_text("", "length")]})
        self.ids_end = _line(
            common | {"object": "text_completion", "choices": [_text("", "length") | {"token_ids": []}]}
        )
        self.gets = {
            "/health": b"",
            "/v1/models": msgspec.json.encode(
                {
                    "object": "list",
                    "data": [
                        {"id": name, "object": "model", "root": str(model), "max_model_len": CONTEXT_LENGTH}
                        | {"created": 1, "owned_by": "vllm"}
                    ],
                }
            ),
            "/version": b'{"version":"0.32.0"}',
            "/metrics": f'vllm:cache_config_info{{block_size="{BLOCK_SIZE}",num_gpu_blocks="{BLOCKS}"}} 1.0\n'.encode(),
            "/tokenize": msgspec.json.encode({"tokens": tokenizer.encode(TEXT, add_special_tokens=False).ids}),
        }

    def streamed(self, path: str, body: Body) -> tuple[list[bytes], bytes]:
        """Return the lines that a stream repeats, and the one with its end."""
        if path == "/v1/chat/completions":
            return self.chat, self.chat_end
        return (self.ids, self.ids_end) if body.return_token_ids else (self.text, self.text_end)

    def whole(self, path: str, tokens: int) -> bytes:
        """Return an answer that is no stream."""
        text = "hello " * tokens
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length", "logprobs": None}
        chat = path == "/v1/chat/completions"
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        usage = {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": 1 + tokens}
        kind = "chat.completion" if chat else "text_completion"
        return msgspec.json.encode(
            {"id": "x", "created": 1, "model": self.name, "object": kind, "choices": [choice], "usage": usage}
        )


def _chat(text: str, finish: str | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": finish}


def _text(text: str, finish: str | None = None) -> dict[str, Any]:
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}


def _line(chunk: dict[str, Any]) -> bytes:
    return _chunk(b"data: " + msgspec.json.encode(chunk) + b"\n\n")


def _chunk(payload: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(payload), payload)


DONE = _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class Engine:
    """Gives each stream a token a step, as long as there are streams."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._streams: dict[Connection, tuple[list[bytes], bytes, int]] = {}
        self._new: dict[Connection, tuple[list[bytes], bytes, int]] = {}
        self._places = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0

    @property
    def streams(self) -> int:
        """How many requests it answers."""
        return len(self._streams) + len(self._new)

    def add(self, connection: Connection, lines: list[bytes], end: bytes, tokens: int) -> None:
        """Answer a request from the next step on."""
        self._new[connection] = (lines, end, tokens)
        if self._timer is None:
            self._due_s = asyncio.get_running_loop().time()
            self._begin()

    def remove(self, connection: Connection) -> None:
        """Forget a request whose client has gone."""
        self._streams.pop(connection, None)
        self._new.pop(connection, None)

    def _begin(self) -> None:
        self._streams |= self._new
        self._new.clear()
        self._timer = None
        if not self._streams:
            return
        loop = asyncio.get_running_loop()
        self._due_s = max(self._due_s + self._step_s, loop.time())
        self._timer = loop.call_at(self._due_s, self._end)

    def _end(self) -> None:
        place = next(self._places)
        for connection, (lines, end, left) in list(self._streams.items()):
            if left > 1:
                connection.write(lines[place % len(lines)])
                self._streams[connection] = (lines, end, left - 1)
            else:
                connection.write(lines[place % len(lines)] + end + DONE)
                del self._streams[connection]
        self._begin()


class Connection(asyncio.Protocol):
    """One connection, with one request at a time."""

    def __init__(self, answers: Answers, engine: Engine) -> None:
        self._answers, self._engine = answers, engine
        self._received = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, _exc: Exception | None) -> None:
        self._engine.remove(self)

    def write(self, data: bytes) -> None:
        """Send a part of an answer."""
        assert self._transport is not None
        self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, rest = self._received.partition(b"\r\n\r\n")
        if not found:
            return
        lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        size = int(headers.get("content-length", "0"))
        if len(rest) < size:
            return
        self._received = rest[size:]
        path = lines[0].split(" ")[1].partition("?")[0]
        if path in ("/v1/chat/completions", "/v1/completions"):
            self._generate(path, _BODY.decode(rest[:size]))
        elif path in self._answers.gets:
            self._answer(200, self._answers.gets[path])
        else:
            self._answer(404, b"{}")

    def _generate(self, path: str, body: Body) -> None:
        if not body.stream:
            self._answer(200, self._answers.whole(path, body.tokens))
            return
        self.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        self._engine.add(self, *self._answers.streamed(path, body), body.tokens)

    def _answer(self, status: int, body: bytes) -> None:
        head = f"HTTP/1.1 {status} OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self.write(head.encode() + body)


async def serve(ports: Sequence[int], answers: Answers, step_s: float) -> None:
    """Serve until the process ends."""
    loop = asyncio.get_running_loop()
    for port in ports:
        connected = partial(Connection, answers, Engine(step_s))
        await loop.create_server(connected, "127.0.0.1", port)
    print("ready", flush=True)
    await loop.create_future()


def main() -> None:
    """Run the server."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--port", type=int, required=True, nargs="+")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--name", default="tiny")
    parser.add_argument("--step-s", type=float, default=0.02)
    flags = parser.parse_args()
    uvloop.run(serve(flags.port, Answers(flags.model, flags.name), flags.step_s))


if __name__ == "__main__":
    main()
