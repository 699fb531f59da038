"""Both ends of the channel between shell and engine: frames on a socket pair.

    | length u32 little-endian | msgpack |

No other process can connect to a socket pair, since it has no name. It leaves nothing to remove, and each end sees at
once that the other process has died.

docs/decisions/0005 gives the reasons.
"""

from __future__ import annotations

import asyncio
import select
import socket
from collections import deque
from math import ceil
from typing import cast

from services.worker.contracts.messages import EngineCommand, EngineReport
from shared.errors import HeadraceError
from shared.messages.codec import Codec

COMMANDS: Codec[EngineCommand] = Codec(EngineCommand, "engine command")
REPORTS: Codec[EngineReport] = Codec(EngineReport, "engine report")

_PREFIX_BYTES = 4
_READ_BYTES = 1 << 18
_MOST_UNREAD_REPORTS = 16
"""Number of unread reports at which the shell stops reading; the engine's `send` waits then."""


class ChannelClosed(HeadraceError):
    """The process at the other end has ended."""


class EngineEnd:
    """The engine's end of the channel: blocking, for a plain loop."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._connection.setblocking(True)
        self._awake = select.poll()
        self._awake.register(connection, select.POLLIN)
        self._writable = select.poll()
        self._writable.register(connection, select.POLLOUT)
        self._buffer = bytearray()

    def send(self, report: EngineReport) -> None:
        """Send a report. Waits while the shell does not read, so that the reports under way are bounded. Raises
        ChannelClosed."""
        unsent = memoryview(_frame(REPORTS.encode(report)))
        while unsent:
            try:
                unsent = unsent[self._connection.send(unsent) :]
            except BlockingIOError:  # uvloop makes a descriptor that it watches non-blocking
                self._writable.poll()
            except OSError as wrong:
                raise ChannelClosed(f"shell: {wrong}") from wrong

    def watch(self, descriptor: int) -> None:
        """Make `receive` return when this descriptor is readable."""
        self._awake.register(descriptor, select.POLLIN)

    def receive(self, limit_s: float | None) -> list[EngineCommand]:
        """Return all commands that have come. If there is none, wait for one up to `limit_s` (None: without a
        limit), or until a watched descriptor is readable; so there may be none. Raise ChannelClosed."""
        if limit_s is None or limit_s > 0:
            self._awake.poll(None if limit_s is None else ceil(1000 * limit_s))
        commands: list[EngineCommand] = []
        while True:
            try:
                chunk = self._connection.recv(_READ_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return commands
            except OSError as wrong:
                raise ChannelClosed(f"shell: {wrong}") from wrong
            if not chunk:
                raise ChannelClosed("the shell has ended")
            self._buffer += chunk
            commands.extend(COMMANDS.decode(frame) for frame in _whole_frames(self._buffer))

    def close(self) -> None:
        self._connection.close()


class ShellEnd(asyncio.Protocol):
    """The shell's end of the channel, on the event loop; made by `open`.

    It is an asyncio protocol and not a stream, so that a report costs one call and at most one wake-up.
    """

    def __init__(self, unread_bytes: int) -> None:
        self._unread_bytes = unread_bytes
        self._buffer = bytearray()
        self._reports: deque[bytes] = deque()
        """Complete reports; bounded, because the shell stops reading while there are many."""
        self._called: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when a report has come, or none will."""
        self._gone = False

    @staticmethod
    async def open(connection: socket.socket, *, unread_bytes: int = 64 << 20) -> ShellEnd:
        """Open the end on this socket. `unread_bytes` is where `full` begins, while the engine does not read."""
        loop = asyncio.get_running_loop()
        _, end = await loop.create_unix_connection(lambda: ShellEnd(unread_bytes), sock=connection)
        return end

    def send(self, command: EngineCommand) -> None:
        """Send a command, unless the engine has ended. Callers bound the commands that wait here by checking `full`."""
        if not self._transport.is_closing():
            self._transport.write(_frame(COMMANDS.encode(command)))

    @property
    def full(self) -> bool:
        """Whether the engine has left too much unread; new work waits or is refused then."""
        return self._transport.get_write_buffer_size() > self._unread_bytes

    async def receive(self) -> EngineReport:
        """Return the next report; one receiver at a time. Raise ChannelClosed."""
        while not self._reports:
            if self._gone:
                raise ChannelClosed("the engine has ended")
            self._called = asyncio.get_running_loop().create_future()
            await self._called
        if len(self._reports) == _MOST_UNREAD_REPORTS and not self._transport.is_closing():
            self._transport.resume_reading()
        return REPORTS.decode(self._reports.popleft())

    def close(self) -> None:
        self._transport.close()

    # --- what the loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport does not inherit from asyncio's

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._reports.extend(_whole_frames(self._buffer))
        if len(self._reports) >= _MOST_UNREAD_REPORTS:
            self._transport.pause_reading()
        if self._reports and not self._called.done():
            self._called.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self._gone = True
        if not self._called.done():
            self._called.set_result(None)


def _whole_frames(buffer: bytearray) -> list[bytes]:
    """Take the complete frames out of the buffer."""
    frames: list[bytes] = []
    start = 0
    while len(buffer) - start >= _PREFIX_BYTES:
        body = start + _PREFIX_BYTES
        end = body + int.from_bytes(buffer[start:body], "little")
        if len(buffer) < end:
            break
        frames.append(bytes(buffer[body:end]))
        start = end
    del buffer[:start]
    return frames


def _frame(payload: bytes) -> bytes:
    return len(payload).to_bytes(_PREFIX_BYTES, "little") + payload
