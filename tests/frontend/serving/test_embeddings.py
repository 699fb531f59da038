from __future__ import annotations

import asyncio
import json
from base64 import b64decode
from math import hypot
from pathlib import Path
from struct import pack, unpack
from typing import Any

import msgspec
import openai
import pytest

from services.frontend.config import LimitsConfig
from services.frontend.protocol.embeddings import EmbeddingAnswer
from services.frontend.serving.embeddings import NUMBERS_PER_TURN, write_answer
from shared import subjects
from shared.bus.memory_bus import MemoryBus
from shared.hashing import pack_tokens
from shared.messages.generate import Refused
from shared.messages.select import Finished, Prefilled
from tests.frontend.auth.test_access import ALICE, KeysFile
from tests.frontend.peers import BLOCK_SIZE, DEADLINE_S, MODEL, NAMESPACE, World, clients, vector_of, world

SIZE = 24
TEXTS = ["water", "the mill at the river", "grüße 🚰"]


def numbers(vector: bytes) -> list[float]:
    return list(unpack(f"<{len(vector) // 4}f", vector))


def vector(w: World, text: str) -> list[float]:
    """What the scripted workers answer."""
    return numbers(vector_of(pack_tokens(w.ids(text)), SIZE))


async def test_openais_client_gets_the_same_vectors_in_both_encodings(directory: Path) -> None:
    """If nothing is said it asks for base64."""
    async with world(directory, embedding_size=SIZE) as w, clients(w) as (client, _):
        default = await client.embeddings.create(model=MODEL, input=TEXTS)
        floats = await client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
        for answer in (default, floats):
            assert [one.embedding for one in answer.data] == [vector(w, text) for text in TEXTS]
            assert [one.index for one in answer.data] == [0, 1, 2]
            assert (answer.object, answer.model, answer.data[0].object) == ("list", MODEL, "embedding")
            count = sum(len(w.ids(text)) for text in TEXTS)
            assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (count, count)


async def test_an_answer_is_what_its_struct_says_and_base64_is_little_endian_float32(directory: Path) -> None:
    async with world(directory, embedding_size=SIZE) as w, clients(w) as (_, http):
        for encoding in ("float", "base64"):
            body = {"input": "water", "encoding_format": encoding, "user": "u"}
            async with http.post("/v1/embeddings", json=body, headers={"X-Request-Id": "mine"}) as response:
                assert response.status == 200
                answer = msgspec.json.decode(await response.read(), type=EmbeddingAnswer)
            [one] = answer.data
            found = one.embedding
            assert (numbers(b64decode(found)) if isinstance(found, str) else found) == vector(w, "water")
            assert isinstance(found, str) == (encoding == "base64")
            assert answer.id.startswith("embd-mine-")


@pytest.mark.parametrize(
    ("given", "count"), [("water", 1), (["water"], 1), ([5, 6, 7], 1), ([[5, 6, 7], [8]], 2), (["a", "b", "a"], 3)]
)
async def test_inputs_are_texts_or_tokens_one_or_many(directory: Path, given: Any, count: int) -> None:
    async with world(directory, embedding_size=SIZE) as w, clients(w) as (client, _):
        answer = await client.embeddings.create(model=MODEL, input=given)
        inputs = [given] if isinstance(given, str) or isinstance(given[0], int) else given
        tokens = [w.ids(one) if isinstance(one, str) else one for one in inputs]
        assert [one.embedding for one in answer.data] == [numbers(vector_of(pack_tokens(one), SIZE)) for one in tokens]
        assert len(answer.data) == count


async def test_fewer_dimensions_are_the_leading_ones_scaled_to_length_1(directory: Path) -> None:
    async with world(directory, embedding_size=SIZE) as w, clients(w) as (client, _):
        for dimensions in (1, 5, SIZE):
            answer = await client.embeddings.create(model=MODEL, input=TEXTS, dimensions=dimensions)
            for one, text in zip(answer.data, TEXTS, strict=True):
                leading = vector(w, text)[:dimensions]
                assert one.embedding == pytest.approx([number / hypot(*leading) for number in leading], abs=1e-7)
                assert hypot(*one.embedding) == pytest.approx(1.0)
                assert dimensions < SIZE or one.embedding == leading


