"""OpenAI's own client: every operation, in its types, whole and streamed, in threads and on a loop, and its errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import aiohttp
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessage, ChatCompletionMessageFunctionToolCall
from pydantic import BaseModel

from tests.clients.served import ECHO, KEY, LIMIT_S, SLOW_KEY, SPEAKER, Served, says

pytestmark = pytest.mark.timeout(1200)

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME: Any = {"type": "function", "function": {"name": "get_time"}}
CALLS: list[tuple[str, dict[str, Any]]] = [("weather", {"city": "Zürich 🚰"}), ("get_time", {})]
LONG: Any = {"model": SPEAKER, "messages": [{"role": "user", "content": "Tell me of a mill."}], "max_tokens": 2000}
ENDLESS: Any = {**LONG, "extra_body": {"ignore_eos": True}}


class Person(BaseModel):
    """A person."""

    name: str
    born: int
    likes: Literal["rivers", "mills"]


@pytest.fixture
def client(stack: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=stack.url, api_key="any", max_retries=0, timeout=LIMIT_S) as client:
        yield client


@pytest.fixture
def on_loop(stack: Served) -> AsyncOpenAI:
    """To be entered by who uses it."""
    return AsyncOpenAI(base_url=stack.url, api_key="any", max_retries=0, timeout=LIMIT_S)


def asks(text: str) -> Any:
    return [{"role": "user", "content": text}]


def called(message: ChatCompletionMessage) -> list[tuple[str, dict[str, Any]]]:
    calls = [call for call in message.tool_calls or () if isinstance(call, ChatCompletionMessageFunctionToolCall)]
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


# --- chats and completions


def test_a_chat_is_the_same_whole_and_streamed(client: OpenAI) -> None:
    asked: Any = {"model": SPEAKER, "messages": asks("What is the capital of France?"), "temperature": 0}
    whole = client.chat.completions.create(max_tokens=24, **asked)
    assert "Paris" in (whole.choices[0].message.content or "")
    assert whole.usage is not None
    with client.chat.completions.stream(max_tokens=24, stream_options={"include_usage": True}, **asked) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "content.delta" in events
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason
    assert final.usage is not None
    assert final.usage.completion_tokens == whole.usage.completion_tokens


def test_log_probabilities_come_in_their_types(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=SPEAKER, messages=asks("Hi"), max_tokens=4, logprobs=True, top_logprobs=2, temperature=0
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    for entry in logprobs.content:
        assert entry.token.encode() == bytes(entry.bytes or ())
        assert entry.top_logprobs[0].token == entry.token
        assert len(entry.top_logprobs) == 2


def test_a_completion_is_the_same_whole_and_streamed(client: OpenAI) -> None:
    asked: Any = {"model": SPEAKER, "prompt": "The river turns the mill, and the mill", "temperature": 0}
    whole = client.completions.create(max_tokens=12, **asked)
    pieces = [chunk.choices[0].text for chunk in client.completions.create(max_tokens=12, stream=True, **asked)]
    assert whole.choices[0].text
    assert "".join(pieces) == whole.choices[0].text
    assert len(pieces) > 2


def test_models_are_listed_and_found_by_name(client: OpenAI) -> None:
    assert {model.id for model in client.models.list()} == {SPEAKER, ECHO}
    found = client.models.retrieve(SPEAKER)
    assert (found.id, found.object, found.owned_by) == (SPEAKER, "model", "headrace")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


# --- tools


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_calls_come_and_their_results_go_back(client: OpenAI, streamed: bool) -> None:
    messages = asks(says(*CALLS, text="I look.\n"))
    asked: Any = {"model": ECHO, "tools": [WEATHER, TIME]}
    if streamed:
        with client.chat.completions.stream(messages=messages, **asked) as stream:
            [choice] = stream.get_final_completion().choices
        finish, message = choice.finish_reason, choice.message
    else:
        [plain] = client.chat.completions.create(messages=messages, **asked).choices
        finish, message = plain.finish_reason, plain.message
    assert finish == "tool_calls"
    assert message.content == "I look.\n"
    assert called(message) == CALLS
    results: Any = [{"role": "tool", "tool_call_id": call.id, "content": "warm"} for call in message.tool_calls or ()]
    sent: Any = message
    end = client.chat.completions.create(messages=[*messages, sent, *results], **asked)
    assert end.choices[0].message.content == "warm"
    assert end.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_real_model_is_held_to_a_call_whole_and_streamed(client: OpenAI, choice: Any) -> None:
    asked: Any = {"model": SPEAKER, "messages": asks("How warm is it in Bern?"), "temperature": 0, "max_tokens": 100}
    asked |= {"tools": [strict(WEATHER)], "tool_choice": choice, "parallel_tool_calls": False}
    whole = client.chat.completions.create(**asked).choices[0]
    with client.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert (whole.finish_reason, streamed.finish_reason) == ("tool_calls", "tool_calls")
    [(name, arguments)] = called(whole.message)
    assert name == "weather"
    assert isinstance(arguments.pop("city"), str)
    assert not arguments
    assert called(streamed.message) == called(whole.message)


def strict(tool: Any) -> Any:
    """The tool, with nothing but what its schema names."""
    function = tool["function"]
    parameters = {**function["parameters"], "additionalProperties": False}
    return {**tool, "function": {**function, "parameters": parameters, "strict": True}}


# --- structured output


def test_a_pydantic_model_is_parsed_whole_and_streamed(client: OpenAI) -> None:
    asked: Any = {"model": SPEAKER, "messages": asks("Who was Ada Lovelace?"), "temperature": 0, "max_tokens": 200}
    parsed = client.chat.completions.parse(response_format=Person, **asked).choices[0].message.parsed
    assert isinstance(parsed, Person)
    with client.chat.completions.stream(response_format=Person, **asked) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == parsed


def test_a_forced_call_is_parsed_into_a_pydantic_model(client: OpenAI) -> None:
    asked = client.chat.completions.parse(
        model=SPEAKER,
        messages=asks("Who was Ada Lovelace?"),
        tools=[openai.pydantic_function_tool(Person)],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=200,
    )
    [call] = asked.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Person)


def test_an_answer_that_was_cut_off_is_the_clients_error_for_that(client: OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(
            model=SPEAKER, messages=asks("Who was Ada?"), response_format=Person, max_tokens=3, temperature=0
        )


def test_a_strict_tool_may_be_left_to_the_model(client: OpenAI) -> None:
    """As `pydantic_function_tool` makes them, and no `tool_choice`."""
    [choice] = client.chat.completions.create(
        model=SPEAKER,
        messages=asks("Who was Ada Lovelace?"),
        tools=[openai.pydantic_function_tool(Person)],
        temperature=0,
        max_tokens=50,
    ).choices
    assert choice.message.content or choice.message.tool_calls


# --- several answers


def test_several_answers_are_the_same_whole_and_streamed(client: OpenAI) -> None:
    asked: Any = {"model": SPEAKER, "messages": asks("Name a river."), "max_tokens": 8, "n": 3, "seed": 7}
    whole = client.chat.completions.create(**asked)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in whole.choices]
    assert len(set(texts)) > 1
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(stream=True, **asked):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def test_several_prompts_are_answered_in_their_order(client: OpenAI) -> None:
    asked: Any = {"model": ECHO, "prompt": ["one mill", "two mills"], "max_tokens": 50}
    whole = client.completions.create(n=2, **asked)
    assert [choice.text for choice in whole.choices] == ["one mill", "one mill", "two mills", "two mills"]
    texts = {0: "", 1: ""}
    for chunk in client.completions.create(stream=True, **asked):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == {0: "one mill", 1: "two mills"}


# --- responses


def test_a_response_is_the_same_whole_and_streamed_and_goes_on(client: OpenAI) -> None:
    asked: Any = {"model": SPEAKER, "input": "What is the capital of France?", "temperature": 0}
    whole = client.responses.create(**asked)
    assert whole.output_text
    with client.responses.stream(**asked) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_response()
    assert events[0] == "response.created"
    assert "response.output_text.delta" in events
    assert final.output_text == whole.output_text
    more = client.responses.create(**{**asked, "input": "And one more."}, previous_response_id=whole.id)
    assert more.usage is not None
    assert whole.usage is not None
    assert more.usage.input_tokens > whole.usage.input_tokens
    assert client.responses.retrieve(more.id).output_text == more.output_text
    client.responses.delete(more.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(more.id)
    with pytest.raises(openai.BadRequestError) as gone:
        client.responses.create(**asked, previous_response_id=more.id)
    assert gone.value.param == "previous_response_id"


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_calls_of_a_response_come_and_their_results_go_back(client: OpenAI, streamed: bool) -> None:
    tools: Any = [{"type": "function", **tool["function"]} for tool in (WEATHER, TIME)]
    for tool in tools:
        tool.setdefault("parameters", {"type": "object", "properties": {}})
    asked: Any = {"model": ECHO, "tools": tools}
    if streamed:
        with client.responses.stream(input=says(*CALLS), **asked) as stream:
            response: Any = stream.get_final_response()
    else:
        response = client.responses.create(input=says(*CALLS), **asked)
    calls = [item for item in response.output if item.type == "function_call"]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == CALLS
    results: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "warm"} for call in calls]
    end = client.responses.create(input=results, previous_response_id=response.id, **asked)
    assert end.output_text == "warm"


def test_a_response_is_parsed_into_a_pydantic_model(client: OpenAI) -> None:
    parsed = client.responses.parse(
        model=SPEAKER, input="Who was Ada Lovelace?", text_format=Person, temperature=0, max_output_tokens=200
    )
    assert isinstance(parsed.output_parsed, Person)


# --- embeddings


def test_embeddings_are_the_same_in_either_form_and_together_or_alone(client: OpenAI) -> None:
    texts = ["The mill at the river", "A mill by a river", "Taxes are due in May"]
    asked: Any = {"model": SPEAKER, "dimensions": 64}
    usual = client.embeddings.create(input=texts, **asked)  # the client asks for base64, and unpacks it
    assert [entry.index for entry in usual.data] == [0, 1, 2]
    assert usual.usage.prompt_tokens > 0
    vectors = [entry.embedding for entry in usual.data]
    for vector in vectors:
        assert len(vector) == 64
        assert sum(x * x for x in vector) == pytest.approx(1, abs=1e-5)
    plain = client.embeddings.create(input=texts, encoding_format="float", **asked)
    alone = [client.embeddings.create(input=text, **asked).data[0].embedding for text in texts]
    for other in ([entry.embedding for entry in plain.data], alone):
        for one, vector in zip(other, vectors, strict=True):
            assert one == pytest.approx(vector, abs=1e-5)

    def near(a: int, b: int) -> float:
        return sum(x * y for x, y in zip(vectors[a], vectors[b], strict=True))

    assert near(0, 1) > near(0, 2)
    with pytest.raises(openai.BadRequestError) as wrong:
        client.embeddings.create(model=SPEAKER, input="x", dimensions=-1)
    assert wrong.value.param == "dimensions"


# --- errors


def test_errors_are_the_clients_own_classes_and_name_the_field(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=ECHO, messages=asks("x"), temperature=3)
    assert (bad.value.param, bad.value.type, bad.value.status_code) == ("temperature", "invalid_request_error", 400)
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=ECHO, messages=asks("x"), extra_body={"best_of": 2})
    assert refused.value.param == "best_of"
    ignored = client.chat.completions.with_raw_response.create(
        model=ECHO, messages=asks("x"), store=True, extra_body={"no_such_field": 1}
    )
    assert ignored.headers["X-Headrace-Ignored"] == "no_such_field, store"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nobody", messages=asks("x"))
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as large:
        client.completions.create(model=SPEAKER, prompt="mill " * 20_000)
    assert large.value.code == "context_length_exceeded"
    for text in ("request_id", "body", "message"):
        assert getattr(bad.value, text)


def test_a_grammar_that_turns_out_too_large_to_follow_is_a_bad_request_and_not_asked_again(client: OpenAI) -> None:
    too_large = {"structured_outputs": {"regex": "(a{1000}){1000}"}}
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model=SPEAKER, messages=asks("x"), max_tokens=40, extra_body=too_large)
    assert wrong.value.param == "structured_outputs.regex"
    # On a slow machine the compiler gives up first.
    assert "cannot be followed" in wrong.value.message or "compiling its grammar takes" in wrong.value.message


def test_without_the_right_key_nothing_is_answered(stack: Served) -> None:
    with OpenAI(base_url=stack.guarded, api_key="sk-wrong", max_retries=0, timeout=LIMIT_S) as stranger:
        with pytest.raises(openai.AuthenticationError) as wrong:
            stranger.models.list()
        assert wrong.value.code == "invalid_api_key"
        with pytest.raises(openai.AuthenticationError):
            stranger.chat.completions.create(model=ECHO, messages=asks("x"))
    with OpenAI(base_url=stack.guarded, api_key=KEY, max_retries=0, timeout=LIMIT_S) as known:
        assert known.chat.completions.create(model=ECHO, messages=asks("x")).choices[0].message.content == "x"


def test_a_key_beyond_its_limit_learns_when_to_ask_again(stack: Served) -> None:
    with OpenAI(base_url=stack.guarded, api_key=SLOW_KEY, max_retries=0, timeout=LIMIT_S) as client:
        raw = client.chat.completions.with_raw_response.create(model=ECHO, messages=asks("x"))
        assert raw.headers["x-ratelimit-limit-requests"] == "1"
        assert raw.headers["x-ratelimit-remaining-requests"] == "0"
        assert raw.parse().choices[0].message.content == "x"
        with pytest.raises(openai.RateLimitError) as beyond:
            client.chat.completions.create(model=ECHO, messages=asks("x"))
    assert beyond.value.code == "rate_limit_exceeded"
    assert int(beyond.value.response.headers["retry-after"]) >= 1


def test_a_deadline_of_the_client_and_one_of_the_request_are_told_apart(client: OpenAI) -> None:
    with pytest.raises(openai.APITimeoutError):
        client.chat.completions.create(**ENDLESS, timeout=0.5)
    with pytest.raises(openai.InternalServerError) as late:
        client.chat.completions.create(**LONG, extra_body={"ignore_eos": True, "deadline_s": 0.5})
    assert late.value.status_code == 504


# --- what else clients use


def test_a_raw_answer_has_its_headers(client: OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=ECHO, messages=asks("x"), extra_headers={"X-Request-Id": "mine-1"}
    )
    assert raw.headers["x-request-id"] == "mine-1"
    assert raw.headers["content-type"].startswith("application/json")
    answer = raw.parse()
    assert answer._request_id == "mine-1"
    streaming = client.chat.completions.with_streaming_response
    with streaming.create(model=ECHO, messages=asks("x"), stream=True) as streamed:
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert [line for line in streamed.iter_lines() if line][-1] == "data: [DONE]"


async def test_streams_that_are_closed_early_end_at_their_worker(on_loop: AsyncOpenAI, stack: Served) -> None:
    async with on_loop as client, aiohttp.ClientSession() as http:
        streams = [await client.chat.completions.create(stream=True, **ENDLESS) for _ in range(4)]
        for stream in streams:
            assert await anext(aiter(stream))
        for stream in streams:
            await stream.close()
        async with asyncio.timeout(LIMIT_S):
            while await running(http, stack):  # noqa: ASYNC110 another process offers nothing to wait on
                await asyncio.sleep(0.05)


async def running(http: aiohttp.ClientSession, stack: Served) -> float:
    """Requests that the frontend has."""
    async with http.get(stack.url.removesuffix("/v1") + "/metrics") as answer:
        text = await answer.text()
    lines = [line for line in text.splitlines() if line.startswith("headrace_inflight_requests")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


async def test_on_a_loop_many_are_asked_at_once(on_loop: AsyncOpenAI) -> None:
    async with on_loop as client:

        async def ask(number: int) -> str:
            text = says(("weather", {"city": f"{number}"}))
            if number % 2:
                answer = await client.chat.completions.create(model=ECHO, messages=asks(text), tools=[WEATHER])
                message = answer.choices[0].message
            else:
                async with client.chat.completions.stream(model=ECHO, messages=asks(text), tools=[WEATHER]) as stream:
                    message = (await stream.get_final_completion()).choices[0].message
            [(_, arguments)] = called(message)
            return str(arguments["city"])

        assert await asyncio.gather(*map(ask, range(16))) == [str(number) for number in range(16)]
