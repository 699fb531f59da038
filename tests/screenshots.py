"""Takes the pictures of the page at /ui and of `headrace top` for docs/images, from a real stack under load.

    .venv/bin/python -m tests.screenshots [FOLDER [ui|top|picture]]

It starts `headrace up` with simulated workers and a block store, and one worker that computes a real model, for the
chat. It asks the simulated ones as many clients would, and lets a headless Chromium look: ui-light.png, ui-dark.png
and, on a phone, ui-phone.png. `top` runs in a terminal of its own, whose screen becomes a page for top.png; before that
a worker is killed, so that there are migrations to see. `picture` is the chat with a model that makes pictures, whose
weights are random: it needs `./headrace install-diffusers`, and is taken only if it is asked for.
"""

from __future__ import annotations

import asyncio
import html
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
from PIL import Image

from tests.chromium import Tab, browser, page, program
from tests.integration.stack import ROOT, STOP_LIMIT_S, Up, running
from tests.terminal_screen import TerminalScreen, terminal_screen
from tests.worker.diffusers.environment import write_image_pipeline

WORKERS = 5
CLIENTS = 14
LOAD_S = 45.0
"""Seconds of load before the first picture, so that the lines have a past."""
SIMULATED = "SmolLM2-135M-Instruct"
REAL = "SmolLM2-135M-chat"
SIZE = (1480, 1580)
PHONE = (412, 915)
PICTURE_SIZE = (1100, 700)
SIZE_LIMIT_BYTES = 300_000
TERMINAL = (100, 33)
TERMINAL_SECONDS = (20.0, 12.0)
"""Seconds of load before a worker is killed, and from then until the picture: its lease ends, another one comes."""
COLOURS = 256
PALETTE = {
    **{"green": "#7ec97e", "cyan": "#5fb8c9", "blue": "#7aa2f7"},
    **{"brown": "#d8b45a", "red": "#e06c75", "black": "#6b7280"},
}
"""pyte's names of colours; what it calls brown is yellow."""
QUESTIONS = ("What does a mill need water for?", "And what does a sluice do? Answer in one sentence.")
LAST_QUESTION = "Tell me a long story about a miller and the river."
TOPICS = ("rivers", "mills", "locks", "weirs", "turbines", "canals", "aqueducts", "tides")
SYSTEM = (
    "You are the keeper of a mill. You know the headrace, which leads water from the weir to the wheel, the sluice "
    "that lets it in, the tailrace that leads it away, and every stone between. Answer kindly, briefly and exactly. "
) * 6


