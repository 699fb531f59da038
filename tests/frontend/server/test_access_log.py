"""The line of each request in the log, at a whole frontend's two doors."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from services.frontend.config import FrontendConfig
from shared import subjects
from shared.bus.memory_bus import MemoryBus
from tests.frontend.peers import DEADLINE_S, MODEL, NAMESPACE, clients, world

HELLO: Any = [{"role": "user", "content": "hello"}]


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [
        {"level": one.levelname, "request": one.__dict__["request"], **one.__dict__["fields"]}
        for one in caplog.records
        if one.name == "services.frontend.access"
    ]


async def test_a_request_has_a_line_over_http_and_over_nats_where_the_setting_says_so(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with world(directory, settings=FrontendConfig(access_log=True)) as w, clients(w) as (client, _):
        w.say("abc")
        answer = await client.chat.completions.create(model=MODEL, messages=HELLO)
        w.say("abc")
        body = json.dumps({"model": MODEL, "messages": HELLO}).encode()
        await MemoryBus(w.broker).request(subjects.client(NAMESPACE, "chat"), body, timeout_s=DEADLINE_S)
        with pytest.raises(Exception, match="does not exist"):
            await client.chat.completions.create(model="no\nsuch", messages=HELLO)
        found = lines(caplog)
    assert [(one["status"], one["model"]) for one in found] == [(200, MODEL), (200, MODEL), (404, "")]
    over_http = found[0]
    assert over_http["request"] in answer.id
    assert answer.usage is not None
    assert over_http["prompt_tokens"] == answer.usage.prompt_tokens
    assert over_http["output_tokens"] == answer.usage.completion_tokens
    assert over_http["operation"] == "chat"
    assert over_http["key"] == ""
    assert over_http["attempts"] == 1
    assert over_http["workers"] == w.workers[0].instance
    assert 0 <= over_http["first_token_s"] <= over_http["seconds"]


async def test_without_the_setting_only_what_fails_in_the_service_has_one(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with world(directory) as w, clients(w) as (client, http):
        w.say("abc")
        await client.chat.completions.create(model=MODEL, messages=HELLO)
        async with http.post("/v1/chat/completions", data=b"no json") as response:
            assert response.status == 400
        w.workers[0].output = None
        body = {"model": MODEL, "prompt": "x", "deadline_s": 0.2}
        async with http.post("/v1/completions", json=body) as response:
            assert response.status == 504
        assert [(one["level"], one["status"], one["model"]) for one in lines(caplog)] == [("WARNING", 504, MODEL)]
