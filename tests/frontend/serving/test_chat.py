"""What the model recommends counts where a request says nothing; and an answer is decoded after what it continues."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from services.frontend.config import FrontendConfig
from shared.hashing import pack_tokens
from shared.messages.cards import SamplingDefaults
from shared.messages.frames import TokenLogprob
from shared.messages.generate import Sampling
from tests.frontend.peers import CONTEXT, MODEL, World, card_entry, clients, instance_entry, world
from tests.frontend.sentencepiece import FIRST_BYTE, SPECIAL, give_sentencepiece

RECOMMENDED = SamplingDefaults(temperature=0.2, top_p=0.9, top_k=40, min_p=0.05, repetition_penalty=1.1)
PROMPTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
}


@asynccontextmanager
async def recommending(directory: Path, settings: FrontendConfig | None = None) -> AsyncIterator[World]:
    async with world(directory, announced=False, settings=settings) as w:
        await w.announce_router()
        card = card_entry("w1", directory, sampling=RECOMMENDED)
        await w.announce("w1", instance_entry("worker", "w1") | card)
        await w.ready()
        yield w


async def sampling_of(w: World, path: str = "/v1/chat/completions", **fields: Any) -> Sampling:
    w.say("fine")
    async with clients(w) as (_, http), http.post(path, json={**PROMPTS[path], **fields}) as response:
        answer = await response.json()
        assert response.status == 200, answer
    sampling = w.workers[0].generates.all[-1].sampling
    if path == "/v1/responses":
        assert (answer["temperature"], answer["top_p"]) == (sampling.temperature, sampling.top_p)
    return sampling


def chosen(sampling: Sampling) -> SamplingDefaults:
    return SamplingDefaults(
        sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.repetition_penalty
    )


@pytest.mark.parametrize("path", PROMPTS)
async def test_a_request_that_says_nothing_gets_what_the_model_recommends(directory: Path, path: str) -> None:
    async with recommending(directory) as w:
        assert chosen(await sampling_of(w, path)) == RECOMMENDED
        own = await sampling_of(w, path, temperature=0, top_p=1, top_k=-1, min_p=0, repetition_penalty=1)
        assert chosen(own) == SamplingDefaults(temperature=0.0)
        async with clients(w) as (_, http), http.get(f"/v1/models/{MODEL}") as response:
            assert (await response.json())["sampling_defaults"]["temperature"] == 0.2


async def test_openais_defaults_can_be_set(directory: Path) -> None:
    async with recommending(directory, FrontendConfig(sampling_defaults="openai")) as w:
        assert chosen(await sampling_of(w)) == SamplingDefaults()
        async with clients(w) as (_, http), http.get(f"/v1/models/{MODEL}") as response:
            assert (await response.json())["sampling_defaults"]["temperature"] == 1.0


async def test_a_chat_without_a_limit_gets_the_default_one_within_the_context(directory: Path) -> None:
    async with recommending(directory, FrontendConfig(default_max_tokens=7)) as w:
        assert (await sampling_of(w)).max_tokens == 7
        assert (await sampling_of(w, max_tokens=9)).max_tokens == 9
        assert (await sampling_of(w, "/v1/completions")).max_tokens == 16
        assert (await sampling_of(w, "/v1/completions", max_tokens=-1)).max_tokens == 7
        assert (await sampling_of(w, max_completion_tokens=-1)).max_tokens == 7
    async with recommending(directory, FrontendConfig()) as w:
        found = [(await sampling_of(w, path, max_tokens=-1)).max_tokens for path in PROMPTS if "responses" not in path]
        assert all(CONTEXT - 100 < most < CONTEXT for most in found)
    async with recommending(directory, FrontendConfig(default_max_tokens=2 * CONTEXT)) as w:
        assert 0 < (await sampling_of(w)).max_tokens < CONTEXT


# --- a text is decoded after what stands before it


@asynccontextmanager
async def spaced(copy: Path, special: tuple[str, ...] = SPECIAL) -> AsyncIterator[tuple[World, aiohttp.ClientSession]]:
    """A model with a tokenizer as Llama 2's, whose workers answer " world world"."""
    tokenizer = give_sentencepiece(copy, special=special)
    token = tokenizer.token_to_id("▁world")
    assert token is not None
    async with world(copy, prompt_logprobs=True) as w, clients(w) as (_, http):
        for worker in w.workers:
            worker.output = [token, token, 2]
            worker.logprobs = [TokenLogprob(-1.0, pack_tokens([token]), (-1.0,))] * 3
        yield w, http


async def posted(http: aiohttp.ClientSession, path: str, **body: Any) -> Any:
    async with http.post(path, json={"model": MODEL, **body}) as response:
        answer = await response.json()
        assert response.status == 200, answer
        return answer


async def streamed(http: aiohttp.ClientSession, path: str, **body: Any) -> list[Any]:
    """The answer's chunks or events."""
    async with http.post(path, json={"model": MODEL, "stream": True, **body}) as response:
        lines = (await response.text()).splitlines()
        assert response.status == 200, lines
    found = [line.removeprefix("data: ") for line in lines if line and not line.startswith((":", "event: "))]
    return [json.loads(line) for line in found if line != "[DONE]"]


