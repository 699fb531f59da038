"""Anthropic's own client against the frontend at the URL given; a traceback where something is not right.

anthropic_client.py URL GUARDED KEY        GUARDED: a frontend that asks for KEY
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import anthropic
from asked import CALL, NUMBERS, PERSON, says

URL, GUARDED, KEY = sys.argv[1:]
OURS: dict[str, Any] = {"base_url": URL, "api_key": "any", "max_retries": 0, "timeout": 600}
MULTIPLY: Any = {"name": "multiply", "description": "Multiplies.", "input_schema": NUMBERS}
ASKED: Any = {"model": "echo", "max_tokens": 500, "tools": [MULTIPLY]}
client = anthropic.Anthropic(**OURS)


def error_of(asking: anthropic.Anthropic, error: type[anthropic.APIStatusError], **more: Any) -> Any:
    """The error that the client raises."""
    try:
        asking.messages.create(**{"model": "echo", "max_tokens": 20, "messages": says("x"), **more})
    except error as wrong:
        return wrong
    raise AssertionError(f"no {error.__name__}")


def refused(error: type[anthropic.APIStatusError], status: int, kind: str, why: str, **more: Any) -> None:
    wrong = error_of(client, error, **more)
    assert (wrong.status_code, wrong.body["error"]["type"]) == (status, kind), wrong.body
    assert why in wrong.body["error"]["message"], wrong.body
    assert wrong.request_id, wrong


def the_model_calls_and_gets_the_result() -> None:
    """Whole and streamed; the message goes back as the client has it, with two results in one turn."""
    messages = says(f"I count. {CALL}\n{CALL}")
    whole = client.messages.create(**ASKED, messages=messages)
    with client.messages.stream(**ASKED, messages=messages) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert kinds[0] == "message_start", kinds
    assert kinds[-1] == "message_stop", kinds
    assert "input_json" in kinds, kinds
    for answer in (whole, streamed):
        text, first, second = answer.content
        assert (text.type, text.text) == ("text", "I count. "), answer
        assert [(use.type, use.name, use.input) for use in (first, second)] == [
            ("tool_use", "multiply", {"a": 6, "b": 7})
        ] * 2, answer
        assert (answer.stop_reason, answer.model, answer.role) == ("tool_use", "echo", "assistant"), answer
        assert answer.usage.output_tokens > 0, answer
        results = [{"type": "tool_result", "tool_use_id": use.id, "content": "42"} for use in (first, second)]
        turns = [*messages, {"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
        assert client.messages.create(**ASKED, messages=turns).content[0].text == "42"
    assert [block.model_dump(exclude={"id"}) for block in whole.content] == [
        block.model_dump(exclude={"id"}) for block in streamed.content
    ]
    alone: Any = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(client.messages.create(**ASKED, messages=messages, tool_choice=alone).content) == 2


def a_real_model_is_held_to_a_call_and_to_a_schema() -> None:
    asked: Any = {"model": "speaker", "max_tokens": 200, "messages": says("6 times 7?")}
    asked["extra_body"] = {"temperature": 0, "top_k": 1}  # the client has no argument for them any longer
    for choice in ({"type": "any"}, {"type": "tool", "name": "multiply"}):
        forced = client.messages.create(
            **asked, tools=[MULTIPLY], tool_choice=choice | {"disable_parallel_tool_use": True}
        )
        [use] = [block for block in forced.content if block.type == "tool_use"]
        assert (use.name, set(map(type, use.input.values()))) == ("multiply", {int}), forced
    form: Any = {"format": {"type": "json_schema", "schema": PERSON}}
    person = client.messages.create(**asked, output_config=form)
    assert '"born"' in person.content[0].text, person


def a_text_streams_and_stops() -> None:
    asked: Any = {"model": "echo", "max_tokens": 99, "messages": says("one, two; three"), "stop_sequences": [";", "x"]}
    with client.messages.stream(**asked, metadata={"user_id": "u"}) as stream:
        assert "".join(stream.text_stream) == "one, two"
        end = stream.get_final_message()
    assert (end.stop_reason, end.stop_sequence) == ("stop_sequence", ";"), end
    short = client.messages.create(**asked | {"max_tokens": 3})
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 3), short


def tokens_are_counted() -> None:
    asked: Any = {"model": "speaker", "system": "Be kind.", "messages": says("6 times 7?"), "tools": [MULTIPLY]}
    counted = client.messages.count_tokens(**asked).input_tokens
    usage = client.messages.create(**asked, max_tokens=1).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    again = client.messages.create(**asked, max_tokens=1).usage
    assert again.cache_read_input_tokens, again


async def it_streams_to_a_loop() -> None:
    async with anthropic.AsyncAnthropic(**OURS) as on_loop:

        async def ask(number: int) -> str:
            async with on_loop.messages.stream(**ASKED, messages=says(f"number {number}")) as stream:
                return (await stream.get_final_message()).content[0].text

        assert await asyncio.gather(*map(ask, range(8))) == [f"number {number}" for number in range(8)]


def what_is_wrong_is_the_clients_error() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}}
    bad = (anthropic.BadRequestError, 400, "invalid_request_error")
    refused(anthropic.NotFoundError, 404, "not_found_error", "'nobody' does not exist", model="nobody")
    for block, why in (
        (image, "images are not served"),
        (document, "files are not served"),
    ):
        refused(*bad, why, messages=[{"role": "user", "content": [block]}])
    refused(*bad, "messages: Expected", messages=[])
    refused(*bad, "thread", extra_body={"thread": {"type": "create"}})
    search: Any = {"type": "web_search_20250305", "name": "web_search"}
    refused(*bad, "tool_choice.name", tools=[search], tool_choice={"type": "tool", "name": "web_search"})


def what_has_no_effect_is_named() -> None:
    raw = client.messages.with_raw_response.create(
        **{"model": "echo", "max_tokens": 20, "messages": says("x"), "metadata": {"user_id": "u"}},
        extra_body={"no_such_field": 1},
    )
    assert set(raw.headers["x-headrace-ignored"].split(", ")) == {"metadata", "no_such_field"}, raw.headers


def a_key_comes_in_anthropics_header_or_as_a_token() -> None:
    for given in ({"api_key": KEY}, {"auth_token": KEY}):
        with anthropic.Anthropic(base_url=GUARDED, max_retries=0, **given) as known:
            known.messages.create(**ASKED, messages=says("x"))
    with anthropic.Anthropic(base_url=GUARDED, api_key="sk-wrong", max_retries=0) as stranger:
        wrong = error_of(stranger, anthropic.AuthenticationError)
    assert wrong.body["error"]["type"] == "authentication_error", wrong.body


the_model_calls_and_gets_the_result()
a_real_model_is_held_to_a_call_and_to_a_schema()
a_text_streams_and_stops()
tokens_are_counted()
asyncio.run(it_streams_to_a_loop())
what_is_wrong_is_the_clients_error()
what_has_no_effect_is_named()
a_key_comes_in_anthropics_header_or_as_a_token()
