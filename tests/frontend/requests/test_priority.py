"""services/frontend/requests/priority.py, and what routers and workers get of it over both doors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from services.frontend.auth.accounts import Account
from services.frontend.config import AccessConfig
from services.frontend.requests.priority import NOT_ALLOWED, lowest_allowed, served_priority
from services.frontend.server.nats_api import STATUS_HEADER
from services.frontend.serving.request_context import SESSION_HEADER, session_name
from shared import subjects
from shared.api_keys import KeyEntry, key_digest
from shared.errors import InvalidRequest
from tests.fakes.memory_bus import MemoryBus
from tests.frontend.peers import DEADLINE_S, MODEL, NAMESPACE, World, clients, world

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
BODIES: dict[str, dict[str, Any]] = {
    "chat": CHAT,
    "completions": {"model": MODEL, "prompt": "hello"},
    "responses": {"model": MODEL, "input": "hello"},
    "embeddings": {"model": MODEL, "input": "hello"},
}
PATHS = {"chat": "/v1/chat/completions"} | {name: f"/v1/{name}" for name in ("completions", "responses", "embeddings")}


@pytest.mark.parametrize(
    ("asked", "lowest", "served"),
    [(None, 0, 0), (0, 0, 0), (7, 0, -7), (-3, -3, 3), (-2, -3, 2), (None, -3, 0), (None, 5, -5), (5, 5, -5)],
)
def test_lower_is_served_earlier_and_without_the_field_it_is_0_or_the_best_allowed(
    asked: int | None, lowest: int, served: int
) -> None:
    assert served_priority(asked, lowest) == served


@pytest.mark.parametrize(("asked", "lowest"), [(-1, 0), (-4, -3), (4, 5), (0, 5)])
def test_more_than_is_allowed_is_refused_by_name_and_not_lowered(asked: int, lowest: int) -> None:
    with pytest.raises(InvalidRequest, match=f"priority: {asked} is lower than {lowest}, ") as refused:
        served_priority(asked, lowest)
    assert (refused.value.param, refused.value.code, refused.value.status) == ("priority", NOT_ALLOWED, 400)


def test_a_key_has_its_own_bound_or_that_of_all() -> None:
    own, none = (Account("a", KeyEntry("0" * 64, min_priority=lowest), 0.0) for lowest in (-9, None))
    assert [lowest_allowed(account, 3) for account in (own, none, None)] == [-9, 3, 3]


async def ask_over_nats(
    w: World, operation: str, body: Any, headers: Mapping[str, str]
) -> tuple[Any, Mapping[str, str]]:
    subject = subjects.client(NAMESPACE, operation)
    message = await MemoryBus(w.broker).request(
        subject, json.dumps(body).encode(), timeout_s=DEADLINE_S, headers=dict(headers)
    )
    return json.loads(message.payload), message.headers


async def ask(w: World, door: str, operation: str, body: Any, headers: Mapping[str, str]) -> tuple[Any, int]:
    """The answer and its status."""
    if door == "nats":
        answer, told = await ask_over_nats(w, operation, body, headers)
        return answer, int(told.get(STATUS_HEADER, 200))
    async with clients(w) as (_, http), http.post(PATHS[operation], json=body, headers=headers) as response:
        return await response.json(), response.status


@pytest.mark.parametrize("door", ["http", "nats"])
@pytest.mark.parametrize("operation", BODIES)
async def test_routers_and_workers_get_the_negative_of_what_the_client_sent(
    door: str, operation: str, directory: Path
) -> None:
    access = AccessConfig(min_priority=-5)
    async with world(directory, embedding_size=8, access=access) as w:
        w.say("a mill")
        for sent in ({}, {"priority": -5}, {"priority": 12}):
            _, status = await ask(w, door, operation, BODIES[operation] | sent, {})
            assert status == 200
        assert [select.priority for select in await w.router.asked.at_least(3)] == [0, 5, -12]
        assert [generate.priority for generate in await w.workers[0].generates.at_least(3)] == [0, 5, -12]

        answer, status = await ask(w, door, operation, BODIES[operation] | {"priority": -6}, {})
        assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, "priority", NOT_ALLOWED)
        assert answer["error"]["message"].startswith("priority: -6 is lower than -5, the lowest that you may ask for")
        assert len(await w.router.asked.at_least(3)) == 3


@pytest.mark.parametrize("door", ["http", "nats"])
async def test_a_key_bounds_what_its_requests_may_ask_for(door: str, directory: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    lowest = {"urgent": {"min_priority": -10}, "usual": {}, "batch": {"min_priority": 20}}
    keys.write_text(json.dumps({name: {"sha256": key_digest(name).hex(), **own} for name, own in lowest.items()}))
    async with world(directory, access=AccessConfig(keys_file=str(keys)), ready=False) as w:
        w.say("a mill")
        seen: dict[tuple[str, int | None], int | str] = {}
        for name in lowest:
            for priority in (None, -10, 0, 20):
                body = CHAT if priority is None else CHAT | {"priority": priority}
                before = len(await w.router.asked.at_least(0))
                answer, status = await ask(w, door, "chat", body, {"Authorization": f"Bearer {name}"})
                served = [select.priority for select in await w.router.asked.at_least(0)][before:]
                seen[name, priority] = served[0] if status == 200 else answer["error"]["code"]
        no = NOT_ALLOWED
        assert [seen["urgent", priority] for priority in (None, -10, 0, 20)] == [0, 10, 0, -20]
        assert [seen["usual", priority] for priority in (None, -10, 0, 20)] == [0, no, 0, -20]
        assert [seen["batch", priority] for priority in (None, -10, 0, 20)] == [-20, no, no, -20]


@pytest.mark.parametrize("door", ["http", "nats"])
@pytest.mark.parametrize("operation", ["chat", "completions", "responses"])
async def test_a_session_is_named_by_the_body_or_else_by_the_header(door: str, operation: str, directory: Path) -> None:
    async with world(directory) as w:
        w.say("a mill")
        named = {"prompt_cache_key": "of the body"}
        for sent, headers in (({}, {}), ({}, {SESSION_HEADER: "of the header"}), (named, {SESSION_HEADER: "x"})):
            _, status = await ask(w, door, operation, BODIES[operation] | sent, headers)
            assert status == 200
        asked = await w.router.asked.at_least(3)
        assert [select.session for select in asked] == ["", "of the header", "of the body"]

        answer, status = await ask(w, door, operation, BODIES[operation], {SESSION_HEADER: "x" * 257})
        assert (status, answer["error"]["param"]) == (400, SESSION_HEADER)
        assert answer["error"]["message"] == f"{SESSION_HEADER}: must be at most 256 printable characters"


@pytest.mark.parametrize("name", ["x" * 257, "a\tb", "a\x7f", "\udcff"])
def test_a_session_is_short_and_printable(name: str) -> None:
    assert session_name(" chat-7 ") == "chat-7"
    assert session_name(None) == session_name("") == ""
    with pytest.raises(InvalidRequest, match=SESSION_HEADER):
        session_name(name)