async def test_a_mean_is_sent_where_there_is_least_to_do_and_a_last_where_its_blocks_are(directory: Path) -> None:
    text = [5] * (3 * BLOCK_SIZE + 1)
    async with world(directory, embedding_size=SIZE, pooling="last") as w, clients(w) as (client, _):
        for more in ({}, {"pooling": "mean"}, {"pooling": "last", "cache_salt": "s"}):
            await client.embeddings.create(model=MODEL, input=text, extra_body=more)
        asked, generated = w.router.asked.all, w.workers[0].generates.all
        assert [len(select.hashes) for select in asked] == [24, 0, 24]
        assert asked[0].hashes != asked[2].hashes
        assert [one.sampling.pooling for one in generated] == ["last", "mean", "last"]
        assert [one.salt for one in generated] == ["", "", "s"]
        assert all((one.prompt_tokens, one.sampling.max_tokens) == (len(text), 1) for one in generated)
        [first, last] = [event for event in w.router.told.all if event.request == asked[0].request]
        assert isinstance(first, Prefilled)
        assert isinstance(last, Finished)


async def test_only_the_first_input_is_refused_for_having_to_wait_for_all_would_wait_for_each_other(
    directory: Path,
) -> None:
    async with world(directory, embedding_size=SIZE) as w, clients(w) as (client, _):
        await client.embeddings.create(model=MODEL, input=TEXTS)
        asked = w.router.asked.all
        assert [(select.request.rpartition("/")[2], select.wait_limit_s) for select in asked] == [
            ("0", 60.0),
            ("1", 0.0),
            ("2", 0.0),
        ]
        assert w.metric("headrace_input_sequence_tokens_count") == len(TEXTS), "all the same each is counted"


async def test_a_model_whose_own_pooling_is_not_built_is_asked_for_another_by_name(directory: Path) -> None:
    async with world(directory, embedding_size=SIZE, pooling="") as w, clients(w) as (client, _):
        with pytest.raises(openai.BadRequestError, match="not supported; ask for mean or last") as refused:
            await client.embeddings.create(model=MODEL, input="water")
        assert refused.value.param == "pooling"
        answer = await client.embeddings.create(model=MODEL, input="water", extra_body={"pooling": "mean"})
        assert answer.data[0].embedding == vector(w, "water")


async def test_where_not_all_workers_embed_alike_none_is_asked(directory: Path) -> None:
    async with world(directory, embedding_size=SIZE) as w, clients(w) as (client, _):
        for size in (0, SIZE + 8):
            await w.announce_worker("w3", embedding_size=size)
            with pytest.raises(openai.BadRequestError, match="not every worker") as refused:
                await client.embeddings.create(model=MODEL, input="water")
            assert refused.value.param == "model"
            await w.leave("w3")
        assert w.router.asked.all == []


async def test_a_worker_that_would_answer_with_text_is_not_offered_what_is_to_be_embedded(directory: Path) -> None:
    async with world(directory, embedding_size=SIZE) as w, clients(w) as (client, _):
        w.router.workers.insert(0, "w9")
        answer = await client.embeddings.create(model=MODEL, input="water")
        assert answer.data[0].embedding == vector(w, "water")
        assert [select.excluded for select in w.router.asked.all] == [(), ("w9",)]


async def test_an_input_whose_worker_is_lost_is_computed_by_another_and_no_other_input_is(directory: Path) -> None:
    async with world(directory, embedding_size=SIZE) as w, clients(w) as (client, _):
        first, second = w.workers
        first.output = None
        first.answer = lambda one: None if one.tokens == pack_tokens([7]) else w.workers[1].answer(one)

        async def lose() -> None:
            for generate in await first.generates.at_least(3):
                if generate.tokens == pack_tokens([6]):
                    await first.send(generate, 0, [], "error", "the engine was lost")
                elif generate.tokens == pack_tokens([5]):
                    await first.send(generate, 0, [], "stop", embedding=vector_of(generate.tokens, SIZE))

        losing = asyncio.create_task(lose())
        answer = await client.embeddings.create(model=MODEL, input=[[5], [6], [7]])
        await losing
        assert [one.embedding for one in answer.data] == [
            numbers(vector_of(pack_tokens([token]), SIZE)) for token in (5, 6, 7)
        ]
        assert sorted(one.tokens for one in second.generates.all) == [pack_tokens([6]), pack_tokens([7])]


