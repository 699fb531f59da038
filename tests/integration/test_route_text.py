"""`headrace route` as processes in front of servers that take text alone."""

from __future__ import annotations

import asyncio
import json
import signal
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import openai
from aiohttp import web

from tests.integration.stack import Up, eventually, started
from tests.integration.test_route import LIMIT_S, said
from tests.servers import free_port
from tests.tiny_model import write_tiny_model
from tests.worker.attached.peer import Peer, answering, says

NAME = "org/tiny:8b"
LOSES = "by text, routed by what was sent; an answer that has begun cannot go on elsewhere (docs/route.md)"


class TextServer(Peer):
    """A server as Ollama is: OpenAI's paths, and none of vLLM's."""

    def __init__(self, directory: Path) -> None:
        super().__init__(write_tiny_model(directory), free_port())
        self.models = [{"id": NAME, "object": "model", "owned_by": "library"}, {"id": "other"}]
        for path in ("/health", "/version", "/metrics", "/kv_event_sources", "/tokenize"):
            self.said[path] = says(404, "not found")
        self.said["/v1/chat/completions"] = self._chat
        self.stops = asyncio.Event()
        """Set if an answer that was asked to wait goes on."""

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if not body.get("stream"):
            message = {"role": "assistant", "content": "once"}
            usage = {"prompt_tokens": 7, "completion_tokens": 1, "total_tokens": 8}
            choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
            return web.json_response(
                {
                    "id": "x",
                    "object": "chat.completion",
                    "created": 1,
                    "model": NAME,
                    "choices": choices,
                    "usage": usage,
                }
            )
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for number in range(3):
            if number and body.get("user") == "waits":
                await self.stops.wait()
            delta = {"index": 0, "delta": {"content": f"{number} "}, "finish_reason": None}
            line = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": NAME, "choices": [delta]}
            await answer.write(b"data: " + json.dumps(line).encode() + b"\n\n")
        await answer.write(b"data: [DONE]\n\n")
        return answer


def ask(text: str, **more: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": [{"role": "user", "content": text}], **more}


def chat(up: Up, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    content = json.dumps(body).encode()
    request = urllib.request.Request(
        f"{up.url}/chat/completions", content, {"Content-Type": "application/json", **headers}
    )
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            return dict(json.loads(answer.read()))
    except urllib.error.HTTPError as wrong:
        raise AssertionError(wrong.read().decode() + "".join(up.output) + up.logs()) from None


def page(up: Up) -> dict[str, Any]:
    """Return what the page at /ui is sent first."""
    with urllib.request.urlopen(f"{up.url.removesuffix('/v1')}/ui/events", timeout=LIMIT_S) as events:
        return dict(json.loads(next(line for line in events if line.startswith(b"data:"))[5:]))


async def has_said(up: Up, line: str, times: int) -> None:
    """Wait until it has said a line this often."""

    def said_by_now() -> bool:
        return "".join(up.output).count(line) == times

    await asyncio.to_thread(eventually, said_by_now, limit_s=LIMIT_S, what=f"{times} times {line}")


async def test_two_servers_are_found_and_prompts_go_where_their_beginnings_were(tmp_path: Path) -> None:
    one, two = TextServer(tmp_path / "one"), TextServer(tmp_path / "two")
    key = tmp_path / "key"
    key.write_text("sesame\n")
    flags = ("--frontends", "1", "--routers", "1", "--api-key-file", str(key), "--set", "router.load.ramp_s=0")
    async with answering(one), answering(two):
        with started(tmp_path / "state", "route", one.url, two.url, *flags) as up:
            await said(up, f"{one.url}: Ollama, model {NAME}, {LOSES}\n", f"{two.url}: Ollama, model {NAME}, {LOSES}\n")
            await said(up, f"{one.url}: serves\n", f"{two.url}: serves\n", "\nready ")
            stories = ("once upon a time " * 300, "long ago " * 500, "in a hole " * 400, "it was " * 600)
            for story in 3 * stories:
                answer = await asyncio.to_thread(chat, up, ask(story))
                assert answer["usage"]["completion_tokens"] == 1
            for story in stories:
                assert sorted(sum(story in str(body) for body in peer.bodies) for peer in (one, two)) == [0, 3]
            assert {headers["Authorization"] for peer in (one, two) for headers in peer.seen} == {"Bearer sesame"}
            rows = (await asyncio.to_thread(page, up))["requests"]
            assert [(row["outcome"], row["prompt"], row["output"]) for row in rows] == [("answered", 7, 1)] * 12
            assert all(row["times"] == sorted(row["times"]) and row["instances"] for row in rows)

            async with openai.AsyncOpenAI(base_url=up.url, api_key="none", max_retries=0, timeout=LIMIT_S) as client:
                assert [model.id for model in (await client.models.list()).data] == [NAME]
                messages: Any = ask(stories[0])["messages"]
                stream = await client.chat.completions.create(
                    model=NAME, messages=messages, stream=True, user="waits", extra_headers={"X-Request-Id": "mine"}
                )
                parts = aiter(stream)
                assert (await anext(parts)).choices[0].delta.content == "0 "
                explained = await asyncio.to_thread(up.explained, NAME, "mine")
                assert explained["decisions"][-1]["predicted_cached_tokens"] > 0
                for peer in (one, two):
                    peer.stops.set()
                assert [part.choices[0].delta.content async for part in parts] == ["1 ", "2 "]
            up.process.send_signal(signal.SIGINT)
            assert await asyncio.to_thread(up.process.wait, LIMIT_S) == 0


async def test_a_server_that_dies_is_left_out_and_its_requests_go_to_the_other(tmp_path: Path) -> None:
    one, two = TextServer(tmp_path / "one"), TextServer(tmp_path / "two")
    flags = ("--frontends", "1", "--routers", "1", "--set", "router.load.ramp_s=0")
    async with answering(two):
        with started(tmp_path / "state", "route", one.url, two.url, *flags) as up:
            await said(up, f"{two.url}: serves\n", "\nready ")
            async with answering(one):
                await said(up, f"{one.url}: serves\n")
                stories = [ask(f"story {number} " * 300) for number in range(16)]
                await asyncio.gather(*(asyncio.to_thread(chat, up, story) for story in stories))
                assert one.bodies
                assert two.bodies
            for story in stories:  # some before its worker has seen that it is gone
                await asyncio.to_thread(chat, up, story)
            await has_said(up, f"{one.url}: left out: does not answer: Connection refused\n", 2)  # and at the start
            async with answering(one):
                await has_said(up, f"{one.url}: serves\n", 2)
            up.process.send_signal(signal.SIGINT)
            assert await asyncio.to_thread(up.process.wait, LIMIT_S) == 0
