"""services/frontend/requests/deadline.py, the body's field, and both of them over both doors."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from services.frontend.config import LimitsConfig
from services.frontend.protocol.chat import decode_chat
from services.frontend.protocol.completions import decode_completion
from services.frontend.requests.deadline import FIELD, HEADER, allowed_s
from services.frontend.server.nats_api import STATUS_HEADER
from shared import subjects
from shared.errors import InvalidRequest
from tests.fakes.memory_bus import MemoryBus
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
    with pytest.raises(InvalidRequest, match=HEADER) as raised:
        allowed_s(5.0, header, LIMITS)
    assert raised.value.param == HEADER
    assert raised.value.status == 400
    assert len(str(raised.value)) < 200


@pytest.mark.parametrize("field", [3600.1, 1e308])
def test_a_field_above_the_servers_limit_is_refused_by_name(field: float) -> None:
    with pytest.raises(InvalidRequest, match="at most 3600 seconds") as raised:
        allowed_s(field, None, LIMITS)
    assert raised.value.param == FIELD


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
    async with world(directory) as w:
        w.workers[0].output = None
        body: dict[str, object] = {"model": MODEL, "prompt": "x"}
        assert await ask(w, body, {HEADER: "0.3"}) == (504, None)
        assert await ask(w, body | {"deadline_s": 0.2}, {HEADER: "50"}) == (504, None)
        for asked, most_s in zip(w.router.asked.all, (0.3, 0.2), strict=True):
            assert 0 < asked.time_left_s <= most_s
        for offered, most_s in zip(w.workers[0].generates.all, (0.3, 0.2), strict=True):
            assert 0 < offered.time_left_s <= most_s
        assert await ask(w, body, {HEADER: "NaN"}) == (400, HEADER)
        assert await ask(w, body | {"deadline_s": 4000}, {}) == (400, FIELD)
        assert await ask(w, body | {"deadline_s": "soon"}, {}) == (400, FIELD)
