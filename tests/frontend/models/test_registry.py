from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import openai
import pytest
from msgspec.structs import replace

from services.frontend import app
from services.frontend.config import FrontendConfig, LimitsConfig
from services.frontend.models import model_names, registry
from shared.messages.cards import INSTANCE
from shared.messages.codec import JSON_HEADER
from tests.frontend.peers import DEADLINE_S, MODEL, World, card_entry, clients, instance_entry, world


async def test_a_model_that_cannot_be_loaded_says_why_and_stops_no_other(directory: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(directory, tmp_path / "broken"))
    entry = card_entry("w3", broken, "broken")
    (broken / "tokenizer.json").write_text("{}")
    async with world(directory) as w, clients(w) as (client, http):
        await w.announce("w3", entry)
        await w.until("/v1/models/broken", lambda answer: "SHA-256" in answer["error"]["message"])
        for _ in range(2):
            with pytest.raises(openai.InternalServerError) as error:
                await client.completions.create(model="broken", prompt="x")
            assert error.value.status_code == 503
            assert "not ready" in error.value.message
        w.say("fine")
        assert (await client.completions.create(model=MODEL, prompt="x")).choices[0].text == "fine"
        async with http.get("/health") as response:
            assert response.status == 200
        assert [model.id for model in (await client.models.list()).data] == [MODEL]


async def test_a_model_whose_workers_no_router_chooses_is_not_served_and_health_says_why(directory: Path) -> None:
    why = (
        "its workers have the role prefill, and none decodes: start one with the role decode or aggregated, or resume"
        " one that is drained, or wake one that sleeps"
    )
    async with world(directory) as w, clients(w) as (client, http):
        await w.announce("w3", card_entry("w3", directory, "half", role="prefill"))
        await w.until("/health", lambda health: health.get("not_served") == [f"model half: {why}"])
        with pytest.raises(openai.InternalServerError, match=why):
            await client.completions.create(model="half", prompt="x")
        assert [model.id for model in (await client.models.list()).data] == [MODEL]
        async with http.get("/health") as response:
            assert response.status == 200
        await w.announce("w4", card_entry("w4", directory, "half"))
        await w.until("/health", lambda health: "not_served" not in health and "half" in health["models"])


def idle_entry(worker: str, model: str, state: str) -> dict[str, bytes]:
    [(key, value)] = instance_entry("worker", worker).items()
    entry = replace(INSTANCE.decode(value, JSON_HEADER), model=model, state=state)
    return {key: INSTANCE.encode(entry, JSON_HEADER)}


async def test_a_model_whose_workers_all_sleep_or_are_drained_gets_503_and_the_command_that_has_them_serve(
    directory: Path,
) -> None:
    asleep, drained = "1 asleep (`headrace wake ID`)", "1 drained (`headrace resume ID`)"
    async with world(directory, announced=False) as w, clients(w) as (client, _):
        await w.announce_router()
        for worker, model, state in (("w1", "one", "asleep"), ("w2", "two", "asleep"), ("w3", "two", "drained")):
            await w.announce(worker, idle_entry(worker, model, state))
        whole = f"no worker serves: 2 asleep (`headrace wake ID`), {drained}"
        await w.until("/health", lambda health: health.get("reasons") == [whole])
        for named, said in (("one", f"'one' now: {asleep}"), ("two", f"'two' now: {asleep}, {drained}")):
            with pytest.raises(openai.InternalServerError) as error:
                await client.completions.create(model=named, prompt="x")
            assert (error.value.status_code, said in error.value.message) == (503, True)
        await w.announce("w4", instance_entry("worker", "w4") | card_entry("w4", directory, "one"))
        await w.ready("one")
        with pytest.raises(openai.InternalServerError, match="no worker serves the model 'two' now"):
            await client.completions.create(model="two", prompt="x")
        await w.leave("w4")
        await w.until("/health", lambda health: health.get("reasons") == [whole])
        with pytest.raises(openai.InternalServerError, match="no worker serves the model 'one' now: 1 asleep"):
            await client.completions.create(model="one", prompt="x")


