"""A ProbeServer in a thread, and clients of it that do as they like."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from deploy.local.check import frames
from deploy.local.check.serve import ProbeServer
from deploy.local.check.wire import Address, Wire
from tests.servers import free_port

PATIENCE_S = 60.0


@contextmanager
def serving() -> Iterator[ProbeServer]:
    """Yield a server that answers."""
    server = ProbeServer(("127.0.0.1", free_port()))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def connected(address: Address) -> tuple[socket.socket, Wire]:
    connection = socket.create_connection(address, PATIENCE_S)
    return connection, Wire(connection, time.monotonic() + PATIENCE_S)


def greet(wire: Wire, greeting: frames.Question | None = None) -> frames.Answer:
    wire.send(greeting or frames.ProbeHello(frames.VERSION, "test"))
    return frames.answer(wire.receive())


def admitted(address: Address) -> tuple[socket.socket, Wire, str]:
    """Connect and begin a measurement, again until the former one has ended."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        connection, wire = connected(address)
        try:
            answer = greet(wire)
        except (EOFError, OSError):  # no room yet
            answer = frames.ProbeBusy("closed")
        if isinstance(answer, frames.ProbeWelcome):
            return connection, wire, answer.session
        connection.close()
        assert time.monotonic() < deadline, answer
        time.sleep(0.01)


def closed(connection: socket.socket) -> bool:
    """Return whether the server ends the connection, and close it; what comes before its end is dropped."""
    with connection:
        connection.settimeout(PATIENCE_S)
        try:
            while connection.recv(1 << 16):
                pass
        except ConnectionResetError:
            pass
        except TimeoutError:
            return False
    return True
