"""deploy/local/check/serve.py: clients that are right, too many, silent, slow, or lie."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from deploy.local.check import frames, serve, wire
from deploy.local.check.serve import MOST_CONNECTIONS, ProbeServer
from shared.errors import ConfigError
from tests.deploy.check.serving import PATIENCE_S, admitted, closed, connected, greet, serving


@pytest.fixture
def server() -> Iterator[ProbeServer]:
    with serving() as running:
        yield running


def still_serves(server: ProbeServer) -> bool:
    """Return whether a client that behaves is served."""
    connection, wire, _ = admitted(server.address)
    with connection:
        wire.send(frames.ProbeUpload(1 << 20))
        wire.send_bytes(1 << 20)
        if frames.answer(wire.receive()) != frames.ProbeUploaded(1 << 20):
            return False
        wire.send(frames.ProbeDownload(3))
        wire.receive_bytes(3)
        wire.send(frames.ProbeEcho(4))
        answer = frames.answer(wire.receive())
        return isinstance(answer, frames.ProbeEchoed) and answer.number == 4


def test_a_client_that_behaves_is_served_again_and_again(server: ProbeServer) -> None:
    assert still_serves(server)
    assert still_serves(server)


def test_one_measurement_at_a_time(server: ProbeServer) -> None:
    first, _, session = admitted(server.address)
    second, wire = connected(server.address)
    answer = greet(wire)
    assert isinstance(answer, frames.ProbeBusy)
    assert "another check measures this machine now; try again in " in answer.reason
    assert closed(second)
    further, wire = connected(server.address)
    assert isinstance(greet(wire, frames.ProbeJoin(frames.VERSION, session)), frames.ProbeWelcome)
    first.close()
    assert closed(further), "the streams of a measurement end with it"
    assert still_serves(server)


@pytest.mark.parametrize("session", ["", "0" * 32, "ä"])
def test_a_measurement_that_is_not_there_has_no_streams(server: ProbeServer, session: str) -> None:
    first, _, _ = admitted(server.address)
    with first:
        connection, wire = connected(server.address)
        assert greet(wire, frames.ProbeJoin(frames.VERSION, session)) == frames.ProbeBusy("no such measurement")
        assert closed(connection)


def test_another_version_is_refused_by_name(server: ProbeServer) -> None:
    connection, wire = connected(server.address)
    answer = greet(wire, frames.ProbeHello(frames.VERSION + 1, "test"))
    assert isinstance(answer, frames.ProbeBusy)
    assert "use one version of Headrace" in answer.reason
    assert closed(connection)


def test_a_measurement_has_a_limit_of_streams(server: ProbeServer) -> None:
    first, _, session = admitted(server.address)
    opened = [first]
    for number in range(frames.MOST_STREAMS):
        connection, wire = connected(server.address)
        opened.append(connection)
        answer = greet(wire, frames.ProbeJoin(frames.VERSION, session))
        assert isinstance(answer, frames.ProbeWelcome if number < frames.MOST_STREAMS - 1 else frames.ProbeBusy)
    for connection in opened:
        connection.close()
    assert still_serves(server)


def test_connections_beyond_the_limit_are_closed(server: ProbeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "FIRST_MESSAGE_S", PATIENCE_S * 10)
    silent = [connected(server.address)[0] for _ in range(MOST_CONNECTIONS)]
    assert closed(connected(server.address)[0])
    for connection in silent:
        connection.close()
    assert still_serves(server)


def test_a_connection_that_says_nothing_is_closed(server: ProbeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "FIRST_MESSAGE_S", 0.5)
    assert closed(connected(server.address)[0])


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\xff\xff\xff\xff",
        b"\0\0\0\0",
        b"\0\0\0\x04abcd",
        frames.encode(frames.ProbeDownload(1 << 30)),
        frames.encode(frames.ProbeBusy("I am a server")),
    ],
)
def test_garbage_and_what_comes_without_a_greeting_end_the_connection(server: ProbeServer, said: bytes) -> None:
    connection, _ = connected(server.address)
    connection.sendall(said)
    assert closed(connection)
    assert still_serves(server)


def test_a_second_greeting_ends_the_connection(server: ProbeServer) -> None:
    connection, wire, session = admitted(server.address)
    wire.send(frames.ProbeJoin(frames.VERSION, session))
    assert closed(connection)


def test_a_size_beyond_the_limit_ends_the_connection(server: ProbeServer) -> None:
    connection, _, _ = admitted(server.address)
    body = frames.encode(frames.ProbeDownload(1 << 30)).replace(struct.pack(">I", 1 << 30), struct.pack(">I", 1 << 31))
    connection.sendall(body)
    assert closed(connection)
    assert still_serves(server)


def test_bytes_of_a_measurement_are_bounded(server: ProbeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    connection, wire, _ = admitted(server.address)
    session = server._session
    assert session is not None
    session.left_bytes = 100
    wire.send(frames.ProbeDownload(100))
    wire.receive_bytes(100)
    wire.send(frames.ProbeDownload(1))
    assert closed(connection)


@pytest.mark.parametrize("size_bytes", [1 << 20, 1 << 30])
def test_a_client_that_sends_less_than_it_said_is_given_up(
    server: ProbeServer, monkeypatch: pytest.MonkeyPatch, size_bytes: int
) -> None:
    monkeypatch.setattr(wire, "MESSAGE_S", 1.0)
    connection, end, _ = admitted(server.address)
    end.send(frames.ProbeUpload(size_bytes))
    connection.sendall(b"x" * 1000)
    assert closed(connection)
    assert still_serves(server)


def test_a_client_that_sends_more_than_it_said_is_given_up(server: ProbeServer) -> None:
    connection, wire, _ = admitted(server.address)
    wire.send(frames.ProbeUpload(1000))
    connection.sendall(b"\xff" * 2000)
    assert closed(connection)
    assert still_serves(server)


def test_a_client_that_never_reads_is_given_up(server: ProbeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MESSAGE_S", 1.0)
    connection, end, _ = admitted(server.address)
    end.send(frames.ProbeDownload(1 << 30))
    with connection:
        assert still_serves(server), "once the first one was given up"


def test_a_client_that_goes_in_the_middle_frees_the_measurement(server: ProbeServer) -> None:
    connection, wire, _ = admitted(server.address)
    wire.send(frames.ProbeDownload(1 << 30))
    wire.receive_bytes(1 << 20)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()  # with a reset
    assert still_serves(server)


def test_a_measurement_ends_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "SESSION_S", 1.5)
    with serving() as server:
        connection, _, _ = admitted(server.address)
        assert closed(connection)


def test_closing_ends_every_thread_and_connection() -> None:
    with serving() as server:
        connection, wire, _ = admitted(server.address)
        wire.send(frames.ProbeUpload(1 << 30))
    assert closed(connection)
    for each in threading.enumerate():
        if "_serve" in each.name:
            each.join(PATIENCE_S)
            assert not each.is_alive()


@pytest.mark.parametrize("address", [("192.0.2.1", 1), ("no.such.host.invalid", 1), ("a" * 300, 1)])
def test_an_address_that_cannot_be_listened_at_is_wrong_usage(address: tuple[str, int]) -> None:
    with pytest.raises(ConfigError):
        ProbeServer(address)


def test_an_address_in_use_is_wrong_usage(server: ProbeServer) -> None:
    with pytest.raises(ConfigError, match=f"--serve 127.0.0.1:{server.address[1]}: "):
        serve.serve(server.address)