async def test_the_doors_open_when_the_models_that_are_there_are_loaded(directory: Path) -> None:
    async with world(directory, ready=False) as w, clients(w) as (client, _):
        w.say("at once")
        assert (await client.completions.create(model=MODEL, prompt="x")).choices[0].text == "at once"


async def test_a_model_that_cannot_be_loaded_does_not_keep_the_doors_shut(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "INFORMED_LIMIT_S", 10 * DEADLINE_S)
    broken = Path(shutil.copytree(directory, tmp_path / "broken"))
    entry = card_entry("w3", broken, "broken")
    (broken / "tokenizer.json").write_text("{}")
    async with (
        asyncio.timeout(DEADLINE_S),
        world(directory, ready=False, more=entry) as w,
        clients(w) as (_, http),
        http.get("/v1/models/broken") as response,
    ):
        assert "SHA-256" in (await response.json())["error"]["message"]


ASKED_EARLY: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 8},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "x"}]},
    "/api/generate": {"prompt": "x", "stream": False},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [3]},
}


async def test_a_request_for_a_model_that_is_expected_waits_until_a_worker_brings_it(directory: Path) -> None:
    expecting = FrontendConfig(expected_models=("late",))
    async with asyncio.timeout(DEADLINE_S), world(directory, settings=expecting) as w, clients(w) as (_, http):
        w.say("fine")

        async def status(path: str, body: dict[str, Any]) -> int:
            async with http.post(path, json={"model": "late", **body}) as response:
                return response.status

        asking = [asyncio.ensure_future(status(path, body)) for path, body in ASKED_EARLY.items()]
        for _ in asking:
            await w.until("/health", lambda health: health["ready"])
        assert not any(each.done() for each in asking)
        await w.announce("w3", card_entry("w3", directory, "late"))
        assert await asyncio.gather(*asking) == [200] * len(asking)


async def test_a_model_that_is_expected_in_vain_gets_503_and_one_that_is_not_404(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "EXPECTED_S", 0.05)
    async with world(directory, settings=FrontendConfig(expected_models=("late",))) as w, clients(w) as (_, http):
        async with http.post("/v1/completions", json={"model": "late", "prompt": "x"}) as response:
            told = (response.status, (await response.json())["error"]["message"])
            assert told == (503, "no worker serves the model 'late' yet")
        async with http.post("/v1/completions", json={"model": "other", "prompt": "x"}) as response:
            assert response.status == 404


async def test_the_only_model_need_not_be_named_and_one_of_several_must(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (_, http):
        w.say("fine")
        for unnamed in ({}, {"model": None}, {"model": ""}):
            async with http.post("/v1/completions", json={"prompt": "x", **unnamed}) as response:
                assert (await response.json())["model"] == MODEL
        await w.announce("w3", card_entry("w3", directory, "second"))
        await w.ready("second")
        for unnamed in ({}, {"model": ""}):
            async with http.post("/v1/completions", json={"prompt": "x", **unnamed}) as response:
                assert response.status == 400
                assert (await response.json())["error"]["param"] == "model"


async def test_a_servers_name_of_a_model_that_has_gone_is_not_answered_by_another_model(
    directory: Path, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(directory, tmp_path / "other"))
    async with world(directory, announced=False) as w, clients(w) as (client, _):
        await w.announce_router()
        await w.announce("w1", instance_entry("worker", "w1") | card_entry("w1", directory, "one", alias="org/one"))
        await w.ready("one")
        await w.leave("w1")
        await w.announce("w2", instance_entry("worker", "w2") | card_entry("w2", other, "two", alias="org/one"))
        await w.ready("two")
        w.say("fine")
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="org/one", prompt="x")
        assert (await client.completions.create(model="two", prompt="x")).model == "two"


