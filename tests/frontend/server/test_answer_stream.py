"""Streams whose prompts take long to prepare: headers, signs of life, and failures as each door's API has them."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from services.frontend.config import HttpConfig
from shared import subjects
from shared.bus.memory_bus import MemoryBus
from tests.frontend.peers import DEADLINE_S, MODEL, NAMESPACE, World, clients, world
from tests.frontend.server.test_sse import DOORS, HELLO, connected, head, post, text_of

WAITING = b": waiting\n\n"


def asking(door: str, minimum: int) -> tuple[str, dict[str, Any], bytes]:
    """Return a door's path, a body that asks for a list of that many numbers or more, and what it sends in a
    silence."""
    path, asked, sign = DOORS[door]
    item = {"type": "integer", "maximum": 1 + list(DOORS).index(door)}  # a known grammar would not be compiled
    schema = {"type": "array", "items": item, "minItems": minimum, "maxItems": 9}
    named = {"type": "json_schema", "name": "a", "schema": schema}
    forms: dict[str, dict[str, Any]] = {
        "chat": {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}},
        "completions": {"structured_outputs": {"json": schema}},
        "responses": {"text": {"format": named}},
        "messages": {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
    }
    form = forms.get(door, {"format": schema})
    return path, {"model": MODEL, "stream": True, **asked, **form}, WAITING if door == "responses" else sign


@contextmanager
def compiler_stopped() -> Iterator[None]:
    """Stop the process that compiles grammars, which has been started, until the context ends."""
    [compiler] = filter(is_compiler, Path("/proc").glob("[0-9]*"))
    os.kill(int(compiler.name), signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # it was ended
            os.kill(int(compiler.name), signal.SIGCONT)


def is_compiler(process: Path) -> bool:
    try:
        parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
        return parent == os.getpid() and b"compiler_process" in (process / "cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


async def start_compiler(w: World) -> None:
    async with clients(w) as (_, http):
        w.say("{}")
        asked = {"model": MODEL, "messages": HELLO, "response_format": {"type": "json_object"}}
        async with http.post("/v1/chat/completions", json=asked) as response:
            assert response.status == 200


async def test_a_stream_whose_grammar_takes_long_is_not_silent_and_fails_as_its_door_does(directory: Path) -> None:
    async with world(directory, grammars=True, http=HttpConfig(silent_s=0.02)) as w, clients(w) as (_, http):
        await start_compiler(w)
        w.say("[1]")
        for door in DOORS:
            for minimum in (1, 10):  # no list has ten items and nine at most
                path, asked, sign = asking(door, minimum)
                with compiler_stopped():
                    response = await http.post(path, json={**asked, "no_such_field": 1})
                    assert response.status == 200
                    assert response.headers["X-Headrace-Ignored"] == "no_such_field"
                    body = b""
                    while body.count(sign) < 2:
                        body += await response.content.readany()
                        assert not response.content.at_eof()
                body += await response.read()
                events = body.decode().replace(": waiting\n\n", "").split("\n" if "ollama" in door else "\n\n")
                told = [json.loads(event[event.find("{") :]) for event in events if "{" in event]
                if door == "responses":
                    assert [event["type"] for event in told][:2] == ["response.created", "response.in_progress"]
                    assert [event["sequence_number"] for event in told] == list(range(len(told)))
                if minimum == 1:
                    assert text_of(told) == "[1]"
                    continue
                failed = told[-1]["response"] if door == "responses" else told[-1]
                assert "minItems" in json.dumps(failed["error"])
                assert body.endswith(b"}\n" if "ollama" in door else b"}\n\n"), "no [DONE]"
                assert w.metric("headrace_requests_total", operation=door, status="400") == 1


async def test_a_client_that_leaves_while_its_grammar_is_compiled_gives_its_place_back(directory: Path) -> None:
    async with world(directory, grammars=True, http=HttpConfig(silent_s=0.02)) as w:
        await start_compiler(w)
        _, asked, _ = asking("completions", 1)
        with compiler_stopped():
            async with connected(w) as (reader, writer):
                writer.write(post(json.dumps(asked).encode()))
                await head(reader)
            await w.counted("headrace_inflight_requests", 0)


async def test_a_grammar_that_is_refused_at_once_is_a_status_also_for_a_stream(directory: Path) -> None:
    async with world(directory, grammars=True) as w, clients(w) as (_, http):
        await start_compiler(w)
        for door in DOORS:
            path, asked, _ = asking(door, 10)
            async with http.post(path, json=asked) as response:
                assert response.status == 400, door


async def test_a_nats_client_whose_grammar_takes_long_gets_chunks_without_text(directory: Path) -> None:
    async with world(directory, grammars=True) as w:
        await start_compiler(w)
        w.say("[1]")
        for door in ("chat", "completions", "responses"):
            _, asked, _ = asking(door, 1)
            subject, payload = subjects.client(NAMESPACE, door), json.dumps(asked).encode()
            async with MemoryBus(w.broker).stream(subject, payload, idle_timeout_s=DEADLINE_S) as messages:
                with compiler_stopped():
                    first = json.loads((await anext(messages)).payload)
                told = [json.loads(message.payload) async for message in messages]
            assert first == {"type": "keepalive"} if door == "responses" else text_of([first]) == ""
            assert text_of(told) == "[1]"
            if door != "responses":
                assert {name: first[name] for name in ("id", "model")} == {
                    name: told[0][name] for name in ("id", "model")
                }
