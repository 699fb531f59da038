"""What the collector hears: load reports of the workers that are known, and no more than it can hold."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from services.frontend.ui import collector, pages
from shared import subjects
from shared.messages.load import LOAD_REPORT, LoadReport
from tests.frontend.peers import DEADLINE_S, NAMESPACE, World, world


def report(worker: str, tokens: int) -> bytes:
    return LOAD_REPORT.encode(LoadReport(worker, 1, 1, 0, 3, 0, 100, 10, 20, output_tokens=tokens))


async def publish(w: World, worker: str, payload: bytes) -> None:
    await w.router.bus.publish(subjects.worker(NAMESPACE, worker, "load"), payload)


@asynccontextmanager
async def stream(w: World) -> AsyncIterator[aiohttp.ClientResponse]:
    async with asyncio.timeout(DEADLINE_S), aiohttp.ClientSession(w.url) as http, http.get("/ui/events") as answer:
        yield answer


async def next_of(answer: aiohttp.ClientResponse) -> dict[str, Any]:
    line = await answer.content.readuntil(b"\n\n")
    seen: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
    return seen


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "INTERVAL_S", 0.02)
    monkeypatch.setattr(collector, "ANSWER_LIMIT_S", 0.02)


async def test_load_reports_become_numbers_and_rates(directory: Path) -> None:
    async with world(directory) as w, stream(w) as answer:
        tokens = 0
        while True:
            tokens += 100
            await publish(w, "w1", report("w1", tokens))
            worker = (await next_of(answer))["workers"][0]
            if worker["tokens_per_s"]:
                break
        assert (worker["state"], worker["running"], worker["held"], worker["cached"]) == ("ready", 3, 10, 20)


async def test_unreadable_reports_and_those_of_strangers_are_left_out(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(directory) as w, stream(w) as answer:
        seen = await next_of(answer)
        # Snapshots that were made before the first report may still be on their way.
        while [each["state"] for each in seen["workers"]] != ["silent", "ready"]:
            await publish(w, "w1", b"rubbish")
            await publish(w, "stranger", report("stranger", 1))
            await publish(w, "w2", report("w2", 1))
            seen = await next_of(answer)
            assert len(seen["workers"]) == 2
    assert "load report" in caplog.text


async def test_reports_of_too_many_strangers_are_not_held(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "WORKERS_HEARD", 2)
    async with world(directory) as w, stream(w) as answer:
        await next_of(answer)
        for number in range(10):
            await publish(w, f"stranger{number}", report(f"stranger{number}", 1))
        while True:  # strangers are forgotten with each snapshot, so that workers find their place again
            await publish(w, "w1", report("w1", 1))
            if (await next_of(answer))["workers"][0]["state"] == "ready":
                return
