"""deploy/local/check/wire.py: over real sockets."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from deploy.local.check import frames, wire
from deploy.local.check.wire import PIECE_BYTES, Wire, parse_address
from shared.errors import ProtocolError
from tests.servers import free_port


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The two ends of a connection over TCP."""
    with (
        socket.create_server(("127.0.0.1", free_port())) as listening,
        socket.create_connection(listening.getsockname()) as one,
        listening.accept()[0] as other,
    ):
        yield one, other


def wire_of(connection: socket.socket, limit_s: float = 60.0) -> Wire:
    return Wire(connection, time.monotonic() + limit_s)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("host:1", ("host", 1)),
        ("[::1]:8770", ("::1", 8770)),
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        (":1", None),
        ("host", None),
        ("host:", None),
        ("host:x", None),
        ("host:65536", None),
        ("host:-1", None),
        ("host:\u0661", None),
    ],
)
def test_an_address_is_a_host_and_a_port(text: str, address: tuple[str, int] | None) -> None:
    assert parse_address(text) == address


def test_messages_and_bytes_follow_each_other(ends: tuple[socket.socket, socket.socket]) -> None:
    one, other = map(wire_of, ends)
    size_bytes = 3 * PIECE_BYTES + 1

    def send() -> None:
        one.send(frames.ProbeEcho(1))
        one.send_bytes(size_bytes)

    sending = threading.Thread(target=send)
    sending.start()
    assert frames.question(other.receive()) == frames.ProbeEcho(1)
    other.receive_bytes(size_bytes)
    sending.join()
    ends[0].close()
    with pytest.raises(EOFError, match="closed"):
        other.receive()


def test_an_end_in_the_middle_is_said_with_what_is_missing(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[0].sendall(b"x" * 10)
    ends[0].close()
    with pytest.raises(EOFError, match="ended with 90 bytes to come"):
        wire_of(ends[1]).receive_bytes(100)


def test_garbage_is_no_message(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(ProtocolError, match="does not speak this protocol"):
        wire_of(ends[1]).receive()


def test_a_message_byte_by_byte_does_not_stretch_its_limit(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "MESSAGE_S", 0.2)
    stop = threading.Event()

    def trickle() -> None:
        for byte in b"\0\0\x0f\xff" + b"x" * 4000:
            if stop.wait(0.05):
                return
            ends[0].sendall(bytes([byte]))

    trickling = threading.Thread(target=trickle)
    trickling.start()
    with pytest.raises(TimeoutError):
        wire_of(ends[1]).receive()
    stop.set()
    trickling.join()


def test_a_peer_that_reads_nothing_is_given_up(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "MESSAGE_S", 0.2)
    with pytest.raises(TimeoutError):
        wire_of(ends[0]).send_bytes(1 << 30)


def test_a_transfer_that_goes_on_and_on_is_given_up(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "TRANSFER_S", 0.2)
    stop = threading.Event()

    def trickle() -> None:
        while not stop.wait(0.02):
            ends[0].sendall(b"x")

    trickling = threading.Thread(target=trickle)
    trickling.start()
    with pytest.raises(TimeoutError):
        wire_of(ends[1]).receive_bytes(1 << 20)
    stop.set()
    trickling.join()


def test_nothing_goes_on_after_the_end_of_the_measurement(ends: tuple[socket.socket, socket.socket]) -> None:
    over = wire_of(ends[0], -1.0)
    for call in (lambda: over.send(frames.ProbeEcho(1)), over.receive, lambda: over.receive_bytes(1)):
        with pytest.raises(TimeoutError):
            call()
