"""deploy/local/route/answers.py: what a server's answers mean."""

from __future__ import annotations

import msgspec
import pytest

from deploy.local.route.answers import (
    EVENT_SOURCES,
    MODEL_LIST,
    MOST_MODELS,
    Found,
    ListedModel,
    PublishedEvents,
    ServerModels,
    describe,
    find_events,
    misfit,
    pick,
    takes_text,
    translate,
)

LISTED = (
    ListedModel("poet", parent="prod"),
    ListedModel("prod", "/models/SmolLM2/"),
    ListedModel("other"),
)
FOUND = Found(ServerModels(LISTED), "0.32.0", 16, 64, 1)


def source(endpoint: str = "tcp://*:5557", replay: str | None = "tcp://*:5558") -> dict[str, PublishedEvents]:
    return {"0": PublishedEvents(endpoint, replay)}


def test_a_model_is_found_by_its_name_or_where_it_is_from_and_a_lora_is_none() -> None:
    for name in ("prod", "SmolLM2", "/models/SmolLM2/"):
        assert pick(FOUND, {name, "else"}) == LISTED[1]
    assert pick(FOUND, None) == LISTED[1]
    assert pick(FOUND, {"poet", "models"}) is None
    assert pick(Found(ServerModels(())), None) is None


def test_a_server_of_another_model_or_block_size_does_not_fit() -> None:
    assert misfit(FOUND, {"prod"}, 16) == misfit(FOUND, {"prod"}, 0) == ""
    assert misfit(FOUND, {"b", "a"}, 16) == "has no model a or b; it has prod, other"
    assert misfit(Found(ServerModels(())), None, 0) == "has no model at all; it has none"
    assert misfit(FOUND, {"prod"}, 32) == "has blocks of 16 tokens, the others have 32: start it with --block-size"


def test_events_are_where_the_server_is() -> None:
    assert find_events("gpu-1", source(), 1) == ("tcp://gpu-1:5557", "tcp://gpu-1:5558", "")
    assert find_events("fe80::1", source(), 1)[0] == "tcp://[fe80::1]:5557"
    assert find_events("gpu-1", source("tcp://10.0.0.5:5557", "tcp://0.0.0.0:5558"), 1)[:2] == (
        "tcp://10.0.0.5:5557",
        "tcp://gpu-1:5558",
    )
    assert find_events("127.0.0.1", source("ipc:///run/events", None), 1)[0] == "ipc:///run/events"


@pytest.mark.parametrize(
    ("sources", "ranks", "said"),
    [
        (None, 1, "it says nothing of KV events, as vLLM does from 0.32 on"),
        ({}, 1, "it publishes no KV events: start it with --kv-events-config '{"),
        (
            {"0": PublishedEvents("tcp://*:5557", None, False)},
            1,
            "it publishes no KV events: start it with --kv-events-",
        ),
        (source(), 2, "its KV events are those of 2 data-parallel ranks, and not followed"),
        (source() | {"1": PublishedEvents("tcp://*:5558")}, 1, "its KV events are those of 2 data-parallel ranks"),
        (source("ipc:///run/events"), 1, "its KV events are at ipc:///run/events, not to be reached from here: --kv"),
        (source("tcp://127.0.0.1:1"), 1, "its KV events are at tcp://127.0.0.1:1, not to be reached from here: --kv"),
        (source("inproc://x"), 1, "its KV events are at inproc://x, not to be reached from here: --kv-events-config"),
        (source("tcp://*:x"), 1, "its KV events are at tcp://*:x, not to be reached from here: --kv-events-config"),
    ],
)
def test_what_is_lacking_for_events_is_said_with_its_flag(
    sources: dict[str, PublishedEvents] | None, ranks: int, said: str
) -> None:
    events, replay, lacks = find_events("gpu-1", sources, ranks)
    assert (events, replay) == ("", "")
    assert lacks.startswith(said)


def test_events_without_replay_are_followed_and_the_flag_is_said() -> None:
    events, replay, lacks = find_events("gpu-1", source(replay=None), 1)
    assert (events, replay) == ("tcp://gpu-1:5557", "")
    assert lacks == (
        'what it cached before is unknown: set "replay_endpoint": "tcp://*:5558" in its --kv-events-config'
    )


