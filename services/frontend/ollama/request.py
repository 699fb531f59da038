"""The bodies of Ollama's API, and the chats, completions and embeddings that they become. Pure.

body ─▶ decode ─▶ as_chat ─▶ JSON of a chat or a completion ─▶ its own decoder, so that its rules hold
                                  └── InvalidRequest ─▶ renaming(NAMES): this body's field names

Ollama's calls have no ids, and clients that send some repeat them. So each call gets a new one here. A tool's result
belongs to a call without a result that has the result's id and tool, as far as it names them: to the oldest of the
model's last turn, else to the oldest of all.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from itertools import count, product
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct

from services.frontend.protocol import chat
from services.frontend.protocol.chat import ChatRequest
from services.frontend.protocol.completions import CompletionRequest, decode_completion
from services.frontend.protocol.decoding import Harmless, NotBuilt, not_supported
from services.frontend.protocol.embeddings import EmbeddingRequest
from services.frontend.protocol.errors import field_error
from services.frontend.protocol.foreign import Hint, ThinkingSupport, ignore, names, renaming, review
from services.frontend.protocol.ignored_fields import IgnoredFields
from services.frontend.protocol.messages import MESSAGES_LIMIT, CalledName
from services.frontend.protocol.parts import PARTS_LIMIT
from services.frontend.protocol.tools import TOOLS_LIMIT, Tools

ModelName = Annotated[str, Meta(min_length=1)]
Images = Annotated[list[str], Meta(max_length=PARTS_LIMIT)]
"""Images in base64, which do not say their format."""


class OllamaFunction(Struct, frozen=True, forbid_unknown_fields=True):
    """The function that the model called."""

    name: CalledName
    arguments: str | dict[str, Any] | None = None
    index: int | None = None


class OllamaCall(Struct, frozen=True, forbid_unknown_fields=True):
    """One of an assistant message's calls."""

    function: OllamaFunction
    id: str | None = None
    type: Literal["function"] | None = None


class OllamaMessage(Struct, frozen=True, forbid_unknown_fields=True):
    """One message of the conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: Annotated[list[OllamaCall], Meta(max_length=TOOLS_LIMIT)] | None = None
    tool_name: str | None = None
    """The tool whose result a tool's message is."""
    name: str | None = None
    """The former name of `tool_name`."""
    tool_call_id: str | None = None
    images: Images | None = None


