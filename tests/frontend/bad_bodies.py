"""Bodies that must be refused, with the field that the refusal names; for both doors."""

from __future__ import annotations

import json
from typing import Any, Literal

from msgspec import Struct

from services.frontend.config import FrontendConfig
from tests.frontend.peers import CONTEXT, MODEL, VOCABULARY

EMBEDDING_SIZE = 8
STRICT = FrontendConfig(unknown_fields="refuse")

_MESSAGES = [{"role": "user", "content": "hello"}]


_BOTH_ENDS: dict[str, Any] = {"add_generation_prompt": True, "continue_final_message": True}
_OUR_WORD = "chat_template_kwargs.messages"

Operation = Literal["chat", "completions", "responses", "embeddings", "tokenize", "detokenize"]


class Bad(Struct, frozen=True):
    """One body."""

    name: str
    operation: Operation
    body: bytes
    status: int
    param: str | None = None
    code: str | None = None


def _chat(name: str, param: str | None, status: int = 400, code: str | None = None, **fields: Any) -> Bad:
    return _bad(name, "chat", {"model": MODEL, "messages": _MESSAGES, **fields}, param, status, code)


def _completion(name: str, param: str | None, status: int = 400, code: str | None = None, **fields: Any) -> Bad:
    return _bad(name, "completions", {"model": MODEL, "prompt": "hello", **fields}, param, status, code)


def _embed(name: str, param: str | None, status: int = 400, code: str | None = None, **fields: Any) -> Bad:
    return _bad(name, "embeddings", {"model": MODEL, "input": "hello", **fields}, param, status, code)


def _response(name: str, param: str | None, status: int = 400, code: str | None = None, **fields: Any) -> Bad:
    return _bad(name, "responses", {"model": MODEL, "input": "hello", **fields}, param, status, code)


def _tokenize(name: str, param: str | None, status: int = 400, code: str | None = None, **fields: Any) -> Bad:
    return _bad(name, "tokenize", {"model": MODEL, **fields}, param, status, code)


def _detokenize(name: str, param: str | None, status: int = 400, code: str | None = None, **fields: Any) -> Bad:
    return _bad(name, "detokenize", {"model": MODEL, **fields}, param, status, code)


def _bad(
    name: str,
    operation: Operation,
    body: dict[str, Any],
    param: str | None,
    status: int,
    code: str | None,
) -> Bad:
    return Bad(name, operation, json.dumps(body).encode(), status, param, code)


_NOT_BUILT = "unsupported_parameter"
_NOT_SERVED = "unsupported_value"
_TOO_LONG = "context_length_exceeded"
_UNKNOWN = "previous_response_not_found"
_GOOD = json.dumps({"model": MODEL, "messages": _MESSAGES}).encode()

_FUNCTION_CALL = {"type": "function_call", "call_id": "a", "name": "x", "arguments": ""}
_CALL_OUTPUT = {"type": "function_call_output", "call_id": "a", "output": "x"}
_PART = {"type": "text", "text": "x"}
_CALL = {"id": "1", "type": "function", "function": {"name": "a", "arguments": "{}"}}


def _item(name: str, param: str, code: str | None = None, /, **item: Any) -> Bad:
    return _response(name, f"input[0].{param}", code=code, input=[item])


