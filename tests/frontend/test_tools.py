"""Tools and thinking, from a client's request to what it gets, through a running frontend."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import aiohttp
import openai
import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionChunk

from shared import subjects
from shared.bus.memory_bus import MemoryBus
from shared.hashing import unpack_tokens
from shared.messages.frames import TokenLogprob
from tests.frontend.cards import Templated
from tests.frontend.peers import DEADLINE_S, MODEL, NAMESPACE, World, clients, world
from tests.frontend.pieces import CALL

HELLO: Any = [{"role": "user", "content": "hello"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
TIME: Any = {"type": "function", "function": {"name": "get_time"}}
TOOLS: Any = [WEATHER, TIME]

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    'Answer <tool_call>\n{"name": <name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n{% endif %}'
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n"
)
ARGUMENTS = '{"city": "Zürich 🚰"}'
TWO = "I look.\n" + CALL + '\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'


async def chunks_of(client: AsyncOpenAI, **fields: Any) -> list[ChatCompletionChunk]:
    stream = await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True, **fields)
    return [chunk async for chunk in stream]


def added_up(chunks: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The message that deltas make, as clients add them up; and why it ended."""
    message: dict[str, Any] = {"content": None, "reasoning_content": None, "tool_calls": [], "finish_reason": None}
    for chunk in chunks:
        for choice in chunk["choices"]:
            message["finish_reason"] = choice["finish_reason"] or message["finish_reason"]
            for field in ("content", "reasoning_content"):
                if (piece := choice["delta"].get(field)) is not None:
                    message[field] = (message[field] or "") + piece
            for piece in choice["delta"].get("tool_calls") or ():
                if piece.get("id"):
                    assert piece["index"] == len(message["tool_calls"])
                    assert piece["type"] == "function"
                    message["tool_calls"].append((piece["function"]["name"], ""))
                else:
                    assert (set(piece), set(piece["function"])) == ({"index", "function"}, {"arguments"})
                name, arguments = message["tool_calls"].pop(piece["index"])
                message["tool_calls"].append((name, arguments + piece["function"]["arguments"]))
    return message


def dumped(chunks: Iterable[ChatCompletionChunk]) -> list[dict[str, Any]]:
    return [chunk.model_dump(exclude_unset=True) for chunk in chunks]


