"""`headrace top` in a terminal of 80 columns and 24 rows, over a real `up` with simulated workers under load."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from tests.integration.stack import ROOT, Up, running
from tests.terminal_screen import TerminalScreen, terminal_screen
from tests.tiny_model import write_tiny_model

WORKERS = 3
ROW = re.compile(r"^([0-9a-f]{16})\s+(\w+)(?: \d+s)?\s+.*?(\d+)\s+(\d+)\s+(?:\d+|-)\s+\d+ %", re.MULTILINE)
"""A worker's line: id, state, running, waiting."""
STREAMS = 4


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    state = tmp_path_factory.mktemp("top")
    model = str(write_tiny_model(state / "tiny"))
    store = ("--kvbm-bytes", "16M", "--kvbm-disk", str(state / "disk"), "--kvbm-disk-bytes", "64M")
    flags = ("--engine", "simulated", "--workers", str(WORKERS), "--model", model, *store)
    with running(state, *flags, "--frontends", "1", "--routers", "2") as stack:
        yield stack


@pytest.fixture
def terminal(up: Up) -> Iterator[TerminalScreen]:
    words = [sys.executable, "-P", "-m", "deploy.local.cli", "top", "--state", str(up.state), "--every", "0.3"]
    with terminal_screen(words, {}, cwd=ROOT) as screen:
        screen.until(lambda text: text.count(" ready ") >= WORKERS and "KVBM" in text, "all workers are ready")
        yield screen


@asynccontextmanager
async def streams(up: Up, count: int) -> AsyncIterator[None]:
    """Keep streams open while the context is."""

    async def ask(http: aiohttp.ClientSession, number: int) -> None:
        body: dict[str, Any] = {"model": "tiny", "prompt": f"{number} the river " * 60, "max_tokens": 400}
        while True:
            async with http.post(f"{up.url}/completions", json=body | {"ignore_eos": True, "stream": True}) as answer:
                await answer.read()

    async with aiohttp.ClientSession() as http:
        asking = [asyncio.create_task(ask(http, number)) for number in range(count)]
        try:
            yield
        finally:
            for each in asking:
                each.cancel()
            await asyncio.gather(*asking, return_exceptions=True)


async def shown(terminal: TerminalScreen, seen: Callable[[str], object], what: str) -> str:
    return await asyncio.to_thread(terminal.until, seen, what)


def rows(text: str) -> list[tuple[str, str, str, str]]:
    found: list[tuple[str, str, str, str]] = ROW.findall(text)
    return found


def is_falling(text: str) -> bool:
    counts = [int(row[2]) for row in rows(text)]
    return len(counts) == WORKERS and counts == sorted(counts, reverse=True)


def names(text: str) -> list[str]:
    return [row[0] for row in rows(text)]


async def test_load_order_and_filter_of_a_running_fleet(up: Up, terminal: TerminalScreen) -> None:
    async with streams(up, STREAMS):
        wanted = f"running {STREAMS}"
        text = await shown(
            terminal,
            lambda text: wanted in text and f"streams {STREAMS}" in text and len(rows(text)) == WORKERS,
            "the load",
        )
        await shown(terminal, lambda text: re.search(r"tokens/s [1-9]", text), "tokens a second")
        await shown(terminal, lambda text: re.search(r"hits device \d+ % host \d+ % disk \d+ %", text), "hits")
        await shown(terminal, lambda text: re.search(r"ttft p50 [\d.]+ m?s", text), "first tokens")
        assert names(text) == sorted(names(text))
        await shown(
            terminal, lambda text: sum(int(row[2]) for row in rows(text)) == STREAMS, "the workers' shares of it"
        )
        await shown(terminal, lambda text: [row[1] for row in rows(text)] == ["ready"] * WORKERS, "all are ready")
        for each in ("host", "disk", "frontend", "router", "tiny", "█"):
            assert each in terminal.text

        terminal.press("r")
        falling = sorted(names(text), reverse=True)
        await shown(
            terminal,
            lambda text: "by worker, turned round" in text and names(text) == falling,
            "the order is turned round",
        )
        terminal.press("ss")
        await shown(terminal, lambda text: " by running " in text and is_falling(text), "the order by load")

        one = names(text)[1]
        terminal.press(f"/{one[:12]}")
        await shown(terminal, lambda text: f"filter: {one[:12]}_" in text and names(text) == [one], "what is typed")
        terminal.press("\r")
        await shown(terminal, lambda text: f"1-1 of 1 with “{one[:12]}”" in text, "one worker")
        terminal.press("\x1b")
        await shown(terminal, lambda text: len(rows(text)) == WORKERS, "all workers again")
    terminal.press("q")
    assert terminal.ended() == 0
    assert terminal.modes() == terminal.first_modes


async def test_a_killed_worker_is_gone_and_its_request_migrated(up: Up, terminal: TerminalScreen) -> None:
    victim = up.pid("worker-1")
    async with streams(up, STREAMS):
        text = await shown(
            terminal,
            lambda text: len(rows(text)) == WORKERS and all(int(row[2]) for row in rows(text)),
            "all workers have work",
        )
        alive = names(text)
        os.kill(victim, signal.SIGKILL)
        moved = await shown(terminal, lambda text: "MIGRATED" in text and " > " in text, "a migration")
        await shown(
            terminal, lambda text: re.search(r"^[0-9a-f]{16} (silent|gone) \d+s", text, re.MULTILINE), "silence"
        )
        assert any(f"{name} > " in moved for name in alive)
        await shown(
            terminal, lambda text: text.count(" ready ") >= WORKERS and set(names(text)) - set(alive), "another"
        )
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.ended() == 128 + signal.SIGTERM