async def client(http: aiohttp.ClientSession, seed: int) -> None:
    """Hold one conversation after another, each turn with all that was said before."""
    draw = random.Random(seed)
    while True:
        topic = draw.choice(TOPICS)
        messages: list[dict[str, Any]] = [{"role": "system", "content": f"{SYSTEM} Today it is about {topic}."}]
        for turn in range(draw.randint(2, 5)):
            messages.append({"role": "user", "content": f"Tell me more about {topic}, part {turn}. " * 4})
            body = {
                **{"model": SIMULATED, "messages": messages, "stream": True, "ignore_eos": True},
                **{"max_tokens": draw.randint(60, 420), "stream_options": {"include_usage": True}},
            }
            async with http.post("/v1/chat/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()
            messages.append({"role": "assistant", "content": f"Of {topic} there is much to tell. " * 8})
            await asyncio.sleep(draw.uniform(0.2, 2.5))


@asynccontextmanager
async def load(url: str) -> AsyncIterator[None]:
    """Keep the stack busy while the context is open."""
    async with aiohttp.ClientSession(url) as http:
        asking = [asyncio.create_task(client(http, seed)) for seed in range(CLIENTS)]
        try:
            yield
        finally:
            for each in asking:
                each.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(*asking)


async def look(url: str, endpoint: str, folder: Path) -> None:
    """Open the page, chat, and take the pictures."""
    async with load(url), page(endpoint) as tab:
        await tab.resize(*SIZE)
        await tab.prefer(prefers_color_scheme="light")
        await tab.open(f"{url}/ui")
        await tab.until(f"[...document.querySelectorAll('#chat-model option')].some((one) => one.value === '{REAL}')")
        await tab.value(f"document.querySelector('#chat-model').value = '{REAL}'")
        await asyncio.sleep(LOAD_S)
        for question in QUESTIONS:
            await chat(tab, question)
        await tab.type_text("#chat-text", LAST_QUESTION)
        await tab.press("Enter")
        await tab.until("[...document.querySelectorAll('.turn.model .said')].at(-1).textContent.length > 150")
        await tab.value("document.activeElement.blur()")
        await tab.value("document.querySelector('tr[data-outcome=running] .pick')?.click()")
        await asyncio.sleep(1)
        await tab.picture(folder / "ui-light.png")
        await tab.prefer(prefers_color_scheme="dark")
        await asyncio.sleep(1)
        await tab.picture(folder / "ui-dark.png")
        await tab.resize(*PHONE, phone=True)
        await asyncio.sleep(1)
        await tab.picture(folder / "ui-phone.png")
        assert tab.complaints == [], tab.complaints


async def look_at_picture(url: str, endpoint: str, folder: Path) -> None:
    """Ask for a picture in the chat, and take a picture of it."""
    async with page(endpoint) as tab:
        await tab.resize(*PICTURE_SIZE)
        await tab.prefer(prefers_color_scheme="light")
        await tab.open(f"{url}/ui")
        await tab.until("document.querySelector('#chat-model option')?.value === 'tiny'")
        await tab.type_text("#chat-text", "A mill at the river, at dusk")
        await tab.press("Enter")
        await tab.until("document.querySelector('img.picture')?.src.startsWith('data:image/png')")
        await tab.until("/seed/.test(document.querySelector('.turn.model .meta').textContent)")
        await tab.value("document.activeElement.blur()")
        await tab.value("document.querySelector('#chat-form').scrollIntoView({block: 'end'})")
        await tab.picture(folder / "picture.png")
        assert tab.complaints == [], tab.complaints


async def look_at_top(up: Up, endpoint: str, folder: Path) -> None:
    """Let `headrace top` run while a worker is killed, and take a picture of its screen."""
    words = [sys.executable, "-P", "-m", "deploy.local.cli", "top", "--state", str(up.state), "--every", "1"]
    columns, rows = TERMINAL
    with terminal_screen(words, {}, cwd=ROOT, columns=columns, rows=rows) as terminal:
        async with load(up.url.removesuffix("/v1")), page(endpoint) as tab:
            await asyncio.to_thread(watch, terminal, TERMINAL_SECONDS[0])
            os.kill(up.pid("worker-1"), signal.SIGKILL)
            await asyncio.to_thread(watch, terminal, TERMINAL_SECONDS[1])
            file = folder / "top.html"
            file.write_text(as_page(terminal), encoding="utf-8")
            await tab.open(file.as_uri())
            size = await tab.value("[document.body.scrollWidth, document.body.scrollHeight]")
            await tab.resize(*size)
            await tab.picture(folder / "top.png")
            file.unlink()
        terminal.press("q")
        assert terminal.ended() == 0


def watch(terminal: TerminalScreen, seconds: float) -> None:
    """Follow a terminal's screen for a while, until a view is whole."""
    deadline = time.monotonic() + seconds
    while terminal.read(0.1) or time.monotonic() < deadline:
        pass


def as_page(terminal: TerminalScreen) -> str:
    """Return the screen of a terminal as HTML."""
    screen = terminal.screen
    lines = []
    for row in range(screen.lines):
        cells = [screen.buffer[row][column] for column in range(screen.columns)]
        lines.append("".join(as_span(cell) for cell in cells))
    style = (
        "body { margin: 0; padding: 14px; background: #16181d; color: #d4d7dd; width: max-content }"
        "pre { margin: 0; font: 15px/1.25 'DejaVu Sans Mono', monospace }"
        ".bold { font-weight: bold } .reverse { background: #d4d7dd; color: #16181d }"
    )
    return f"<!doctype html><meta charset=utf-8><style>{style}</style><pre>{chr(10).join(lines)}</pre>"


def as_span(cell: Any) -> str:
    """Return one cell of a terminal as HTML."""
    names = " ".join(name for name in ("bold", "reverse") if getattr(cell, name))
    colour = f" style='color: {PALETTE[cell.fg]}'" if cell.fg in PALETTE and not cell.reverse else ""
    return f"<span class='{names}'{colour}>{html.escape(cell.data)}</span>"


async def chat(tab: Tab, text: str) -> None:
    """Ask in the chat, and wait for the line below the answer."""
    turns = await tab.value("document.querySelectorAll('.turn.model').length")
    await tab.type_text("#chat-text", text)
    await tab.press("Enter")
    await tab.until(f"document.querySelectorAll('.turn.model .meta button').length === {turns + 1}")


@contextmanager
def real_worker(up: Up) -> Iterator[None]:
    """Let a worker join that computes the model, under another name."""
    settings = (up.state / "run" / "worker-0.toml").read_text()
    settings = re.sub(r"(?m)^(port = .*|\[simulated\]|capacity_blocks = .*)$", "", settings)
    settings = settings.replace('engine = "simulated"', 'engine = "native"')
    settings = settings.replace(f'model_name = "{SIMULATED}"', f'model_name = "{REAL}"')
    file = up.state / "real.toml"
    file.write_text(settings)
    with (up.state / "real.log").open("ab") as log:
        worker = subprocess.Popen(
            [sys.executable, "-m", "services.worker", "--config", str(file)], cwd=ROOT, stdout=log, stderr=log
        )
    try:
        yield
    finally:
        worker.terminate()
        worker.wait(STOP_LIMIT_S)


def shrink(picture: Path) -> None:
    """Write a picture again with COLOURS colours: a page of flat colours looks the same."""
    with Image.open(picture) as shot:
        few = shot.convert("RGB").quantize(COLOURS, Image.Quantize.MAXCOVERAGE, kmeans=3, dither=Image.Dither.NONE)
        few.save(picture, optimize=True)
    size = picture.stat().st_size
    print(f"{picture}: {size} bytes")
    assert size <= SIZE_LIMIT_BYTES, f"{picture} is too large"


def main() -> None:
    """Take the pictures."""
    folder = (Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images").absolute()
    wanted = sys.argv[2:] or ["ui", "top"]
    if program() is None:
        sys.exit("error: no Chromium is installed; on Debian: apt-get install chromium")
    folder.mkdir(parents=True, exist_ok=True)
    if "picture" in wanted:
        with tempfile.TemporaryDirectory() as name:
            model = write_image_pipeline(Path(name, "tiny"))
            with (
                running(Path(name), "--engine", "diffusers", "--model", str(model)) as up,
                browser(Path(name)) as endpoint,
            ):
                asyncio.run(look_at_picture(up.url.removesuffix("/v1"), endpoint, folder))
    if {"ui", "top"} & set(wanted):
        look_at_stack(folder, wanted)
    for picture in sorted(each for name in wanted for each in folder.glob(f"{name}*.png")):
        shrink(picture)


def look_at_stack(folder: Path, wanted: list[str]) -> None:
    """Take the pictures of a stack under load."""
    with tempfile.TemporaryDirectory() as name:
        state = Path(name)
        store = ("--kvbm-bytes", "96M", "--kvbm-disk", str(state / "disk"), "--kvbm-disk-bytes", "1G")
        fleet = ("--engine", "simulated", "--workers", str(WORKERS), "--frontends", "2", "--routers", "2")
        small = ("--set", "worker.capacity_blocks=640")
        with running(state, *fleet, *store, *small) as up, real_worker(up), browser(state) as endpoint:
            if "ui" in wanted:
                asyncio.run(look(up.url.removesuffix("/v1"), endpoint, folder))
            if "top" in wanted:
                asyncio.run(look_at_top(up, endpoint, folder))


if __name__ == "__main__":
    main()
