"""What the model recommends counts where a request says nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from services.frontend.config import FrontendConfig
from shared.messages import Sampling, SamplingDefaults
from tests.frontend.peers import CONTEXT, MODEL, World, card_entry, clients, instance_entry, world

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
    async with recommending(directory, FrontendConfig(default_max_tokens=2 * CONTEXT)) as w:
        assert 0 < (await sampling_of(w)).max_tokens < CONTEXT
