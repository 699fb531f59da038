"""deploy/local/check/peer.py: against a real server, and against peers that lie, stop, freeze or are something else."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from deploy.local.check import frames, peer, wire
from deploy.local.check.measurements import PeerMeasured, Unmeasured
from deploy.local.check.wire import Wire
from shared.errors import ProtocolError
from tests.deploy.check.serving import PATIENCE_S, admitted, serving
from tests.servers import free_port

ROOT = Path(__file__).resolve().parents[3]
WELCOME = frames.ProbeWelcome(frames.VERSION, "9.9.9", "name", nixl=False)
Serve = Callable[[socket.socket, Wire], None]


@pytest.fixture(autouse=True)
def short_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transfers that are long enough at once: what is tested here is no rate."""
    monkeypatch.setattr(peer, "ENOUGH_S", 0.0)


@contextmanager
def a_peer(serve: Serve) -> Iterator[tuple[str, int]]:
    """Yield the address of a peer that does with each connection what `serve` does, after a greeting was read."""
    with socket.create_server(("127.0.0.1", free_port())) as listening:

        def one(connection: socket.socket) -> None:
            with connection:
                end = Wire(connection, time.monotonic() + PATIENCE_S)
                try:
                    end.receive()
                    serve(connection, end)
                except (OSError, EOFError, ProtocolError):
                    return

        def accept() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                threads.append(threading.Thread(target=one, args=(connection,)))
                threads[-1].start()

        threads = [threading.Thread(target=accept)]
        threads[0].start()
        try:
            yield listening.getsockname()
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join(PATIENCE_S)
                assert not thread.is_alive()


def honest(end: Wire, asked: frames.Question) -> None:
    """Answer one question as a server does."""
    match asked:
        case frames.ProbeEcho(number=number):
            end.send(frames.ProbeEchoed(number, time.time()))
        case frames.ProbeUpload(size_bytes=size_bytes):
            end.receive_bytes(size_bytes)
            end.send(frames.ProbeUploaded(size_bytes))
        case frames.ProbeDownload(size_bytes=size_bytes):
            end.send_bytes(size_bytes)
        case _:
            raise AssertionError(asked)


def answering(special: Callable[[socket.socket, Wire, frames.Question], bool]) -> Serve:
    """Return a peer that is honest where `special` returns False."""

    def serve(connection: socket.socket, end: Wire) -> None:
        end.send(WELCOME)
        while True:
            asked = frames.question(end.receive())
            if not special(connection, end, asked):
                honest(end, asked)

    return serve


def test_a_peer_is_measured_over_all_roads_there_are() -> None:
    with serving() as server:
        found = peer.measure(server.address)
    assert isinstance(found, PeerMeasured), found
    assert found.round_trip_s > 0
    assert found.clock is not None
    assert found.clock.least_s <= 0 <= found.clock.most_s
    measured = {(each.outward, each.streams) for each in found.rates}
    assert measured == {(outward, streams) for outward in (True, False) for streams in (1, peer.STREAMS)}
    assert all(each.bytes_s > 0 for each in found.rates)
    assert {each.name: each.there for each in found.roads} == {"sockets": True, "CUDA IPC": False, "NIXL": False}
    assert "there: ./headrace install-nixl" in found.roads[-1].reason
    assert not found.fault


def test_a_transfer_grows_until_it_takes_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def note(connection: socket.socket, end: Wire, asked: frames.Question) -> bool:
        if isinstance(asked, frames.ProbeUpload):
            sizes.append(asked.size_bytes)
        return False

    monkeypatch.setattr(peer, "ENOUGH_S", 3600.0)
    monkeypatch.setattr(frames, "TRANSFER_LIMIT_BYTES", 8 << 20)
    with a_peer(answering(note)) as address:
        assert isinstance(peer.measure(address), PeerMeasured)
    assert sizes[0] == peer.FIRST_BYTES
    assert max(sizes) == 8 << 20


def test_a_peer_that_another_check_measures_is_busy() -> None:
    with serving() as server:
        connection, _, _ = admitted(server.address)
        with connection:
            found = peer.measure(server.address)
    assert isinstance(found, Unmeasured)
    assert "another check measures this machine now" in found.reason
    assert found.wanted


def test_a_peer_that_is_not_there_says_how_to_start_it() -> None:
    port = free_port()
    found = peer.measure(("127.0.0.1", port))
    assert isinstance(found, Unmeasured)
    assert "Connection refused" in found.reason
    assert f"--serve 0.0.0.0:{port}" in found.advice
    assert isinstance(peer.measure(("no.such.host.invalid", 1)), Unmeasured)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "does not speak this protocol"),
        (b"", "closed the connection"),
        (b"\0\0\0\x03abc", "unreadable answer"),
        (frames.encode(frames.ProbeEchoed(1, 1.0)), "does not greet"),
        (frames.encode(msgspec.structs.replace(WELCOME, version=2)), "does not greet"),
        (frames.encode(frames.ProbeBusy("use one version of Headrace")), "use one version of Headrace"),
    ],
)
def test_what_is_no_peer_is_said(said: bytes, reason: str) -> None:
    with a_peer(lambda connection, end: connection.sendall(said)) as address:
        found = peer.measure(address)
    assert isinstance(found, Unmeasured)
    assert reason in found.reason
    assert found.wanted