def _called(call: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": "x", "tool_calls": [call]}]


def _called_with(**function: str) -> list[dict[str, Any]]:
    return _called({**_CALL, "function": {"name": "a", "arguments": "{}", **function}})


def _tool(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def _allowed(*names: str) -> dict[str, Any]:
    tools = [_tool(name) for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tools}}


def _schema(schema: dict[str, Any], name: str = "a") -> dict[str, Any]:
    return _tool(name, parameters=schema)


def _json_schema(name: str | None, schema: Any) -> dict[str, Any]:
    given = {"name": name, "schema": schema}
    return {"type": "json_schema", "json_schema": {key: value for key, value in given.items() if value is not None}}


_ANY = {"type": "json_object"}
_A = {"regex": "a"}
_LENIENT = {"type": "object", "x-guidance": {"lenient": True}}


def _nested(levels: int) -> dict[str, Any]:
    return {"x": _nested(levels - 1)} if levels else {}


BAD_BODIES = [
    Bad("nothing", "chat", b"", 400),
    Bad("not JSON", "chat", b"{model: 1}", 400),
    Bad("cut off", "chat", _GOOD[:-5], 400),
    Bad("not an object", "chat", b"[1, 2]", 400),
    Bad("null", "completions", b"null", 400),
    Bad("invalid UTF-8", "chat", _GOOD.replace(b"hello", b"h\xff\xfe"), 400),
    Bad("half a surrogate pair", "chat", _GOOD.replace(b"hello", b"\\ud800"), 400),
    Bad("an integer of 5,000 digits", "chat", _GOOD[:-1] + b', "n": ' + b"9" * 5000 + b"}", 400, "n"),
    Bad("nested deeply", "chat", _GOOD[:-1] + b', "audio": ' + b"[" * 100_000, 400),
    Bad("NaN", "chat", _GOOD[:-1] + b', "temperature": NaN}', 400),
    Bad("infinite", "chat", _GOOD[:-1] + b', "temperature": 1e999}', 400, "temperature"),
    Bad("10 MB", "chat", _GOOD[:-1] + b', "user": "' + b"x" * 10_000_000 + b'"}', 413, code="request_too_large"),
    _bad("no messages", "chat", {"model": MODEL}, "messages", 400, None),
    _bad("no prompt", "completions", {"model": MODEL}, "prompt", 400, None),
    _chat("unknown model", "model", 404, "model_not_found", model="nobody"),
    _completion("unknown model", "model", 404, "model_not_found", model="nobody"),
    _chat("a number as model", "model", model=7),
    _chat("empty messages", "messages", messages=[]),
    _chat("messages no list", "messages", messages="hello"),
    _chat("4,097 messages", "messages", messages=[{"role": "user", "content": "x"}] * 4097),
    _chat("4,097 parts", "messages[0].content", messages=[{"role": "user", "content": [_PART] * 4097}]),
    *(
        _chat(
            f"a part of type {kind}",
            "messages[0].content[1].type",
            code=_NOT_SERVED,
            messages=[{"role": "user", "content": [_PART, part]}],
        )
        for kind, part in {
            "image_url": {"type": "image_url", "image_url": {"url": "data:image/png;base64,????"}},
            "input_audio": {"type": "input_audio", "input_audio": {"data": "????", "format": "wav"}},
            "file": {"type": "file", "file": {"file_data": "????", "filename": "a.pdf"}},
        }.items()
    ),
    _chat("brackets alone", "audio", code=_NOT_BUILT, audio=[[]] * 1_000_000),
    _chat("a schema of brackets", "tools[0].function.parameters", tools=[_schema({"a": [[]] * 1_000_000})]),
    _completion("2,049 prompts", "prompt", prompt=[""] * 2049),
    _completion("a million prompts", "prompt", prompt=[[]] * 1_000_000),
    _chat("a long cache_salt", "cache_salt", cache_salt="x" * 257),
    _chat("a long prompt_cache_key", "prompt_cache_key", prompt_cache_key="x" * 257),
    _chat("a priority that is a word", "priority", priority="high"),
    _chat("a priority that is a fraction", "priority", priority=0.5),
    _chat("a priority of true", "priority", priority=True),
    _chat("a priority above 31 bits", "priority", priority=1 << 31),
    _chat("a priority of 5,000 digits", "priority", priority=10**4000),
    _chat("a priority that no key allows", "priority", code="priority_not_allowed", priority=-1),
    _completion("a priority in a list", "priority", prompt="x", priority=[1]),
    _completion("a completion's long key", "prompt_cache_key", prompt="x", prompt_cache_key="x" * 257),
    _chat("no role", "messages[0].role", messages=[{"content": "x"}]),
    _chat("a tool that names no call", "messages[0].tool_call_id", messages=[{"role": "tool", "content": "x"}]),
    _chat("a user's tool_call_id", "messages[0].tool_call_id", messages=[{**_MESSAGES[0], "tool_call_id": "x"}]),
    _chat("a user's calls", "messages[0].tool_calls", messages=[{**_MESSAGES[0], "tool_calls": [_CALL]}]),
    _chat("a user's thinking", "messages[0].reasoning_content", messages=[{**_MESSAGES[0], "reasoning_content": "x"}]),
    _chat("content a number", "messages[0].content", messages=[{"role": "user", "content": 3}]),
    _chat("no content", "messages[0].content", messages=[{"role": "user"}]),
    _chat("a user's refusal", "messages[0].refusal", messages=[{**_MESSAGES[0], "refusal": "no"}]),
    _chat("an answer's sound", "messages[0].audio", code=_NOT_BUILT, messages=[{"role": "assistant", "audio": {}}]),
    _chat(
        "an image",
        "messages[0].content[0].type",
        code=_NOT_SERVED,
        messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    ),
    _chat("a call of nothing", "messages[0].tool_calls[0].function", messages=_called({"id": "1", "type": "custom"})),
    _chat("a call's long name", "messages[0].tool_calls[0].function.name", messages=_called_with(name="n" * 257)),
    _chat("a call's unknown field", "messages[0].tool_calls[0].extra", messages=_called({**_CALL, "extra": 0})),
    _chat("calls, and the template takes none", "messages[0].tool_calls", code=_NOT_BUILT, messages=_called(_CALL)),
    _chat("unknown field", "frobnicate", frobnicate=1),
    _chat("unknown field in a message", "messages[0].x", messages=[{"role": "user", "content": "", "x": 1}]),
    *(_chat(f"n of {n!r}", "n", n=n) for n in (0, -1, 129, 1 << 70, True, 1.5, "2")),
    _chat("tools, and the template takes none", "tools", code=_NOT_BUILT, tools=[_tool("a")]),
    _chat("tools no list", "tools", tools={"type": "function"}),
    _chat("129 tools", "tools", tools=[_tool(f"a{at}") for at in range(129)]),
    _chat("a tool without a function", "tools[0].function", tools=[{"type": "function"}]),
    _chat("a custom tool", "tools", code=_NOT_BUILT, tools=[{"type": "custom", "custom": {"name": "a"}}]),
    _chat("a custom tool without itself", "tools[0].custom", tools=[{"type": "custom", "function": {"name": "a"}}]),
    _chat("a custom tool's bad name", "tools[0].custom.name", tools=[{"type": "custom", "custom": {"name": "a b"}}]),
    _chat("custom tools of one name", "tools[1].custom.name", tools=[{"type": "custom", "custom": {"name": "a"}}] * 2),
    _chat("a tool without a name", "tools[1].function.name", tools=[_tool("a"), {"type": "function", "function": {}}]),
    *(
        _chat(f"the name {name[:9]!r}", "tools[3].function.name", tools=[*map(_tool, "abc"), _tool(name)])
        for name in ("", "a b", "a.b", "a\n", "ä", "x" * 65, "a")
    ),
    _chat("a long description", "tools[0].function.description", tools=[_tool("a", description="x" * 132_000)]),
    _chat("unknown in a tool", "tools[0].function.x", tools=[_tool("a", x=1)]),
    _chat("a tool of no known strictness", "tools[0].function.strict", tools=[_tool("a", strict="very")]),
    _chat("a list as schema", "tools[0].function.parameters", tools=[_tool("a", parameters=[])]),
    _chat("a schema of no object", "tools[0].function.parameters.type", tools=[_schema({"type": "string"})]),
    _chat("a megabyte of schema", "tools[0].function.parameters", tools=[_schema({"enum": ["x" * 1_000_000]})]),
    _chat("thousands of enums", "tools[0].function.parameters", tools=[_schema({"enum": [*range(20_000)]})]),
    _chat("a schema nested deeply", "tools[0].function.parameters", tools=[_schema(_nested(65))]),
    _chat(
        "schemas of much more together", "tools", tools=[_schema({"enum": ["x" * 60_000]}, f"a{at}") for at in range(9)]
    ),
    _chat("a tool required of none", "tool_choice", tool_choice="required"),
    _chat("a tool required of a model without", "tools", code=_NOT_BUILT, tools=[_tool("a")], tool_choice="required"),
    _chat("an unknown tool_choice", "tool_choice", tool_choice="perhaps"),
    _chat("another tool_choice", "tool_choice.custom", tools=[_tool("a")], tool_choice={"type": "custom"}),
    _chat("a tool_choice of no kind", "tool_choice.type", code=_NOT_SERVED, tool_choice={"type": "web_search"}),
    _chat("no tools allowed", "tool_choice.allowed_tools.tools", tool_choice=_allowed()),
    _chat(
        "an unknown tool allowed", "tool_choice.allowed_tools.tools[0]", tools=[_tool("b")], tool_choice=_allowed("a")
    ),
    _chat("a format beside calls", "response_format", code=_NOT_BUILT, tool_choice="required", response_format=_ANY),
    _chat("parallel_tool_calls no flag", "parallel_tool_calls", parallel_tool_calls=2),
    _chat("a word that the template has not", "chat_template_kwargs.x", code=_NOT_BUILT, chat_template_kwargs={"x": 1}),
    _chat("a word that is ours", "chat_template_kwargs.tools", code=_NOT_BUILT, chat_template_kwargs={"tools": 1}),
    _chat("65 words", "chat_template_kwargs", chat_template_kwargs={f"x{at}": 1 for at in range(65)}),
    _chat("thinking_token_budget", "thinking_token_budget", code=_NOT_BUILT, thinking_token_budget=100),
    _chat("a budget below nothing", "thinking_token_budget", thinking_token_budget=-2),
    _chat("reasoning_effort", "reasoning_effort", code=_NOT_BUILT, reasoning_effort="low"),
    _chat("an effort that nobody knows", "reasoning_effort", reasoning_effort="maximal"),
    _chat("json, of workers that cannot", "response_format", code=_NOT_BUILT, response_format={"type": "json_object"}),
    _chat("an unknown format", "response_format.type", response_format={"type": "xml"}),
    _chat("a list for a schema", "response_format.json_schema.schema", response_format=_json_schema("a", [])),
    *(
        _chat(what, "response_format.json_schema.schema", response_format=_json_schema("a", schema))
        for what, schema in (
            ("an answer's schema of a megabyte", {"enum": ["x" * 1_000_000]}),
            ("thousands of enums in an answer's schema", {"enum": [*range(20_000)]}),
            ("an answer's schema nested deeply", _nested(65)),
        )
    ),
    _chat("x-guidance", "response_format.json_schema.schema.x-guidance", response_format=_json_schema("a", _LENIENT)),
    _chat("nothing structured", "structured_outputs", structured_outputs={}),
    _chat("two structures", "structured_outputs", structured_outputs={"regex": "a", "choice": ["a"]}),
    _chat("an unknown structure", "structured_outputs.structural_tag", structured_outputs={"structural_tag": "x"}),
    _chat("a format, and a structure", "structured_outputs", response_format=_ANY, structured_outputs={"regex": "a"}),
    _chat("a schema as a bad text", "structured_outputs.json", structured_outputs={"json": "{"}),
    _chat("json_object false", "structured_outputs.json_object", structured_outputs={"json_object": False}),
    _chat("a long regex", "structured_outputs.regex", structured_outputs={"regex": "a" * 17_000}),
    _chat("no choice", "structured_outputs.choice", structured_outputs={"choice": []}),
    _chat("1,001 choices", "structured_outputs.choice", structured_outputs={"choice": ["a"] * 1001}),
    _chat("a number to choose", "structured_outputs.choice[0]", structured_outputs={"choice": [1]}),
    _chat("an end ignored that a format sets", "ignore_eos", response_format=_ANY, ignore_eos=True),
    _completion("guided_json, of workers that cannot", "guided_json", code=_NOT_BUILT, guided_json={}),
    _completion("a regex, of workers that cannot", "structured_outputs.regex", code=_NOT_BUILT, structured_outputs=_A),
    _chat("a bias, of workers that add none", "logit_bias", code=_NOT_BUILT, logit_bias={"5": 1}),
    _chat("min_tokens, of workers that draw any", "min_tokens", code=_NOT_BUILT, min_tokens=1),
    *(_chat(f"min_tokens {least!r}", "min_tokens", min_tokens=least) for least in (-1, 1.5, "1", True, 1 << 31)),
    _chat("min_tokens above max_tokens", "min_tokens", min_tokens=9, max_tokens=8),
    _chat("min_tokens above max_completion_tokens", "min_tokens", min_tokens=9, max_completion_tokens=8),
    _completion("min_tokens of a prompt above max_tokens", "min_tokens", min_tokens=9, max_tokens=8),
    *(
        _completion(f"{field} no flag", field, 400, None, **{field: 1})
        for field in ("skip_special_tokens", "include_stop_str_in_output", "return_token_ids")
    ),
    _completion("spaces no flag", "spaces_between_special_tokens", spaces_between_special_tokens=1),
    *(
        _completion(f"{kept!r} tokens kept", "truncate_prompt_tokens", truncate_prompt_tokens=kept)
        for kept in (0, -2, 1.5, "1", CONTEXT, 1 << 31)
    ),
    _completion("a suffix, and tokens kept", "truncate_prompt_tokens", suffix="x", truncate_prompt_tokens=5),
    _completion("a prompt's beginning of an answer", "add_generation_prompt", add_generation_prompt=True),
    _chat("add_generation_prompt no flag", "add_generation_prompt", add_generation_prompt=1),
    _chat("continue_final_message no flag", "continue_final_message", continue_final_message="yes"),
    _chat("both ends of a prompt", "continue_final_message", **_BOTH_ENDS),
    _chat(
        "nothing to go on with",
        "messages[0].content",
        messages=[{"role": "assistant", "tool_calls": [_CALL]}],
        continue_final_message=True,
    ),
    _chat(
        "calls to go on with",
        "messages[0].tool_calls",
        messages=[{"role": "assistant", "content": "x", "tool_calls": [_CALL]}],
        continue_final_message=True,
    ),
    *(
        _chat(
            f"a {role} message to go on with",
            "messages[1].role",
            messages=[*_MESSAGES, {"role": role, "content": "be"}],
            continue_final_message=True,
        )
        for role in ("system", "developer")
    ),
    *(
        _chat(
            f"{name} of the template", f"chat_template_kwargs.{name}", code=_NOT_BUILT, chat_template_kwargs={name: "x"}
        )
        for name in ("messages", "tools", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token")
    ),
    *(
        _chat(f"prompt_logprobs {count!r}", "prompt_logprobs", code=_NOT_BUILT, prompt_logprobs=count)
        for count in (0, 1, "x")
    ),
    _chat("301 biases", "logit_bias", logit_bias={str(token): 1 for token in range(301)}),
    _chat("a bias beyond 100", "logit_bias[...]", logit_bias={"5": 100.5}),
    _chat("a bias of a long token", "logit_bias", logit_bias={"5" * 513: 1}),
    _chat("a bias of no number", "logit_bias[...]", logit_bias={"5": "1"}),
    *(
        _completion(f"a bias of {token!r}", f"logit_bias[{token}]", logit_bias={token: 1})
        for token in ("", "x", "-1", "05", "1.5", " 5", "٣", "9" * 11)
    ),
    _chat("audio", "audio", code=_NOT_BUILT, audio={"voice": "x"}),
    _chat("store", "store", code=_NOT_BUILT, store=True),
    _completion("best_of", "best_of", code=_NOT_BUILT, best_of=2),
    *(_completion(f"best_of {best!r}", "best_of", best_of=best) for best in (True, 0, "1")),
    _completion("echo a number", "echo", echo=1),
    _completion(
        "log-probabilities of a prompt, which not all workers compute",
        "logprobs",
        code=_NOT_BUILT,
        echo=True,
        logprobs=0,
    ),
    _completion("an empty answer without echo", "max_tokens", max_tokens=0),
    _completion(
        "log-probabilities of a cut prompt",
        "truncate_prompt_tokens",
        code=_NOT_BUILT,
        echo=True,
        logprobs=0,
        truncate_prompt_tokens=3,
    ),
    _completion("a suffix, and the model has no marks", "suffix", code=_NOT_BUILT, suffix="end"),
    _completion("a suffix to token ids", "suffix", suffix="end", prompt=["a", [5]]),
    _completion("a suffix no text", "suffix", suffix=["end"]),
    _completion("best_of, and more wanted", "best_of", best_of=1, n=2),
    _completion("n a flag", "n", n=True),
    _chat("temperature negative", "temperature", temperature=-0.1),
    _chat("temperature huge", "temperature", temperature=1e300),
    _chat("temperature a text", "temperature", temperature="hot"),
    _chat("temperature a flag", "temperature", temperature=True),
    _chat("top_p below zero", "top_p", top_p=-0.1),
    _chat("top_p above one", "top_p", top_p=1.01),
    _chat("top_k below -1", "top_k", top_k=-2),
    _chat("top_k huge", "top_k", top_k=10**30),
    _chat("min_p negative", "min_p", min_p=-1),
    _chat("presence_penalty", "presence_penalty", presence_penalty=2.5),
    _chat("frequency_penalty", "frequency_penalty", frequency_penalty=-3),
    _chat("repetition_penalty zero", "repetition_penalty", repetition_penalty=0),
    _chat("repetition_penalty huge", "repetition_penalty", repetition_penalty=1e9),
    _chat("seed huge", "seed", seed=1 << 70),
    _chat("seed a fraction", "seed", seed=1.5),
    _chat("max_tokens zero", "max_tokens", max_tokens=0),
    _chat("max_tokens negative", "max_tokens", max_tokens=-5),
    _chat("max_tokens beyond the context", "max_tokens", code=_TOO_LONG, max_tokens=CONTEXT),
    _chat(
        "max_completion_tokens beyond the context",
        "max_completion_tokens",
        code=_TOO_LONG,
        max_completion_tokens=CONTEXT,
    ),
    _chat("max_tokens huge", "max_completion_tokens", max_completion_tokens=1 << 62),
    _chat("two limits", "max_tokens", max_tokens=5, max_completion_tokens=6),
    _chat("a long stop string", "stop", stop="x" * 1000),
    _chat("many stop strings", "stop", stop=["x"] * 257),
    _chat("long stop strings", "stop", stop=["x" * 64] * 65),
    _chat("stop_token_ids", "stop_token_ids[1]", stop_token_ids=[3, VOCABULARY]),
    _chat("top_logprobs 21", "top_logprobs", logprobs=True, top_logprobs=21),
    _chat("top_logprobs alone", "top_logprobs", top_logprobs=2),
    _chat("logprobs a number", "logprobs", logprobs=3),
    _completion("logprobs 21", "logprobs", logprobs=21),
    _chat("stream_options alone", "stream_options", stream_options={"include_usage": True}),
    _chat("prompt too long", "messages", code=_TOO_LONG, messages=[{"role": "user", "content": "水" * CONTEXT}]),
    _completion("prompt too long", "prompt", code=_TOO_LONG, prompt="x " * CONTEXT),
    _completion("prompt fills the context", "prompt", code=_TOO_LONG, prompt=[5] * CONTEXT),
    _completion("prompt empty", "prompt", prompt=""),
    _completion("prompt without ids", "prompt", prompt=[]),
    _completion("129 prompts", "prompt", prompt=["a"] * 129),
    _completion("33 prompts for four choices each", "prompt", prompt=[[5]] * 33, n=4),
    _completion("an id beside prompts", "prompt[1]", prompt=["a", 5]),
    _completion("a prompt in a prompt", "prompt[0]", prompt=[5, [6]]),
    _completion("a prompt deeper", "prompt[0][0]", prompt=[[[5]]]),
    _completion("one prompt of two too long", "prompt[1]", code=_TOO_LONG, prompt=["a", [5] * CONTEXT]),
    _completion("one prompt of two empty", "prompt[1]", prompt=["a", ""]),
    _completion("one id of two prompts outside the vocabulary", "prompt[1][1]", prompt=["a", [5, VOCABULARY]]),
    _completion("an id outside the vocabulary", "prompt[1]", prompt=[5, VOCABULARY]),
    _completion("a negative id", "prompt[1]", prompt=[5, -1]),
    _completion("a huge id", "prompt[0]", prompt=[1 << 40]),
    _completion("a fraction as id", "prompt[0]", prompt=[1.5]),
    Bad("no JSON to embed", "embeddings", b"hello", 400),
    _bad("nothing to embed", "embeddings", {"model": MODEL}, "input", 400, None),
    _embed("an empty text to embed", "input", input=""),
    _embed("an empty list to embed", "input", input=[]),
    _embed("an empty text among others", "input[1]", input=["a", "", "b"]),
    _embed("an empty list of tokens among others", "input[2]", input=[[1], [2], []]),
    _embed("tokens and texts mixed", "input[1]", input=["a", 5]),
    _embed("tokens mixed with lists of them", "input[0]", input=[5, [5]]),
    _embed("a list of lists of texts", "input[0][0]", input=[["a"]]),
    _embed("a number to embed", "input", input=5),
    _embed("a fraction of a token", "input[0]", input=[1.5]),
    _embed("a negative token to embed", "input[0]", input=[-1]),
    _embed("a token outside the vocabulary to embed", "input[1]", input=[1, VOCABULARY]),
    _embed("a token outside the vocabulary in a list", "input[1][2]", input=[[1], [1, 2, VOCABULARY]]),
    _embed("too many inputs", "input", input=["a"] * 2049),
    _embed("more than the context to embed", "input", code=_TOO_LONG, input=[1] * (CONTEXT + 1)),
    _embed("more than the context in a list", "input[1]", code=_TOO_LONG, input=["a", "a " * (CONTEXT + 1)]),
    _embed("more tokens than are embedded at once", "input[512]", input=[[1] * CONTEXT] * 513),
    _embed("another encoding", "encoding_format", encoding_format="x"),
    _embed("no dimensions", "dimensions", dimensions=0),
    _embed("negative dimensions", "dimensions", dimensions=-3),
    _embed("more dimensions than there are", "dimensions", dimensions=EMBEDDING_SIZE + 1),
    _embed("dimensions as a text", "dimensions", dimensions="8"),
    _embed("another pooling", "pooling", pooling="cls"),
    _embed("an unknown model to embed", "model", 404, "model_not_found", model="nobody"),
    _embed("an unknown field to embed", "truncate_prompt_tokens", truncate_prompt_tokens=5),
    _embed("a salt that is no text", "cache_salt", cache_salt=5),
    _embed("no time to embed", "deadline_s", deadline_s=0),
    Bad("no JSON to respond to", "responses", b"hello", 400),
    Bad(
        "an output that is not UTF-8",
        "responses",
        b'{"model": "%b", "input": [{"type": "custom_tool_call", "call_id": "c", "name": "g", "input": "i"}, '
        b'{"type": "custom_tool_call_output", "call_id": "c", "output": "\xe9"}]}' % MODEL.encode(),
        400,
        "input[].output",
    ),
    _response("nothing to respond to", "input", input=[]),
    _response("a number to respond to", "input", input=5),
    _response("a number for an item", "input[0]", input=[5]),
    _response("4,097 items", "input", input=[{"role": "user", "content": "x"}] * 4097),
    _response("more than the context", "input", code=_TOO_LONG, input="x" * 3000),
    _response("messages to respond to", "messages", messages=_MESSAGES),
    _item("an item without content", "content", role="user"),
    _item("an item of a tool's role", "role", role="tool", content="x"),
    _item("a reference to no item", "id", type="item_reference"),
    _item("a reference to an item without a name", "id", type="item_reference", id=""),
    _item("a reference without a type to an item without a name", "id", id=""),
    _item("a reference with content", "role", id="msg_1", content="x"),
    _item("an item of an unknown type", "type", _NOT_BUILT, type="thought", id="1"),
    _response(
        "an item of a tool of OpenAI's",
        "input[1].type",
        code=_NOT_BUILT,
        input=[
            _MESSAGES[0],
            {"type": "web_search_call", "id": "1", "status": "completed", "action": {"type": "search"}},
        ],
    ),
    _item("an item that only OpenAI can read, alone", "type", _NOT_BUILT, type="compaction", encrypted_content="x"),
    _item("an item whose type is no text", "type", type=5),
    _response(
        "an input image",
        "input[0].content[0].type",
        code=_NOT_SERVED,
        input=[{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}],
    ),
    _item(
        "an image of the assistant",
        "content[0].type",
        _NOT_SERVED,
        role="assistant",
        content=[{"type": "input_image", "image_url": "x"}],
    ),
    _item("a part without text", "content[0].text", role="user", content=[{"type": "input_text"}]),
    _item(
        "a part that parts the cache",
        "content[0].prompt_cache_breakpoint",
        role="user",
        content=[{"type": "input_text", "text": "x", "prompt_cache_breakpoint": {"mode": "explicit"}}],
    ),
    _item("a phase", "phase", _NOT_BUILT, role="assistant", content="x", phase="commentary"),
    _item("a call of a long name", "name", **(_FUNCTION_CALL | {"name": "n" * 257})),
    _item("a call's namespace", "namespace", **(_FUNCTION_CALL | {"namespace": 1})),
    _response(
        "encrypted thinking",
        "input[1].encrypted_content",
        code=_NOT_BUILT,
        input=[_MESSAGES[0], {"type": "reasoning", "encrypted_content": "x"}],
    ),
    _response("no thinking, alone", "input", input=[{"type": "reasoning", "summary": []}]),
    _item(
        "thinking in very many parts",
        "content",
        type="reasoning",
        content=[{"type": "reasoning_text", "text": ""}] * 4097,
    ),
    _item(
        "thinking in short",
        "summary",
        _NOT_BUILT,
        type="reasoning",
        content=[{"type": "reasoning_text", "text": "x"}],
        summary=[{"type": "summary_text", "text": "x"}],
    ),
    _item("thinking in a short of another kind", "summary[0].type", type="reasoning", summary=[{"type": "text"}]),
    _response("a tool of OpenAI's", "tools[0].type", code=_NOT_SERVED, tools=[{"type": "web_search"}]),
    _response(
        "a namespace's bad tool",
        "tools[1].tools[0].name",
        tools=[
            {"type": "function", "name": "x"},
            {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "a b"}]},
        ],
    ),
    _response(
        "a namespace in another",
        "tools[0].tools[0].type",
        tools=[{"type": "namespace", "name": "n", "tools": [{"type": "namespace", "name": "m", "tools": []}]}],
    ),
    _response(
        "a list as schema in a namespace",
        "tools[0].tools[0].parameters.type",
        tools=[
            {
                "type": "namespace",
                "name": "n",
                "tools": [{"type": "function", "name": "a", "parameters": {"type": "array"}}],
            }
        ],
    ),
    _response(
        "a search that is forced",
        "tool_choice.type",
        code=_NOT_SERVED,
        tools=[{"type": "function", "name": "x"}],
        tool_choice={"type": "web_search"},
    ),
    _response("chat's form of a tool", "tools[0].function", tools=[_tool("a")]),
    _response("a response's bad tool", "tools[0].name", tools=[{"type": "function", "name": "x y"}]),
    _response("a response's tool twice", "tools[1].name", tools=[{"type": "function", "name": "x"}] * 2),
    _response(
        "a response's tool that takes a list",
        "tools[0].parameters.type",
        tools=[{"type": "function", "name": "x", "parameters": {"type": "array"}}],
    ),
    _response("a response's tools, and no place", "tools", code=_NOT_BUILT, tools=[{"type": "function", "name": "x"}]),
    _response("a call forced of no tool", "tool_choice", tool_choice="required"),
    _response("a call forced of an unknown tool", "tool_choice", tool_choice={"type": "function", "name": "x"}),
    _response("allowed tools", "tool_choice", tool_choice={"type": "allowed_tools", "mode": "auto", "tools": []}),
    _response("text as XML", "text.format.type", text={"format": {"type": "xml"}}),
    _response("text of few words", "text.verbosity", code=_NOT_BUILT, text={"verbosity": "low"}),
    _response("JSON of nobody", "text.format", code=_NOT_BUILT, text={"format": {"type": "json_object"}}),
    _response("thinking kept secret", "include[0]", code="unsupported_value", include=["reasoning.encrypted_content"]),
    _response("likeliest tokens of nothing", "top_logprobs", top_logprobs=3),
    _response("21 likeliest tokens", "top_logprobs", top_logprobs=21, include=["message.output_text.logprobs"]),
    _response("thinking summed up", "reasoning.summary", code=_NOT_BUILT, reasoning={"summary": "auto"}),
    _response("hard thinking", "reasoning.effort", code=_NOT_BUILT, reasoning={"effort": "high"}),
    _response("thinking now and then", "reasoning.effort", reasoning={"effort": "sometimes"}),
    _response("a response's budget", "thinking_token_budget", code=_NOT_BUILT, thinking_token_budget=5),
    _response("no output tokens", "max_output_tokens", max_output_tokens=0),
    _response("more output than the context", "max_output_tokens", code=_TOO_LONG, max_output_tokens=1_000_000),
    _response("a hot response", "temperature", temperature=3),
    _response("a response's priority as text", "priority", priority="1"),
    _response("a response's priority that no key allows", "priority", code="priority_not_allowed", priority=-1),
    _response("a response's long key", "prompt_cache_key", prompt_cache_key="x" * 257),
    _response("a response's metadata of numbers", "metadata[...]", metadata={"a": 5}),
    _response(
        "a template's word for a response", "chat_template_kwargs.x", code=_NOT_BUILT, chat_template_kwargs={"x": 1}
    ),
    _response("an input cut to size", "truncation", code=_NOT_BUILT, truncation="auto"),
    _response("a response in the background", "background", code=_NOT_BUILT, background=True),
    _response("a conversation of OpenAI's", "conversation", code=_NOT_BUILT, conversation="conv_1"),
    _response("a prompt of OpenAI's", "prompt", code=_NOT_BUILT, prompt={"id": "pmpt_1"}),
    _response("a previous response that is none", "previous_response_id", code=_UNKNOWN, previous_response_id="x"),
    _response("a previous response of nobody", "previous_response_id", code=_UNKNOWN, previous_response_id="resp_f9.x"),
    _response("a previous response without a name", "previous_response_id", previous_response_id=""),
    _response(
        "padding of a response",
        "stream_options.include_obfuscation",
        code=_NOT_BUILT,
        stream=True,
        stream_options={"include_obfuscation": True},
    ),
    _response("a model of nobody to respond", "model", 404, "model_not_found", model="nobody"),
    Bad("no JSON to tokenise", "tokenize", b"hello", 400),
    _tokenize("nothing to tokenise", "prompt"),
    _tokenize("a prompt, and messages", "prompt", prompt="x", messages=_MESSAGES),
    _tokenize("prompts to tokenise", "prompt", prompt=["x"]),
    _tokenize("no messages to tokenise", "messages", messages=[]),
    _tokenize(
        "a user's calls to tokenise", "messages[0].tool_calls", messages=[{**_MESSAGES[0], "tool_calls": [_CALL]}]
    ),
    _tokenize("an unknown model to tokenise", "model", 404, "model_not_found", model="nobody", prompt="x"),
    _tokenize("an unknown field to tokenise", "x", prompt="x", x=1),
    _tokenize("a prompt's tools", "tools", prompt="x", tools=[_tool("a")]),
    _tokenize("a prompt's words", "chat_template_kwargs", prompt="x", chat_template_kwargs={}),
    _tokenize("a prompt's answer", "add_generation_prompt", prompt="x", add_generation_prompt=True),
    _tokenize("tools to tokenise, and no place", "tools", code=_NOT_BUILT, messages=_MESSAGES, tools=[_tool("a")]),
    _tokenize("a bad tool to tokenise", "tools[0].function.name", messages=_MESSAGES, tools=[_tool("a b")]),
    _tokenize("a template", "chat_template", code=_NOT_BUILT, messages=_MESSAGES, chat_template="{{ messages }}"),
    _tokenize("a prompt's message to go on with", "continue_final_message", prompt="x", continue_final_message=True),
    _tokenize("a prompt's thinking", "enable_thinking", prompt="x", enable_thinking=False),
    _tokenize("a prompt's effort", "reasoning_effort", prompt="x", reasoning_effort="low"),
    _tokenize("a prompt's choice of tools", "tool_choice", prompt="x", tool_choice="none"),
    _tokenize("both ends to tokenise", "continue_final_message", messages=_MESSAGES, **_BOTH_ENDS),
    _tokenize(
        "a word of ours to tokenise",
        _OUR_WORD,
        code=_NOT_BUILT,
        messages=_MESSAGES,
        chat_template_kwargs={"messages": "x"},
    ),
    _tokenize("nothing kept to tokenise", "truncate_prompt_tokens", prompt="x", truncate_prompt_tokens=0),
    _tokenize("more kept than the context", "truncate_prompt_tokens", prompt="x", truncate_prompt_tokens=CONTEXT),
    _tokenize("more than 1 Mi tokens", "prompt", prompt="水" * 400_000),
    _detokenize("nothing to detokenise", "tokens"),
    _detokenize("a text to detokenise", "tokens", tokens="x"),
    _detokenize("another vocabulary's id", "tokens[1]", tokens=[5, VOCABULARY]),
    _detokenize("a negative id to detokenise", "tokens[0]", tokens=[-1]),
    _detokenize("more than 1 Mi ids", "tokens", tokens=[5] * ((1 << 20) + 1)),
    _detokenize("an unknown field to detokenise", "skip_special_tokens", tokens=[5], skip_special_tokens=True),
    _detokenize("an unknown model to detokenise", "model", 404, "model_not_found", model="nobody", tokens=[5]),
]