async def test_calls_are_in_the_message_and_the_turn_ends_for_them(templated: Templated) -> None:
    async with world(templated(TEMPLATE)) as w, clients(w) as (client, _):
        said = w.say(TWO)
        answer = await client.chat.completions.create(model=MODEL, messages=HELLO, tools=TOOLS)
        [choice] = answer.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I look.\n"
        assert choice.message.tool_calls is not None
        called = [call.model_dump() for call in choice.message.tool_calls]
        first, second = called
        assert first.pop("id") != second.pop("id")
        assert first == {"type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
        assert second == {"type": "function", "function": {"name": "get_time", "arguments": "{}"}}
        assert answer.usage is not None
        assert answer.usage.completion_tokens == len(said) + 1
        assert w.metric("headrace_tool_calls_total", format="hermes", outcome="complete") == 2
        w.say(CALL)
        answer = await client.chat.completions.create(model=MODEL, messages=HELLO, tools=TOOLS)
        assert answer.choices[0].message.content is None
        w.say("It is warm.")
        answer = await client.chat.completions.create(model=MODEL, messages=HELLO, tools=TOOLS)
        assert answer.choices[0].finish_reason == "stop"
        assert answer.choices[0].message.content == "It is warm."
        assert answer.choices[0].message.tool_calls is None


async def test_a_message_goes_back_as_clients_have_it_streamed_or_not(templated: Templated) -> None:
    async with world(templated(TEMPLATE)) as w, clients(w) as (client, _):
        asked: Any = {"model": MODEL, "tools": TOOLS}
        w.say(TWO)
        answer = await client.chat.completions.create(messages=HELLO, **asked)
        async with client.chat.completions.stream(messages=HELLO, **asked) as stream:
            final = await stream.get_final_completion()
        for message in (answer.choices[0].message, final.choices[0].message):
            assert message.tool_calls is not None
            results: Any = [{"role": "tool", "tool_call_id": call.id, "content": "3"} for call in message.tool_calls]
            sent: Any
            dumped_message = message.model_dump()
            lite = {**dumped_message, "provider_specific_fields": {"refusal": None}}  # LiteLLM's
            for sent in (message, dumped_message, message.to_dict(), lite):
                again = await client.chat.completions.create(messages=[*HELLO, sent, *results], **asked)
                assert again.choices[0].finish_reason == "tool_calls"


async def test_calls_stream_in_openais_chunks(templated: Templated) -> None:
    async with world(templated(TEMPLATE)) as w, clients(w) as (client, _):
        w.say(TWO)
        chunks = dumped(await chunks_of(client, tools=TOOLS))
        assert chunks[0]["choices"] == [
            {"index": 0, "delta": {"role": "assistant", "content": None}, "logprobs": None, "finish_reason": None}
        ]
        assert chunks[-1]["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "tool_calls"}]
        assert all(chunk["choices"][0]["delta"] for chunk in chunks[:-1]), "no chunk that says nothing"
        assert added_up(chunks) == {
            "content": "I look.\n",
            "reasoning_content": None,
            "tool_calls": [("weather", ARGUMENTS), ("get_time", "{}")],
            "finish_reason": "tool_calls",
        }
        pieces = [piece for chunk in chunks for piece in chunk["choices"][0]["delta"].get("tool_calls") or ()]
        assert len(pieces) > 5, "arguments come as they are written"
        async with client.chat.completions.stream(model=MODEL, messages=HELLO, tools=TOOLS) as stream:
            final = await stream.get_final_completion()
        [choice] = final.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I look.\n"
        calls = choice.message.tool_calls or []
        assert [(call.function.name, call.function.arguments) for call in calls] == added_up(chunks)["tool_calls"]


async def test_a_custom_tool_is_called_with_a_text_streamed_and_not(templated: Templated) -> None:
    grammar = {"syntax": "regex", "definition": "[+-].*\\n"}
    patch: Any = {
        "type": "custom",
        "custom": {"name": "patch", "description": "Patches.", "format": {"type": "grammar", "grammar": grammar}},
    }
    async with world(templated(TEMPLATE), grammars=True) as w, clients(w) as (client, _):
        w.say('<tool_call>{"name": "patch", "arguments": {"input": "+\\"ü\\n"}}</tool_call>')
        answer = await client.chat.completions.create(model=MODEL, messages=HELLO, tools=[patch])
        [call] = answer.choices[0].message.tool_calls or []
        assert call.type == "custom"
        assert (call.custom.name, call.custom.input) == ("patch", '+"ü\n')
        assert "[+-].*" in w.workers[0].generates.all[-1].sampling.grammar
        assert "The input follows this regex grammar" in w.latest_prompt()
        pieces = [
            piece
            for chunk in await chunks_of(client, tools=[patch])
            for choice in chunk.choices
            for piece in choice.delta.tool_calls or []
        ]
        assert (pieces[0].index, pieces[0].type) == (0, "custom")
        written = [(piece.model_extra or {})["custom"] for piece in pieces]
        assert "".join(piece["input"] for piece in written) == '+"ü\n'
        assert [piece["name"] for piece in written if "name" in piece] == ["patch"]
        choice: Any = {"type": "custom", "custom": {"name": "patch"}}
        await client.chat.completions.create(model=MODEL, messages=HELLO, tools=[patch, *TOOLS], tool_choice=choice)
        assert "get_time" not in w.workers[0].generates.all[-1].sampling.grammar


async def test_a_conversation_with_calls_and_results_goes_through_the_template(templated: Templated) -> None:
    async with world(templated(TEMPLATE)) as w, clients(w) as (client, _):
        w.say(CALL)
        asked = await client.chat.completions.create(model=MODEL, messages=HELLO, tools=TOOLS)
        w.say("It is warm.")
        message: Any = asked.choices[0].message.model_dump(exclude_unset=True)
        result: Any = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "21 °C"}
        await client.chat.completions.create(model=MODEL, messages=[*HELLO, message, result], tools=TOOLS)
        prompt = w.tokenizer.decode(unpack_tokens(w.workers[0].generates.all[-1].tokens), skip_special_tokens=False)
        assert prompt == (
            f"<|im_start|>system\n{json.dumps(WEATHER)}\n"
            '{"type": "function", "function": {"name": "get_time", '
            '"parameters": {"type": "object", "properties": {}}}}\n'
            'Answer <tool_call>\n{"name": <name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
            "<|im_start|>user\nhello<|im_end|>\n"
            "<|im_start|>assistant\n"
            '<tool_call>{"name": "weather", "arguments": {"city": "Zürich 🚰"}}</tool_call><|im_end|>\n'
            "<|im_start|>tool\n21 °C<|im_end|>\n<|im_start|>assistant"
        )


async def test_with_tool_choice_none_the_prompt_has_no_tools_and_a_text_is_a_text(templated: Templated) -> None:
    async with world(templated(TEMPLATE)) as w, clients(w) as (client, _):
        w.say(CALL)
        fields: Any = {"model": MODEL, "messages": HELLO}
        answer = await client.chat.completions.create(**fields, tools=TOOLS, tool_choice="none")
        assert answer.choices[0].message.content == CALL
        assert answer.choices[0].finish_reason == "stop"
        await client.chat.completions.create(**fields)
        with_none, without = w.workers[0].generates.all
        assert with_none.tokens == without.tokens


def allowing(name: str, mode: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}}]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_allowed_tools_are_the_only_ones_that_the_model_knows_and_may_call(
    templated: Templated, mode: str
) -> None:
    choice: Any = allowing("get_time", mode)
    strict: Any = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    async with world(templated(TEMPLATE), grammars=True) as w, clients(w) as (client, http):
        w.say(TWO)
        answer = await client.chat.completions.create(
            model=MODEL, messages=HELLO, tools=[strict, TIME], tool_choice=choice
        )
        assert answer.usage is not None
        assert '"get_time"' in w.latest_prompt()
        assert "weather" not in w.latest_prompt()
        message = answer.choices[0].message
        assert [one.to_dict()["function"] for one in message.tool_calls or ()] == [
            {"name": "get_time", "arguments": "{}"}
        ]
        assert CALL in (message.content or ""), "what is no tool here is text"
        generate = next(worker.generates.all[-1] for worker in w.workers if worker.generates.all)
        assert bool(generate.sampling.grammar) == (mode == "required")
        assert "weather" not in generate.sampling.grammar
        body = {"model": MODEL, "messages": HELLO, "tools": [strict, TIME], "tool_choice": choice}
        async with http.post("/tokenize", json=body) as response:
            assert (await response.json())["count"] == answer.usage.prompt_tokens
        status, param, text = await refused(w, http, tools=[TIME], tool_choice=allowing("weather", mode))
        assert (status, param) == (400, "tool_choice.allowed_tools.tools[0]")
        assert "there is no tool named 'weather'" in text


