"""Clients ask for a LoRA by its name, wherever a body has `model`; routers and workers get its id."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from shared.hashing import pack_hashes, seed_of, sequence_hashes
from shared.messages.generate import Generate, GenerateReply, Refused
from shared.messages.select import Select, SelectRefused, SelectReply
from tests.frontend.peers import BLOCK_SIZE, DEADLINE_S, MODEL, World, card_entry, clients, instance_entry, world

PROMPT = "once upon a time " * 8


async def load(w: World, instance: str, *ids: str, model: str = MODEL) -> None:
    """Have a worker show a card with these LoRAs."""
    await w.announce(instance, instance_entry("worker", instance) | card_entry(instance, w.directory, model, lora=ids))


async def listed(w: World) -> dict[str, dict[str, Any]]:
    async with clients(w) as (_, http), http.get("/v1/models") as response:
        return {entry["id"]: entry for entry in (await response.json())["data"]}


async def until_listed(w: World, *names: str) -> dict[str, dict[str, Any]]:
    """Wait until exactly these models are listed; return their entries."""
    async with asyncio.timeout(DEADLINE_S):
        while set(entries := await listed(w)) != set(names):
            pass
    return entries


def generated(w: World) -> list[Generate]:
    return [one for worker in w.workers for one in worker.generates.all]


async def test_a_name_is_asked_for_as_a_model_and_the_id_goes_to_routers_and_workers(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (client, http):
        await load(w, "w1", "team/sql@0123")
        entries = await until_listed(w, MODEL, "team/sql")
        lora = entries["team/sql"]
        assert (lora["parent"], lora["root"], lora["max_model_len"]) == (MODEL, "team/sql@0123", 2048)
        assert (entries[MODEL]["parent"], entries[MODEL]["root"]) == (None, MODEL)
        async with http.get("/v1/models/team/sql") as response:
            assert await response.json() == lora
        w.say("fine")
        answer = await client.completions.create(model="team/sql", prompt=PROMPT)
        assert answer.model == "team/sql"
        select, generate = w.router.asked.all[-1], generated(w)[-1]
        assert (select.model, select.lora) == (generate.model, generate.lora) == (MODEL, "team/sql@0123")
        prompt = generate.tokens[: 4 * generate.prompt_tokens]
        assert select.hashes == pack_hashes(sequence_hashes(prompt, BLOCK_SIZE, seed_of("team/sql@0123")))
        await client.completions.create(model=MODEL, prompt=PROMPT)
        assert (w.router.asked.all[-1].lora, generated(w)[-1].lora) == ("", "")
        assert w.router.asked.all[-1].hashes != select.hashes


async def test_every_operation_takes_the_name(directory: Path) -> None:
    messages: Any = [{"role": "user", "content": "x"}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": messages},
        "/v1/completions": {"prompt": "x"},
        "/v1/responses": {"input": "x", "store": False},
        "/v1/messages": {"messages": messages, "max_tokens": 5},
        "/api/chat": {"messages": messages, "stream": False},
        "/api/generate": {"prompt": "x", "stream": False},
    }
    async with world(directory) as w, clients(w) as (_, http):
        await load(w, "w1", "sql@1")
        await load(w, "w2", "sql@1")
        await until_listed(w, MODEL, "sql")
        w.say("fine")
        for path, body in bodies.items():
            async with http.post(path, json={"model": "sql", **body}) as response:
                answer = await response.json()
                assert response.status == 200, answer
                assert answer["model"] == "sql", path
            assert (w.router.asked.all[-1].model, w.router.asked.all[-1].lora) == (MODEL, "sql@1"), path
        for path, body in (("/tokenize", {"prompt": "x"}), ("/v1/messages/count_tokens", {"messages": messages})):
            async with http.post(path, json={"model": "sql", **body}) as response:
                assert response.status == 200, path
        async with http.get("/api/tags") as response:
            tags = {one["name"]: one["details"]["parent_model"] for one in (await response.json())["models"]}
        assert tags == {MODEL: "", "sql": MODEL}
        async with http.post("/api/show", json={"model": "sql:latest"}) as response:
            assert (await response.json())["details"]["parent_model"] == MODEL


async def test_embeddings_take_the_name(directory: Path) -> None:
    async with world(directory, embedding_size=8, pooling="last") as w, clients(w) as (client, _):
        card = card_entry("w1", directory, embedding_size=8, pooling="last", lora=("sql@1",))
        await w.announce("w1", instance_entry("worker", "w1") | card)
        await until_listed(w, MODEL, "sql")
        assert (await client.embeddings.create(model="sql", input=PROMPT)).model == "sql"
        assert (w.router.asked.all[-1].model, w.router.asked.all[-1].lora) == (MODEL, "sql@1")
        assert generated(w)[-1].lora == "sql@1"


async def test_an_unloaded_lora_is_404_with_names_like_it_and_one_whose_workers_went_503(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (client, _):
        await load(w, "w1", "french-law@1", "french-lore@1")
        await until_listed(w, MODEL, "french-law", "french-lore")
        await load(w, "w1", "french-lore@1")
        await until_listed(w, MODEL, "french-lore")
        with pytest.raises(openai.NotFoundError, match="'french-law' does not exist; there is french-lore") as error:
            await client.completions.create(model="french-law", prompt="x")
        assert error.value.code == "model_not_found"
        assert MODEL not in error.value.message
        with pytest.raises(openai.NotFoundError, match=f"there is french-lore, {MODEL}"):
            await client.completions.create(model="x" * 100_000, prompt="x")
        await w.leave("w1")
        await until_listed(w, MODEL)
        with pytest.raises(openai.InternalServerError, match="no worker has the LoRA 'french-lore' now") as gone:
            await client.completions.create(model="french-lore", prompt="x")
        assert gone.value.status_code == 503


async def test_a_base_model_comes_before_a_lora_of_its_name_which_is_logged_once(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(directory) as w, clients(w) as (client, _):
        await load(w, "w1", f"{MODEL}@1", "sql@1")
        entries = await until_listed(w, MODEL, "sql")
        assert entries[MODEL]["parent"] is None
        w.say("fine")
        await client.completions.create(model=MODEL, prompt="x")
        assert w.router.asked.all[-1].lora == ""
        await load(w, "w2", f"{MODEL}@1")
        await load(w, "w3", "second@1", model="second")
        await until_listed(w, MODEL, "sql", "second")
        for name in (MODEL, "second"):
            said = f"the LoRA {name} cannot be asked for: a model has its name; load it under another one"
            assert caplog.messages.count(said) == 1


async def test_a_continuation_keeps_the_id_that_it_began_with(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (client, _):
        for instance in ("w1", "w2"):
            await load(w, instance, "sql@1")
        await until_listed(w, MODEL, "sql")
        tokens = w.ids("one two three")
        first, second = w.workers
        first.output, second.output = None, [*tokens, 2]
        async with asyncio.TaskGroup() as tasks:
            answer = tasks.create_task(client.completions.create(model="sql", prompt="x"))
            [begun] = await first.generates.at_least(1)
            await first.send(begun, 0, tokens[:1])
            for instance in ("w3", "w4"):  # from now on the name means these files
                await load(w, instance, "sql@2")
            await load(w, "w1", "sql@2")
            async with clients(w) as (_, http), asyncio.timeout(DEADLINE_S):
                root = ""
                while root != "sql@2":
                    async with http.get("/v1/models/sql") as response:
                        root = (await response.json())["root"]
            await first.send(begun, 1, [], "error", "the engine was lost")
            [continued] = await second.generates.at_least(1)
        assert (begun.lora, continued.lora) == ("sql@1", "sql@1")
        assert answer.result().choices[0].text == "one two three"


async def test_a_worker_that_has_not_loaded_it_any_more_gives_way_to_another(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (client, _):
        for instance in ("w1", "w2"):
            await load(w, instance, "sql@1")
        await until_listed(w, MODEL, "sql")
        w.say("fine")

        def refused(one: Generate) -> GenerateReply:
            return Refused(one.request, one.attempt, "wrong_model", "this worker has not loaded that LoRA")

        w.workers[0].answer = refused
        answer = await client.completions.create(model="sql", prompt="x")
        assert answer.choices[0].text == "fine"
        assert [len(worker.generates.all) for worker in w.workers] == [1, 1]
        assert w.router.asked.all[-1].excluded == ("w1",)


async def test_a_router_that_has_not_heard_of_the_lora_is_asked_again(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (client, _):
        await load(w, "w1", "sql@1")
        await until_listed(w, MODEL, "sql")
        w.say("fine")
        chooses, behind = w.router.answer, iter(range(3))

        def late(select: Select) -> SelectReply | None:
            if next(behind, None) is not None:
                return SelectRefused(select.request, select.attempt, "unknown_model", "no instance has the LoRA")
            return chooses(select)

        w.router.answer = late
        assert (await client.completions.create(model="sql", prompt="x")).choices[0].text == "fine"
        assert len(w.router.asked.all) == 4


async def test_an_error_says_that_no_worker_has_the_lora(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (client, _):
        await load(w, "w1", "sql@1")
        await until_listed(w, MODEL, "sql")

        def none(select: Select) -> SelectReply:
            return SelectRefused(
                select.request, select.attempt, "unknown_model", f"no instance has the LoRA {select.lora}"
            )

        w.router.answer = none
        with pytest.raises(openai.InternalServerError, match="no instance has the LoRA sql@1"):
            await client.completions.create(model="sql", prompt="x")
