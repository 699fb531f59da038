"""`headrace top`: asks the fleet again and again, reads keys, and lets Rich draw.

    _gather ── look, scrape ──▶ Known ─┐
    keys ──────── KeyReader ──▶ Controls ├──▶ Known.view ─▶ render ─▶ Rich's Live, on the terminal's other screen
    SIGWINCH ── the new size ───────────┘

One task draws. Whatever ends it, the terminal's screen and modes are again what they were.

Rich only lays out tables. Textual would own the event loop for widgets that are not needed.
"""

from __future__ import annotations

import asyncio
import errno
import io
import os
import signal
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from rich.console import Console
from rich.live import Live

from deploy.local.show.fleet import FleetConfig
from deploy.local.show.status import discovered, look, scrape
from deploy.local.top.keys import Controls, KeyReader, press
from deploy.local.top.model import Known
from deploy.local.top.render import render, space
from shared.errors import ConfigError, DiscoveryDown

ASKED = 16
"""Frontends, routers and block stores that are asked for each view, of each kind."""
ESCAPE_S = 0.05
"""Seconds after which ESC is a key by itself."""
TYPED_LIMIT_BYTES = 4096
"""Bytes that wait to be read as keys; more are skipped."""
NO_SCREEN = ("", "dumb", "unknown")
"""Values of TERM that say that a terminal cannot place text."""
HUNG_UP = 128 + signal.SIGHUP


def require_terminal() -> None:
    """Raise ConfigError unless keys and views go to a terminal that can place text."""
    kind, draws = os.environ.get("TERM", ""), sys.stdin.isatty() and sys.stdout.isatty()
    if not draws or kind in NO_SCREEN:
        why = f"TERM is {kind!r}" if draws else "its input and output are not a terminal"
        raise ConfigError(f"`headrace top` needs a terminal, and {why}; use `headrace status --watch`")


def top(config: FleetConfig, every_s: float) -> int:
    """Show the fleet until `q`, Ctrl-C or a signal; return the exit status. Raise DiscoveryDown if it cannot be read at
    first."""
    try:
        return asyncio.run(Top(config, every_s).run())
    except OSError as wrong:
        if wrong.errno != errno.EIO:  # the terminal is gone
            raise
        return HUNG_UP


class Top:
    """The view, while it runs."""

    def __init__(self, config: FleetConfig, every_s: float) -> None:
        self._config = config
        self._every_s = every_s
        self._known = Known()
        self._clock = ""
        self._typed = bytearray()
        self._status: int | None = None
        """The exit status, once a signal has come."""
        self._wake = asyncio.Event()
        """Set when there is something to draw, or the end has come."""

    async def run(self) -> int:
        """Show the fleet until the end; return the exit status. Raise DiscoveryDown if it cannot be read at first."""
        values = await discovered(self._config)
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # what the terminal's encoding lacks
        console = Console(highlight=False, markup=False, emoji=False, force_terminal=True, force_interactive=True)
        loop, keyboard = asyncio.get_running_loop(), sys.stdin.fileno()
        ends = {signal.SIGINT: 0, signal.SIGTERM: 128 + signal.SIGTERM, signal.SIGHUP: HUNG_UP}
        for number, status in ends.items():
            loop.add_signal_handler(number, self._end, status)
        loop.add_signal_handler(signal.SIGWINCH, self._wake.set)
        gathering = asyncio.create_task(self._gather(values))
        gathering.add_done_callback(lambda _: self._wake.set())
        screen = Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        try:
            with _single_keys(keyboard), screen:
                loop.add_reader(keyboard, self._read, keyboard)
                return await self._follow(console, screen, gathering)
        finally:
            loop.remove_reader(keyboard)
            gathering.cancel()
            await asyncio.wait([gathering])

    def _end(self, status: int) -> None:
        self._status = status
        self._wake.set()

    def _read(self, keyboard: int) -> None:
        try:
            data = os.read(keyboard, TYPED_LIMIT_BYTES)
        except OSError:
            data = b""
        if not data:  # the terminal is gone
            asyncio.get_running_loop().remove_reader(keyboard)
            self._end(HUNG_UP)
        self._typed += data[: TYPED_LIMIT_BYTES - len(self._typed)]
        self._wake.set()

    async def _follow(self, console: Console, screen: Live, gathering: asyncio.Task[None]) -> int:
        """Draw, and take keys, until the end; return the exit status."""
        reader, controls = KeyReader(), Controls()
        while True:
            with suppress(OSError):
                columns, rows = os.get_terminal_size(sys.stdout.fileno())
                console.size = (columns or 80, rows or 24)
            view = self._known.view(controls, self._clock)
            screen.update(render(view, *console.size), refresh=True)
            with suppress(TimeoutError):
                async with asyncio.timeout(ESCAPE_S if reader.pending else None):
                    await self._wake.wait()
            keys = reader.feed(bytes(self._typed)) if self._wake.is_set() else reader.flush()
            self._wake.clear()
            self._typed.clear()
            page = space(view, *console.size).page
            for key in keys:
                controls = press(controls, key, page, max(0, view.chosen - page))
            if gathering.done():
                gathering.result()
            if controls.ended or self._status is not None:
                return self._status or 0

    async def _gather(self, values: Mapping[str, bytes]) -> None:
        notes: list[str] = []
        while True:
            begun_s = time.monotonic()
            found = await look(self._config, values, notes, most=ASKED)
            doors = [each for each in found.overview.instances if each.service == "frontend"]
            samples, silent = await scrape([each for each in doors if each.instance in found.asked])
            self._known.learn(found, samples, silent, time.monotonic())
            self._clock = time.strftime("%H:%M:%S")
            self._wake.set()
            await asyncio.sleep(max(0.0, begun_s + self._every_s - time.monotonic()))
            try:
                values, notes = await discovered(self._config), []
            except DiscoveryDown as wrong:
                notes = [f"{wrong}; these are the processes that were alive before"]


@contextmanager
def _single_keys(keyboard: int) -> Iterator[None]:
    """Let each key be read when it is pressed, unseen, and none of them be a signal; afterwards as before."""
    before = termios.tcgetattr(keyboard)
    modes = termios.tcgetattr(keyboard)
    modes[0] &= ~termios.IXON
    modes[3] &= ~(termios.ECHO | termios.ICANON | termios.ISIG | termios.IEXTEN)
    modes[6][termios.VMIN], modes[6][termios.VTIME] = 1, 0
    try:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, modes)
        yield
    finally:
        with suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(keyboard, termios.TCSAFLUSH, before)
