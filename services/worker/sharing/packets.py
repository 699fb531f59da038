"""Packets and descriptors on a Unix socket, without waiting."""

from __future__ import annotations

import array
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from services.worker.sharing.messages import MOST_DESCRIPTORS, MOST_PACKET_BYTES
from shared.errors import ProtocolError
from shared.socket_path import reachable

SHARERS = "lenders"
"""The directory of the sockets of sharers, in the directory of the pool."""
MOST_NAMES = 4
"""The most sharers of one worker that are tried."""
_CREDENTIALS = struct.Struct("3i")
_DESCRIPTOR_BYTES = array.array("i").itemsize


class ConnectionEnded(Exception):
    """The other side closed the connection, or does not read what it is sent."""


def socket_of(directory: Path, sharer: str) -> Path:
    return directory / SHARERS / sharer


def sharers_of(directory: Path, worker: str) -> list[str]:
    """Return the names of the sharers of a worker's engines, the newest first; an engine that has ended may be among
    them."""
    try:
        found = [path for path in (directory / SHARERS).iterdir() if path.name.rpartition("-")[0] == worker]
    except OSError:
        return []
    return [path.name for path in sorted(found, key=_made_ns, reverse=True)[:MOST_NAMES]]


def _made_ns(path: Path) -> int:
    try:
        return path.lstat().st_mtime_ns
    except OSError:
        return 0


def listening(path: Path) -> socket.socket:
    """Return a listening socket at a path if there is none. Raise OSError."""
    made = _new_socket()
    try:
        with ExitStack() as opened:
            made.bind(reachable(str(path), opened))
        made.listen()
    except OSError:
        made.close()
        raise
    return made


def connected(path: Path) -> socket.socket:
    """Return a socket that is connected. Raise OSError: no process listens, or its queue is full."""
    made = _new_socket()
    try:
        with ExitStack() as opened:
            made.connect(reachable(str(path), opened))
    except OSError:
        made.close()
        raise
    return made


def is_own_user(connection: socket.socket) -> bool:
    """Return whether the other end belongs to this process's user."""
    return _credentials(connection)[1] == os.geteuid()


def process_of(connection: socket.socket) -> int:
    """Return the id of the process at the other end, as it was when the connection was made."""
    return _credentials(connection)[0]


def _credentials(connection: socket.socket) -> tuple[int, int]:
    """Return the process and the user of the other end."""
    process, user, _ = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return process, user


def send(connection: socket.socket, packet: bytes, descriptors: Sequence[int] = ()) -> None:
    """Send a packet. Raise ConnectionEnded."""
    assert len(packet) <= MOST_PACKET_BYTES
    try:
        if descriptors:
            socket.send_fds(connection, [packet], list(descriptors))
        else:
            connection.send(packet)
    except OSError as wrong:  # a full buffer, too: the other side owes answers to nothing, and does not read
        raise ConnectionEnded(str(wrong)) from wrong


def receive(connection: socket.socket) -> tuple[bytes, list[int]] | None:
    """Return the next packet and its descriptors, which are the caller's. None if none is there yet.

    Raise ConnectionEnded, and ProtocolError for a packet that is too long or has too many descriptors.
    """
    room = socket.CMSG_SPACE(MOST_DESCRIPTORS * _DESCRIPTOR_BYTES)
    try:
        packet, extras, flags, _ = connection.recvmsg(MOST_PACKET_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    except BlockingIOError:
        return None
    except OSError as wrong:
        raise ConnectionEnded(str(wrong)) from wrong
    received = array.array("i")
    for level, kind, content in extras:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            received.frombytes(content[: len(content) - len(content) % _DESCRIPTOR_BYTES])
    descriptors = list(received)
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        close_all(descriptors)
        raise ProtocolError(f"a packet of more than {MOST_PACKET_BYTES} bytes or {MOST_DESCRIPTORS} descriptors")
    if not packet:
        close_all(descriptors)
        raise ConnectionEnded("the other side closed the connection")
    return packet, descriptors


def close_all(descriptors: Sequence[int]) -> None:
    """Close descriptors. One of a file whose system fails, which a peer may have sent, is closed all the same."""
    for descriptor in descriptors:
        with suppress(OSError):
            os.close(descriptor)


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
