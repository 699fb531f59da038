"""Validates answers strictly against the response types of Anthropic's, Ollama's and OpenAI's own clients: whole and
streamed, of several kinds. A traceback where an answer has another form, or a field of its own that is not in OURS.

official_answers.py URL
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import anthropic.types as anthropic
import httpx
import ollama
import openai.types as openai
from asked import COUNTED, NUMBERS
from openai.pagination import SyncPage
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

URL = sys.argv[1]
OURS = {
    *("cached_tokens_by_tier", "reasoning_content", "token_ids", "prompt_token_ids", "id", "max_model_len"),
    *("sampling_defaults", "root", "parent", "context_length", "index", "size_vram", "expires_at", "thinking"),
    *("store", "name", "bytes"),
}
"""Fields that an answer may have beyond the clients' types."""
HELLO = [{"role": "user", "content": "one, two"}]
CALLS = [{"role": "user", "content": COUNTED}]
OBJECT = [{"role": "user", "content": '{"a": 1}'}]
THINKS = [{"role": "user", "content": "<think>Hm.</think>Yes."}]
FUNCTION: dict[str, Any] = {"name": "multiply", "description": "Multiplies.", "parameters": NUMBERS}
CHAT_TOOLS = [{"type": "function", "function": FUNCTION}]
client = httpx.Client(base_url=URL, timeout=600)


def checked(kind: Any, text: str | bytes) -> Any:
    """Validate an answer and return it."""
    found = TypeAdapter(kind).validate_json(text, strict=True)
    more = set(extras(found)) - OURS
    assert not more, (more, text)
    return found


def extras(value: Any) -> Iterator[str]:
    """The fields that no type has, anywhere in an answer."""
    if isinstance(value, BaseModel):
        yield from value.model_extra or ()
        value = [getattr(value, name) for name in type(value).model_fields]
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from extras(inner)


def whole(path: str, kind: Any, **body: Any) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return checked(kind, answer.content)


def events(path: str, kind: Any, **body: Any) -> list[Any]:
    """Validate each event of a stream, or each line of Ollama's."""
    found: list[Any] = []
    with client.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            text = (
                line if path.startswith("/api/") else line.removeprefix("data: ") if line.startswith("data: ") else ""
            )
            if kind is openai.Completion:  # whose type is that of a whole answer: OpenAI's own chunks have null, too
                text = text.replace('"finish_reason":null', '"finish_reason":"stop"')
            if text and text != "[DONE]":
                found.append(checked(kind, text))
    assert found
    return found


def chats() -> None:
    asked: dict[str, Any] = {"model": "echo", "max_tokens": 200}
    usage = {"include_usage": True}
    for body in (
        {"messages": HELLO},
        {"messages": HELLO, "n": 2, "logprobs": True, "top_logprobs": 2, "service_tier": "auto"},
        {"messages": CALLS, "tools": CHAT_TOOLS},
        {"messages": THINKS, "return_token_ids": True},
        {"messages": OBJECT, "response_format": {"type": "json_object"}},
    ):
        whole("/v1/chat/completions", ChatCompletion, **asked | body)
        events("/v1/chat/completions", ChatCompletionChunk, **asked | body, stream_options=usage)
        events(
            "/v1/chat/completions",
            ChatCompletionChunk,
            **asked | body,
            stream_options=usage | {"continuous_usage_stats": True},
        )


def completions() -> None:
    for more in ({}, {"n": 2, "echo": True}, {"logprobs": 2}, {"prompt": ["a", "b"], "stop": [" "]}):
        body: dict[str, Any] = {"model": "echo", "prompt": "one, two", **more}
        whole("/v1/completions", openai.Completion, **body)
        events("/v1/completions", openai.Completion, **body, stream_options={"include_usage": True})


def responses() -> None:
    tools = [{"type": "function", "strict": False, **FUNCTION}]
    for more in (
        {"input": "one, two", "metadata": {"a": "b"}, "user": "u", "service_tier": "auto", "truncation": "auto"},
        {"input": "one, two", "text": {"format": {"type": "text"}, "verbosity": "low"}, "tool_choice": "none"},
        {"input": CALLS, "tools": tools},
        {"input": THINKS, "reasoning": {"summary": "auto"}},
        {"input": THINKS, "max_output_tokens": 2, "instructions": "Be kind.", "store": False},
    ):
        body: dict[str, Any] = {"model": "echo", **more}
        stored = whole("/v1/responses", Response, **body)
        events("/v1/responses", ResponseStreamEvent, **body)
        if body.get("store") is not False:
            checked(Response, client.get(f"/v1/responses/{stored.id}").content)


def messages() -> None:
    tool = {"name": "multiply", "input_schema": NUMBERS}
    for more in (
        {"messages": HELLO, "stop_sequences": ["two"]},
        {"messages": CALLS, "tools": [tool]},
        {"messages": THINKS},
    ):
        body: dict[str, Any] = {"model": "echo", "max_tokens": 200, **more}
        whole("/v1/messages", anthropic.Message, **body)
        found = events("/v1/messages", anthropic.RawMessageStreamEvent | Ping, **body)
        assert found[-1].type == "message_stop", found
    whole("/v1/messages/count_tokens", anthropic.MessageTokensCount, model="echo", messages=HELLO)


class Ping(BaseModel):
    """An event that the client's types leave out."""

    type: str


def ollamas() -> None:
    for more in ({"messages": HELLO}, {"messages": CALLS, "tools": CHAT_TOOLS}, {"messages": THINKS}, {"messages": []}):
        whole("/api/chat", ollama.ChatResponse, model="echo", stream=False, **more)
        events("/api/chat", ollama.ChatResponse, model="echo", **more)
    whole("/api/generate", ollama.GenerateResponse, model="echo", prompt="one, two", stream=False)
    events("/api/generate", ollama.GenerateResponse, model="echo", prompt="one, two")
    whole("/api/show", ollama.ShowResponse, model="echo")
    whole("/api/embed", ollama.EmbedResponse, model="speaker", input=["a", "b"])
    checked(ollama.ListResponse, client.get("/api/tags").content)
    checked(ollama.ProcessResponse, client.get("/api/ps").content)


def a_real_model_and_its_vectors() -> None:
    checked(SyncPage[openai.Model], client.get("/v1/models").content)
    checked(openai.Model, client.get("/v1/models/echo").content)
    whole("/v1/embeddings", openai.CreateEmbeddingResponse, model="speaker", input=["a", "b"])
    asked = {"model": "speaker", "input": "Hi", "max_output_tokens": 3, "include": ["message.output_text.logprobs"]}
    whole("/v1/responses", Response, **asked)
    events("/v1/responses", ResponseStreamEvent, **asked)
    answer = client.post("/v1/embeddings", json={"model": "speaker", "input": "a", "encoding_format": "base64"})
    assert isinstance(json.loads(answer.text)["data"][0]["embedding"], str)


chats()
completions()
responses()
messages()
ollamas()
a_real_model_and_its_vectors()
