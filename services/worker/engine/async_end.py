"""AsyncEnd: an engine's end of the channel on an event loop, for engines whose work is elsewhere.

the shell's commands ──▶ `handle`, one after the other
Stepped ◀── `report`, once at the end of a turn of the loop in which `flush_soon` was called
`ended` ◀── Shutdown, a failure, or the loss of the shell
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from services.worker.contracts.messages import EngineCommand, EngineOrder, EngineReport, Failed, Shutdown, TakeOver
from services.worker.engine.channel import ChannelClosed


class EngineChannel(Protocol):
    """The engine's end of a channel to a shell."""

    def send(self, report: EngineReport, /) -> None:
        """Send a report. Raise ChannelClosed."""
        ...

    def receive(self, limit_s: float | None, /) -> list[EngineCommand]:
        """Return all commands that have come. Raise ChannelClosed."""
        ...


class Readable(Protocol):
    """What has a descriptor."""

    def fileno(self) -> int: ...


class AsyncEnd:
    """Receives commands and times reports. All methods run in the loop's thread."""

    def __init__(
        self,
        channel: EngineChannel,
        connection: Readable,
        *,
        handle: Callable[[EngineOrder], None],
        report: Callable[[], None],
    ) -> None:
        """`connection` is readable when commands have come, such as the channel's socket. `handle` takes each command
        but Shutdown; `report` sends all that is new. Both may raise ChannelClosed, which ends the engine."""
        self._channel = channel
        self._connection = connection
        self._handle = handle
        self._report = report
        self._flushing = False
        self.ended: asyncio.Future[Failed | None] = asyncio.get_running_loop().create_future()
        """None after Shutdown, or why the engine failed; it raises ChannelClosed, and what `break_off` was given."""

    @contextmanager
    def receiving(self) -> Iterator[None]:
        """Report once, and then take commands until the block ends. Raise ChannelClosed."""
        self._report()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._connection.fileno(), self._receive)
        try:
            yield
        finally:
            loop.remove_reader(self._connection.fileno())

    async def serve_beside(self, *tasks: asyncio.Future[None]) -> None:
        """Take commands until the engine ends, or one of the tasks does. Raise what ended it."""
        with self.receiving():
            ends: list[asyncio.Future[Any]] = [self.ended, *tasks]
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for one in done:
            one.result()

    def end(self, failed: Failed | None) -> None:
        """End the engine, unless it has ended."""
        if not self.ended.done():
            self.ended.set_result(failed)

    def break_off(self, wrong: BaseException) -> None:
        """End the engine with an exception, unless it has ended."""
        if not self.ended.done():
            self.ended.set_exception(wrong)

    def flush_soon(self) -> None:
        """Report at the end of this turn of the loop."""
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _receive(self) -> None:
        try:
            for command in self._channel.receive(0.0):
                if isinstance(command, Shutdown):
                    self.end(None)
                else:
                    assert not isinstance(command, TakeOver), "no standby is on an event loop"
                    self._handle(command)
        except ChannelClosed as wrong:
            self.break_off(wrong)

    def _flush(self) -> None:
        self._flushing = False
        try:
            if not self.ended.done():
                self._report()
        except ChannelClosed as wrong:
            self.break_off(wrong)
