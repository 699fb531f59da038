"""Deadlines and priorities by header and field, and what routers and workers get of them, over both doors."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from services.frontend.auth.accounts import Account
from services.frontend.config import AccessConfig, LimitsConfig
from services.frontend.protocol.chat import decode_chat
from services.frontend.protocol.completions import decode_completion
from services.frontend.requests.terms import (
    DEADLINE_FIELD,
    DEADLINE_HEADER,
    PRIORITY_NOT_ALLOWED,
    allowed_s,
    lowest_allowed,
    served_priority,
)
from services.frontend.server.nats_api import STATUS_HEADER
from services.frontend.serving.request_context import SESSION_HEADER, session_name
from shared import subjects
from shared.api_keys import KeyEntry, key_digest
from shared.bus.memory_bus import MemoryBus
from shared.errors import InvalidRequest
from tests.frontend.peers import DEADLINE_S, MODEL, NAMESPACE, World, clients, world

LIMITS = LimitsConfig(deadline_s=600.0, deadline_most_s=3600.0)


@pytest.mark.parametrize(
    ("field", "header", "seconds"),
    [
        (None, None, 600.0),
        (5.0, None, 5.0),
        (None, "7.25", 7.25),
        (5.0, "7", 5.0),
        (9.0, "7", 7.0),
        (3600.0, "3600.0", 3600.0),
        (1e-9, None, 1e-9),
    ],
)
def test_the_smaller_of_what_was_asked_holds_else_the_default(
    field: float | None, header: str | None, seconds: float
) -> None:
    assert allowed_s(field, header, LIMITS) == seconds


@pytest.mark.parametrize(
    "header",
    [
        "0",
        "-1",
        "+1",
        "NaN",
        "inf",
        "1e400",
        "1e2",
        "soon",
        "",
        " 5",
        "5 ",
        "5s",
        "\u0665",
        "3600.1",
        "9" * 400,
        "0.0",
        "1,5",
    ],
)
def test_a_header_that_is_no_deadline_is_refused_by_name(header: str) -> None:
    with pytest.raises(InvalidRequest, match=DEADLINE_HEADER) as raised:
        allowed_s(5.0, header, LIMITS)
    assert raised.value.param == DEADLINE_HEADER
    assert raised.value.status == 400
    assert len(str(raised.value)) < 200


@pytest.mark.parametrize("field", [3600.1, 1e308])
def test_a_field_above_the_servers_limit_is_refused_by_name(field: float) -> None:
    with pytest.raises(InvalidRequest, match="at most 3600 seconds") as raised:
        allowed_s(field, None, LIMITS)
    assert raised.value.param == DEADLINE_FIELD


@pytest.mark.parametrize("value", ["0", "-1", "-0.0", "1e400", "1e-400", '"5"', "true", "[5]", "{}"])
def test_a_body_whose_field_is_no_deadline_is_refused_by_name(value: str) -> None:
    for decode, body in (
        (decode_completion, f'{{"prompt": "x", "deadline_s": {value}}}'),
        (decode_chat, f'{{"messages": [{{"role": "user", "content": "x"}}], "deadline_s": {value}}}'),
    ):
        with pytest.raises(InvalidRequest, match="deadline_s") as raised:
            decode(body.encode())
        assert raised.value.param == "deadline_s"


def test_a_body_may_leave_the_field_out_or_null() -> None:
    assert decode_completion(b'{"prompt": "x", "deadline_s": null}').deadline_s is None
    assert decode_completion(b'{"prompt": "x"}').deadline_s is None
    assert decode_completion(b'{"prompt": "x", "deadline_s": 2}').deadline_s == 2.0


async def over_http(w: World, body: dict[str, object], headers: dict[str, str]) -> tuple[int, str | None]:
    """The status and the error's `param`."""
    async with clients(w) as (_, http), http.post("/v1/completions", json=body, headers=headers) as response:
        return response.status, (await response.json())["error"]["param"]


async def over_nats(w: World, body: dict[str, object], headers: dict[str, str]) -> tuple[int, str | None]:
    message = await MemoryBus(w.broker).request(
        *(subjects.client(NAMESPACE, "completions"), json.dumps(body).encode()), timeout_s=DEADLINE_S, headers=headers
    )
    return int(message.headers[STATUS_HEADER]), json.loads(message.payload)["error"]["param"]


@pytest.mark.parametrize("ask", [over_http, over_nats])
async def test_a_client_sets_its_deadline_by_header_or_field_and_it_goes_with_all_that_is_asked(
    directory: Path, ask: Callable[[World, dict[str, object], dict[str, str]], Awaitable[tuple[int, str | None]]]
) -> None:
    limits = LimitsConfig(select_timeout_s=DEADLINE_S, drain_s=0.0)  # a slow router is not asked again
    async with world(directory, limits=limits) as w:
        w.workers[0].output = None
        body: dict[str, object] = {"model": MODEL, "prompt": "x"}
        assert await ask(w, body, {DEADLINE_HEADER: "1.0"}) == (504, None)
        assert await ask(w, body | {"deadline_s": 0.8}, {DEADLINE_HEADER: "50"}) == (504, None)
        for asked, most_s in zip(w.router.asked.all, (1.0, 0.8), strict=True):
            assert 0 < asked.time_left_s <= most_s
        for offered, most_s in zip(w.workers[0].generates.all, (1.0, 0.8), strict=True):
            assert 0 < offered.time_left_s <= most_s
        assert await ask(w, body, {DEADLINE_HEADER: "NaN"}) == (400, DEADLINE_HEADER)
        assert await ask(w, body | {"deadline_s": 4000}, {}) == (400, DEADLINE_FIELD)
        assert await ask(w, body | {"deadline_s": "soon"}, {}) == (400, DEADLINE_FIELD)


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
    assert (refused.value.param, refused.value.code, refused.value.status) == ("priority", PRIORITY_NOT_ALLOWED, 400)


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
        assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, "priority", PRIORITY_NOT_ALLOWED)
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
        no = PRIORITY_NOT_ALLOWED
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