@pytest.mark.parametrize(
    "wrong", [b"", pack("<2f", 0.6, 0.8), vector_of(b"", SIZE) + b"0000"], ids=["none", "short", "long"]
)
async def test_a_vector_of_another_size_makes_no_sense_and_is_computed_elsewhere(directory: Path, wrong: bytes) -> None:
    async with world(directory, embedding_size=SIZE) as w, clients(w) as (client, _):
        first = w.workers[0]
        first.output = None
        asking = asyncio.create_task(client.embeddings.create(model=MODEL, input="water"))
        [generate] = await first.generates.at_least(1)
        await first.send(generate, 0, [], "stop", embedding=wrong)
        assert (await asking).data[0].embedding == vector(w, "water")
        assert w.metric("headrace_attempts_lost_total", reason="senseless") == 1


async def test_tokens_in_place_of_a_vector_make_no_sense(directory: Path) -> None:
    async with world(directory, embedding_size=SIZE) as w, clients(w) as (client, _):
        first = w.workers[0]
        first.output = None
        asking = asyncio.create_task(client.embeddings.create(model=MODEL, input="water"))
        [generate] = await first.generates.at_least(1)
        await first.send(generate, 0, [5])
        assert (await asking).data[0].embedding == vector(w, "water")


async def test_one_input_that_fails_for_good_ends_the_others(directory: Path) -> None:
    async with world(directory, embedding_size=SIZE) as w, clients(w) as (client, _):
        for worker in w.workers:
            worker.output = None
        asking = asyncio.create_task(client.embeddings.create(model=MODEL, input=[[5], [6]]))
        five, six = sorted(await w.workers[0].generates.at_least(2), key=lambda one: one.tokens)
        w.workers[1].answer = lambda one: Refused(one.request, one.attempt, "bad_request", "not that")
        await w.workers[0].send(five, 0, [], "error", "the numbers broke down")
        with pytest.raises(openai.BadRequestError, match="not that"):
            await asking
        assert [one.request for one in await w.workers[0].cancels.at_least(1)] == [six.request]


@pytest.mark.parametrize(
    "limits", [LimitsConfig(inputs_at_once=3), LimitsConfig(requests=3)], ids=["inputs", "requests"]
)
async def test_no_more_inputs_are_asked_for_at_once_than_is_set(directory: Path, limits: LimitsConfig) -> None:
    limits = msgspec.structs.replace(limits, drain_s=0.0)
    async with world(directory, embedding_size=SIZE, limits=limits) as w, clients(w) as (client, _):
        w.workers[0].output = None
        asking = asyncio.create_task(client.embeddings.create(model=MODEL, input=[[token] for token in range(5)]))
        for done in range(5):
            generated = await w.workers[0].generates.at_least(min(3 + done, 5))
            assert len(generated) == min(3 + done, 5)
            one = generated[done]
            await w.workers[0].send(one, 0, [], "stop", embedding=vector_of(one.tokens, SIZE))
        assert len((await asking).data) == 5


async def test_a_client_that_goes_cancels_its_inputs(directory: Path) -> None:
    async with world(directory, embedding_size=SIZE) as w, clients(w) as (_, http):
        w.workers[0].output = None
        asking = asyncio.create_task(http.post("/v1/embeddings", json={"input": [[5], [6]]}))
        generated = await w.workers[0].generates.at_least(2)
        asking.cancel()
        cancelled = await w.workers[0].cancels.at_least(2)
        assert {one.request for one in cancelled} == {one.request for one in generated}


