"""What a client got as an answer, it sends back as history: at every door, whole and streamed, for strict templates."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from tests.frontend.cards import Templated
from tests.frontend.foreign import CITY
from tests.frontend.peers import MODEL, World, clients, world
from tests.frontend.pieces import CALL
from tests.frontend.strict_templates import GEMMA_2, MISTRAL_V3, MISTRAL_V11, QWEN_3_5
from tests.frontend.test_tools import added_up

SHOWS = '{# <tool_call>{"name" <think></think> #}{% if tools %}{% endif %}'
"""What a template shows that offers tools and thinks."""
ANSWERS = {
    "text": "hello",
    "empty": "",
    "thinking only": "<think>hm",
    "text and thinking": "<think>hm</think>hello",
    "a call": CALL,
    "a text and two calls": f"I look.\n{CALL}\n{CALL}",
    "a call cut off": CALL.partition(" 🚰")[0],
    "a call cut off before its arguments": CALL.partition("{")[0] + '{"name": "weather", "arguments": ',
    "a broken call": '<tool_call>\n{"name": "weather", "arguments": {"city": ]}}\n</tool_call> and more',
    "a raw line end": CALL.replace("Zürich", "Zü\nrich"),
    "a refusal": "I cannot do that.",
}
FUNCTION: Any = {"name": "weather", "parameters": CITY}
ASK: Any = {"role": "user", "content": "ask"}


async def lines_of(http: aiohttp.ClientSession, path: str, body: Any) -> list[Any]:
    """The JSON of each event or line of an answer; of a whole answer, that alone."""
    async with http.post(path, json=body) as response:
        text = await response.text()
        assert response.status == 200, (path, body, text)
    found = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith(("data: {", "{"))]
    return [json.loads(line) for line in found]


async def over_chat(http: aiohttp.ClientSession, streamed: bool) -> Callable[[], Any]:
    body: Any = {"model": MODEL, "tools": [{"type": "function", "function": FUNCTION}], "max_tokens": 500}
    lines = await lines_of(http, "/v1/chat/completions", body | {"messages": [ASK], "stream": streamed})
    if streamed:
        message = {"role": "assistant", **added_up(lines)} | {"tool_calls": []}
        del message["finish_reason"]
        pieces = [one for line in lines for one in line["choices"][0]["delta"].get("tool_calls", ())]
        for piece in pieces:
            if piece.get("id"):
                message["tool_calls"].append(piece)
            else:
                message["tool_calls"][piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    else:
        message = lines[0]["choices"][0]["message"]
    calls = message.get("tool_calls") or []
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "seen"} for call in calls]
    return lambda: lines_of(
        http, "/v1/chat/completions", body | {"messages": [ASK, message, *results, ASK | {"content": "more"}]}
    )


async def over_responses(http: aiohttp.ClientSession, streamed: bool, *, by_id: bool = False) -> Callable[[], Any]:
    body: Any = {"model": MODEL, "tools": [{"type": "function", **FUNCTION}], "max_output_tokens": 500}
    lines = await lines_of(http, "/v1/responses", body | {"input": [ASK], "stream": streamed})
    response = lines[-1]["response"] if streamed else lines[0]
    calls = [item for item in response["output"] if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "seen"} for call in calls]
    more = [*results, ASK | {"content": "more"}]
    former: Any = {"input": more, "previous_response_id": response["id"]}
    return lambda: lines_of(
        http, "/v1/responses", body | (former if by_id else {"input": [ASK, *response["output"], *more]})
    )


async def over_responses_by_id(http: aiohttp.ClientSession, streamed: bool) -> Callable[[], Any]:
    return await over_responses(http, streamed, by_id=True)


async def over_messages(http: aiohttp.ClientSession, streamed: bool) -> Callable[[], Any]:
    tool = {"name": "weather", "input_schema": CITY}
    body: Any = {"model": MODEL, "tools": [tool], "max_tokens": 500}
    lines = await lines_of(http, "/v1/messages", body | {"messages": [ASK], "stream": streamed})
    blocks = [] if streamed else lines[0]["content"]
    for event in lines if streamed else ():
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"] | {"written": ""})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            for field in ("text", "thinking", "signature"):
                if field in delta:
                    blocks[-1][field] += delta[field]
            blocks[-1]["written"] += delta.get("partial_json", "")
    for block in blocks if streamed else ():
        if (written := block.pop("written")) and block["type"] == "tool_use":
            block["input"] = written  # as clients keep it that cannot read it
    uses = [block["id"] for block in blocks if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": use, "content": "seen"} for use in uses]
    turns = [{"role": "assistant", "content": blocks}]
    turns.append({"role": "user", "content": [*results, {"type": "text", "text": "more"}]})
    return lambda: lines_of(http, "/v1/messages", body | {"messages": [ASK, *turns]})


async def over_ollama(http: aiohttp.ClientSession, streamed: bool) -> Callable[[], Any]:
    body: Any = {"model": MODEL, "tools": [{"type": "function", "function": FUNCTION}]}
    lines = await lines_of(http, "/api/chat", body | {"messages": [ASK], "stream": streamed})
    message: Any = {"role": "assistant", "content": "".join(line["message"]["content"] for line in lines)}
    calls = [call for line in lines for call in line["message"].get("tool_calls", ())]
    message |= {"thinking": "".join(line["message"].get("thinking", "") for line in lines), "tool_calls": calls}
    results = [{"role": "tool", "tool_name": "weather", "content": "seen"} for _ in calls]
    more = [message, *results, ASK | {"content": "more"}]
    return lambda: lines_of(http, "/api/chat", body | {"messages": [ASK, *more], "stream": False})


DOORS = [over_chat, over_responses, over_responses_by_id, over_messages, over_ollama]
STRICT_LISTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "system", "content": "be"}, {"role": "developer", "content": "dev"}, ASK, ASK]},
        "be dev ask",
    ),
    "responses": (
        "/v1/responses",
        {"instructions": "be", "input": [{"role": "developer", "content": "dev"}, ASK]},
        "be dev ask",
    ),
    "messages": (
        "/v1/messages",
        {
            "system": "be",
            "max_tokens": 50,
            "messages": [
                ASK,
                ASK,
                *[{"role": "assistant", "content": "say"}] * 2,
                {"role": "system", "content": "now"},
            ],
        },
        "be ask say now",
    ),
    "ollama": (
        "/api/chat",
        {"messages": [{"role": "system", "content": "be"}, {"role": "system", "content": "dev"}, ASK]},
        "be dev ask",
    ),
}
"""A path, a body with a list of messages that strict templates refuse, and the words that are to be in its prompt."""


def script(w: World, answer: str, *, cut: bool) -> None:
    w.say(answer)
    for worker in w.workers:
        worker.finish = "length" if cut else "stop"
        if cut:
            worker.output = w.ids(answer)


CUT: dict[str, Any] = {
    "/v1/chat/completions": {"messages": [{"role": "tool", "tool_call_id": "gone", "content": "seen"}]},
    "/v1/responses": {"input": [{"type": "function_call_output", "call_id": "gone", "output": "seen"}]},
    "/v1/messages": {
        "messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "gone", "content": "seen"}]}],
        "max_tokens": 50,
    },
}


@pytest.mark.parametrize("template", [MISTRAL_V3, GEMMA_2, QWEN_3_5], ids=["mistral", "gemma", "qwen"])
async def test_a_result_whose_call_a_client_has_cut_off_is_taken(templated: Templated, template: str) -> None:
    async with world(templated(SHOWS + template)) as w, clients(w) as (_, http):
        for path, body in CUT.items():
            for before in ([], [ASK, {"role": "assistant", "content": "say"}]):
                w.say("fine")
                field = "input" if "input" in body else "messages"
                await lines_of(http, path, body | {"model": MODEL, field: [*before, *body[field], ASK]})
                assert [word for word in ("seen", "ask") if word not in w.latest_prompt()] == [], (path, before)


def nameless(path: str) -> dict[str, Any]:
    """Return a conversation with a call whose name was lost, as clients send it back whose stream broke."""
    if path == "/v1/responses":
        call: dict[str, Any] = {"type": "function_call", "call_id": "c", "name": "", "arguments": "{}"}
        return {"input": [ASK, call, {"type": "function_call_output", "call_id": "c", "output": "seen"}, ASK]}
    if path == "/v1/messages":
        use = {"type": "tool_use", "id": "c", "name": "", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "c", "content": "seen"}
        turns = [
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result, {"type": "text", "text": "more"}]},
        ]
        return {"messages": [ASK, *turns], "max_tokens": 50}
    call = {"id": "c", "type": "function", "function": {"name": "", "arguments": "{}" if "v1" in path else {}}}
    made = {"role": "assistant", "content": "", "tool_calls": [call]}
    return {"messages": [ASK, made, {"role": "tool", "tool_call_id": "c", "content": "seen"}, ASK]}


@pytest.mark.parametrize("template", [MISTRAL_V3, QWEN_3_5], ids=["mistral", "qwen"])
async def test_a_call_whose_name_was_lost_does_not_end_the_conversation(templated: Templated, template: str) -> None:
    """OpenAI refuses such a history for good, and agents that send it again stick."""
    async with world(templated(SHOWS + template)) as w, clients(w) as (_, http):
        for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"):
            w.say("fine")
            await lines_of(http, path, nameless(path) | {"model": MODEL, "stream": False})
            assert "seen" in w.latest_prompt(), path


@pytest.mark.parametrize(("template", "streamed"), [(MISTRAL_V11, True), (QWEN_3_5, False)], ids=["mistral", "qwen"])
async def test_every_answer_can_be_sent_back_at_every_door(templated: Templated, template: str, streamed: bool) -> None:
    async with world(templated(SHOWS + template), tool_parser={MODEL: "hermes"}) as w, clients(w) as (_, http):
        for kind, answer in ANSWERS.items():
            for door in DOORS:
                script(w, answer, cut="cut" in kind or "only" in kind)
                send_back = await door(http, streamed)
                script(w, "and on", cut=False)
                await send_back()
                assert "more" in w.latest_prompt(), (kind, door.__name__)


@pytest.mark.parametrize("template", [MISTRAL_V3, GEMMA_2, QWEN_3_5], ids=["mistral", "gemma", "qwen"])
async def test_every_door_makes_lists_that_strict_templates_take(templated: Templated, template: str) -> None:
    async with world(templated(template)) as w, clients(w) as (_, http):
        w.say("fine")
        for path, body, words in STRICT_LISTS.values():
            await lines_of(http, path, {"model": MODEL, **body})
            assert [word for word in words.split() if word not in w.latest_prompt()] == []
