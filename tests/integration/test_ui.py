"""The page at /ui in a real Chromium, over a real stack: what it shows, and that its policy forbids nothing of it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from shared.api_keys import key_digest
from tests.chromium import Tab, browser, page, program
from tests.integration.stack import Up, running
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.skipif(program() is None, reason="no Chromium is installed (Debian's package: chromium)")

WORKERS = 3
LIVE = "document.querySelector('#live').dataset.state === 'live'"
READY = "[...document.querySelectorAll('.worker')].filter((one) => one.dataset.state === 'ready').length === {}"
WIDTHS = """[...document.querySelectorAll('table')].map((table) =>
    [...table.rows].map((row) => [...row.cells].reduce((sum, cell) => sum + cell.colSpan, 0)))"""
"""The columns of each row of each table, headings included."""
BELOW = """Object.fromEntries([...document.querySelectorAll('.candidates thead th')].map((heading, at) =>
    [heading.textContent, document.querySelector('.candidates tr.chosen').cells[at].textContent]))"""
"""Heading → the chosen candidate's cell below it."""
QUESTION = "How does water get from the river to the mill? " * 4
KEY = "sk-the-key-of-this-test-0123456789"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with browser(tmp_path_factory.mktemp("chromium")) as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    state = tmp_path_factory.mktemp("ui")
    model = str(write_tiny_model(state / "tiny"))
    store = ("--kvbm-bytes", "16M", "--kvbm-disk", str(state / "disk"), "--kvbm-disk-bytes", "64M")
    flags = ("--engine", "simulated", "--workers", str(WORKERS), "--model", model, *store)
    with running(state, *flags, "--frontends", "2", "--routers", "2") as stack:
        yield stack


@asynccontextmanager
async def opened(endpoint: str, url: str) -> AsyncIterator[Tab]:
    """The page, once it shows the stack; no complaint may be left in the end."""
    async with page(endpoint) as tab:
        await tab.resize(1400, 1000)
        await tab.open(f"{url}/ui")
        await tab.until(LIVE)
        yield tab
        assert tab.complaints == []
        assert {address.split("/")[2] for address in tab.requested if address.startswith("http")} == {url.split("/")[2]}
        refused = {address: status for address, status in tab.statuses.items() if status >= 400}
        assert refused == {}


def base(up: Up) -> str:
    return up.url.removesuffix("/v1")


def in_page(up: Up, chromium: str, look: Callable[[Tab], Awaitable[None]]) -> None:
    async def run() -> None:
        async with opened(chromium, base(up)) as tab:
            await look(tab)

    asyncio.run(run())


async def ask(tab: Tab, text: str) -> str:
    """Ask in the chat; return the line below the answer."""
    turns = await tab.value("document.querySelectorAll('.turn.model').length")
    await tab.type_text("#chat-text", text)
    await tab.press("Enter")
    last = "[...document.querySelectorAll('.turn.model')].at(-1)"
    await tab.until(f"document.querySelectorAll('.turn.model').length === {turns + 1}")
    await tab.until(f"{last}.querySelector('.meta .name') !== null && {last}.querySelector('.meta button') !== null")
    line: str = await tab.value(f"{last}.querySelector('.meta').innerText")
    return line


def test_the_page_shows_every_process_and_the_tiers(up: Up, chromium: str) -> None:
    async def look(tab: Tab) -> None:
        assert await tab.value("document.title") == "Headrace"
        await tab.until(READY.format(WORKERS))
        await tab.until("document.querySelectorAll('.service[data-state=ready]').length === 4")
        kinds = await tab.value("[...document.querySelectorAll('.tier .kind')].map((one) => one.textContent)")
        assert kinds == ["host", "disk"]
        assert await tab.value("document.querySelector('#notes').hidden")

    in_page(up, chromium, look)


