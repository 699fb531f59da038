"""The numbers and reasons in answers are what happened, at every door."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.frontend.cards import Templated
from tests.frontend.peers import MODEL, clients, world

TEMPLATE = (
    '{# <tool_call>{"name" <think></think> #}{% if tools %}{{ tools | tojson }}{% endif %}'
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The answer of a model that thinks and calls tools."""
QUESTION: dict[str, Any] = {"messages": [{"role": "system", "content": "Kind."}, {"role": "user", "content": "hü?"}]}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Now.", "parameters": SCHEMA}}


async def post(http: aiohttp.ClientSession, path: str, **body: Any) -> Any:
    async with http.post(path, json={"model": MODEL, **body}) as response:
        answer = await response.json()
        assert response.status == 200, answer
        return answer


async def chunks(http: aiohttp.ClientSession, path: str, **body: Any) -> list[Any]:
    async with http.post(path, json={"model": MODEL, "stream": True, **body}) as response:
        lines = (await response.text()).splitlines()
        assert response.status == 200, lines
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(line) for line in data if line != "[DONE]"]


async def test_a_chats_usage_has_the_tokens_of_reasoning(templated: Templated) -> None:
    async with world(templated(TEMPLATE)) as w, clients(w) as (_, http):
        w.say("<think>hm</think>Yes.")
        thought = len(w.ids("<think>hm"))
        for n in (1, 2):
            usage = (await post(http, "/v1/chat/completions", **QUESTION, n=n))["usage"]
            *_, last = await chunks(
                http, "/v1/chat/completions", **QUESTION, n=n, stream_options={"include_usage": True}
            )
            for each in (usage, last["usage"]):
                assert each["completion_tokens_details"] == {"reasoning_tokens": n * thought}
                assert each["completion_tokens"] == n * (len(w.ids("<think>hm</think>Yes.")) + 1)
        w.say("Yes.")
        assert "completion_tokens_details" not in (await post(http, "/v1/chat/completions", **QUESTION))["usage"]


@pytest.mark.parametrize("tools", [False, True])
async def test_a_prompt_has_the_same_tokens_wherever_they_are_counted(templated: Templated, tools: bool) -> None:
    named = {"name": "weather", "description": "Now."}
    chat: dict[str, Any] = {"tools": [TOOL]} if tools else {}
    message: dict[str, Any] = {"tools": [{**named, "input_schema": SCHEMA}]} if tools else {}
    response: dict[str, Any] = {"tools": [{"type": "function", **named, "parameters": SCHEMA}]} if tools else {}
    asked = {"system": "Kind.", "messages": QUESTION["messages"][1:], **message}
    async with world(templated(TEMPLATE)) as w, clients(w) as (_, http):
        w.say("Yes.")
        w.workers[0].cached_tokens = 16
        counted = (await post(http, "/tokenize", **QUESTION, **chat))["count"]
        usage = (await post(http, "/v1/chat/completions", **QUESTION, **chat))["usage"]
        assert usage["prompt_tokens"] == counted == w.workers[0].generates.all[-1].prompt_tokens
        assert (await post(http, "/v1/messages/count_tokens", **asked))["input_tokens"] == counted
        usage = (await post(http, "/v1/messages", **asked, max_tokens=9))["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted
        assert (await post(http, "/api/chat", **QUESTION, **chat, stream=False))["prompt_eval_count"] == counted
        answer = await post(http, "/v1/responses", instructions="Kind.", input="hü?", **response)
        assert answer["usage"]["input_tokens"] == counted
        assert answer["usage"]["input_tokens_details"]["cached_tokens"] == 16
        w.workers[0].cached_tokens = 1 << 20
        usage = (await post(http, "/v1/chat/completions", **QUESTION, **chat))["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == counted


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_all_chunks_have_one_identity(directory: Path, path: str) -> None:
    body = QUESTION if path == "/v1/chat/completions" else {"prompt": "hü?"}
    async with world(directory) as w, clients(w) as (_, http):
        w.say("one two three")
        found = await chunks(http, path, **body, n=3, stream_options={"include_usage": True})
        assert len({(each["id"], each["created"], each["model"], each["object"]) for each in found}) == 1
        ends = [one["finish_reason"] for each in found for one in each["choices"] if one["finish_reason"]]
        assert ends == ["stop"] * 3
        assert [bool(each["usage"]) for each in found] == [False] * (len(found) - 1) + [True]


@pytest.mark.parametrize("text", ["", "x"])
async def test_the_shortest_answers_have_durations(directory: Path, text: str) -> None:
    async with world(directory) as w, clients(w) as (_, http):
        w.say(text)
        answer = await post(http, "/api/chat", **QUESTION, stream=False, options={"num_predict": 1})
        prompt, generation, whole = (answer[f"{of}_duration"] for of in ("prompt_eval", "eval", "total"))
        assert answer["eval_count"] == 1
        assert answer["done_reason"] == ("length" if text else "stop")
        assert min(prompt, generation) > 1, "measured"
        assert whole >= answer["load_duration"] + prompt + generation


async def test_text_that_is_held_back_counts_as_generated(directory: Path) -> None:
    """It is no part of the prompt's duration."""
    async with world(directory) as w, clients(w) as (_, http):
        ids = w.say("stop here")
        first, _ = w.workers
        first.output = None
        body = {**QUESTION, "stream": False, "options": {"stop": ["stop here!"]}}
        asked = asyncio.create_task(post(http, "/api/chat", **body))
        [generate] = await first.generates.at_least(1)
        await first.send(generate, 0, ids[:1])
        await w.counted("headrace_time_to_first_token_seconds_count", 1)
        came_s = time.monotonic()
        async with http.get("/health"):
            waited_s = time.monotonic() - came_s
        await first.send(generate, 1, [*ids[1:], 2], "stop")
        answer = await asked
        assert answer["message"]["content"] == "stop here"
        assert answer["eval_duration"] > 1e9 * waited_s


async def test_an_answer_that_moved_counts_each_token_once(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (_, http):
        ids = w.say("one two three")
        first, second = w.workers
        first.output, first.cached_tokens, second.cached_tokens = None, 16, 32
        asked = asyncio.create_task(post(http, "/v1/chat/completions", **QUESTION))
        [generate] = await first.generates.at_least(1)
        await first.send(generate, 0, ids[:2])
        await w.leave("w1")
        usage = (await asked)["usage"]
        assert len(second.generates.all) == 1
        assert usage["prompt_tokens"] == generate.prompt_tokens
        assert usage["completion_tokens"] == len(ids) + 1
        assert usage["prompt_tokens_details"]["cached_tokens"] == 16, "as the client's first token found them"
