"""/v1/responses, from a client's request to what it gets, through a running frontend, and between two of them."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response
from pydantic import BaseModel

from services.frontend.app import frontend
from services.frontend.config import AccessConfig, FrontendConfig, HttpConfig, LimitsConfig
from services.frontend.protocol.ignored_fields import IGNORED_HEADER
from services.frontend.protocol.responses_items import items_by_id
from services.frontend.protocol.responses_request import LOGPROBS
from services.frontend.requests.terms import DEADLINE_HEADER
from services.frontend.server.nats_api import STATUS_HEADER
from services.frontend.serving import response_directory, responses
from shared import subjects
from shared.api_keys import key_digest
from shared.bus.contract import LAST_HEADER, Message
from shared.bus.memory_bus import MemoryBus
from shared.messages.frames import TokenLogprob
from shared.messages.frontends import RECALLED, Recalled
from tests.fake_runtime import fake_runtime
from tests.frontend.cards import HERMES, Templated, with_template
from tests.frontend.peers import DEADLINE_S, MODEL, NAMESPACE, World, clients, world
from tests.frontend.pieces import CALL, THOUGHTFUL

ASK: Any = {"model": MODEL, "input": "hello"}
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "Tells the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": None,
}
TEMPLATE = (
    '{% if tools %}<tool_call>{"name": <name>}{% endif %}'
    "{% for message in messages %}[{{ message.role }}]"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}"
    "{% for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}[assistant]"
)
PLAIN = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}[assistant]"
ARGUMENTS = '{"city": "Zürich 🚰"}'


@asynccontextmanager
async def another(w: World, instance: str = "f2", **config: Any) -> AsyncIterator[AsyncOpenAI]:
    """A client of one more frontend of the same world."""
    settings = FrontendConfig(
        namespace=NAMESPACE, http=HttpConfig(port=0), limits=LimitsConfig(drain_s=0.0, deadline_s=60.0), **config
    )
    async with asyncio.TaskGroup() as holding:
        done, opened = asyncio.Event(), asyncio.get_running_loop().create_future()

        async def hold() -> None:
            bus = MemoryBus(w.broker)
            async with fake_runtime(NAMESPACE, "frontend", instance, bus, w.broker, w.store) as runtime:
                async with frontend(runtime, settings) as door:
                    opened.set_result(door.url)
                    await done.wait()
                await bus.drain()
                raise _Over

        holder = holding.create_task(_ended(hold()))
        url = await opened
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S) as client:
            async with asyncio.timeout(DEADLINE_S):
                while not [model async for model in client.models.list()]:
                    pass
            yield client
        done.set()
        await holder


class _Over(Exception):
    """Ends a runtime's tasks."""


async def _ended(holding: Any) -> None:
    try:
        await holding
    except* _Over:
        pass