async def test_a_model_that_replaces_another_one_has_its_servers_name_after_a_while_without_a_restart_of_the_frontend(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Path(shutil.copytree(directory, tmp_path / "other"))
    async with world(directory, announced=False) as w, clients(w) as (client, _):
        await w.announce_router()
        await w.announce("w1", instance_entry("worker", "w1") | card_entry("w1", directory, "one", alias="org/one"))
        await w.ready("one")
        await w.announce("w2", instance_entry("worker", "w2") | card_entry("w2", other, "two", alias="org/one"))
        await w.ready("two")
        await w.leave("w1")
        await w.until("/health", lambda health: health["models"] == ["two"])
        w.say("fine")
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="org/one", prompt="x")
        monkeypatch.setattr(model_names, "KEPT_S", 0.0)
        assert (await client.completions.create(model="org/one", prompt="x")).model == "two"


async def test_a_model_is_known_by_its_servers_name_too_and_listed_once(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(directory, announced=False) as w, clients(w) as (client, http):
        await w.announce_router()
        await w.announce("w1", instance_entry("worker", "w1") | card_entry("w1", directory, "one", alias="org/one"))
        await w.ready("one")
        w.say("fine")
        for name in ("one", "org/one"):
            assert (await client.completions.create(model=name, prompt="x")).model == "one"
            assert (await client.models.retrieve(name)).id == "one"
            async with http.post("/api/show", json={"model": name}) as response:
                assert response.status == 200
        assert {select.model for select in w.router.asked.all} == {"one"}
        assert [model.id for model in (await client.models.list()).data] == ["one"]
        await w.leave("w1")
        await w.until("/health", lambda health: not health["models"])
        with pytest.raises(openai.InternalServerError, match="no worker serves the model 'one' now"):
            await client.completions.create(model="org/one", prompt="x")
        for number in range(3):
            name = f"w{number + 2}"
            await w.announce(name, card_entry(name, directory, "two", alias="org/one"))
        await w.ready("two")
        w.say("fine")
        assert (await client.completions.create(model="org/one", prompt="x")).model == "two"
        await w.announce("w7", card_entry("w7", directory, "one", alias="org/one"))
        await w.ready("one")
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="org/one", prompt="x")
        await w.announce("w9", card_entry("w9", directory, "org/one", lora=("sql",)))
        await w.announce("w8", card_entry("w8", directory, "three", alias="sql"))
        await w.ready("org/one")
        await w.ready("three")
        assert (await client.models.retrieve("org/one")).id == "org/one"
        assert (await client.models.retrieve("sql")).id == "sql"
    said = [text for record in caplog.records if "the name '" in (text := record.getMessage())]
    assert said == [
        "the name 'org/one' means no model, because servers of one, two have it",
        "the name 'org/one' means the model of that name, although servers of one, two have it",
        "the name 'sql' means the model of that name, although servers of three have it",
    ]


async def test_a_new_tokenizer_is_loaded_before_its_workers_are_used(directory: Path, tmp_path: Path) -> None:
    changed = Path(shutil.copytree(directory, tmp_path / "changed"))
    with (changed / "tokenizer.json").open("a") as file:
        file.write("\n")
    async with world(directory) as w, clients(w) as (client, _):
        w.say("fine")
        await client.completions.create(model=MODEL, prompt="x")
        for instance in ("w1", "w2"):
            await w.leave(instance)
        await w.until("/health", lambda health: not health["models"])
        await w.announce("w1", card_entry("w1", changed))
        await w.ready()
        assert (await client.completions.create(model=MODEL, prompt="x")).choices[0].text == "fine"


async def test_a_template_that_takes_too_long_meets_the_deadline(directory: Path, tmp_path: Path) -> None:
    slow = Path(shutil.copytree(directory, tmp_path / "slow"))
    (slow / "chat_template.jinja").write_text(
        "{% for a in range(2000) %}{% for b in range(5000) %}{% endfor %}{% endfor %}"
    )
    async with world(directory, limits=LimitsConfig(deadline_s=0.05, drain_s=0.0)) as w, clients(w) as (client, _):
        await w.announce("w3", card_entry("w3", slow, "slow"))
        await w.ready("slow")
        messages: Any = [{"role": "user", "content": "x" * 2000}]
        with pytest.raises(openai.InternalServerError, match="before its prompt was tokenised") as error:
            await client.chat.completions.create(model="slow", messages=messages)
        assert error.value.status_code == 504
        assert w.router.asked.all == []