async def test_without_parallel_calls_the_answer_ends_with_its_first_and_the_worker_is_cancelled(
    templated: Templated,
) -> None:
    async with world(templated(TEMPLATE)) as w, clients(w) as (client, _):
        worker = w.workers[0]
        for count, stream in enumerate((False, True), 1):
            worker.output = None
            fields: Any = {"model": MODEL, "messages": HELLO, "tools": TOOLS, "parallel_tool_calls": False}
            asking: Any = (
                chunks_of(client, tools=TOOLS, parallel_tool_calls=False)
                if stream
                else client.chat.completions.create(**fields)
            )
            answering = asyncio.create_task(asking)
            generate = (await worker.generates.at_least(count))[-1]
            await worker.send(generate, 0, w.ids(CALL.removesuffix("\n</tool_call>")))
            answer = await answering
            cancelled = await worker.cancels.at_least(count)
            assert cancelled[-1].request == generate.request
            if stream:
                message = added_up(dumped(answer))
                assert message["tool_calls"] == [("weather", ARGUMENTS)]
                assert message["finish_reason"] == "tool_calls"
            else:
                assert len(answer.choices[0].message.tool_calls) == 1
                assert answer.choices[0].finish_reason == "tool_calls"
                assert answer.usage.completion_tokens == len(w.ids(CALL.removesuffix("\n</tool_call>")))