async def test_a_text_as_the_official_client_reads_it(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (client, _):
        said = w.say("hello, Mühle 🚰")
        answer = await client.responses.create(**ASK, instructions="Be kind.", metadata={"a": "b"}, top_p=0.5)
        assert isinstance(Response.model_validate(answer.model_dump(warnings=False)), Response)
        assert answer.output_text == "hello, Mühle 🚰"
        [item] = answer.output
        assert (item.type, item.status) == ("message", "completed")
        assert (answer.status, answer.model, answer.store) == ("completed", MODEL, True)
        assert (answer.instructions, answer.metadata, answer.top_p) == ("Be kind.", {"a": "b"}, 0.5)
        assert answer.usage is not None
        assert answer.usage.output_tokens == len(said) + 1
        assert answer.usage.output_tokens_details.reasoning_tokens == 0
        assert "Be kind." in w.latest_prompt()
        assert answer.id.startswith("resp_f1.")


async def test_a_streamed_text_is_events_with_names_and_no_done(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (client, http):
        w.say("hello there")
        events = [event async for event in await client.responses.create(**ASK, stream=True)]
        types = [event.type for event in events]
        deltas = types.count("response.output_text.delta")
        assert deltas
        assert types == [
            *("response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"),
            *["response.output_text.delta"] * deltas,
            *("response.output_text.done", "response.content_part.done", "response.output_item.done"),
            "response.completed",
        ]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        async with client.responses.stream(**ASK) as stream:
            final = await stream.get_final_response()
        assert final.output_text == "hello there"
        async with http.post("/v1/responses", json=ASK | {"stream": True}) as response:
            raw = (await response.read()).decode()
        for event in raw.removesuffix("\n\n").split("\n\n"):
            name, content = event.split("\n")
            assert json.loads(content.removeprefix("data: "))["type"] == name.removeprefix("event: ")


async def test_tokens_stream_as_they_come_one_event_each_and_are_kept(templated: Templated) -> None:
    async with world(templated(TEMPLATE)) as w, clients(w) as (client, _):
        for worker in w.workers:
            worker.output = None

        async def read() -> list[Any]:
            return [event async for event in await client.responses.create(**ASK, tools=[WEATHER], stream=True)]

        reading = asyncio.create_task(read())
        [generate] = await w.workers[0].generates.at_least(1)
        tokens = w.ids(THOUGHTFUL)
        for at, token in enumerate(tokens):
            await w.workers[0].send(generate, at, [token])
            if at % 3 == 0:  # turns of the frontend's loop, in which what has come goes out
                await w.until("/health", lambda _: True)
        await w.workers[0].send(generate, len(tokens), [2], "stop")
        told = await reading
        kept = await client.responses.retrieve(told[-1].response.id)
        assert kept == told[-1].response
        types = [event.type for event in told]
        for kind in ("output_text", "reasoning_text", "function_call_arguments"):
            assert types.count(f"response.{kind}.delta") > 1
        assert [event.sequence_number for event in told] == list(range(len(told)))
        arguments = [event.delta for event in told if event.type == "response.function_call_arguments.delta"]
        assert "".join(arguments) == ARGUMENTS


async def test_thinking_and_calls_are_items_streamed_and_not_and_go_back_as_they_came(templated: Templated) -> None:
    async with world(templated(TEMPLATE)) as w, clients(w) as (client, _):
        asked: Any = ASK | {"tools": [WEATHER]}
        w.say(THOUGHTFUL)
        answer = await client.responses.create(**asked)
        async with client.responses.stream(**asked) as stream:
            streamed = await stream.get_final_response()
        for each in (answer, streamed):
            thought, message, call = cast("Any", each.output)
            assert (thought.type, message.type, call.type) == ("reasoning", "message", "function_call")
            assert thought.content[0].text == "hm\n"
            assert each.output_text == "I look.\n"
            assert (call.name, call.arguments, call.status) == ("weather", ARGUMENTS, "completed")
            assert each.usage is not None
            assert each.usage.output_tokens_details.reasoning_tokens == len(w.ids("<think>\nhm\n"))
            w.say("It is warm.")
            output = {"type": "function_call_output", "call_id": call.call_id, "output": "21 °C"}
            items: Any = [{"role": "user", "content": "hello"}, *each.output, output]
            first = await client.responses.create(model=MODEL, tools=[WEATHER], input=items)
            by_hand = w.latest_prompt()
            outputs: Any = [output]
            second = await client.responses.create(
                model=MODEL, tools=[WEATHER], input=outputs, previous_response_id=each.id
            )
            assert first.output_text == second.output_text == "It is warm."
            assert w.latest_prompt() == by_hand
            assert by_hand.endswith(
                "[user]hello[assistant]<think>hm\n</think>I look.\n"
                '<tool_call>{"name": "weather", "arguments": {"city": "Zürich 🚰"}}</tool_call>[tool]21 °C[assistant]'
            )
            w.say(THOUGHTFUL)


async def test_thinking_is_sent_as_the_summary_that_is_asked_for_and_goes_back_as_it_came(templated: Templated) -> None:
    async with world(templated(TEMPLATE)) as w, clients(w) as (client, http):
        asked: Any = ASK | {"reasoning": {"summary": "auto"}}
        w.say("<think>hm</think>Yes.")
        answer = await client.responses.create(**asked)
        async with client.responses.stream(**asked) as stream:
            said = [event.delta async for event in stream if event.type == "response.reasoning_summary_text.delta"]
            streamed = await stream.get_final_response()
        assert "".join(said) == "hm"
        for each in (answer, streamed):
            output: Any = each.output
            thought, _ = output
            assert ([part.text for part in thought.summary], thought.content) == (["hm"], [])
            assert each.reasoning is not None
            assert each.reasoning.summary == "auto"
            again: Any = [{"role": "user", "content": "hello"}, *output, {"role": "user", "content": "So?"}]
            await client.responses.create(model=MODEL, input=again)
            by_hand = w.latest_prompt()
            assert "[assistant]<think>hm</think>Yes.[user]So?" in by_hand
            await client.responses.create(model=MODEL, input="So?", previous_response_id=each.id)
            assert w.latest_prompt() == by_hand
            refer: Any = [{"type": "item_reference", "id": item.id} for item in output]
            await client.responses.create(model=MODEL, input=[again[0], *refer, again[-1]])
            assert w.latest_prompt() == by_hand
        async with http.post("/v1/responses", json=asked) as response:
            assert IGNORED_HEADER not in response.headers


@pytest.mark.parametrize("field", ["summary", "generate_summary"])
async def test_a_summary_of_thinking_is_ignored_for_a_model_that_does_not_think(directory: Path, field: str) -> None:
    async with world(directory) as w, clients(w) as (_, http):
        w.say("Yes.")
        async with http.post("/v1/responses", json=ASK | {"reasoning": {field: "auto"}}) as response:
            assert response.headers[IGNORED_HEADER] == f"reasoning.{field}"


async def test_strict_tools_hold_the_answer_and_those_that_may_not_be_called_do_not(templated: Templated) -> None:
    async with world(templated(TEMPLATE), grammars=True) as w, clients(w) as (client, _):
        w.say(CALL)
        strict = WEATHER | {"strict": True}
        answer = await client.responses.create(**ASK, tools=[strict])
        assert answer.tools[0].type == "function"
        assert answer.tools[0].strict is True
        assert "city" in w.workers[0].generates.all[-1].sampling.grammar
        choice: Any = {"type": "function", "name": "weather"}
        named = await client.responses.create(**ASK, tools=[WEATHER], tool_choice=choice)
        assert named.tool_choice.model_dump() == choice
        assert "city" in w.workers[0].generates.all[-1].sampling.grammar
        await client.responses.create(**ASK, tools=[strict], tool_choice="none")
        assert not w.workers[0].generates.all[-1].sampling.grammar


async def test_functions_of_a_namespace_are_called_streamed_and_not_and_their_calls_go_back(
    templated: Templated,
) -> None:
    space: Any = {"type": "namespace", "name": "earth", "description": "The earth.", "tools": [WEATHER]}
    async with world(templated(TEMPLATE)) as w, clients(w) as (client, _):
        asked: Any = ASK | {"tools": [space]}
        w.say(CALL.replace("weather", "earth__weather"))
        answer = await client.responses.create(**asked)
        async with client.responses.stream(**asked) as stream:
            streamed = await stream.get_final_response()
        for each in (answer, streamed):
            *_, call = cast("Any", each.output)
            assert (call.name, call.namespace, call.arguments) == ("weather", "earth", ARGUMENTS)
            assert [tool.type for tool in each.tools] == ["namespace"]
            w.say("It is warm.")
            output = {"type": "function_call_output", "call_id": call.call_id, "output": "21 °C"}
            items: Any = [{"role": "user", "content": "hello"}, *each.output, output]
            await client.responses.create(model=MODEL, tools=[space], input=items)
            by_hand = w.latest_prompt()
            outputs: Any = [output]
            more: Any = {"model": MODEL, "tools": [space], "previous_response_id": each.id}
            await client.responses.create(input=outputs, **more)
            assert w.latest_prompt() == by_hand
            assert '{"name": "earth__weather", "arguments": {"city": "Zürich 🚰"}}' in by_hand
            w.say(CALL.replace("weather", "earth__weather"))


async def test_a_custom_tool_is_called_with_a_text_streamed_and_not_and_its_call_goes_back(
    templated: Templated,
) -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "+" /[a-z]+/ LF\n%import common.LF'}
    patch: Any = {"type": "custom", "name": "patch", "description": "Patches.", "format": grammar}
    written = 'I look.<tool_call>{"name": "patch", "arguments": {"input": "+\\"ü\\n"}}</tool_call>'
    async with world(templated(TEMPLATE), grammars=True) as w, clients(w) as (client, _):
        asked: Any = ASK | {"tools": [patch]}
        w.say(written)
        answer = await client.responses.create(**asked)
        assert "[a-z]+" in w.workers[0].generates.all[-1].sampling.grammar
        async with client.responses.stream(**asked) as stream:
            told = [event async for event in stream]
            streamed = await stream.get_final_response()
        pieces = [event.delta for event in told if event.type == "response.custom_tool_call_input.delta"]
        [done] = [event.input for event in told if event.type == "response.custom_tool_call_input.done"]
        assert "".join(pieces) == done == '+"ü\n'
        for each in (answer, streamed):
            _, call = cast("Any", each.output)
            assert (call.type, call.name, call.input) == ("custom_tool_call", "patch", '+"ü\n')
            w.say("Done.")
            output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "patched"}
            items: Any = [{"role": "user", "content": "hello"}, *each.output, output]
            await client.responses.create(model=MODEL, tools=[patch], input=items)
            by_hand = w.latest_prompt()
            outputs: Any = [output]
            more: Any = {"model": MODEL, "tools": [patch], "previous_response_id": each.id}
            await client.responses.create(input=outputs, **more)
            assert w.latest_prompt() == by_hand
            assert '{"name": "patch", "arguments": {"input": "+\\"ü\\n"}}' in by_hand
            assert "[tool]patched" in by_hand
            w.say(written)


async def test_a_grammar_that_no_text_in_json_can_be_held_to_is_ignored_and_a_wrong_one_refused(
    templated: Templated,
) -> None:
    def patch(syntax: str, definition: str) -> Any:
        grammar = {"type": "grammar", "syntax": syntax, "definition": definition}
        return [WEATHER, {"type": "custom", "name": "patch", "format": grammar}]

    async with world(templated(TEMPLATE), grammars=True) as w, clients(w) as (client, _):
        w.say("fine")
        nested = patch("lark", 'start: "(" start ")" | "x"')
        raw = await client.responses.with_raw_response.create(**ASK, tools=nested)
        assert raw.headers[IGNORED_HEADER] == "tools[].format"
        await client.responses.create(**ASK, tools=patch("regex", "[0-9]{3}"), tool_choice="required")
        assert "[0-9]{3}" in w.workers[0].generates.all[-1].sampling.grammar
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(**ASK, tools=patch("regex", "[0-9"))
        assert refused.value.param == "tools[1].format"
        choice: Any = {"type": "custom", "name": "patch"}
        named = await client.responses.create(**ASK, tools=patch("regex", "[0-9]{3}"), tool_choice=choice)
        assert cast("Any", named.tool_choice).name == "patch"


async def test_tools_that_only_openai_runs_are_ignored_and_named(templated: Templated) -> None:
    async with world(templated(TEMPLATE)) as w, clients(w) as (client, _):
        w.say("fine")
        tools: Any = [{"type": "web_search", "external_web_access": True}, WEATHER, {"type": "of_tomorrow", "x": [1]}]
        raw = await client.responses.with_raw_response.create(**ASK, tools=tools)
        assert raw.headers[IGNORED_HEADER] == "tools[].web_search, tools[].of_tomorrow"
        assert [tool.type for tool in raw.parse().tools] == ["function"]
        for choice in ({"type": "web_search"}, {"type": "mcp", "server_label": "x"}, {"type": "of_tomorrow"}):
            with pytest.raises(openai.BadRequestError, match="are not served") as refused:
                await client.responses.create(**ASK, tools=tools, tool_choice=cast("Any", choice))
            assert refused.value.param == "tool_choice.type"


class Person(BaseModel):
    name: str
    born: int


async def test_a_schema_is_parsed_by_the_official_client(directory: Path) -> None:
    async with world(directory, grammars=True) as w, clients(w) as (client, _):
        w.say('{"name": "Ada", "born": 1815}')
        parsed = await client.responses.parse(**ASK, text_format=Person)
        assert parsed.output_parsed == Person(name="Ada", born=1815)
        assert parsed.text is not None
        assert parsed.text.format is not None
        assert parsed.text.format.type == "json_schema"
        grammar = w.workers[0].generates.all[-1].sampling.grammar
        assert '"born"' in grammar
        wrong: Any = {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(**ASK, text=wrong)
        assert refused.value.param == "text.format.schema"


async def test_log_probabilities_come_with_the_text(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (client, _):
        said = w.say("abc")
        for worker in w.workers:
            worker.logprobs = [TokenLogprob(-0.5)] * (len(said) + 1)
        include: Any = ["message.output_text.logprobs"]
        answer = await client.responses.create(**ASK, include=include)
        [item] = answer.output
        assert item.type == "message"
        assert item.content[0].type == "output_text"
        assert [one.logprob for one in item.content[0].logprobs or ()] == [-0.5] * len(said)


async def test_a_conversation_goes_on_by_id_and_instructions_are_not_carried_over(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (client, _):
        w.say("one")
        first = await client.responses.create(**ASK, instructions="Rhyme.")
        w.say("two")
        second = await client.responses.create(model=MODEL, input="and then?", previous_response_id=first.id)
        w.say("three")
        await client.responses.create(model=MODEL, input="and?", previous_response_id=second.id)
        prompt = w.latest_prompt()
        assert [word in prompt for word in ("hello", "one", "and then?", "two", "and?")] == [True] * 5
        assert "Rhyme." not in prompt
        again = await client.responses.create(model=MODEL, input="or?", previous_response_id=first.id)
        assert again.previous_response_id == first.id
        assert "two" not in w.latest_prompt(), "a response can be continued twice"


async def test_what_is_kept_can_be_retrieved_and_deleted(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (client, http):
        w.say("one")
        first = await client.responses.create(**ASK)
        assert await client.responses.retrieve(first.id) == first
        assert w.metric("headrace_kept_responses") == 1
        async with http.delete(f"/v1/responses/{first.id}") as response:
            assert await response.json() == {"id": first.id, "object": "response", "deleted": True}
        assert w.metric("headrace_kept_responses") == 0
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(first.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.delete(first.id)
        with pytest.raises(openai.BadRequestError) as unknown:
            await client.responses.create(**ASK, previous_response_id=first.id)
        assert (unknown.value.param, unknown.value.code) == ("previous_response_id", "previous_response_not_found")
        async with http.get(f"/v1/responses/{first.id}?stream=true") as response:
            assert (response.status, (await response.json())["error"]["param"]) == (400, "stream")


@pytest.mark.parametrize("named", ["resp_f1.abc", "resp_f9.abc", "resp_", "nonsense", "resp_a b.c", "resp_*.x", "ü"])
async def test_an_id_that_no_frontend_stores_is_unknown(directory: Path, named: str) -> None:
    async with world(directory) as w, clients(w) as (client, _):
        with pytest.raises(openai.BadRequestError) as unknown:
            await client.responses.create(**ASK, previous_response_id=named)
        assert unknown.value.code == "previous_response_not_found"


async def test_items_that_are_kept_can_be_referred_to_at_any_frontend(templated: Templated) -> None:
    async with world(templated(TEMPLATE)) as w, clients(w) as (client, _), another(w) as other:
        asked: Any = ASK | {"tools": [WEATHER]}
        w.say(THOUGHTFUL)
        thought, message, call = cast("Any", (await client.responses.create(**asked)).output)
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "warm"}
        refer: Any = [{"type": "item_reference", "id": item.id} for item in (thought, message, call)]
        short: Any = [{"id": item.id} for item in (thought, message)] + [{"id": call.id, "type": None}]
        w.say("It is warm.")
        whole: Any = [item.model_dump(exclude_none=True) for item in (thought, message, call)]
        prompts: list[str] = []
        for each in (client, other):
            for sent in (whole, refer, short):
                await each.responses.create(**asked | {"input": [{"role": "user", "content": "hi"}, *sent, result]})
                prompts.append(w.latest_prompt())
        assert "<think>hm\n</think>I look." in prompts[0]
        assert len(set(prompts)) == 1


@pytest.mark.parametrize("named", ["msg_1", "x", "rs_f1.abc-0", "rs_f9.abc-0", "-", "_", "resp_f1.x"])
async def test_an_item_that_no_frontend_keeps_is_unknown(directory: Path, named: str) -> None:
    async with world(directory) as w, clients(w) as (client, _):
        with pytest.raises(openai.NotFoundError) as wrong:
            await client.responses.create(**ASK | {"input": [{"type": "item_reference", "id": named}]})
        assert (wrong.value.param, wrong.value.code) == ("input[0].id", "item_not_found")


async def test_items_of_too_many_responses_and_too_large_ones_are_refused(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(directory) as w, clients(w) as (client, _):
        w.say("hello")
        made = [(await client.responses.create(**ASK)).output[0].id for _ in range(3)]
        refer: Any = [{"type": "item_reference", "id": name} for name in made]
        monkeypatch.setattr(responses, "REFERENCED_RESPONSES", 2)
        with pytest.raises(openai.BadRequestError) as many:
            await client.responses.create(**ASK | {"input": refer})
        assert many.value.param == "input[2].id"
        monkeypatch.setattr(responses, "BODY_LIMIT_BYTES", 300)
        with pytest.raises(openai.APIStatusError) as large:
            await client.responses.create(**ASK | {"input": [*refer[:1], *refer[:1]]})
        assert (large.value.status_code, large.value.param) == (413, "input[1].id")


async def test_the_responses_that_items_are_of_count_as_a_whole(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = LimitsConfig(drain_s=0.0, deadline_s=60.0, body_bytes=20_000)
    tools = [WEATHER | {"parameters": {"type": "object", "description": "x" * 8000}}]
    async with world(directory, limits=limits) as w, clients(w) as (client, _), another(w) as other:
        w.say("hello")
        made = [await client.responses.create(**ASK, tools=tools, tool_choice="none") for _ in range(3)]
        refer: Any = [{"type": "item_reference", "id": one.output[0].id} for one in made]
        for each in (client, other):
            await each.responses.create(**ASK | {"input": refer})
        with monkeypatch.context() as smaller:
            smaller.setattr(responses, "RECALLED_BYTES", 20_000)
            for each in (client, other):
                with pytest.raises(openai.APIStatusError) as large:
                    await each.responses.create(**ASK | {"input": refer})
                assert (large.value.status_code, large.value.param) == (413, "input[2].id")
                await each.responses.create(**ASK | {"input": refer[:2] * 20})
        for worker in w.workers:
            worker.output = None
        asked = len(w.router.asked.all)
        waiting = asyncio.create_task(client.responses.create(**ASK))
        await w.router.asked.at_least(asked + 1)
        with pytest.raises(openai.RateLimitError, match="the bodies and pictures of other requests"):
            await client.responses.create(**ASK | {"input": refer})
        waiting.cancel()
        await asyncio.wait([waiting])


async def test_other_tasks_run_between_the_responses_that_items_are_of(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns, read = 0, list[int]()

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    def recorded(response: bytes) -> dict[str, bytes]:
        read.append(turns)
        return items_by_id(response)

    async with world(directory) as w, clients(w) as (client, _):
        w.say("hello")
        made = [(await client.responses.create(**ASK)).output[0].id for _ in range(5)]
        refer: Any = [{"type": "item_reference", "id": name} for name in made]
        monkeypatch.setattr(responses, "items_by_id", recorded)
        counting = asyncio.create_task(count())
        await client.responses.create(**ASK | {"input": refer})
        counting.cancel()
        assert len(read) == len(set(read)) == 5


async def test_store_false_keeps_nothing(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (client, _):
        w.say("one")
        first = await client.responses.create(**ASK, store=False)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(first.id)
        assert w.metric("headrace_kept_responses") == 0


async def test_another_keys_response_is_unknown(directory: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text("".join(f'{name} = {{ sha256 = "{key_digest(name).hex()}" }}\n' for name in ("alice", "bob")))
    async with (
        world(directory, access=AccessConfig(str(keys)), ready=False) as w,
        clients(w, "alice") as (alice, _),
        clients(w, "bob") as (bob, _),
    ):
        w.say("one")
        async with asyncio.timeout(DEADLINE_S):
            while not [model async for model in alice.models.list()]:
                pass
        first = await alice.responses.create(**ASK)
        with pytest.raises(openai.NotFoundError):
            await bob.responses.retrieve(first.id)
        with pytest.raises(openai.NotFoundError):
            await bob.responses.delete(first.id)
        with pytest.raises(openai.BadRequestError) as unknown:
            await bob.responses.create(**ASK, previous_response_id=first.id)
        assert unknown.value.param == "previous_response_id"
        assert (await alice.responses.retrieve(first.id)).id == first.id


async def test_any_frontend_continues_what_another_one_keeps(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_directory, "PIECE_BYTES", 10)
    async with world(directory) as w, clients(w) as (client, _):
        async with another(w) as second:
            w.say("one")
            first = await second.responses.create(**ASK)
            assert first.id.startswith("resp_f2.")
            assert await client.responses.retrieve(first.id) == first
            w.say("two")
            answer = await client.responses.create(model=MODEL, input="and?", previous_response_id=first.id)
            assert answer.id.startswith("resp_f1.")
            assert "one" in w.latest_prompt()
            await second.responses.create(model=MODEL, input="or?", previous_response_id=answer.id)
            assert "and?" in w.latest_prompt()
            await client.responses.delete(first.id)
            with pytest.raises(openai.NotFoundError):
                await second.responses.retrieve(first.id)
            kept = await second.responses.create(**ASK)
        with pytest.raises(openai.BadRequestError) as gone:
            await client.responses.create(**ASK, previous_response_id=kept.id)
        assert gone.value.code == "previous_response_not_found", "it went with its frontend"


async def test_a_frontend_that_keeps_it_and_does_not_answer_is_503(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_directory, "PEER_TIMEOUT_S", 0.05)
    async with world(directory) as w, clients(w) as (client, _):

        async def silence(_message: Any) -> None:
            """Frozen."""

        await MemoryBus(w.broker).subscribe(subjects.response_store(NAMESPACE, "f2"), silence)
        with pytest.raises(openai.InternalServerError) as away:
            await client.responses.create(**ASK, previous_response_id="resp_f2.x")
        assert away.value.status_code == 503


async def test_asking_another_frontend_takes_no_longer_than_the_request_may(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (client, http):

        async def silence(_message: Message) -> None:
            """Frozen."""

        await MemoryBus(w.broker).subscribe(subjects.response_store(NAMESPACE, "f2"), silence)
        with pytest.raises(openai.InternalServerError) as late:
            await client.responses.create(**ASK, previous_response_id="resp_f2.x", extra_body={"deadline_s": 0.05})
        assert (late.value.status_code, late.value.code) == (504, "deadline_exceeded")
        for ask in (http.get, http.delete):
            async with ask("/v1/responses/resp_f2.x", headers={DEADLINE_HEADER: "0.05"}) as response:
                assert (response.status, (await response.json())["error"]["code"]) == (504, "deadline_exceeded")
            async with ask("/v1/responses/resp_f2.x", headers={DEADLINE_HEADER: "soon"}) as response:
                assert (response.status, (await response.json())["error"]["param"]) == (400, DEADLINE_HEADER)


async def test_a_conversation_that_another_version_wrote_is_an_error_in_openais_shape(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (client, _):
        bus = MemoryBus(w.broker)

        async def newer(message: Message) -> None:
            recalled = RECALLED.encode(Recalled(True, b'[{"role": "user", "content": "x", "mood": "new"}]'))
            await bus.publish(message.reply, recalled, headers={LAST_HEADER: "true"})

        await bus.subscribe(subjects.response_store(NAMESPACE, "f2"), newer)
        with pytest.raises(openai.InternalServerError) as wrong:
            await client.responses.create(**ASK, previous_response_id="resp_f2.x")
        assert "mood" in wrong.value.message


async def told_over_nats(bus: MemoryBus, operation: str, body: dict[str, Any]) -> list[tuple[Any, Mapping[str, str]]]:
    """The messages of an answer with their headers. Keepalives, which come while a machine is slow, are left out."""
    subject = subjects.client(NAMESPACE, operation)
    async with bus.stream(subject, json.dumps(body).encode(), idle_timeout_s=DEADLINE_S) as messages:
        told = [(json.loads(message.payload), message.headers) async for message in messages]
    return [(message, headers) for message, headers in told if message.get("type") != "keepalive"]


async def test_over_nats_it_is_the_same(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (client, _):
        w.say("one")
        bus = MemoryBus(w.broker)

        async def ask(operation: str, body: dict[str, Any]) -> list[dict[str, Any]]:
            return [message for message, _ in await told_over_nats(bus, operation, body)]

        [first] = await ask("responses", ASK)
        events = await ask("responses", ASK | {"stream": True, "previous_response_id": first["id"]})
        assert [events[0]["type"], events[-1]["type"]] == ["response.created", "response.completed"]
        assert "one" in w.latest_prompt()
        assert await ask("retrieve_response", {"response_id": first["id"]}) == [first]
        assert (await client.responses.retrieve(first["id"])).id == first["id"]
        [deleted] = await ask("delete_response", {"response_id": first["id"]})
        assert deleted["deleted"]
        [gone] = await ask("retrieve_response", {"response_id": first["id"]})
        assert gone["error"]["code"] == "response_not_found"


async def test_a_last_event_over_natss_limit_is_an_error_in_its_place(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(directory) as w, clients(w) as (client, _):
        w.say("long " * 200)
        monkeypatch.setattr(w.bus, "_payload_limit_bytes", 2000)
        told = await told_over_nats(MemoryBus(w.broker), "responses", ASK | {"stream": True})
        types = [event.get("type") for event, _ in told]
        assert types[-2:] == ["response.output_item.done", None]
        last, headers = told[-1]
        assert (last["error"]["code"], headers[STATUS_HEADER]) == ("request_too_large", "413")
        kept = await client.responses.retrieve(told[0][0]["response"]["id"])
        assert kept.output_text == "long " * 200, "over HTTP it can still be had"


async def test_a_worker_that_fails_after_the_first_text_ends_the_stream_with_failed(directory: Path) -> None:
    limits = LimitsConfig(rescue_s=0.0, drain_s=0.0)
    async with world(directory, limits=limits) as w, clients(w) as (client, _):
        for worker in w.workers:
            worker.output = None

        async def break_it() -> None:
            generate = (await w.workers[0].generates.at_least(1))[-1]
            await w.workers[0].send(generate, 0, w.ids("half"))
            for worker in w.workers:
                worker.output = []
                await worker.die()
            w.router.workers.clear()
            await w.workers[0].send(generate, len(w.ids("half")), [], "error", "broken")

        breaking = asyncio.create_task(break_it())
        events = [event async for event in await client.responses.create(**ASK, stream=True)]
        await breaking
        assert events[-1].type == "response.failed"
        assert events[-1].response.status == "failed"
        assert events[-1].response.error is not None
        assert events[-1].response.output_text == "half"
        assert w.metric("headrace_requests_total", operation="responses", status="503") == 1
        assert w.metric("headrace_kept_responses") == 0


async def test_a_client_that_goes_cancels_it_and_nothing_is_kept(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (client, _):
        for worker in w.workers:
            worker.output = None
        asking = asyncio.create_task(client.responses.create(**ASK))
        [generate] = await w.workers[0].generates.at_least(1)
        asking.cancel()
        [cancelled] = await w.workers[0].cancels.at_least(1)
        assert cancelled.request == generate.request
        await w.counted("headrace_inflight_requests", 0)
        assert w.metric("headrace_kept_responses") == 0


async def test_what_a_former_conversation_takes_counts_as_a_body(directory: Path) -> None:
    async with world(directory, limits=LimitsConfig(body_bytes=3000, drain_s=0.0)) as w, clients(w) as (client, _):
        w.say("one")
        first = await client.responses.create(model=MODEL, input="long " * 300)
        w.workers[0].output = None
        running = asyncio.create_task(client.responses.create(model=MODEL, input="x", previous_response_id=first.id))
        await w.workers[0].generates.at_least(2)
        with pytest.raises(openai.RateLimitError):
            await client.responses.create(model=MODEL, input="x", previous_response_id=first.id)
        running.cancel()
        await w.counted("headrace_inflight_requests", 0)


async def test_fields_that_ask_for_nothing_are_taken(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (client, _):
        w.say("one")
        answer = await client.responses.create(
            **ASK,
            background=False,
            include=[],
            max_tool_calls=3,
            parallel_tool_calls=True,
            prompt_cache_key="a",
            reasoning={},
            safety_identifier="b",
            service_tier="auto",
            stream=False,
            text={"format": {"type": "text"}},
            tool_choice="auto",
            tools=[],
            top_logprobs=0,
            truncation="disabled",
            user="c",
        )
        assert (answer.service_tier, answer.user, answer.safety_identifier) == ("default", "c", "b")


async def test_a_conversation_that_grew_beyond_a_body_is_refused(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses, "BODY_LIMIT_BYTES", 200)
    async with world(directory) as w, clients(w) as (client, _):
        w.say("one")
        first = await client.responses.create(**ASK)
        for store in (True, False):
            with pytest.raises(openai.APIStatusError) as large:
                await client.responses.create(model=MODEL, input="x" * 200, previous_response_id=first.id, store=store)
            assert (large.value.status_code, large.value.param) == (413, "previous_response_id")


async def test_a_model_that_thinks_ignores_encrypted_reasoning_and_refuses_log_probabilities(
    directory: Path, tmp_path: Path
) -> None:
    copy = with_template(Path(shutil.copytree(directory, tmp_path / "thinks")), HERMES)
    async with world(copy) as w, clients(w) as (_, http):
        w.say("fine")
        asked = {"input": "x", "include": ["reasoning.encrypted_content"]}
        async with http.post("/v1/responses", json=asked) as response:
            assert response.status == 200, await response.text()
            assert response.headers[IGNORED_HEADER] == "include[].reasoning.encrypted_content"
        async with http.post("/v1/responses", json={"input": "x", "include": [LOGPROBS]}) as response:
            assert (await response.json())["error"]["param"] == "include"