async def test_the_workers_chat_template_takes_the_place_of_the_models_own(directory: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first.jinja", tmp_path / "second.jinja"
    first.write_text("first")
    second.write_text("second")
    async with world(directory, announced=False) as w:
        await w.announce("w1", card_entry("w1", directory, template=first))
        await w.until("/health", lambda health: bool(health["models"]))
        assert await rendered(w) == "first"
        # Its tokens mean the same, so the model is served with the former template until the new one is loaded.
        await w.announce("w1", card_entry("w1", directory, template=second))
        await until_rendered(w, "second")


async def until_rendered(w: World, text: str) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while await rendered(w) != text:
            pass


async def rendered(w: World) -> str:
    async with clients(w) as (_, http):
        async with http.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]}) as response:
            tokens = (await response.json())["tokens"]
        async with http.post("/detokenize", json={"tokens": tokens}) as response:
            return str((await response.json())["prompt"])


async def test_a_chat_template_that_is_not_the_workers_is_refused(directory: Path, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("one")
    card = card_entry("w3", directory, "other", template=file)
    file.write_text("another")
    async with world(directory) as w:
        await w.announce("w3", card)
        await w.until("/v1/models/other", lambda answer: "template.jinja: SHA-256" in answer["error"]["message"])


def worker(instance: str, started: float, directory: Path, template: Path, text: str = "") -> dict[str, bytes]:
    card = card_entry(instance, directory, template=template, template_text=text)
    return instance_entry("worker", instance, started) | card


async def test_the_newest_card_that_loads_serves_the_model_and_health_names_the_worker_of_the_other(
    directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good, broken = tmp_path / "good.jinja", tmp_path / "broken.jinja"
    good.write_text("good")
    broken.write_text("{% broken")
    entries = worker("w1", 1.0, directory, good) | worker("w2", 2.0, directory, broken)
    async with world(directory, announced=False, ready=False, more=entries) as w:
        assert await rendered(w) == "good"
        [said] = (await health(w))["cards_not_loaded"]
        assert said.startswith(f"model {MODEL}: the card of worker w2 cannot be loaded: the chat template, line 1")
        assert sum("the card of worker w2 cannot" in line for line in caplog.messages) == 1
        assert await rendered(w) == "good"
        await w.announce("w3", worker("w3", 0.5, directory, broken))
        await w.until("/health", lambda shown: len(shown["cards_not_loaded"]) == 2)
        await w.leave("more")  # what no worker has any longer is not used
        await w.until(f"/v1/models/{MODEL}", lambda answer: "line 1" in answer.get("error", {}).get("message", ""))


async def test_the_template_of_a_worker_that_left_gives_way_to_that_of_the_newest_other(
    directory: Path, tmp_path: Path
) -> None:
    files = {name: tmp_path / f"{name}.jinja" for name in ("one", "two", "three")}
    for name, file in files.items():
        file.write_text(name)
    async with world(directory, announced=False) as w:
        # The order in which they arrive, which differs between frontends, says nothing.
        for instance, started, name in (("w2", 2.0, "two"), ("w3", 3.0, "three"), ("w1", 1.0, "one")):
            await w.announce(instance, worker(instance, started, directory, files[name]))
        await w.until("/health", lambda shown: bool(shown["models"]))
        await until_rendered(w, "three")
        await w.leave("w3")
        await until_rendered(w, "two")
        await w.leave("w1")
        await w.announce("w0", worker("w0", 0.5, directory, files["one"]))
        assert await rendered(w) == "two"
        await w.leave("w2")
        await until_rendered(w, "one")


async def health(w: World) -> Any:
    async with clients(w) as (_, http), http.get("/health") as response:
        return await response.json()


async def test_a_template_in_the_card_needs_no_file(directory: Path, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("of the card")
    entries = worker("w1", 1.0, directory, file, "of the card")
    file.unlink()
    async with world(directory, announced=False, more=entries) as w:
        await until_rendered(w, "of the card")


async def test_a_card_may_be_known_before_its_worker_is(directory: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one.jinja", tmp_path / "two.jinja"
    one.write_text("one")
    two.write_text("two")
    entries = worker("w2", 1.0, directory, two) | card_entry("w1", directory, template=one)
    async with world(directory, announced=False, more=entries) as w:
        await until_rendered(w, "two")
        await w.announce("w1", instance_entry("worker", "w1", 2.0))
        await until_rendered(w, "one")


async def test_a_card_whose_worker_is_no_longer_known_is_the_oldest_as_for_a_frontend_that_starts_then(
    directory: Path, tmp_path: Path
) -> None:
    one, two = tmp_path / "one.jinja", tmp_path / "two.jinja"
    one.write_text("one")
    two.write_text("two")
    async with world(directory, announced=False, more=worker("w1", 1.0, directory, one)) as w:
        await w.announce("w2", instance_entry("worker", "w2", 2.0))
        await w.announce("card", card_entry("w2", directory, template=two))
        await until_rendered(w, "two")
        await w.leave("w2")
        await until_rendered(w, "one")


@pytest.mark.parametrize("first", ["w1", "w2"])
async def test_a_template_whose_text_contradicts_its_digest_is_not_used_whichever_card_comes_first(
    directory: Path, tmp_path: Path, first: str
) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("true")
    cards = {"w1": worker("w1", 1.0, directory, file, "true"), "w2": worker("w2", 2.0, directory, file, "false")}
    said = f"model {MODEL}: the card of worker w2 cannot be loaded: template_text: its SHA-256 is not template_digest"
    async with world(directory, announced=False, more=cards.pop(first)) as w:
        for instance, entries in cards.items():
            await w.announce(instance, entries)
        await w.until("/health", lambda shown: shown.get("cards_not_loaded", [""])[0].startswith(said))
        assert await rendered(w) == "true"
        await w.leave("more" if first == "w1" else "w1")
        await w.until("/health", lambda shown: not shown["models"])


async def test_a_new_card_is_loaded_at_once_while_another_waits_for_its_next_attempt(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "RETRY_S", 3600.0)
    files = {name: tmp_path / f"{name}.jinja" for name in ("good", "better", "broken", "other")}
    for name, file in files.items():
        file.write_text("{% broken" if name in ("broken", "other") else name)
    async with world(directory, announced=False, more=worker("w1", 1.0, directory, files["broken"])) as w:
        await w.until("/health", lambda shown: "line 1" in shown.get("not_served", [""])[0])
        await w.announce("w2", worker("w2", 2.0, directory, files["good"]))
        await w.until("/health", lambda shown: bool(shown["models"]))
        assert await rendered(w) == "good"
        await w.announce("w3", worker("w3", 3.0, directory, files["other"]))
        await w.until("/health", lambda shown: bool(shown.get("cards_not_loaded")))
        await w.announce("w4", worker("w4", 4.0, directory, files["better"]))
        await until_rendered(w, "better")


async def test_models_beyond_the_limit_are_left_out_make_no_series_and_are_one_line_of_the_log(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(registry, "MODELS_LIMIT", 2)
    async with world(directory) as w, clients(w) as (client, _):
        for number in range(50):
            await w.announce(f"x{number}", card_entry(f"x{number}", directory, f"model-{number}"))
        await w.announce("last", card_entry("last", directory, lora=("after-all",)))
        await w.until("/v1/models", lambda answer: {"after-all", "model-0"} <= {one["id"] for one in answer["data"]})
        assert {model.id for model in (await client.models.list()).data} == {MODEL, "model-0", "after-all"}
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="model-49", prompt="x")
        values = {sample.labels.get("model") for family in w.registry.collect() for sample in family.samples}
        assert values <= {None, "", MODEL, "model-0"}
    lines = [text for record in caplog.records if "is left out" in (text := record.getMessage())]
    assert len(lines) == 1
    assert "model-1 is left out: 2 models are known already" in lines[0]