def test_one_line_says_what_was_found() -> None:
    assert describe(FOUND, "prod") == "vLLM 0.32.0, model prod, 64 blocks of 16 tokens, routed by what was sent"
    found = msgspec.structs.replace(FOUND, events="tcp://gpu-1:5557", version="", blocks=0, block_size=0, lacks="more")
    assert describe(found, "prod") == ("a server without /version, model prod, KV events at tcp://gpu-1:5557; more")


def test_answers_of_another_form_are_refused() -> None:
    with pytest.raises(msgspec.MsgspecError):
        MODEL_LIST.decode(b"<html>")
    with pytest.raises(msgspec.MsgspecError):
        MODEL_LIST.decode(msgspec.json.encode({"data": [{"id": "a"}] * (MOST_MODELS + 1)}))
    assert EVENT_SOURCES.decode(b'{"0": {"endpoint": "tcp://*:1", "hwm": 5}}') == {"0": PublishedEvents("tcp://*:1")}


def test_a_workers_reason_is_said_in_the_words_of_route() -> None:
    url = "http://gpu-1:8001"
    for reason, said in (
        (f"headrace-worker: attached.url: {url} serves another model", "serves another model"),
        (f"attached.api_key_file: {url}/v1/models answers 401", f"--api-key-file: {url}/v1/models answers 401"),
        (f"the engine was lost and is starting again: attached.url: {url}/health answers 503", "/health answers 503"),
        (f"loading: 10 %; the engine before this one was lost: attached.url: {url} was started again", "was started"),
        (f"attached.url: {url}/health does not answer: Connection refused", "does not answer: Connection refused"),
        (f"attached.ca_file /none: No such file: {url}", "--ca-file /none: No such file"),
    ):
        assert translate(reason, url).startswith(said)


@pytest.mark.parametrize(
    ("listed", "block_size", "text"),
    [
        ({"id": "m:8b", "owned_by": "library"}, 0, True),
        ({"id": "/models/m.gguf", "owned_by": "llamacpp"}, 0, True),
        ({"id": "org/m", "owned_by": "org/m"}, 0, True),
        ({"id": "m", "owned_by": "tensorrt_llm"}, 0, True),
        ({"id": "m", "owned_by": None}, 0, True),
        ({"id": "m", "owned_by": "vllm"}, 0, False),
        ({"id": "m", "owned_by": "sglang", "root": "org/m"}, 0, False),
        ({"id": "m", "root": "/models/m"}, 0, False),
        ({"id": "m"}, 16, False),
    ],
)
def test_servers_that_take_text_alone_are_known_by_what_they_say(
    listed: dict[str, object], block_size: int, text: bool
) -> None:
    assert takes_text(MODEL_LIST.decode(msgspec.json.encode({"data": [listed]})), block_size) == text


def test_a_server_that_takes_text_has_the_name_that_clients_give() -> None:
    found = msgspec.structs.replace(FOUND, text=True)
    assert pick(found, {"prod"}) == LISTED[1]
    assert pick(found, {"SmolLM2"}) is None
    assert pick(found, None) == LISTED[1]


def test_servers_of_both_kinds_do_not_fit() -> None:
    takes = msgspec.structs.replace(FOUND, text=True)
    assert misfit(takes, {"prod"}, 0, text=True) == misfit(FOUND, {"prod"}, 16, text=False) == ""
    assert misfit(takes, {"prod"}, 0, text=False).startswith("takes text alone, and the others do not: with --by text")
    assert misfit(FOUND, {"prod"}, 16, text=True).startswith("takes token ids, and the others do not")


def test_one_line_says_what_is_lost_by_text() -> None:
    models = ServerModels((ListedModel("m:8b", owned_by="library"), ListedModel("n", owned_by=None)))
    found = Found(models, text=True)
    loses = "by text, routed by what was sent; an answer that has begun cannot go on elsewhere (docs/route.md)"
    assert describe(found, "m:8b") == f"Ollama, model m:8b, {loses}"
    assert describe(found, "n") == f"a server, model n, {loses}"
