"""A headless Chromium for tests, driven over the DevTools protocol by aiohttp: no browser driver is needed.

    with browser(folder) as endpoint:                  # one process; its profile lies in the folder
        async with page(endpoint) as tab:
            await tab.open(url)
            await tab.until("document.title === 'Headrace'")

A Tab collects what a page must not have: errors in the console, uncaught exceptions, violations of its policy.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import os
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp

LIMIT_S = 120.0
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


def program() -> str | None:
    """The browser of this machine. None if there is none."""
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


@contextmanager
def browser(folder: Path, *, flags: tuple[str, ...] = ()) -> Iterator[str]:
    """Run a browser; yield the address of its DevTools."""
    found = program()
    assert found is not None, "no Chromium is installed"
    profile = folder / "chromium"
    profile.mkdir(parents=True, exist_ok=True)
    command = [
        *(found, "--headless=new", "--remote-debugging-port=0", f"--user-data-dir={profile}"),
        *("--no-first-run", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"),
        *("--disable-component-update", "--disable-extensions", "--hide-scrollbars", "--mute-audio"),
        *(("--no-sandbox",) if os.geteuid() == 0 else ()),  # Chromium has no sandbox for root
        *flags,
        "about:blank",
    ]
    with (folder / "chromium.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "HOME": str(folder)})
    try:
        written = profile / "DevToolsActivePort"
        deadline = time.monotonic() + LIMIT_S
        while not (written.exists() and written.read_text().strip()):
            assert process.poll() is None, (folder / "chromium.log").read_text(errors="replace")[-2000:]
            assert time.monotonic() < deadline, "Chromium did not open its DevTools"
            time.sleep(0.05)
        yield f"http://127.0.0.1:{written.read_text().split()[0]}"
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Tab:
    """One page of the browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.complaints: list[str] = []
        """Errors of the console, uncaught exceptions and what the policy forbade."""
        self.requested: list[str] = []
        """The addresses that the page asked for."""
        self.statuses: dict[str, int] = {}
        """Address → the status of its last answer."""

    async def read(self) -> None:
        """Take up what the browser says, until it closes the page."""
        async for message in self._socket:
            said = message.json()
            if "id" in said:
                answer = self._answers.pop(said["id"], None)
                if answer is not None and not answer.done():
                    answer.set_result(said)
            else:
                self._heard(said["method"], said.get("params", {}))

    def _heard(self, method: str, given: Mapping[str, Any]) -> None:
        match method:
            case "Runtime.exceptionThrown":
                self.complaints.append(str(given["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if given["type"] in ("error", "warning", "assert"):
                self.complaints.append(str(given["args"]))
            case "Log.entryAdded" if given["entry"]["level"] in ("error", "warning"):
                self.complaints.append(str(given["entry"]))
            case "Network.requestWillBeSent":
                self.requested.append(given["request"]["url"])
            case "Network.responseReceived":
                self.statuses[given["response"]["url"]] = given["response"]["status"]

    async def call(self, method: str, **given: Any) -> dict[str, Any]:
        """Send a command of the protocol; return its result."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": given})
        async with asyncio.timeout(LIMIT_S):
            said = await answer
        assert "error" not in said, f"{method}: {said.get('error')}"
        result: dict[str, Any] = said["result"]
        return result

    async def open(self, url: str) -> None:
        """Go to an address; return when its document and scripts are loaded."""
        await self.call("Page.navigate", url=url)
        await self.until("location.href !== 'about:blank' && document.readyState === 'complete'")

    async def value(self, expression: str) -> Any:
        """What a JavaScript expression gives; a promise is awaited."""
        # The policy of the page forbids eval; the protocol's own is not held to it.
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found.get("exceptionDetails")
        return found["result"].get("value")

    async def until(self, expression: str, limit_s: float = LIMIT_S) -> Any:
        """Ask until an expression is truthy; return its value."""
        deadline = time.monotonic() + limit_s
        while not (found := await self.value(expression)):
            if time.monotonic() > deadline:
                shown = await self.value("document.body.innerText")
                raise AssertionError(f"not within {limit_s} s: {expression}\n{self.complaints}\n{shown}")
            await asyncio.sleep(0.1)
        return found

    async def type_text(self, selector: str, text: str) -> None:
        """Type a text where a person would."""
        await self.value(f"document.querySelector({selector!r}).focus({{preventScroll: true}})")
        await self.call("Input.insertText", text=text)

    async def press(self, key: str) -> None:
        """Press a key: Enter or Tab."""
        code = {"Enter": 13, "Tab": 9}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        pressed = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **pressed, **text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **pressed)

    async def resize(self, width: int, height: int, *, phone: bool = False, scale: float = 1) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone
        )

    async def prefer(self, **features: str) -> None:
        """Set media features, as the user's system would: prefers_color_scheme, prefers_reduced_motion."""
        wanted = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        await self.call("Emulation.setEmulatedMedia", features=wanted)

    async def picture(self, file: Path) -> None:
        """Write what is seen into a PNG file."""
        shot = await self.call("Page.captureScreenshot", format="png")
        await asyncio.to_thread(file.write_bytes, base64.b64decode(shot["data"]))


@asynccontextmanager
async def page(endpoint: str) -> AsyncIterator[Tab]:
    """Open an empty page of a browser, and close it in the end."""
    async with aiohttp.ClientSession() as http:
        async with http.put(f"{endpoint}/json/new?about:blank") as answer:
            target = await answer.json()
        async with http.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=64 << 20) as socket:
            tab = Tab(socket)
            reading = asyncio.create_task(tab.read())
            try:
                for domain in ("Page", "Runtime", "Log", "Network"):
                    await tab.call(f"{domain}.enable")
                yield tab
            finally:
                await http.get(f"{endpoint}/json/close/{target['id']}")
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
