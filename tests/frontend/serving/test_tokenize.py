from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import aiohttp
import msgspec
import pytest

from services.frontend.config import LimitsConfig
from services.frontend.models.model import Model, ModelLimits, load_model
from services.frontend.models.registry import ModelRegistry
from services.frontend.output.detokenize import TokenBytes
from services.frontend.protocol.chat import ChatRequest
from services.frontend.requests.admission import Permit
from services.frontend.requests.terms import DEADLINE_HEADER
from services.frontend.serving.prompts import ImageSize
from services.frontend.serving.request_context import RequestContext, request_id
from services.frontend.serving.tokenize import TOKENS_PER_TURN, ServingTokenize
from shared import subjects
from shared.bus.memory_bus import MemoryBus
from shared.errors import InvalidRequest
from shared.hashing import unpack_tokens
from tests.frontend.cards import card_of, with_template
from tests.frontend.peers import CONTEXT, DEADLINE_S, MODEL, NAMESPACE, VOCABULARY, clients, world
from tests.frontend.pools import encode_pool

HELLO: Any = [{"role": "user", "content": "grüße 🚰"}]
RENDERED = "<|im_start|>user\ngrüße 🚰<|im_end|>\n"
BEGUN = "<|im_start|>assistant\n"


async def post(http: aiohttp.ClientSession, path: str, **body: Any) -> Any:
    async with http.post(path, json={"model": MODEL, **body}) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "application/json"
        return await response.json()