def test_a_peer_that_never_greets_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MESSAGE_S", 0.3)

    def wait(connection: socket.socket, end: Wire) -> None:
        connection.recv(1)

    with a_peer(wait) as address:
        assert isinstance(peer.measure(address), Unmeasured)


def test_a_peer_with_the_time_of_another_question_is_refused() -> None:
    def other(connection: socket.socket, end: Wire, asked: frames.Question) -> bool:
        end.send(frames.ProbeEchoed(12345, time.time()))
        return True

    with a_peer(answering(other)) as address:
        found = peer.measure(address)
    assert isinstance(found, Unmeasured)
    assert "another question" in found.reason


@pytest.mark.parametrize("factor", [0.5, 2])
def test_a_peer_that_lies_about_what_has_come_is_refused(factor: float) -> None:
    def lie(connection: socket.socket, end: Wire, asked: frames.Question) -> bool:
        if not isinstance(asked, frames.ProbeUpload):
            return False
        end.receive_bytes(asked.size_bytes)
        end.send(frames.ProbeUploaded(int(asked.size_bytes * factor)))
        return True

    with a_peer(answering(lie)) as address:
        found = peer.measure(address)
    assert isinstance(found, Unmeasured)
    assert "other bytes than were sent" in found.reason


def test_a_peer_that_sends_more_than_was_asked_for_is_refused() -> None:
    def more(connection: socket.socket, end: Wire, asked: frames.Question) -> bool:
        if not isinstance(asked, frames.ProbeDownload):
            return False
        connection.sendall(b"\xff" * (asked.size_bytes + 1000))
        return True

    with a_peer(answering(more)) as address:
        found = peer.measure(address)
    assert isinstance(found, Unmeasured)
    assert "does not speak this protocol" in found.reason


def stop(connection: socket.socket, end: Wire, asked: frames.Question) -> bool:
    """Send a half, and close."""
    if isinstance(asked, frames.ProbeDownload):
        end.send_bytes(asked.size_bytes // 2)
        connection.shutdown(socket.SHUT_RDWR)
    return isinstance(asked, frames.ProbeDownload)


def freeze(connection: socket.socket, end: Wire, asked: frames.Question) -> bool:
    """Send a half, and nothing more until the other side has gone."""
    if isinstance(asked, frames.ProbeDownload):
        end.send_bytes(asked.size_bytes // 2)
        connection.recv(1)
    return isinstance(asked, frames.ProbeDownload)


def unread(connection: socket.socket, end: Wire, asked: frames.Question) -> bool:
    """Read nothing of an upload."""
    if isinstance(asked, frames.ProbeUpload):
        connection.settimeout(PATIENCE_S)
        while connection.recv(1 << 20, socket.MSG_PEEK) and not over.wait(0.01):
            pass
    return isinstance(asked, frames.ProbeUpload)


over = threading.Event()


@pytest.mark.parametrize(("special", "measured"), [(stop, 2), (freeze, 2), (unread, 0)])
def test_a_peer_that_stops_in_the_middle_keeps_what_was_measured_before(
    special: Callable[[socket.socket, Wire, frames.Question], bool], measured: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "MESSAGE_S", 3.0)
    monkeypatch.setattr(peer, "FIRST_BYTES", 32 << 20)  # more than sockets keep
    over.clear()
    with a_peer(answering(special)) as address:
        try:
            found = peer.measure(address)
        finally:
            over.set()
    assert isinstance(found, PeerMeasured), found
    assert found.fault
    assert len(found.rates) == measured


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root and the program ip"
)
def test_a_peer_in_another_network_namespace_is_measured_and_a_cut_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with namespace() as (run, here, there):
        port = free_port()
        command = [sys.executable, "-P", "-m", "deploy.local.cli", "check", "--serve", f"{there}:{port}"]
        with subprocess.Popen([*run, *command], cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                assert f"./headrace check --peer {there}:{port}" in server.stdout.readline()
                found = peer.measure((there, port))
                assert isinstance(found, PeerMeasured), found
                assert not found.fault
                assert found.clock is not None
                assert found.clock.least_s <= 0 <= found.clock.most_s
                monkeypatch.setattr(peer, "CONNECT_S", 0.5)
                subprocess.run(["ip", "link", "set", here, "down"], check=True)
                cut = peer.measure((there, port))
                assert isinstance(cut, Unmeasured)
            finally:
                server.kill()


@contextmanager
def namespace() -> Iterator[tuple[list[str], str, str]]:
    """Yield the command that runs a program in a new network namespace, our link to it, and its address."""
    name = f"hrcheck{os.getpid() % 100_000}"
    net = f"10.{os.getpid() // 250 % 250}.{os.getpid() % 250}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no network namespace can be made: {made.stderr.strip()}")
    inside = ["ip", "netns", "exec", name]
    try:
        for command in (
            ["ip", "link", "add", name, "type", "veth", "peer", "name", "inside", "netns", name],
            ["ip", "address", "add", f"{net}.1/24", "dev", name],
            ["ip", "link", "set", name, "up"],
            [*inside, "ip", "address", "add", f"{net}.2/24", "dev", "inside"],
            [*inside, "ip", "link", "set", "inside", "up"],
        ):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"no link between network namespaces can be made: {done.stderr.strip()}")
        yield inside, name, f"{net}.2"
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)
