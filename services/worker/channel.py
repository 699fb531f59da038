"""Both ends of the channel between shell and engine: frames on a socket pair.

    | length u32 little-endian | msgpack |

A socket pair has no name that anybody else could connect to, nothing to remove afterwards, and each end sees at once
that the other process has died.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

from services.worker.engine import EngineCommand, EngineReport
from shared.errors import HeadraceError
from shared.messages import Codec

COMMANDS: Codec[EngineCommand] = Codec(EngineCommand, "engine command")
REPORTS: Codec[EngineReport] = Codec(EngineReport, "engine report")

_PREFIX_BYTES = 4
_READ_BYTES = 1 << 18


class PeerGone(HeadraceError):
    """The process at the other end has ended."""


class EngineEnd:
    """The engine's end: blocking, for a plain loop."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._connection.setblocking(True)
        self._buffer = bytearray()

    def send(self, report: EngineReport) -> None:
        """Waits while the shell does not read, so that what is on its way stays bounded. Raises PeerGone."""
        try:
            self._connection.sendall(_frame(REPORTS.encode(report)))
        except OSError as wrong:
            raise PeerGone(f"shell: {wrong}") from wrong

    def receive(self, *, wait: bool) -> list[EngineCommand]:
        """All commands that have come; with `wait`, blocks until there is one. Raises PeerGone."""
        commands = self._read(0 if wait else socket.MSG_DONTWAIT)
        while wait and not commands:
            commands = self._read(0)
        return commands

    def close(self) -> None:
        self._connection.close()

    def _read(self, flags: int) -> list[EngineCommand]:
        """One blocking read at most, then what is there already."""
        commands: list[EngineCommand] = []
        while True:
            try:
                chunk = self._connection.recv(_READ_BYTES, flags)
            except BlockingIOError:
                return commands
            except OSError as wrong:
                raise PeerGone(f"shell: {wrong}") from wrong
            if not chunk:
                raise PeerGone("the shell has ended")
            self._buffer += chunk
            commands.extend(COMMANDS.decode(frame) for frame in self._whole_frames())
            flags = socket.MSG_DONTWAIT

    def _whole_frames(self) -> list[bytes]:
        frames: list[bytes] = []
        start = 0
        while len(self._buffer) - start >= _PREFIX_BYTES:
            body = start + _PREFIX_BYTES
            end = body + int.from_bytes(self._buffer[start:body], "little")
            if len(self._buffer) < end:
                break
            frames.append(bytes(self._buffer[body:end]))
            start = end
        del self._buffer[:start]
        return frames


class ShellEnd:
    """The shell's end, on the event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, unread_bytes: int) -> None:
        self._reader = reader
        self._writer = writer
        self._unread_bytes = unread_bytes

    @staticmethod
    async def open(connection: socket.socket, *, unread_bytes: int = 64 << 20) -> ShellEnd:
        """`unread_bytes` bounds what waits here while the engine does not read."""
        reader, writer = await asyncio.open_unix_connection(sock=connection)
        return ShellEnd(reader, writer, unread_bytes)

    def send(self, command: EngineCommand) -> None:
        """Nothing is sent to an engine that has ended. What waits here is bounded by those who look at `full`."""
        if not self._writer.transport.is_closing():
            self._writer.write(_frame(COMMANDS.encode(command)))

    @property
    def full(self) -> bool:
        """Whether the engine has left more unread than it should; new work waits or is refused then."""
        return self._writer.transport.get_write_buffer_size() > self._unread_bytes

    async def receive(self) -> EngineReport:
        """The next report. Raises PeerGone."""
        try:
            length = int.from_bytes(await self._reader.readexactly(_PREFIX_BYTES), "little")
            return REPORTS.decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, OSError) as wrong:
            raise PeerGone(f"engine: {wrong}") from wrong

    async def ended(self) -> None:
        """Reads on and drops it, until the other end is closed."""
        with suppress(OSError):
            while await self._reader.read(_READ_BYTES):
                pass

    def close(self) -> None:
        self._writer.close()


def _frame(payload: bytes) -> bytes:
    return len(payload).to_bytes(_PREFIX_BYTES, "little") + payload