class OllamaBody(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Fields of both chats and texts."""

    model: ModelName
    options: dict[str, Any] | None = None
    format: str | dict[str, Any] | None = None
    """The text json, or a JSON Schema."""
    stream: bool | None = None
    """False means one JSON object in place of lines."""
    think: bool | Literal["low", "medium", "high"] | None = None
    cache_salt: chat.CacheName | None = None
    """A chat has the same; Ollama has no such field."""
    keep_alive: Hint = UNSET
    truncate: Hint = UNSET
    """A conversation that does not fit the context is refused."""
    shift: Hint = UNSET
    logprobs: Annotated[NotBuilt, Harmless(False)] = None
    top_logprobs: Annotated[NotBuilt, Harmless(0)] = None


class OllamaChatRequest(OllamaBody, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /api/chat."""

    messages: Annotated[list[OllamaMessage], Meta(max_length=MESSAGES_LIMIT)] | None = None
    """Without messages nothing is generated, as Ollama then only loads the model."""
    tools: Tools | None = None


class OllamaGenerateRequest(OllamaBody, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /api/generate."""

    prompt: str | None = None
    """Without a prompt nothing is generated, as Ollama then only loads the model."""
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    """If true, the prompt is completed without a chat template."""
    images: Images | None = None
    template: Annotated[NotBuilt, Harmless("")] = None
    context: Annotated[NotBuilt, Harmless([])] = None


class OllamaEmbedRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /api/embed."""

    model: ModelName
    input: str | list[str]
    dimensions: chat.LeastTokens | None = None
    """0 means as many as the model has."""
    cache_salt: chat.CacheName | None = None
    """Embeddings at OpenAI's door have the same; Ollama has no such field."""
    options: Hint = UNSET
    keep_alive: Hint = UNSET
    truncate: Hint = UNSET
    """An input that does not fit the context is refused."""


class OllamaShowRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /api/show."""

    model: str | None = None
    name: str | None = None
    """The former name of `model`, which counts if that is missing or empty."""
    verbose: Hint = UNSET

    @property
    def asked(self) -> str:
        """The model's name. Raise InvalidRequest if there is none."""
        if found := self.model or self.name:
            return found
        raise field_error("model", "needed: the name of a model of /api/tags")


_OPTIONS = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "seed", "stop")},
    **{"presence_penalty": "presence_penalty", "frequency_penalty": "frequency_penalty"},
    **{"repeat_penalty": "repetition_penalty", "num_predict": "max_tokens"},
}
"""Each option that is served, and the field of a chat that it is."""
_INTEGERS = ("top_k", "seed", "num_predict")
"""Options of which Ollama drops the decimals."""
OPTIONS = frozenset(
    (
        *_OPTIONS,
        *("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "use_mmap", "use_mlock", "numa"),
        *("low_vram", "f16_kv", "logits_all", "vocab_only", "embedding_only"),
        *("penalize_newline", "mirostat", "mirostat_tau", "mirostat_eta", "tfs_z", "repeat_last_n"),
        "typical_p",
    )
)
"""Ollama's options. Those that are not served are ignored: how Ollama loads a model, what it does not read any longer,
and over how many tokens a repetition penalty counts, which is the whole text here."""
_IDLE: dict[str, object] = {"mirostat": 0, "tfs_z": 1, "typical_p": 1, "repeat_last_n": -1}
"""Values that ask for nothing. Another `typical_p` is refused."""
_NEVER = re.compile(rb'"?[+-]?(0+(\.0*)?[a-z\xc2\xb5]*)+"?')
"""A duration of 0, as a number of seconds or as Go writes it."""
NAMES = names(
    {
        **{f"^{field}": f"options.{option}" for option, field in _OPTIONS.items()},
        r"^response_format(\.json_schema\.schema)?": "format",
        r"^(reasoning_effort|thinking_token_budget|chat_template_kwargs.*)$": "think",
        r"^messages$": "messages",
        r"^(messages\[\d+\])\.content\[(\d+)\]\.(type|image_url)$": r"\1.images[\2]",
    }
)
"""The names of a chat's fields in this body."""


def generates(request: OllamaBody) -> bool:
    """Tell whether a request asks for an answer; if not, Ollama only loads the model."""
    if isinstance(request, OllamaGenerateRequest):
        return bool(request.prompt or request.suffix)
    return isinstance(request, OllamaChatRequest) and bool(request.messages)


def unloads(request: OllamaBody) -> bool:
    """Tell whether a request that asks for no answer asks Ollama to unload the model."""
    return request.keep_alive is not UNSET and _NEVER.fullmatch(bytes(request.keep_alive)) is not None


def served_name(model: str) -> str:
    """Return the name of a model without the tag that Ollama's clients add."""
    return model.removesuffix(":latest")


def as_chat(
    request: OllamaChatRequest | OllamaGenerateRequest, support: ThinkingSupport, ignored: IgnoredFields
) -> ChatRequest | CompletionRequest:
    """Return the request as a chat, or as a completion if it is raw or has a suffix; add the names of its fields that
    are ignored to `ignored`. Raise InvalidRequest."""
    review(request, ignored)
    fields = {**_options(request.options or {}, ignored), "model": served_name(request.model)}
    fields |= {"stream": request.stream is not False, "response_format": _format(request.format)}
    fields["cache_salt"] = request.cache_salt
    with renaming(NAMES):
        if isinstance(request, OllamaGenerateRequest) and (request.raw or request.suffix):
            for field in ("system", "think", "images"):
                if getattr(request, field):
                    raise field_error(field, "cannot be combined with raw or suffix, which use no chat template")
            fields |= {"prompt": request.prompt or "", "suffix": request.suffix or None}
            return decode_completion(msgspec.json.encode(fields), ignored)
        if isinstance(request, OllamaGenerateRequest):
            system = [{"role": "system", "content": request.system}] if request.system else []
            content = _content(request.prompt, request.images)
            fields["messages"] = [*system, {"role": "user", "content": content}]
        else:
            messages = list(_messages(request.messages or ()))
            for at, tool in enumerate(request.tools or ()):
                if tool.custom is not None:
                    raise field_error(f"tools[{at}].type", "Ollama's API has no custom tools", "unsupported_value")
            fields |= {"messages": messages, "tools": request.tools}
            last = messages[-1]
            if last["role"] == "assistant" and last["content"] and "tool_calls" not in last:
                fields["continue_final_message"] = True  # as Ollama does
        fields |= _think(request.think, support)
        return chat.decode_chat(msgspec.json.encode(fields), ignored)


def as_embedding(request: OllamaEmbedRequest) -> EmbeddingRequest:
    """Return the request as OpenAI's."""
    given: Any = request.input
    name, salt = served_name(request.model), request.cache_salt
    return EmbeddingRequest(input=given, model=name, dimensions=request.dimensions or None, cache_salt=salt)


def _options(options: dict[str, Any], ignored: IgnoredFields) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in options.items():
        if name in _OPTIONS:
            whole = name in _INTEGERS and isinstance(value, float) and math.isfinite(value)
            fields[_OPTIONS[name]] = int(value) if whole else value
        elif value is None or value == _IDLE.get(name):
            continue
        elif name == "typical_p":
            raise not_supported(f"options.{name}")
        elif name != "repeat_last_n" or value != 0:
            ignore(f"options.{name}", ignored)
    if options.get("repeat_last_n") == 0:
        fields["repetition_penalty"] = 1.0  # a penalty over no tokens
    if isinstance(limit := fields.get("max_tokens"), int) and limit <= 0:
        del fields["max_tokens"]  # -1 and -2: no limit but the context
    return fields


def _format(asked: str | dict[str, Any] | None) -> dict[str, Any] | None:
    if isinstance(asked, dict):
        return {"type": "json_schema", "json_schema": {"name": "format", "schema": asked}}
    if asked not in (None, "", "json"):
        raise field_error("format", f"{asked!r} is neither json nor a JSON Schema")
    return {"type": "json_object"} if asked else None


def _think(asked: bool | str | None, support: ThinkingSupport) -> dict[str, Any]:
    if asked is None or asked is False:
        return {} if asked is None else {"reasoning_effort": "none"}
    if not support.thinks:
        raise field_error("think", "the model is not known to think")
    return {"chat_template_kwargs": support.switch or None, "reasoning_effort": None if asked is True else asked}


def _content(text: str | None, images: Sequence[str] | None) -> str | list[dict[str, Any]]:
    """Return the content of a chat's message. Ollama shows images before the text, too."""
    if not images:
        return text or ""
    shown = [{"type": "image_url", "image_url": {"url": f"data:;base64,{image}"}} for image in images]
    return [*shown, *([{"type": "text", "text": text}] if text else [])]


def _messages(messages: Sequence[OllamaMessage]) -> Iterator[dict[str, Any]]:
    """Return the messages of a chat."""
    named: dict[str, list[tuple[str | None, str | None]]] = {}
    """The calls without a result → what a result may name: the client's id and the tool, one of them, or neither."""
    waiting: dict[tuple[str | None, str | None], dict[str, None]] = {}
    """Calls without a result by what a result may name, oldest first, so that no call is searched for."""
    latest: dict[tuple[str | None, str | None], dict[str, None]] = {}
    """Calls of the model's last turn, as above: of the last assistant message, and of those right before it."""
    numbers = count()
    for at, message in enumerate(messages):
        if message.role == "assistant" and at and messages[at - 1].role != "assistant":
            latest.clear()
        turn: dict[str, Any] = {"role": message.role, "content": _content(message.content, message.images)}
        if message.thinking:
            turn["reasoning_content"] = message.thinking
        for call in message.tool_calls or ():
            own = f"call{next(numbers):05}"  # nine letters and digits: Mistral's templates accept no other
            named[own] = list(dict.fromkeys(product((call.id or None, None), (call.function.name, None))))
            for key in named[own]:
                for calls in (waiting, latest):
                    calls.setdefault(key, {})[own] = None
            function = {"name": call.function.name, "arguments": call.function.arguments}
            turn.setdefault("tool_calls", []).append({"id": own, "type": "function", "function": function})
        if message.role == "tool":
            key = message.tool_call_id or None, message.tool_name or message.name or None
            answered = next(iter(latest.get(key) or waiting.get(key) or ()), None)
            turn["tool_call_id"] = answered or f"call{next(numbers):05}"  # a result of no call is one, as in Ollama
            if key[1] is not None:
                turn["name"] = key[1]
            for key in () if answered is None else named.pop(answered):
                del waiting[key][turn["tool_call_id"]]
                latest.get(key, {}).pop(turn["tool_call_id"], None)
        yield turn
