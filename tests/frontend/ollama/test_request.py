"""Bodies of Ollama's API as chats and completions: what a field becomes, what is ignored, what is refused by name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from services.frontend.ollama.request import (
    OllamaChatRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
    as_chat,
    as_embedding,
    generates,
    unloads,
)
from services.frontend.protocol.chat import ChatRequest
from services.frontend.protocol.completions import CompletionRequest
from services.frontend.protocol.decoding import decode_body
from services.frontend.protocol.embeddings import EmbeddingRequest
from services.frontend.protocol.foreign import ThinkingSupport
from services.frontend.protocol.ignored_fields import REFUSE, IgnoredFields
from services.frontend.protocol.messages import messages_as_rendered
from services.frontend.protocol.structured import JsonObjectFormat, JsonSchemaFormat
from shared.errors import InvalidRequest
from tests.frontend.foreign import CITY, HELLO, PLAIN

THINKS = ThinkingSupport(thinks=True, reads=("enable_thinking",))
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}


def called(*cities: str, **more: str) -> dict[str, Any]:
    calls = [{"function": {"name": "weather", "arguments": {"city": city}}} | more for city in cities]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def chat(support: ThinkingSupport = PLAIN, /, **fields: Any) -> tuple[ChatRequest, tuple[str, ...]]:
    body = msgspec.json.encode({"model": "tiny:latest", "messages": HELLO, **fields})
    ignored = IgnoredFields()
    asked = as_chat(decode_body(OllamaChatRequest, body, ignored), support, ignored)
    assert isinstance(asked, ChatRequest)
    return asked, tuple(ignored.names)


def text(**fields: Any) -> ChatRequest | CompletionRequest:
    body = msgspec.json.encode({"model": "tiny", "prompt": "hello", **fields})
    return as_chat(decode_body(OllamaGenerateRequest, body), PLAIN, REFUSE)


def test_options_are_the_fields_of_a_chat() -> None:
    options = {
        **{"num_predict": 9, "temperature": 0.5, "top_k": 3, "top_p": 0.25, "min_p": 0.1, "seed": 7, "stop": ["x"]},
        **{"repeat_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25},
    }
    asked, ignored = chat(options=options)
    assert (asked.model, asked.stream, asked.max_tokens, asked.seed, asked.stop) == ("tiny", True, 9, 7, ["x"])
    assert (asked.temperature, asked.top_k, asked.top_p, asked.min_p) == (0.5, 3, 0.25, 0.1)
    assert (asked.repetition_penalty, asked.presence_penalty, asked.frequency_penalty) == (1.5, 0.5, 0.25)
    assert ignored == ()
    assert chat(stream=False)[0].stream is False


@pytest.mark.parametrize("limit", [-1, -2, 0])
def test_no_limit_is_the_rest_of_the_context(limit: int) -> None:
    assert chat(options={"num_predict": limit})[0].max_tokens is None


def test_what_only_loads_a_model_is_ignored_and_named() -> None:
    options = {"num_ctx": 4096, "num_gpu": 1, "use_mmap": True, "mirostat": 0, "tfs_z": 1.0, "repeat_last_n": None}
    assert chat(options={"no_such_option": 1})[1] == ("options.no_such_option",)
    _, ignored = chat(options=options, keep_alive="5m", truncate=True, shift=False)
    assert set(ignored) == {"options.num_ctx", "options.num_gpu", "options.use_mmap", "keep_alive", "truncate"}


def test_results_belong_to_the_oldest_call_of_their_tool_and_calls_without_ids_get_one() -> None:
    other = {"function": {"name": "clock", "arguments": {}}}
    calls = called("Zürich", "Genf")
    calls["tool_calls"].append(other)
    turns = [
        *HELLO,
        calls | {"thinking": "hm"},
        {"role": "tool", "tool_name": "clock", "content": "noon"},
        {"role": "tool", "tool_name": "weather", "content": "warm"},
        {"role": "tool", "content": "cold"},
    ]
    rendered = messages_as_rendered(chat(messages=turns, tools=[WEATHER])[0].messages)
    made = [call["id"] for call in rendered[1]["tool_calls"]]
    assert len(set(made)) == 3
    assert all(len(one) == 9 and one.isalnum() for one in made)
    assert rendered[1]["reasoning_content"] == "hm"
    assert [(turn["content"], turn["tool_call_id"]) for turn in rendered[2:]] == [
        *(("noon", made[2]), ("warm", made[0]), ("cold", made[1])),
    ]
    *_, again = chat(messages=[*turns, {"role": "tool", "name": "weather", "content": "again"}])[0].messages
    assert (again.name, again.tool_call_id in made) == ("weather", False), "a result of no call is one, as in Ollama"


def test_ids_of_calls_may_be_repeated_and_need_no_form() -> None:
    def result(content: str, **more: str) -> dict[str, Any]:
        return {"role": "tool", "content": content, **more}

    turns = [
        called("Zürich", "Łódź", id="one"),
        called("Rome", id="two"),
        *(result("2", tool_call_id="two"), result("0", tool_call_id="one", tool_name="weather")),
        *(called("Oslo", id=""), called("Bern", id="one")),
        *(result("4", tool_call_id="one"), result("1", tool_call_id="one"), result("3", tool_call_id="")),
    ]
    rendered = messages_as_rendered(chat(messages=turns)[0].messages)
    made = [call["id"] for turn in rendered for call in turn.get("tool_calls", ())]
    assert made == [f"call{number:05}" for number in range(5)]
    answered = {turn["content"]: turn["tool_call_id"] for turn in rendered if turn["role"] == "tool"}
    assert answered == {str(number): one for number, one in enumerate(made)}
    for former, more in ((turns, {}), (turns[:1], {"tool_name": "other"})):
        *_, other = chat(messages=[*former, result("x", tool_call_id="one", **more)])[0].messages
        assert other.tool_call_id not in (made if former is turns else made[:1])


def test_arguments_are_an_object_or_its_text_or_missing() -> None:
    given: list[Any] = [{"a": 1}, '{"a": 1}', '{"a": ', None]
    turn = {"role": "assistant", "tool_calls": [{"function": {"name": "a.b", "arguments": one}} for one in given]}
    [_, found] = messages_as_rendered(chat(messages=[*HELLO, turn])[0].messages)
    assert [one["function"]["arguments"] for one in found["tool_calls"]] == ['{"a":1}', '{"a": 1}', '{"a": ', ""]


def test_a_result_belongs_to_the_models_last_turn_if_an_earlier_call_without_result_has_the_same_id() -> None:
    def results_of(*turns: dict[str, Any]) -> dict[str, str]:
        rendered = messages_as_rendered(chat(messages=list(turns))[0].messages)
        return {turn["content"]: turn["tool_call_id"] for turn in rendered if turn["role"] == "tool"}

    def result(content: str) -> dict[str, Any]:
        return {"role": "tool", "content": content, "tool_call_id": "call_0", "tool_name": "weather"}

    abandoned, question = called("Zürich", id="call_0"), {"role": "user", "content": "Leave that. Genf?"}
    again = called("Genf", id="call_0")
    assert results_of(abandoned, question, again, result("1")) == {"1": "call00001"}
    assert results_of(abandoned, question, again, result("1"), result("0")) == {"1": "call00001", "0": "call00000"}
    # Clients that append each line of a stream have several messages of one turn; those are answered in their order.
    turn = (called("Rome", id="call_0"), called("Oslo", id="call_0"))
    assert results_of(abandoned, question, *turn, result("1"), result("2")) == {"1": "call00001", "2": "call00002"}


def test_a_format_holds_the_answer() -> None:
    assert isinstance(chat(format="json")[0].response_format, JsonObjectFormat)
    schema = chat(format=CITY)[0].response_format
    assert isinstance(schema, JsonSchemaFormat)
    assert schema.json_schema is not None
    assert schema.json_schema.schema == CITY
    assert chat(format="")[0].response_format is None


def test_thinking_is_the_templates_switch() -> None:
    assert chat(THINKS, think=True)[0].chat_template_kwargs == {"enable_thinking": True}
    assert chat(THINKS, think=False)[0].reasoning_effort == "none"
    low = chat(THINKS, think="low")[0]
    assert (low.chat_template_kwargs, low.reasoning_effort) == ({"enable_thinking": True}, "low")
    assert chat(THINKS)[0].chat_template_kwargs is None


def test_a_prompt_is_a_chat_unless_it_is_raw_or_has_a_suffix() -> None:
    asked = text(system="Be kind.")
    assert isinstance(asked, ChatRequest)
    assert [(message.role, message.content) for message in asked.messages] == [
        ("system", "Be kind."),
        ("user", "hello"),
    ]
    raw = text(raw=True, options={"num_predict": 3})
    assert isinstance(raw, CompletionRequest)
    assert (raw.prompt, raw.suffix, raw.max_tokens) == ("hello", None, 3)
    between = text(suffix="world")
    assert isinstance(between, CompletionRequest)
    assert (between.prompt, between.suffix) == ("hello", "world")


def test_without_a_prompt_or_messages_nothing_is_generated() -> None:
    assert not generates(decode_body(OllamaGenerateRequest, b'{"model": "tiny"}'))
    assert not generates(decode_body(OllamaChatRequest, b'{"model": "tiny", "messages": []}'))
    assert generates(decode_body(OllamaGenerateRequest, b'{"model": "tiny", "prompt": "x"}'))


@pytest.mark.parametrize("never", ["0", "0.0", "-0", '"0"', '"0s"', '"0m0s"', '"0.0h"', '"-0ms"'])
def test_a_duration_of_zero_unloads(never: str) -> None:
    assert unloads(decode_body(OllamaChatRequest, b'{"model": "m", "keep_alive": %b}' % never.encode()))


@pytest.mark.parametrize("keep", ["null", "-1", "300", '"5m"', '"0s1m"', '"-1"', '""', "0.5"])
def test_another_duration_does_not_unload(keep: str) -> None:
    assert not unloads(decode_body(OllamaGenerateRequest, b'{"model": "m", "keep_alive": %b}' % keep.encode()))


def test_the_models_former_field_is_name() -> None:
    shown = [{"name": "m"}, {"model": "", "name": "m"}, {"model": "m", "name": "x"}]
    assert [decode_body(OllamaShowRequest, msgspec.json.encode(one)).asked for one in shown] == ["m", "m", "m"]
    for one in ({}, {"name": ""}, {"model": None}):
        with pytest.raises(InvalidRequest, match=r"^model: "):
            _ = decode_body(OllamaShowRequest, msgspec.json.encode(one)).asked


def test_a_custom_tool_is_refused_since_ollama_has_none() -> None:
    with pytest.raises(InvalidRequest, match="has no custom tools") as wrong:
        chat(tools=[{"type": "custom", "custom": {"name": "patch"}}])
    assert wrong.value.param == "tools[0].type"


def test_options_lose_their_decimals_where_ollama_drops_them() -> None:
    asked, ignored = chat(options={"top_k": 40.9, "seed": 7.0, "num_predict": -1.5, "temperature": 1})
    assert (asked.top_k, asked.seed, asked.max_tokens, asked.temperature, ignored) == (40, 7, None, 1, ())


def test_options_with_their_defaults_ask_for_nothing_that_is_refused() -> None:
    defaults = {
        **{"num_keep": 4, "seed": -1, "num_predict": -1, "top_k": 40, "top_p": 0.9, "min_p": 0.0, "tfs_z": 1.0},
        **{"typical_p": 1.0, "repeat_last_n": 64, "temperature": 0.8, "repeat_penalty": 1.1, "presence_penalty": 0.0},
        **{"frequency_penalty": 0.0, "mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1, "stop": None},
        **{"penalize_newline": True, "numa": False, "num_ctx": 2048, "num_batch": 512, "num_gpu": -1, "main_gpu": 0},
    }
    asked, ignored = chat(options=defaults)
    assert (asked.seed, asked.repetition_penalty) == (-1, 1.1)
    assert {"options.repeat_last_n", "options.num_ctx"} <= set(ignored)
    assert chat(options={"mirostat": 2})[1] == ("options.mirostat",), "Ollama does not read it any longer"
    assert chat(options={"repeat_penalty": 1.5, "repeat_last_n": 0})[0].repetition_penalty == 1.0


def test_null_stands_for_a_field_that_is_not_there() -> None:
    names = (
        "prompt",
        "suffix",
        "system",
        "raw",
        "images",
        "options",
        "format",
        "stream",
        "think",
        "template",
        "context",
    )
    body = msgspec.json.encode({"model": "m", **dict.fromkeys(names)})
    assert not generates(decode_body(OllamaGenerateRequest, body))
    assert not generates(decode_body(OllamaChatRequest, b'{"model": "m", "messages": null, "tools": null}'))
    assert (
        as_embedding(decode_body(OllamaEmbedRequest, b'{"model": "m", "input": "x", "dimensions": 0}')).dimensions
        is None
    )


def test_inputs_are_those_of_embeddings() -> None:
    body = (
        b'{"model": "tiny:latest", "input": ["a", "b"], "dimensions": 8, "truncate": true, "options": {"num_ctx": 9}}'
    )
    asked: Any = ["a", "b"]
    assert as_embedding(decode_body(OllamaEmbedRequest, body)) == EmbeddingRequest(
        input=asked, model="tiny", dimensions=8
    )


@pytest.mark.parametrize(
    ("fields", "param", "why"),
    [
        ({"options": {"temperature": 3}}, "options.temperature", "<= 2"),
        ({"options": {"num_predict": "many"}}, "options.num_predict", "Expected `int"),
        ({"options": {"repeat_penalty": 0}}, "options.repeat_penalty", "> 0"),
        ({"options": {"stop": [""]}}, "options.stop[0]", "stops nothing"),
        ({"options": {"typical_p": 0.5}}, "options.typical_p", "not supported"),
        ({"options": {"no_such_option": 1}}, "options.no_such_option", "not supported"),
        ({"format": "yaml"}, "format", "neither json nor"),
        ({"think": True}, "think", "not known to think"),
        ({"logprobs": True}, "logprobs", "not supported"),
        ({"x": 1}, "x", "unknown field"),
        ({"messages": [{"role": "system", "content": "x", "images": ["AAAA"]}]}, "messages[0].images[0]", "not served"),
        ({"messages": [called("x") | {"role": "user"}]}, "messages[0].tool_calls", "only role assistant"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name", "two tools"),
    ],
)
def test_what_cannot_be_served_is_refused_by_its_name(fields: dict[str, Any], param: str, why: str) -> None:
    body = msgspec.json.encode({"model": "tiny", "messages": HELLO, **fields})
    with pytest.raises(InvalidRequest) as wrong:
        as_chat(decode_body(OllamaChatRequest, body), PLAIN, REFUSE)
    assert wrong.value.param == param
    assert why in str(wrong.value)
    assert param in str(wrong.value)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"raw": True, "system": "x"}, "system"),
        ({"suffix": "x", "think": True}, "think"),
        ({"template": "x"}, "template"),
        ({"context": [1]}, "context"),
        ({"images": ["AAAA"], "raw": True}, "images"),
        ({"raw": True, "options": {"top_p": 2}}, "options.top_p"),
    ],
)
def test_what_a_prompt_cannot_have_is_refused_by_its_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as wrong:
        text(**fields)
    assert wrong.value.param == param
