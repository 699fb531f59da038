"""Reads ZMQ's sockets in the event loop.

ZMQ's descriptor is edge-triggered, and it wakes for sending too. So a socket is read until nothing is left, after every
wake and after every send. (`zmq.asyncio` costs three times as much per message.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq

FAIR_SHARE = 16
"""The number of messages read from one socket before the event loop gets a turn. A flood of small batches then delays
others by less than 0.5 ms for each source, and a message costs no more than with larger shares."""
_POLLIN = int(zmq.POLLIN)


def _readable(socket: zmq.Socket[bytes]) -> bool:
    """Return whether a message can be read. The exception would cost twice as much (4 µs), and most wakes bring at most
    one message."""
    events = socket.getsockopt(zmq.EVENTS)
    assert isinstance(events, int)
    return events & _POLLIN != 0


def receive_message(socket: zmq.Socket[bytes]) -> list[bytes]:
    """Receive a message. Raise zmq.Again if there is none."""
    return socket.recv_multipart(zmq.DONTWAIT)


def receive_batch(socket: zmq.Socket[bytes]) -> list[bytes]:
    """Receive a batch at half the cost of `receive_message` (2 µs).

    Asking whether more frames follow costs more than receiving one, so it is not asked after a frame that looks like a
    sequence. If that was the last frame, the next message is lost with this one: a gap like any other.
    """
    frames = [socket.recv(zmq.DONTWAIT)]
    if socket.getsockopt(zmq.RCVMORE):
        frames.append(socket.recv(zmq.DONTWAIT))
        if len(frames[1]) == 8:
            try:
                frames.append(socket.recv(zmq.DONTWAIT))
            except zmq.Again:
                return frames
        while socket.getsockopt(zmq.RCVMORE):
            frames.append(socket.recv(zmq.DONTWAIT))
    return frames


class ZmqReader:
    """Calls `take(frames)` for each message that comes to `socket`, in the event loop."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        take: Callable[[list[bytes]], None],
        receive: Callable[[zmq.Socket[bytes]], list[bytes]] = receive_message,
    ) -> None:
        self._socket = socket
        self._take = take
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self._again: asyncio.Handle | None = None
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self.read)
        self.read()

    def read(self) -> None:
        """Read what is there. This must be called after each send as well: sending may consume the descriptor's
        edge."""
        if self._again is not None:
            self._again.cancel()
            self._again = None
        for _ in range(FAIR_SHARE):
            if self._socket.closed or not _readable(self._socket):
                return
            try:
                frames = self._receive(self._socket)
            except zmq.Again:
                return
            try:
                self._take(frames)
            except BaseException:
                self._again = self._loop.call_soon(self.read)  # the next messages must not wait for the next edge
                raise
        self._again = self._loop.call_soon(self.read)

    def close(self) -> None:
        if self._again is not None:
            self._again.cancel()
        self._loop.remove_reader(self._descriptor)
        self._socket.close(linger=0)