CONTINUED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"continue_final_message": True},
    "/v1/messages": {"max_tokens": 9},
    "/api/chat": {"stream": False},
}

PLAIN = CONTINUED | {"/v1/chat/completions": {}}


def text_in(answer: Any) -> str:
    message = answer["choices"][0].get("message") if "choices" in answer else answer.get("message")
    if message is not None:
        return str(message["content"])
    return str(answer["content"][0]["text"] if "content" in answer else answer["response"])


async def test_a_completion_continues_its_prompt(copy: Path) -> None:
    async with spaced(copy) as (w, http):
        [choice] = (await posted(http, "/v1/completions", prompt="Hello", logprobs=1))["choices"]
        assert choice["text"] == " world world"
        assert choice["logprobs"]["text_offset"][:2] == [0, 6]
        chunks = await streamed(http, "/v1/completions", prompt="Hello", stop=["d wo"], n=2)
        pieces = [one["choices"][0] for one in chunks]
        for index in (0, 1):
            assert "".join(one["text"] for one in pieces if one["index"] == index) == " worl"
        ids = w.tokenizer.encode("Hello").ids
        assert (await posted(http, "/v1/completions", prompt=ids))["choices"][0]["text"] == " world world"
        assert (await posted(http, "/v1/completions", prompt=[1]))["choices"][0]["text"] == "world world"
        shown = {"prompt": [1], "skip_special_tokens": False}
        assert (await posted(http, "/v1/completions", **shown))["choices"][0]["text"] == " world world"
        for prompt, begins in (("Hello", "Hello"), (ids, "<s> Hello"), ([1], "<s>")):
            echo = await posted(http, "/v1/completions", prompt=prompt, echo=True)
            assert echo["choices"][0]["text"] == f"{begins} world world"
        raw = await posted(http, "/api/generate", prompt="Hello", raw=True, stream=False)
        assert text_in(raw) == " world world"


async def test_a_character_that_the_prompt_begins_ends_in_the_answer(copy: Path) -> None:
    begun, rest = [FIRST_BYTE + 0xE6, FIRST_BYTE + 0xB0], FIRST_BYTE + 0xB4
    async with spaced(copy) as (w, http):
        for worker in w.workers:
            worker.output = [rest, 2]
        body: dict[str, Any] = {"prompt": [1, *begun]}
        assert (await posted(http, "/v1/completions", **body))["choices"][0]["text"] == "水"
        assert (await posted(http, "/v1/completions", **body, echo=True))["choices"][0]["text"] == "<s>水"
        alone = await posted(http, "/v1/completions", **body, echo=True, max_tokens=0)
        assert alone["choices"][0]["text"] == "<s>\N{REPLACEMENT CHARACTER}"
        for worker in w.workers:
            worker.output = [2]
        assert (await posted(http, "/v1/completions", **body))["choices"][0]["text"] == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("path", CONTINUED)
async def test_an_answer_continues_the_last_message_and_otherwise_begins_a_text(copy: Path, path: str) -> None:
    asked = {"role": "user", "content": "Hello"}
    async with spaced(copy) as (w, http):
        begun = [asked, {"role": "assistant", "content": "Hello"}]
        assert text_in(await posted(http, path, messages=begun, **CONTINUED[path])) == " world world"
        assert w.latest_prompt().endswith("Hello")
        assert text_in(await posted(http, path, messages=[asked], **PLAIN[path])) == "world world"


async def test_the_answer_of_a_chat_begins_a_text_as_its_log_probabilities_do(copy: Path) -> None:
    async with spaced(copy) as (_, http):
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "logprobs": True, "max_tokens": 2}
        [choice] = (await posted(http, "/v1/chat/completions", **body))["choices"]
        entries = choice["logprobs"]["content"]
        assert bytes(one for entry in entries for one in entry["bytes"]).decode() == choice["message"]["content"]
        generated = await posted(http, "/api/generate", prompt="Hello", stream=False)
        assert text_in(generated) == "world world"


async def test_a_middle_keeps_its_first_space(copy: Path) -> None:
    async with spaced(copy, ("<unk>", "<s>", "</s>", "▁<PRE>", "▁<SUF>", "▁<MID>")) as (_, http):
        answer = await posted(http, "/v1/completions", prompt="Hello", suffix="Hello")
        assert answer["choices"][0]["text"] == " world world"


async def test_an_answer_that_moves_to_another_worker_goes_on_in_its_text(copy: Path) -> None:
    async with spaced(copy) as (w, http):
        first, second = w.workers
        answer_ids, first.output = second.output or [], None
        asked = asyncio.create_task(posted(http, "/v1/completions", prompt="Hello"))
        [generate] = await first.generates.at_least(1)
        await first.send(generate, 0, answer_ids[:1])
        await w.leave("w1")
        answer = await asked
        assert answer["choices"][0]["text"] == " world world"
        assert len(second.generates.all) == 1