def test_a_chat_streams_and_shows_cached_tokens_the_instance_and_the_decision(up: Up, chromium: str) -> None:
    async def look(tab: Tab) -> None:
        await tab.until(READY.format(WORKERS))
        first = await ask(tab, QUESTION)
        assert "cached tokens" in first
        assert "answered by" in first
        said = await tab.value("document.querySelector('.turn.model .said').textContent")
        assert "from the river to the mill?" in said
        await tab.value("document.querySelector('#chat-clear').click()")
        again = await ask(tab, QUESTION)
        assert "cached tokens 0 of" not in again.replace("\n", " ")
        marks = '<img src=x onerror="document.title=1"><script>document.title=2</script>'
        await ask(tab, marks)
        assert await tab.value("document.querySelectorAll('.log img, .log script').length") == 0
        assert await tab.value("document.title") == "Headrace"
        chosen = "document.querySelector('.candidates tr.chosen code').textContent"
        await tab.value("document.querySelector('.turn.model .meta button').click()")
        await tab.until(f"document.querySelector('.candidates tr.chosen') && {chosen}")
        assert await tab.value(chosen) in again
        assert await tab.value("document.querySelectorAll('.candidates tbody tr').length") == WORKERS
        widths = await tab.value(WIDTHS)
        assert [set(table) for table in widths] == [{9}, {10}]
        below = await tab.value(BELOW)
        assert re.fullmatch(r"\u2013|<?[0-9.]+ m?s", below["First token"])
        assert re.fullmatch(r"-?[0-9.,]+", below["Score"])
        assert re.fullmatch(r"[0-9]+", below["Remote"])
        assert re.search("[a-z]", below["Why"])
        await tab.until("document.querySelector('#requests tr.chosen[data-outcome=good]') !== null")
        stops = "document.querySelectorAll('#requests tr.chosen .stop[data-state=done]').length"
        assert await tab.value(stops) == 5

    in_page(up, chromium, look)


def test_a_worker_that_is_killed_shows_and_so_does_the_one_that_comes_after_it(up: Up, chromium: str) -> None:
    async def look(tab: Tab) -> None:
        await tab.until(READY.format(WORKERS))
        os.kill(up.pid("worker-0"), signal.SIGKILL)
        await tab.until("document.querySelector('.worker[data-state=silent], .worker[data-state=gone]') !== null")
        await tab.until(READY.format(WORKERS))

    in_page(up, chromium, look)


def test_themes_a_phone_and_the_keyboard(up: Up, chromium: str) -> None:
    async def look(tab: Tab) -> None:
        ground = "getComputedStyle(document.documentElement).backgroundColor"
        await tab.prefer(prefers_color_scheme="light")
        light = await tab.value(ground)
        await tab.prefer(prefers_color_scheme="dark")
        dark = await tab.value(ground)
        assert light != dark
        await tab.value("document.querySelector('#theme').click()")
        assert await tab.value(ground) == light
        await tab.value("document.querySelector('#theme').click()")
        await tab.prefer(prefers_color_scheme="light")
        assert await tab.value(ground) == dark
        await tab.value("document.querySelector('#theme').click()")

        await tab.resize(390, 844, phone=True)
        assert await tab.value("document.documentElement.scrollWidth") <= 390

        seen = []
        for _ in range(3):
            await tab.press("Tab")
            seen.append(await tab.value("document.activeElement.id || document.activeElement.className"))
        assert seen[:2] == ["skip", "theme"]
        unnamed = """[...document.querySelectorAll('button, input, select, textarea')].filter(
            (one) => !one.textContent.trim() && !document.querySelector(`label[for="${one.id}"]`)).length"""
        assert await tab.value(unnamed) == 0

    in_page(up, chromium, look)


def test_with_keys_the_page_asks_for_one_and_keeps_it_in_the_tab(tmp_path: Path, chromium: str) -> None:
    model = str(write_tiny_model(tmp_path / "tiny"))
    keys = tmp_path / "keys.toml"
    keys.write_text(f'alice = {{ sha256 = "{key_digest(KEY).hex()}" }}\n')
    state = tmp_path / "state"
    state.mkdir()
    flags = ("--engine", "simulated", "--workers", "1", "--model", model, "--discovery", "file", "--keys", str(keys))
    with running(state, *flags, "--set", "frontend.ui.serve=api") as stack:

        async def look() -> None:
            async with page(chromium) as tab:
                await tab.open(f"{base(stack)}/ui")
                for key in ("wrong", KEY):
                    await tab.until("document.querySelector('#key-dialog').open")
                    await tab.type_text("#key-input", key)
                    await tab.press("Enter")
                await tab.until(LIVE)
                await tab.until(READY.format(1))
                assert "cached tokens" in await ask(tab, "Is it far?")
                assert await tab.value("JSON.stringify({...localStorage})") == "{}"
                assert KEY not in await tab.value("document.documentElement.outerHTML")
                assert [each for each in tab.requested if KEY in each] == []

        asyncio.run(look())