async def test_what_is_no_call_is_text_and_counted_and_the_stream_goes_on(templated: Templated) -> None:
    async with world(templated(TEMPLATE)) as w, clients(w) as (client, _):
        said = '<tool_call>{"name": "wether", "arguments": {}}</tool_call> <tool_call>weather()</tool_call>'
        w.say(said)
        message = added_up(dumped(await chunks_of(client, tools=TOOLS)))
        assert message == {"content": said, "reasoning_content": None, "tool_calls": [], "finish_reason": "stop"}
        for outcome in ("unknown_tool", "malformed"):
            assert w.metric("headrace_tool_calls_total", format="hermes", outcome=outcome) == 1


async def test_a_call_that_is_cut_off_by_max_tokens_ends_for_length(templated: Templated) -> None:
    async with world(templated(TEMPLATE)) as w, clients(w) as (client, _):
        w.say(CALL)
        most = len(w.ids(CALL.partition("🚰")[0]))
        message = added_up(dumped(await chunks_of(client, tools=TOOLS, max_tokens=most)))
        assert message["finish_reason"] == "length"
        assert message["tool_calls"] == [("weather", ARGUMENTS.partition("🚰")[0])]
        assert w.metric("headrace_tool_calls_total", format="hermes", outcome="unfinished") == 1


@pytest.mark.parametrize("written", ["I look.\n<tool_c", CALL[:-5], TWO[: TWO.rindex("<") - 30]])
async def test_no_piece_of_a_mark_is_content_where_max_tokens_cuts_streamed_or_not(
    templated: Templated, written: str
) -> None:
    async with world(templated(TEMPLATE)) as w, clients(w) as (client, _):
        most = len(w.say(written))
        before, _, call = written.partition("<tool_c")
        streamed = added_up(dumped(await chunks_of(client, tools=TOOLS, max_tokens=most)))
        asked: Any = {"messages": HELLO, "tools": TOOLS, "max_tokens": most}
        [choice] = (await client.chat.completions.create(model=MODEL, **asked)).choices
        assert streamed["finish_reason"] == choice.finish_reason == "length"
        assert (streamed["content"] or "") == (choice.message.content or "") == before
        assert len(streamed["tool_calls"]) == len(choice.message.tool_calls or []) == bool(call)


async def test_stop_strings_and_logprobs_work_together_with_calls(templated: Templated) -> None:
    async with world(templated(TEMPLATE)) as w, clients(w) as (client, _):
        said = w.say("Hm. " + CALL + "\nand more")
        for worker in w.workers:
            worker.logprobs = [TokenLogprob(-0.5)] * (len(said) + 1)
        chunks = dumped(await chunks_of(client, tools=TOOLS, stop="and", logprobs=True))
        message = added_up(chunks)
        assert (message["content"], message["tool_calls"]) == ("Hm. ", [("weather", ARGUMENTS)])
        entries = [
            entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
        ]
        written = b"".join(bytes(entry["bytes"]) for entry in entries).decode()
        assert written == "Hm. " + CALL + "\n", "of all tokens, up to the stop string"


async def test_over_nats_it_is_the_same(templated: Templated) -> None:
    async with world(templated(TEMPLATE)) as w:
        w.say(TWO)
        subject = subjects.client(NAMESPACE, "chat")
        body = {"model": MODEL, "messages": HELLO, "tools": TOOLS}
        async with MemoryBus(w.broker).stream(
            subject, json.dumps({**body, "stream": True}).encode(), idle_timeout_s=DEADLINE_S
        ) as messages:
            chunks = [json.loads(message.payload) async for message in messages]
        streamed = added_up(chunks)
        assert streamed["tool_calls"] == [("weather", ARGUMENTS), ("get_time", "{}")]
        assert (streamed["content"], streamed["finish_reason"]) == ("I look.\n", "tool_calls")
        answer = await MemoryBus(w.broker).request(subject, json.dumps(body).encode(), timeout_s=DEADLINE_S)
        [choice] = json.loads(answer.payload)["choices"]
        called = [(call["function"]["name"], call["function"]["arguments"]) for call in choice["message"]["tool_calls"]]
        assert called == streamed["tool_calls"]