async def test_a_request_too_large_for_one_answer_is_refused_before_anything_is_computed(directory: Path) -> None:
    async with world(directory, embedding_size=4096) as w, clients(w) as (client, http):
        async with http.post("/v1/embeddings", json={"input": [[5]] * 1025}) as response:
            assert response.status == 400
            error = (await response.json())["error"]
        assert error["param"] == "input"
        assert "1025 vectors of 4096 numbers, more than 4194304" in error["message"]
        assert w.router.asked.all == []
        answer = await client.embeddings.create(model=MODEL, input=[[5]] * 1025, dimensions=2)
        assert len(answer.data) == 1025


@pytest.mark.parametrize("as_text", [True, False])
async def test_a_large_answer_is_written_in_turns(as_text: bool) -> None:
    vectors = [vector_of(bytes((number,)), 4096) for number in range(50)]
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(others())
    pieces = [piece async for piece in write_answer(vectors, 4096, b'{"model":"m"}', as_text=as_text)]
    beside.cancel()
    assert turns >= 50 * 4096 // (NUMBERS_PER_TURN + 4096)
    answer = json.loads(b"".join(pieces))
    found = [one["embedding"] for one in answer["data"]]
    assert [numbers(b64decode(one)) if as_text else one for one in found] == [numbers(one) for one in vectors]
    assert answer["model"] == "m"


async def test_an_answer_of_megabytes_comes_whole(directory: Path) -> None:
    async with world(directory, embedding_size=4096) as w, clients(w) as (_, http):
        inputs = [[5, number] for number in range(100)]
        async with http.post("/v1/embeddings", json={"input": inputs}) as response:
            answer = json.loads(await response.read())
        assert answer["data"][99]["embedding"] == numbers(vector_of(pack_tokens([5, 99]), 4096))
        assert len(answer["data"]) == 100


async def test_over_nats_the_same_and_too_large_an_answer_is_413(directory: Path) -> None:
    async with world(directory, embedding_size=SIZE) as w:
        bus = MemoryBus(w.broker)
        subject = subjects.client(NAMESPACE, "embeddings")
        reply = await bus.request(subject, json.dumps({"input": TEXTS}).encode(), timeout_s=DEADLINE_S)
        answer = msgspec.json.decode(reply.payload, type=EmbeddingAnswer)
        assert [one.embedding for one in answer.data] == [vector(w, text) for text in TEXTS]
        reply = await bus.request(subject, json.dumps({"input": [""]}).encode(), timeout_s=DEADLINE_S)
        assert reply.headers["Headrace-Status"] == "400"
    async with world(directory, embedding_size=4096) as w:
        bus = MemoryBus(w.broker)
        body = json.dumps({"input": [[5]] * 200, "encoding_format": "float"}).encode()
        reply = await bus.request(subject, body, timeout_s=DEADLINE_S)
        assert reply.headers["Headrace-Status"] == "413"
        assert json.loads(reply.payload)["error"]["code"] == "request_too_large"


async def test_a_key_pays_for_the_tokens_of_its_inputs_and_for_none_where_they_failed(
    directory: Path, tmp_path: Path
) -> None:
    access = KeysFile(tmp_path).write(tokens_per_minute=6000)
    async with world(directory, embedding_size=SIZE, access=access) as w, clients(w, ALICE) as (client, _):

        async def left() -> int:
            answer = await client.embeddings.with_raw_response.create(model=MODEL, input=[[5] * 1000, [6] * 1000])
            return int(answer.headers["x-ratelimit-remaining-tokens"])

        assert 4000 <= await left() < 5000, "less what comes back meanwhile"
        answers = [worker.answer for worker in w.workers]
        for worker in w.workers:
            worker.answer = lambda one: Refused(one.request, one.attempt, "bad_request", "not that")
        with pytest.raises(openai.BadRequestError, match="not that"):
            await left()
        for worker, answer in zip(w.workers, answers, strict=True):
            worker.answer = answer
        assert 2000 <= await left() < 3000
        with pytest.raises(openai.RateLimitError, match="tokens per min"):
            await client.embeddings.create(model=MODEL, input=[[5] * 2000, [6] * 2000])