async def test_a_prompt_is_counted_as_a_completion_of_it_would_be(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (client, http):
        w.say("x")
        answer = await post(http, "/tokenize", prompt="grüße 🚰")
        completion = await client.completions.create(model=MODEL, prompt="grüße 🚰")
        [generate] = w.workers[0].generates.all
        tokens = unpack_tokens(generate.tokens)
        assert answer == {"count": len(tokens), "max_model_len": CONTEXT, "tokens": list(tokens), "token_strs": None}
        assert completion.usage is not None
        assert completion.usage.prompt_tokens == answer["count"]


async def test_messages_are_counted_as_a_chat_of_them_would_be(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (client, http):
        w.say("x")
        answer = await post(http, "/tokenize", messages=HELLO)
        await client.chat.completions.create(model=MODEL, messages=HELLO)
        [generate] = w.workers[0].generates.all
        assert answer["tokens"] == list(unpack_tokens(generate.tokens))
        assert len(w.router.asked.all) == 1, "only the chat's"


async def test_messages_may_end_before_an_answer_begins(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (_, http):
        for begins, text in ((None, RENDERED + BEGUN), (True, RENDERED + BEGUN), (False, RENDERED)):
            tokens = (await post(http, "/tokenize", messages=HELLO, add_generation_prompt=begins))["tokens"]
            assert (await post(http, "/detokenize", tokens=tokens)) == {"prompt": text}


async def test_special_tokens_are_put_around_a_prompt_and_around_messages_where_that_is_asked_for(copy: Path) -> None:
    file = msgspec.json.decode((copy / "tokenizer.json").read_bytes())
    file["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    (copy / "tokenizer.json").write_bytes(msgspec.json.encode(file))
    async with world(copy) as w, clients(w) as (_, http):
        for body in ({"prompt": "water"}, {"messages": HELLO}):
            without = (await post(http, "/tokenize", **body, add_special_tokens=False))["tokens"]
            around = (await post(http, "/tokenize", **body, add_special_tokens=True))["tokens"]
            assert around == [0, *without]
            default = (await post(http, "/tokenize", **body))["tokens"]
            assert default == (around if "prompt" in body else without)


async def test_tools_and_the_templates_own_words_count(copy: Path) -> None:
    with_template(copy, '{{ tools }}<tool_call>{"name": {{ messages[0].tool_calls }}{{ word }}')
    tools = [{"type": "function", "function": {"name": "weather"}}]
    async with world(copy) as w, clients(w) as (_, http):
        body = {"messages": HELLO, "tools": tools, "chat_template_kwargs": {"word": "windy"}}
        tokens = (await post(http, "/tokenize", **body))["tokens"]
        text = (await post(http, "/detokenize", tokens=tokens))["prompt"]
        assert "weather" in text
        assert text.endswith("windy")


async def test_tokens_are_named_as_in_the_vocabulary(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (_, http):
        answer = await post(http, "/tokenize", prompt="<|im_end|> a", return_token_strs=True)
        assert answer["token_strs"] == [w.tokenizer.id_to_token(token) for token in answer["tokens"]]
        assert answer["token_strs"][0] == "<|im_end|>"


async def test_tokens_become_the_text_that_the_tokenizer_makes_of_them_special_ones_too(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (_, http):
        tokens = list(range(VOCABULARY))
        text = w.tokenizer.decode(tokens, skip_special_tokens=False)
        assert await post(http, "/detokenize", tokens=tokens) == {"prompt": text}
        assert "<|im_end|>" in text
        assert await post(http, "/detokenize", tokens=[]) == {"prompt": ""}
        assert (await post(http, "/tokenize", prompt=""))["count"] == 0


async def test_what_needs_many_turns_is_the_same_and_may_be_longer_than_the_context(directory: Path) -> None:
    text = "水🚰 " * TOKENS_PER_TURN
    async with world(directory) as w, clients(w) as (_, http):
        answer = await post(http, "/tokenize", prompt=text, return_token_strs=True)
        assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) > TOKENS_PER_TURN > CONTEXT
        assert answer["tokens"] == w.ids(text)
        assert await post(http, "/detokenize", tokens=answer["tokens"]) == {"prompt": text}


async def test_both_are_asked_over_nats_too_and_an_answer_too_long_for_it_is_413(directory: Path) -> None:
    async with world(directory) as w:
        bus = MemoryBus(w.broker)

        async def ask(operation: str, **body: Any) -> tuple[Any, str | None]:
            subject = subjects.client(NAMESPACE, operation)
            message = await bus.request(subject, msgspec.json.encode(body), timeout_s=DEADLINE_S)
            return msgspec.json.decode(message.payload), message.headers.get("Headrace-Status")

        told, status = await ask("tokenize", prompt="grüße 🚰")
        assert (told["tokens"], status) == (w.ids("grüße 🚰"), None)
        assert await ask("detokenize", tokens=told["tokens"]) == ({"prompt": "grüße 🚰"}, None)
        told, status = await ask("tokenize", prompt="水" * 300_000, return_token_strs=True)
        assert (told["error"]["code"], status) == ("request_too_large", "413")


async def test_they_take_a_place_and_keep_to_their_deadline(directory: Path) -> None:
    limits = LimitsConfig(requests=1, drain_s=0.0)
    async with world(directory, limits=limits) as w, clients(w) as (client, http):
        w.workers[0].output = None
        first = asyncio.create_task(client.chat.completions.create(model=MODEL, messages=HELLO))
        [generate] = await w.workers[0].generates.at_least(1)
        for path in ("/tokenize", "/detokenize"):
            async with http.post(path, json={"prompt": "x"}) as response:
                assert (response.status, "Retry-After" in response.headers) == (429, True)
        await w.workers[0].send(generate, 0, [*w.ids("a"), 2], "stop")
        await first
        for given, status in (("0.000001", 504), ("soon", 400)):
            async with http.post(
                "/tokenize", json={"prompt": "x" * 200_000}, headers={DEADLINE_HEADER: given}
            ) as response:
                assert (given, response.status) == (given, status)
        await post(http, "/tokenize", prompt="x")
        assert w.metric("headrace_requests_total", operation="tokenize", status="200") == 1
        assert w.metric("headrace_requests_total", operation="tokenize", status="429") == 1


class OneModel:
    """Models, of which there is one."""

    def __init__(self, model: Model) -> None:
        self._model = model

    async def wait_expected(self, _name: str | None) -> None:
        """None is expected."""

    def find(self, _name: str | None) -> tuple[Model, ModelLimits]:
        return self._model, ModelLimits(CONTEXT, VOCABULARY, grammars=False, biases=False)


async def no_sizes(_request: ChatRequest, _limits: ModelLimits, _context: RequestContext) -> list[ImageSize]:
    return []


async def test_a_text_much_longer_than_its_tokens_is_refused(directory: Path) -> None:
    long = TokenBytes([b" " * 1024] * VOCABULARY, [b" " * 1024] * VOCABULARY, strip_first_space=False)
    model = msgspec.structs.replace(load_model(card_of(directory), directory), token_bytes=long)
    context = RequestContext(request_id(), cast(Permit, None), 0.0)
    with encode_pool() as pool:
        tokens = ServingTokenize(cast(ModelRegistry, OneModel(model)), LimitsConfig(), no_sizes)
        fits = await tokens.answer("detokenize", msgspec.json.encode({"tokens": [5] * 8192}), pool, context)
        assert len(msgspec.json.decode(fits)["prompt"]) == 8 << 20
        with pytest.raises(InvalidRequest) as refusal:
            await tokens.answer("detokenize", msgspec.json.encode({"tokens": [5] * 8193}), pool, context)
        assert refusal.value.param == "tokens"


async def test_messages_take_the_fields_of_a_chat_that_its_prompt_depends_on(copy: Path) -> None:
    with_template(
        copy,
        '{{ tools }}<tool_call>{"name": {{ messages[0].tool_calls }}'
        "{% for m in messages %}[{{ m.content }}]{% endfor %}"
        "{{ enable_thinking }}{{ reasoning_effort }}{% if add_generation_prompt %}So:{% endif %}",
    )
    tools = [{"type": "function", "function": {"name": "weather"}}]
    turns = [*HELLO, {"role": "assistant", "content": "I"}]
    async with world(copy) as w, clients(w) as (_, http):
        for fields in (
            {"enable_thinking": False},
            {"chat_template_kwargs": {"enable_thinking": True, "unread": 1}},
            {"reasoning_effort": "low"},
            {"tools": tools, "tool_choice": "none"},
            {"tools": tools},
            {"add_generation_prompt": False},
            {"messages": turns, "continue_final_message": True},
            {"truncate_prompt_tokens": 5},
        ):
            w.say("x")
            body = {"messages": HELLO, **fields}
            tokens = (await post(http, "/tokenize", **body))["tokens"]
            await post(http, "/v1/chat/completions", **body)
            assert tokens == list(unpack_tokens(w.workers[0].generates.all[-1].tokens)), fields
        text = (await post(http, "/detokenize", tokens=tokens))["prompt"]
        assert len(tokens) == 5
        assert text.endswith("So:")


async def test_variables_that_no_template_reads_are_ignored_by_name(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (_, http):
        body = {"model": MODEL, "messages": HELLO, "chat_template_kwargs": {"unread": 1}}
        async with http.post("/tokenize", json=body) as response:
            assert response.status == 200
            assert response.headers["X-Headrace-Ignored"] == "chat_template_kwargs.unread"