async def test_a_worker_lost_at_any_token_of_a_call_is_replaced_and_the_calls_add_up_to_the_same(
    templated: Templated,
) -> None:
    async with world(templated(TEMPLATE)) as w, clients(w) as (client, _):
        first, second = w.workers
        said = w.ids(TWO)
        first.output, second.output = None, [*said, 2]
        for count, lost_at in enumerate(range(1, len(said), 5), 1):
            answering = asyncio.create_task(chunks_of(client, tools=TOOLS))
            generate = (await first.generates.at_least(count))[-1]
            for at in range(lost_at):
                await first.send(generate, at, [said[at]])
            await first.send(generate, lost_at, [], "error", "it broke")
            message = added_up(dumped(await answering))
            assert message["tool_calls"] == [("weather", ARGUMENTS), ("get_time", "{}")], lost_at
            assert (message["content"], message["finish_reason"]) == ("I look.\n", "tool_calls")
            again = second.generates.all[-1]
            assert unpack_tokens(again.tokens) == unpack_tokens(generate.tokens) + said[:lost_at]


async def refused(w: World, http: aiohttp.ClientSession, **fields: Any) -> tuple[int, str, str]:
    async with http.post("/v1/chat/completions", json={"model": MODEL, "messages": HELLO, **fields}) as response:
        error = (await response.json())["error"]
        return response.status, error["param"], error["message"]


async def test_a_model_whose_format_does_not_show_takes_tools_once_it_is_set(templated: Templated) -> None:
    unclear = templated("{{ tools | tojson }}{% for message in messages %}{{ message.content }}{% endfor %}")
    async with world(unclear) as w, clients(w) as (_, http):
        status, param, message = await refused(w, http, tools=TOOLS)
        assert (status, param) == (400, "tools")
        assert "tool_parser" in message
    async with world(unclear, tool_parser={MODEL: "pythonic"}) as w, clients(w) as (client, _):
        w.say("[weather(city='Rome')]")
        answer = added_up(dumped(await chunks_of(client, tools=TOOLS)))
        assert answer["tool_calls"] == [("weather", '{"city": "Rome"}')]


