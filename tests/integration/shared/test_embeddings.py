"""Vectors from real processes and a small model's real arithmetic: alone, in a batch, and while workers are killed."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import nats
import numpy as np
import openai
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tests.integration.fleet import Fleet
from tests.integration.shared.conftest import WithWorkers
from tests.tiny_model import write_tiny_model
from tests.worker.native.reference import embedding, last_hidden_states

LIMIT_S = 180.0
TEXTS = [f"The mill at river {number} turns {'again and ' * (number % 40)}again" for number in range(200)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "embeddings", layers=4)


@pytest.fixture(scope="module")
def services(model: Path, with_workers: WithWorkers) -> Iterator[Fleet]:
    def start(one: Fleet) -> None:
        for name in ("worker 1", "worker 2"):
            one.start("worker", name, "--model", str(model), "--threads", "1")

    with with_workers(start) as one:
        yield one


@pytest.fixture
def client(services: Fleet) -> Iterator[openai.OpenAI]:
    url = f"{services.services['frontend'].url}/v1"
    with openai.OpenAI(base_url=url, api_key="any", max_retries=0, timeout=LIMIT_S) as client:
        yield client


def vectors(client: openai.OpenAI, texts: list[str]) -> NDArray[np.float32]:
    answer = client.embeddings.create(model="embeddings", input=texts)
    return np.asarray([one.embedding for one in answer.data], np.float32)


def test_both_poolings_are_those_of_a_plain_decoder(client: openai.OpenAI, model: Path) -> None:
    tokens = Tokenizer.from_file(str(model / "tokenizer.json")).encode(TEXTS[39]).ids
    states = last_hidden_states(model, tokens)
    for pooling in ("mean", "last"):
        answer = client.embeddings.create(model="embeddings", input=TEXTS[39], extra_body={"pooling": pooling})
        expected = embedding(states, pooling)
        np.testing.assert_allclose(answer.data[0].embedding, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
        assert answer.usage.prompt_tokens == len(tokens)


def test_over_nats_the_same(services: Fleet, client: openai.OpenAI, nats_url: str) -> None:
    async def ask() -> list[float]:
        connection = await nats.connect(nats_url)
        body = json.dumps({"input": [TEXTS[3]]}).encode()
        reply = await connection.request("headrace.shared.frontend.embeddings", body, timeout=LIMIT_S)
        await connection.close()
        found: list[float] = json.loads(reply.data)["data"][0]["embedding"]
        return found

    assert services.services["frontend"].ready()
    np.testing.assert_allclose(asyncio.run(ask()), vectors(client, [TEXTS[3]])[0], rtol=0, atol=1e-6)


def test_a_batch_is_what_each_is_alone_and_outlives_a_killed_worker(
    services: Fleet, client: openai.OpenAI, model: Path
) -> None:
    alone = np.concatenate([vectors(client, [text]) for text in TEXTS[::20]])
    together = vectors(client, TEXTS)
    np.testing.assert_allclose(together[::20], alone, rtol=0, atol=1e-6)
    victim = services.services["worker 2"]

    begun = threading.Event()

    def kill() -> None:
        """While one batch after the other is computed, faster than a worker shows what it runs."""
        begun.wait(LIMIT_S)
        victim.kill()

    killing = threading.Thread(target=kill)
    killing.start()
    again: list[NDArray[np.float32]] = []
    while killing.is_alive():
        again.append(vectors(client, TEXTS))
        begun.set()
    killing.join()
    again.append(vectors(client, TEXTS))  # its lease is not over
    for one in again:
        np.testing.assert_allclose(one, together, rtol=0, atol=1e-6)
    assert services.services["frontend"].metric("headrace_attempts_lost_total") > 0
