"""Other providers' APIs, from a client's request to what it gets, through a running frontend."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import pytest

from services.frontend.config import AccessConfig, FrontendConfig, LimitsConfig
from services.frontend.requests.terms import DEADLINE_HEADER
from shared.api_keys import key_digest
from tests.frontend.cards import Templated
from tests.frontend.foreign import CITY, WEATHER
from tests.frontend.peers import DEADLINE_S, MODEL, World, clients, world
from tests.frontend.pieces import CALL, THOUGHTFUL
from tests.frontend.serving.test_responses import TEMPLATE

SWITCHED = TEMPLATE + "{% if enable_thinking %}<on>{% endif %}"
ASK: Any = {"model": MODEL, "max_tokens": 200, "messages": [{"role": "user", "content": "hello"}]}
T = TypeVar("T")


async def post(http: aiohttp.ClientSession, path: str, body: Any, status: int = 200, **headers: str) -> Any:
    async with http.post(path, json=body, headers=headers) as response:
        text = await response.text()
        assert response.status == status, text
        return json.loads(text)


async def events_of(http: aiohttp.ClientSession, body: Any) -> list[Any]:
    """The events of a streamed message, each with its name."""
    async with http.post("/v1/messages", json=body | {"stream": True}) as response:
        assert response.content_type == "text/event-stream"
        raw = (await response.read()).decode()
    events = []
    for event in raw.removesuffix("\n\n").split("\n\n"):
        name, content = event.split("\n")
        events.append(json.loads(content.removeprefix("data: ")))
        assert events[-1]["type"] == name.removeprefix("event: ")
    return events


# --- Anthropic


async def test_a_message_is_answered_whole_and_streamed(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (_, http):
        said = w.say("hello, Mühle 🚰")
        async with http.post("/v1/messages", json=ASK | {"system": "Be kind."}) as response:
            whole = await response.json()
            assert response.headers["Request-Id"] == response.headers["X-Request-Id"]
            assert whole["id"] == f"msg_{response.headers['X-Request-Id']}"
        assert whole["content"] == [{"type": "text", "text": "hello, Mühle 🚰"}]
        assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", MODEL)
        assert (whole["stop_reason"], whole["usage"]["output_tokens"]) == ("end_turn", len(said) + 1)
        assert "Be kind." in w.latest_prompt()
        assert w.workers[0].generates.all[-1].sampling.max_tokens == 200
        events = await events_of(http, ASK)
        assert [event["type"] for event in events[:3]] == ["message_start", "ping", "content_block_start"]
        assert "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta") == (
            "hello, Mühle 🚰"
        )
        [end] = [event for event in events if event["type"] == "message_delta"]
        assert end["usage"]["output_tokens"] == len(said) + 1
        assert w.metric("headrace_requests_total", operation="messages", status="200") == 2


async def test_tokens_of_a_message_stream_as_they_come(templated: Templated) -> None:
    async with world(templated(TEMPLATE)) as w, clients(w) as (_, http):
        for worker in w.workers:
            worker.output = None
        reading = asyncio.create_task(events_of(http, ASK | {"tools": [WEATHER]}))
        [generate] = await w.workers[0].generates.at_least(1)
        tokens = w.ids(THOUGHTFUL)
        for at, token in enumerate(tokens):
            await w.workers[0].send(generate, at, [token])
            if at % 3 == 0:  # turns of the frontend's loop, in which what has come goes out
                await w.until("/health", lambda _: True)
        await w.workers[0].send(generate, len(tokens), [2], "stop")
        events = await reading
        grown: dict[str, list[str]] = {}
        for event in events:
            if event["type"] == "content_block_delta":
                kind, text = event["delta"].values()
                grown.setdefault(kind, []).append(text)
        assert {kind: "".join(texts) for kind, texts in grown.items()} == {
            "thinking_delta": "hm\n",
            "text_delta": "I look.\n",
            "input_json_delta": '{"city": "Zürich 🚰"}',
        }
        assert all(len(texts) > 1 for texts in grown.values())
        assert events[-2]["delta"]["stop_reason"] == "tool_use"


async def test_thinking_and_calls_go_back_as_they_came(templated: Templated) -> None:
    async with world(templated(TEMPLATE)) as w, clients(w) as (_, http):
        w.say(THOUGHTFUL)
        first = await post(http, "/v1/messages", ASK | {"tools": [WEATHER]})
        assert [block["type"] for block in first["content"]] == ["thinking", "text", "tool_use"]
        result = {"type": "tool_result", "tool_use_id": first["content"][-1]["id"], "content": "21 °C"}
        turns = [
            *ASK["messages"],
            {"role": "assistant", "content": first["content"]},
            {"role": "user", "content": [result]},
        ]
        w.say("It is warm.")
        second = await post(http, "/v1/messages", ASK | {"tools": [WEATHER], "messages": turns})
        assert second["content"] == [{"type": "text", "text": "It is warm."}]
        assert w.latest_prompt().endswith(
            "[user]hello[assistant]<think>hm\n</think>I look.\n"
            '<tool_call>{"name": "weather", "arguments": {"city": "Zürich 🚰"}}</tool_call>[tool]21 °C[assistant]'
        )


async def test_calls_are_forced_and_one_alone(templated: Templated) -> None:
    async with world(templated(TEMPLATE), grammars=True) as w, clients(w) as (_, http):
        w.say(CALL + CALL)
        one = {"type": "any", "disable_parallel_tool_use": True}
        answer = await post(http, "/v1/messages", ASK | {"tools": [WEATHER], "tool_choice": one})
        assert [block["type"] for block in answer["content"]] == ["tool_use"]
        assert "city" in w.workers[0].generates.all[-1].sampling.grammar
        none = await post(http, "/v1/messages", ASK | {"tools": [WEATHER], "tool_choice": {"type": "none"}})
        assert [block["type"] for block in none["content"]] == ["text"]
        schema = {"format": {"type": "json_schema", "schema": CITY}}
        await post(http, "/v1/messages", ASK | {"output_config": schema})
        assert "city" in w.workers[0].generates.all[-1].sampling.grammar


async def test_thinking_is_switched_by_the_template_and_errors_have_anthropics_names(templated: Templated) -> None:
    async with world(templated(SWITCHED), grammars=True) as w, clients(w) as (_, http):
        w.say("x")
        await post(http, "/v1/messages", ASK | {"thinking": {"type": "adaptive"}})
        assert w.latest_prompt().endswith("<on>")
        budget = await post(http, "/v1/messages", ASK | {"thinking": {"type": "enabled", "budget_tokens": 9}}, 400)
        assert budget["error"]["message"].startswith("thinking.budget_tokens: this model ends its reasoning")
        for thinking in ({"type": "disabled"}, None):
            await post(http, "/v1/messages", ASK | {"thinking": thinking})
            assert not w.latest_prompt().endswith("<on>")


@pytest.mark.parametrize("streamed", [False, True])
async def test_what_has_no_effect_is_named_in_a_header(directory: Path, streamed: bool) -> None:
    async with world(directory) as w, clients(w) as (_, http):
        w.say("x")
        asked: dict[str, dict[str, Any]] = {
            "/v1/messages": {**ASK, "metadata": {}, "cache_control": {"type": "ephemeral"}, "unknown": 1},
            "/api/chat": {**CHAT, "keep_alive": "5m", "options": {"num_ctx": 9, "seed": 1}},
        }
        named = {"/v1/messages": {"cache_control", "unknown"}, "/api/chat": {"keep_alive", "options.num_ctx"}}
        for path, body in asked.items():
            async with http.post(path, json=body | {"stream": streamed}) as response:
                assert response.status == 200, await response.text()
                assert set(response.headers["X-Headrace-Ignored"].split(", ")) == named[path]


async def test_the_stop_sequence_that_was_found_is_named(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (_, http):
        w.say("one, two; three")
        body = ASK | {"stop_sequences": [";", "; t", ","]}
        answer = await post(http, "/v1/messages", body)
        assert (answer["content"][0]["text"], answer["stop_reason"], answer["stop_sequence"]) == (
            *("one", "stop_sequence", ","),
        )
        assert (await events_of(http, body))[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": ","}


async def test_tokens_are_counted_as_a_message_counts_them(templated: Templated) -> None:
    async with world(templated(TEMPLATE)) as w, clients(w) as (_, http):
        w.say("x")
        asked = {**ASK, "system": "Be kind.", "tools": [WEATHER]}
        usage = (await post(http, "/v1/messages", asked))["usage"]
        del asked["max_tokens"]
        counted = await post(http, "/v1/messages/count_tokens", asked)
        assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
        assert len(w.workers[0].generates.all) == 1, "no worker counts"
        wrong = await post(http, "/v1/messages/count_tokens", {**asked, "model": "nobody"}, 404)
        assert wrong["error"]["type"] == "not_found_error"


async def test_an_answer_continues_a_last_message_of_the_assistant(templated: Templated) -> None:
    async with world(templated(TEMPLATE)) as w, clients(w) as (_, http):
        w.say(" river is the Rhine.")
        asked = {"model": MODEL, "messages": [*ASK["messages"], {"role": "assistant", "content": "One such"}]}
        whole = await post(http, "/v1/messages", {**asked, "max_tokens": 99})
        assert whole["content"] == [{"type": "text", "text": " river is the Rhine."}]
        assert w.latest_prompt().endswith("[user]hello[assistant]One such")
        counted = await post(http, "/v1/messages/count_tokens", asked)
        assert counted["input_tokens"] == whole["usage"]["input_tokens"]
        events = await events_of(http, {**asked, "max_tokens": 99})
        said = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
        assert "".join(said) == " river is the Rhine."


async def test_refusals_have_anthropics_form(directory: Path) -> None:
    async with world(directory, limits=LimitsConfig(requests=1, drain_s=0.0)) as w, clients(w) as (_, http):
        w.say("x")
        for body, status, kind, why in (
            ({**ASK, "model": "nobody"}, 404, "not_found_error", "'nobody' does not exist"),
            ({**ASK, "max_tokens": 5000}, 400, "invalid_request_error", "max_tokens of 5000 do not fit"),
            ({**ASK, "tools": [WEATHER]}, 400, "invalid_request_error", "no place for tools"),
            ({**ASK, "stop_sequences": [7]}, 400, "invalid_request_error", "stop_sequences[0]"),
        ):
            wrong = await post(http, "/v1/messages", body, status)
            assert (wrong["type"], wrong["error"]["type"]) == ("error", kind)
            assert why in wrong["error"]["message"]
        async with http.get("/v1/messages") as response:
            assert response.status == 405
            assert (await response.json())["error"]["type"] == "invalid_request_error"
        w.workers[0].output = None
        waiting = asyncio.create_task(post(http, "/v1/messages", ASK))
        [generate] = await w.workers[0].generates.at_least(1)
        full = await post(http, "/v1/messages", ASK, 429)
        assert full["error"]["type"] == "rate_limit_error"
        await w.workers[0].send(generate, 0, [5, 2], "stop")
        await waiting
        late = await post(http, "/v1/messages", ASK, 504, **{DEADLINE_HEADER: "0.05"})
        assert late["error"]["type"] == "timeout_error"


async def test_a_message_that_fails_after_it_has_begun_ends_with_an_error(directory: Path) -> None:
    async with world(directory, limits=LimitsConfig(rescue_s=0.0, drain_s=0.0)) as w, clients(w) as (_, http):
        events = await broken_off(w, events_of(http, ASK))
        assert (events[0]["type"], events[-1]["type"]) == ("message_start", "error")
        assert events[-1]["error"]["type"] == "overloaded_error"
        assert w.metric("headrace_requests_total", operation="messages", status="503") == 1


async def broken_off(w: World, asking: Coroutine[Any, Any, T]) -> T:
    """What a client reads whose worker is lost after the first text, with no other left."""
    w.workers[0].output = None
    reading = asyncio.create_task(asking)
    generate = (await w.workers[0].generates.at_least(1))[-1]
    await w.workers[0].send(generate, 0, w.ids("half"))
    for worker in w.workers:
        worker.output = []
        await worker.die()
    w.router.workers.clear()
    await w.workers[0].send(generate, len(w.ids("half")), [], "error", "broken")
    return await reading


async def test_claude_codes_line_for_its_bill_is_dropped_and_named_in_strict_mode_too(directory: Path) -> None:
    bill = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1;"}
    async with (
        world(directory, settings=FrontendConfig(unknown_fields="refuse")) as w,
        clients(w) as (_, http),
    ):
        w.say("x")
        async with http.post("/v1/messages", json=ASK | {"system": [bill]}) as response:
            assert (response.status, response.headers["X-Headrace-Ignored"]) == (
                200,
                "system.x-anthropic-billing-header",
            )
        assert "billing" not in w.latest_prompt()


async def test_a_key_comes_in_either_header_but_only_one(directory: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text("".join(f'{name} = {{ sha256 = "{key_digest(name).hex()}" }}\n' for name in ("alice", "bob")))
    async with world(directory, access=AccessConfig(str(keys)), ready=False) as w, clients(w) as (_, http):
        w.say("x")
        wrong = await post(http, "/v1/messages", ASK, 401)
        assert (wrong["type"], wrong["error"]["type"]) == ("error", "authentication_error")
        wrong = await post(http, "/v1/messages", ASK, 401, **{"X-Api-Key": "carol"})
        assert wrong["error"]["type"] == "authentication_error"
        alices = {"X-Api-Key": "alice"}
        both = await post(http, "/v1/messages", ASK, 400, **alices, Authorization="Bearer bob")
        assert "more than one key" in both["error"]["message"]
        async with asyncio.timeout(DEADLINE_S):
            while (await models_of(http, "alice")) == []:
                pass
        await post(http, "/v1/messages", ASK, 200, **alices)
        await post(http, "/v1/messages", ASK, 200, **alices, Authorization="Bearer alice")
        await post(http, "/v1/messages", ASK, Authorization="Bearer bob")
        assert w.metric("headrace_key_requests_total", key="alice") == 2


async def test_without_keys_none_is_looked_at(directory: Path, tmp_path: Path) -> None:
    two = {"X-Api-Key": "alice", "Authorization": "Bearer bob"}
    async with world(directory) as w, clients(w) as (_, http):
        w.say("x")
        await post(http, "/v1/messages", ASK, 200, **two)
    (tmp_path / "keys.toml").write_text("")
    access = AccessConfig(str(tmp_path / "keys.toml"))
    async with world(directory, access=access, ready=False) as w, clients(w) as (_, http):
        for path, status in (("/live", 200), ("/health", 200), ("/v1/models", 400)):
            async with asyncio.timeout(DEADLINE_S):
                while True:  # health is 503 until the router has answered
                    async with http.get(path, headers=two) as response:
                        if response.status == status:
                            break


@pytest.mark.parametrize(
    ("versions", "status"),
    [((), 200), (("2023-06-01",), 200), (("latest",), 400), (("",), 400), (("2023-06-01", "2023-06-01"), 400)],
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_a_version_of_the_api_may_be_missing_but_not_malformed(
    directory: Path, path: str, versions: tuple[str, ...], status: int
) -> None:
    async with world(directory) as w, clients(w) as (_, http):
        w.say("x")
        headers = [("anthropic-version", version) for version in versions]
        body = ASK if path == "/v1/messages" else {"model": MODEL, "messages": ASK["messages"]}
        async with http.post(path, json=body, headers=headers) as response:
            said = await response.json()
            assert response.status == status, said
        if status == 400:
            assert (said["type"], said["error"]["type"]) == ("error", "invalid_request_error")
            assert "anthropic-version: no version" in said["error"]["message"]


async def models_of(http: aiohttp.ClientSession, key: str) -> Any:
    async with http.get("/v1/models", headers={"X-Api-Key": key}) as response:
        return (await response.json())["data"]


async def test_a_client_that_is_gone_cancels_its_message(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (_, http):
        w.workers[0].output = None
        asking = asyncio.create_task(post(http, "/v1/messages", ASK))
        [generate] = await w.workers[0].generates.at_least(1)
        asking.cancel()
        [cancel] = await w.workers[0].cancels.at_least(1)
        assert cancel.request == generate.request


# --- Ollama

CHAT: Any = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}


async def lines_of(http: aiohttp.ClientSession, path: str, body: Any) -> list[Any]:
    async with http.post(path, json=body) as response:
        assert response.content_type == "application/x-ndjson"
        text = (await response.read()).decode()
    assert text.endswith("}\n")
    return [json.loads(line) for line in text.splitlines()]


async def test_ollamas_answers_are_lines_unless_a_client_wants_one(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (_, http):
        said = w.say("hello, Mühle 🚰")
        lines = await lines_of(http, "/api/chat", CHAT)
        assert "".join(line["message"]["content"] for line in lines) == "hello, Mühle 🚰"
        assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
        whole = await post(http, "/api/chat", CHAT | {"stream": False, "options": {"num_predict": 99}})
        assert whole["message"] == {"role": "assistant", "content": "hello, Mühle 🚰"}
        for answer in (lines[-1], whole):
            assert (answer["model"], answer["done_reason"], answer["eval_count"]) == (MODEL, "stop", len(said) + 1)
            assert answer["prompt_eval_count"] > 0
            assert answer["prompt_eval_duration"] > 0 < answer["eval_duration"]
            assert answer["total_duration"] >= answer["prompt_eval_duration"] + answer["eval_duration"]
            assert answer["eval_duration"] % 1_000_000, "the loop's clock, which has milliseconds"
        text = await lines_of(http, "/api/generate", {"model": MODEL, "prompt": "hello", "system": "Be kind."})
        assert "".join(line["response"] for line in text) == "hello, Mühle 🚰"
        assert "Be kind." in w.latest_prompt()
        await post(http, "/api/generate", {"model": MODEL, "prompt": "hello", "raw": True, "stream": False})
        assert w.latest_prompt().endswith("hello")
        room = w.workers[0].generates.all[-1].sampling.max_tokens
        assert room > 1000, "a raw prompt without a limit may fill the context"
        assert w.metric("headrace_requests_total", operation="ollama_chat", status="200") == 2
        assert w.metric("headrace_requests_total", operation="ollama_generate", status="200") == 2


async def test_ollamas_lines_come_as_tokens_do_and_calls_come_whole(templated: Templated) -> None:
    async with world(templated(TEMPLATE)) as w, clients(w) as (_, http):
        for worker in w.workers:
            worker.output = None
        tool = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
        reading = asyncio.create_task(lines_of(http, "/api/chat", CHAT | {"tools": [tool]}))
        [generate] = await w.workers[0].generates.at_least(1)
        tokens = w.ids(THOUGHTFUL)
        for at, token in enumerate(tokens):
            await w.workers[0].send(generate, at, [token])
            if at % 3 == 0:
                await w.until("/health", lambda _: True)
        await w.workers[0].send(generate, len(tokens), [2], "stop")
        messages = [line["message"] for line in await reading]
        thoughts = [message["thinking"] for message in messages if "thinking" in message]
        texts = [message["content"] for message in messages if message["content"]]
        assert ("".join(thoughts), "".join(texts)) == ("hm\n", "I look.\n")
        assert min(len(thoughts), len(texts)) > 1
        [calls] = [message["tool_calls"] for message in messages if "tool_calls" in message]
        assert [call["function"]["arguments"] for call in calls] == [{"city": "Zürich 🚰"}]
        w.say("warm")
        back = [*CHAT["messages"], {"role": "assistant", "content": "", "tool_calls": calls}]
        back.append({"role": "tool", "tool_name": "weather", "content": "21 °C"})
        w.say("It is warm.")
        end = await post(http, "/api/chat", CHAT | {"messages": back, "tools": [tool], "stream": False})
        assert end["message"]["content"] == "It is warm."
        assert w.latest_prompt().endswith("[tool]21 °C[assistant]")


async def test_a_level_of_thinking_needs_a_template_that_reads_it(templated: Templated) -> None:
    asked = CHAT | {"think": "low", "stream": False}
    switched = templated(SWITCHED)
    async with world(switched) as w, clients(w) as (_, http):
        w.say("x")
        async with http.post("/api/chat", json=asked) as response:
            assert (response.status, response.headers["X-Headrace-Ignored"]) == (200, "think")
        assert w.latest_prompt().endswith("<on>")
    async with world(switched, settings=FrontendConfig(unknown_fields="refuse")) as w, clients(w) as (_, http):
        wrong = await post(http, "/api/chat", asked, 400)
        assert wrong["error"].startswith("think: the chat template does not support 'low'")


async def test_a_request_that_only_loads_a_model_is_answered_at_once(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (_, http):
        chat = await post(http, "/api/chat", {"model": MODEL, "messages": [], "keep_alive": 0})
        text = await post(http, "/api/generate", {"model": f"{MODEL}:latest"})
        assert (chat["done_reason"], text["done_reason"], text["response"]) == ("unload", "load", "")
        assert (await post(http, "/api/show", {"name": MODEL}))["capabilities"]
        assert not w.workers[0].generates.all
        assert "not exist" in (await post(http, "/api/generate", {"model": "nobody"}, 404))["error"]


async def test_vectors_are_those_of_embeddings(directory: Path) -> None:
    async with world(directory, embedding_size=8) as w, clients(w) as (client, http):
        answer = await post(http, "/api/embed", {"model": MODEL, "input": ["a mill", "a river"], "dimensions": 4})
        ours = await client.embeddings.create(
            model=MODEL, input=["a mill", "a river"], dimensions=4, encoding_format="float"
        )
        assert answer["embeddings"] == [pytest.approx(one.embedding) for one in ours.data]
        assert (answer["model"], answer["prompt_eval_count"]) == (MODEL, ours.usage.prompt_tokens)
        assert answer["total_duration"] > 0
        assert "input[0] is empty" in (await post(http, "/api/embed", {"model": MODEL, "input": [""]}, 400))["error"]


async def test_models_are_listed_and_shown(templated: Templated) -> None:
    async with world(templated(TEMPLATE), embedding_size=8) as w, clients(w) as (_, http):
        for path in ("/api/tags", "/api/ps"):
            async with http.get(path) as response:
                [model] = (await response.json())["models"]
            assert (model["name"], model["model"]) == (MODEL, MODEL)
            assert len(model["digest"]) == 64
        shown = await post(http, "/api/show", {"model": f"{MODEL}:latest"})
        assert set(shown["capabilities"]) == {"completion", "tools", "thinking", "embedding"}
        architecture = shown["model_info"]["general.architecture"]
        assert shown["model_info"][f"{architecture}.context_length"] == 2048
        assert "not exist" in (await post(http, "/api/show", {"model": "nobody"}, 404))["error"]
        async with http.get("/api/version") as response:
            assert "version" in await response.json()
        async with http.get("/") as response:
            assert await response.text() == "Ollama is running"
        async with http.head("/") as response:
            assert response.status == 200


async def test_refusals_have_ollamas_form(directory: Path) -> None:
    async with world(directory, limits=LimitsConfig(rescue_s=0.0, drain_s=0.0)) as w, clients(w) as (_, http):
        for path, body, status, why in (
            ("/api/chat", CHAT | {"model": "nobody"}, 404, "'nobody' does not exist"),
            ("/api/chat", CHAT | {"options": {"num_predict": 5000}}, 400, "options.num_predict of 5000 do not fit"),
            ("/api/generate", {"model": MODEL, "prompt": "x", "suffix": "y"}, 400, "suffix: "),
            ("/api/pull", {"model": MODEL}, 404, "/api/pull"),
        ):
            wrong = await post(http, path, body, status)
            assert wrong.keys() == {"error"}
            assert why in wrong["error"]
        lines = await broken_off(w, lines_of(http, "/api/chat", CHAT))
        assert lines[0]["message"]["content"] == "half"
        assert "error" in lines[-1]


async def test_a_key_is_asked_for_on_ollamas_paths_too(directory: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(f'alice = {{ sha256 = "{key_digest("alice").hex()}" }}\n')
    async with world(directory, access=AccessConfig(str(keys)), ready=False) as w, clients(w) as (_, http):
        assert "API key" in (await post(http, "/api/chat", CHAT, 401))["error"]
        async with http.get("/api/tags") as response:
            assert (response.status, (await response.json()).keys()) == (401, {"error"})