IGNORED = {
    "unknown field": "frobnicate",
    "unknown field in a message": "messages[].x",
    "reasoning_effort": "reasoning_effort",
    "store": "store",
    "stream_options alone": "stream_options",
    "an unknown field to embed": "truncate_prompt_tokens",
    "messages to respond to": "messages",
    "a word that the template has not": "chat_template_kwargs.x",
    "a template's word for a response": "chat_template_kwargs.x",
    "a part that parts the cache": "input[].content[].prompt_cache_breakpoint",
    "an answer's sound": "messages[].audio",
    "an item of a tool of OpenAI's": "input[].web_search_call",
    "a phase": "input[].phase",
    "encrypted thinking": "input[].encrypted_content",
    "thinking in short": "input[].summary",
    "a tool of OpenAI's": "tools[].web_search",
    "text of few words": "text.verbosity",
    "thinking kept secret": "include[].reasoning.encrypted_content",
    "thinking summed up": "reasoning.summary",
    "hard thinking": "reasoning.effort",
    "an input cut to size": "truncation",
    "padding of a response": "stream_options.include_obfuscation",
    "an unknown field to tokenise": "x",
    "a prompt's beginning of an answer": "add_generation_prompt",
    "an unknown field to detokenise": "skip_special_tokens",
}
"""Bodies that are bad only for fields that have no effect → the name of that field in the answer's header."""

BAD_OTHERWISE = {
    "a call's unknown field": "messages[0].tool_calls",
    "unknown in a tool": "tools",
    "a format beside calls": "tool_choice",
    "an unknown structure": "structured_outputs",
    "chat's form of a tool": "tools[0].name",
    "an item that only OpenAI can read, alone": "input",
}
"""Bodies that are bad without those fields too → the field that is named then."""