TAGS = (
    "{% if tools %}{{ tools | tojson }}\n<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls %}<tool_call>\n<function={{ call.function.name }}>\n"
    "{% for key, value in call.function.arguments | items %}<parameter={{ key }}>\n{{ value }}\n</parameter>\n"
    "{% endfor %}</function>\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


async def test_values_in_tags_have_their_tools_types_and_go_back_as_they_were_written(templated: Templated) -> None:
    days: Any = {"city": {"type": "string"}, "days": {"type": "integer"}}
    tools: Any = [
        {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": days}}}
    ]
    called = (
        "<tool_call>\n<function=weather>\n<parameter=city>\n12\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
    )
    async with world(templated(TAGS)) as w, clients(w) as (client, _):
        w.say(f"I look.\n{called}")
        streamed = added_up(dumped(await chunks_of(client, tools=tools)))
        assert streamed["tool_calls"] == [("weather", '{"city": "12", "days": 3}')]
        answer = await client.chat.completions.create(model=MODEL, messages=HELLO, tools=tools)
        message = answer.choices[0].message
        assert message.tool_calls is not None
        assert (message.content, message.tool_calls[0].to_dict()["function"]) == (
            "I look.\n",
            {"name": "weather", "arguments": '{"city": "12", "days": 3}'},
        )
        result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "warm"}
        back: Any = [*HELLO, message.to_dict(), result]
        await client.chat.completions.create(model=MODEL, messages=back, tools=tools)
        assert called in w.latest_prompt()


async def test_tools_can_be_switched_off_for_a_model(templated: Templated) -> None:
    async with world(templated(TEMPLATE), tool_parser={MODEL: "none"}) as w, clients(w) as (client, _):
        with pytest.raises(openai.BadRequestError) as refusal:
            await client.chat.completions.create(model=MODEL, messages=HELLO, tools=TOOLS)
        assert refusal.value.param == "tools"


THINKING = TEMPLATE.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n") + "{# </think> #}"


async def test_thinking_is_separated_from_the_answer_and_the_calls(templated: Templated) -> None:
    async with world(templated(THINKING)) as w, clients(w) as (client, _):
        w.say("Hm. <tool_call>?\n</think>\n\n" + TWO)
        message = added_up(dumped(await chunks_of(client, tools=TOOLS)))
        assert message == {
            "content": "I look.\n",
            "reasoning_content": "Hm. <tool_call>?\n",
            "tool_calls": [("weather", ARGUMENTS), ("get_time", "{}")],
            "finish_reason": "tool_calls",
        }
        answer = await client.chat.completions.create(model=MODEL, messages=HELLO, tools=TOOLS)
        whole = answer.choices[0].message.model_dump()
        assert (whole["content"], whole["reasoning_content"]) == ("I look.\n", "Hm. <tool_call>?\n")
        w.say("Hm.</think>\n\nYes.")
        message = added_up(dumped(await chunks_of(client)))
        assert (message["content"], message["reasoning_content"], message["finish_reason"]) == ("Yes.", "Hm.", "stop")
        w.say("Never done")
        answer = await client.chat.completions.create(model=MODEL, messages=HELLO)
        whole = answer.choices[0].message.model_dump()
        assert (whole["content"], whole["reasoning_content"]) == (None, "Never done")
        completion = await client.completions.create(model=MODEL, prompt="x")
        assert completion.choices[0].text == "Never done", "a completion is its text"


async def test_thinking_that_a_client_began_goes_on_as_thinking(templated: Templated) -> None:
    async with world(templated(THINKING)) as w, clients(w) as (_, http):
        w.say("so.</think>\n\nYes.")
        for begun, message in (
            ("<think>\nHm", {"content": "Yes.", "reasoning_content": "so."}),
            ("<think>Hm</think>\n\nWell", {"content": "so.</think>\n\nYes."}),
        ):
            messages = [*HELLO, {"role": "assistant", "content": begun}]
            body = {"model": MODEL, "messages": messages, "continue_final_message": True}
            async with http.post("/v1/chat/completions", json=body) as response:
                [choice] = (await response.json())["choices"]
            assert {name: choice["message"].get(name) for name in message} == message
            prompt = w.tokenizer.decode(unpack_tokens(w.workers[0].generates.all[-1].tokens), skip_special_tokens=False)
            assert prompt.endswith(begun)


@pytest.mark.parametrize("streams", [False, True])
async def test_each_choice_has_its_own_calls(templated: Templated, streams: bool) -> None:
    async with world(templated(TEMPLATE)) as w, clients(w) as (_, http):
        worker, tokens = w.workers[0], w.ids
        worker.output = None
        body = {"model": MODEL, "messages": HELLO, "tools": TOOLS, "n": 2, "stream": streams}
        asking = asyncio.create_task(http.post("/v1/chat/completions", json=body))
        [first] = await worker.generates.at_least(1)
        await worker.send(first, 0, tokens(CALL)[:1])
        [_, second] = await worker.generates.at_least(2)
        for at, (call, text) in enumerate(zip(tokens(CALL)[1:], tokens(TWO), strict=False)):
            await worker.send(first, at + 1, [call])
            await worker.send(second, at, [text])
        done = len(tokens(CALL)) - 1
        await worker.send(second, done, [*tokens(TWO)[done:], 2], "stop")
        await worker.send(first, done + 1, [2], "stop")
        answer = (await (await asking).read()).decode()
        if streams:
            chunks = [json.loads(line.removeprefix("data: ")) for line in answer.split("\n\n")[:-2]]
            apart = [[one for one in chunks if one["choices"][0]["index"] == index] for index in (0, 1)]
            told = [(made["content"], made["tool_calls"], made["finish_reason"]) for made in map(added_up, apart)]
        else:
            told = [
                (
                    one["message"]["content"],
                    [
                        (call["function"]["name"], call["function"]["arguments"])
                        for call in one["message"]["tool_calls"]
                    ],
                    one["finish_reason"],
                )
                for one in json.loads(answer)["choices"]
            ]
        assert told == [
            (None, [("weather", ARGUMENTS)], "tool_calls"),
            ("I look.\n", [("weather", ARGUMENTS), ("get_time", "{}")], "tool_calls"),
        ]
