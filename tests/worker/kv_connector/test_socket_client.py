"""services/worker/kv_connector/socket_client.py: its bounds, with peers on a real Unix socket that behave badly."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from services.worker.contracts.messages import KvbmAsked
from services.worker.kv_connector import socket_client
from services.worker.kv_connector.contract import KvbmAsk, KvbmDown, KvbmReply, KvbmUp
from services.worker.kv_connector.socket_client import HELLO_S, MOST_UNSENT_BYTES, RETRY_S, SocketClient
from shared.pool.lock import SOCKET
from shared.pool.socket_frames import (
    MOST_FRAME_BYTES,
    PROTOCOL,
    TO_KVBM,
    Answered,
    Asked,
    FrameReader,
    Hello,
    encode_frame,
)
from shared.socket_path import reachable
from shared.tracing.traceparent import TraceParent

LIMIT_S = 60.0
"""Seconds after which a peer's blocking call fails the test."""
ASK = KvbmAsk(1, "store", b"q", timeout_s=3.0)


class Peer:
    """A listening socket where the kvbm's would be, and one client of it. The time is the test's."""

    def __init__(self, directory: Path) -> None:
        directory.chmod(0o700)
        self.listening = socket.socket(socket.AF_UNIX)
        self.listening.settimeout(LIMIT_S)
        self.listening.bind(str(directory / SOCKET))
        self.listening.listen()
        self.client = SocketClient(directory)

    def accept(self, *, now_s: float = 0.0) -> socket.socket:
        """Have the client connect, and return the peer's end."""
        assert self.client.poll(now_s) == []
        made, _ = self.listening.accept()
        made.settimeout(LIMIT_S)
        return made

    def up(self) -> socket.socket:
        """Have the client connect, and greet it."""
        made = self.accept()
        made.sendall(encode_frame(Hello(PROTOCOL, "k1", namespace="a")))
        assert self.client.poll(0.0) == [KvbmUp("k1", "a")]
        return made


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    made = Peer(tmp_path)
    with made.listening:
        yield made
        made.client.close()


def read_asked(stream: socket.socket) -> Asked:
    reader = FrameReader()
    while True:
        for body in reader.feed(stream.recv(1 << 16)):
            return TO_KVBM.decode(body)


# --- no connection


def test_a_directory_without_a_kvbm_is_tried_again_only_after_a_while(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    client = SocketClient(tmp_path)
    assert client.settling
    assert client.poll(0.0) == [KvbmDown(f"{tmp_path / SOCKET}: no kvbm listens")]
    assert not client.settling
    assert client.poll(RETRY_S) == [], "that is no news"
    assert client.send(ASK, 0.0) == [KvbmReply(1, b"", failed="there is no kvbm")]
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / SOCKET))
        listening.listen()
        client.poll(1.5 * RETRY_S)
        assert not client.settling, "it has not connected"
        client.poll(2 * RETRY_S)
        assert client.settling
    client.close()


def test_a_directory_that_others_can_change_or_that_is_not_there_is_not_connected_to(
    peer: Peer, tmp_path: Path
) -> None:
    tmp_path.chmod(0o777)
    peer.client.poll(0.0)
    assert "no other user may write to it" in peer.client.trouble
    peer.listening.setblocking(False)
    with pytest.raises(BlockingIOError):
        peer.listening.accept()
    missing = SocketClient(tmp_path / "missing")
    missing.poll(0.0)
    assert "start a kvbm with that pool.directory" in missing.trouble


def test_a_full_queue_of_connections_is_a_trouble_and_not_a_wait(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / SOCKET))
        listening.listen(0)
        clients = [SocketClient(tmp_path) for _ in range(4)]
        for client in clients:
            client.poll(0.0)
        assert "temporarily unavailable" in clients[-1].trouble
        assert not clients[-1].settling
        for client in clients:
            client.close()


# --- before its first words


def test_a_peer_that_says_nothing_is_given_up_after_its_time(peer: Peer) -> None:
    with peer.accept() as stream:
        assert peer.client.poll(HELLO_S / 2) == []
        assert peer.client.settling
        assert peer.client.send(ASK, 1.0) == [KvbmReply(1, b"", failed="there is no kvbm")]
        assert peer.client.wait_until_s == HELLO_S
        assert peer.client.poll(HELLO_S) == [KvbmDown(peer.client.trouble)]
        assert "no Hello came" in peer.client.trouble
        assert not peer.client.settling
        assert stream.recv(1) == b""
    peer.accept(now_s=HELLO_S + RETRY_S).close()


def test_half_a_hello_is_no_hello(peer: Peer) -> None:
    with peer.accept() as stream:
        stream.sendall(encode_frame(Hello(PROTOCOL, "k1"))[:-1])
        assert peer.client.poll(0.0) == []
        assert peer.client.poll(HELLO_S) == [KvbmDown(peer.client.trouble)]
        assert "no Hello came" in peer.client.trouble


@pytest.mark.parametrize(
    ("sent", "trouble"),
    [
        (encode_frame(Hello(PROTOCOL + 1, "k1")), f"kvbm k1 speaks protocol {PROTOCOL + 1}, this engine {PROTOCOL}"),
        (encode_frame(Answered(1, b"")), "the kvbm sent Answered"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "a frame of"),
        (b"\0\0\0\0", "a frame of 0 bytes"),
        ((MOST_FRAME_BYTES + 1).to_bytes(4, "little"), f"a frame of {MOST_FRAME_BYTES + 1} bytes"),
        (b"\3\0\0\0abc", "frame from kvbm"),
        (encode_frame(Asked(1, "store", b"")), "frame from kvbm"),
    ],
)
def test_other_first_words_end_the_connection(peer: Peer, sent: bytes, trouble: str) -> None:
    with peer.accept() as stream:
        stream.sendall(sent)
        assert peer.client.poll(0.0) == [KvbmDown(peer.client.trouble)]
        assert trouble in peer.client.trouble
        assert stream.recv(1) == b""


# --- while it is up


def test_questions_and_answers_pass_in_order(peer: Peer) -> None:
    with peer.up() as stream:
        assert peer.client.trouble == ""
        assert peer.client.send(ASK, 0.0) == []
        assert read_asked(stream) == Asked(1, "store", b"q")
        stream.sendall(encode_frame(Answered(1, b"a", last=False)) + encode_frame(Answered(1, b"b")))
        assert peer.client.poll(0.0) == [KvbmReply(1, b"a", last=False), KvbmReply(1, b"b")]
        assert peer.client.poll(100.0) == [], "nothing is awaited any longer"


def test_each_answer_has_its_time_and_a_late_one_is_dropped(peer: Peer) -> None:
    with peer.up() as stream:
        peer.client.send(ASK, 0.0)
        stream.sendall(encode_frame(Answered(1, b"a", last=False)))
        assert len(peer.client.poll(2.0)) == 1
        assert peer.client.poll(4.9) == []
        assert peer.client.poll(5.0) == [KvbmReply(1, b"", failed="no answer in 3 s")]
        assert peer.client.poll(99.0) == []
        stream.sendall(encode_frame(Answered(1, b"late")))
        assert peer.client.poll(99.0) == []


@pytest.mark.parametrize(
    "sent", [encode_frame(Hello(PROTOCOL, "k2")), b"\xff\xff\xff\xff", b"\1\0\0\0\xc1", b"\3\0\0\0abc"]
)
def test_after_garbage_the_kvbm_is_down(peer: Peer, sent: bytes) -> None:
    with peer.up() as stream:
        peer.client.send(ASK, 0.0)
        read_asked(stream)
        stream.sendall(encode_frame(Answered(1, b"a")))
        assert peer.client.poll(0.0) == [KvbmReply(1, b"a")]
        stream.sendall(sent)
        assert peer.client.poll(0.0) == [KvbmDown(peer.client.trouble)]
        assert stream.recv(1) == b""
    assert peer.client.send(ASK, 0.0) == [KvbmReply(1, b"", failed="there is no kvbm")]


def test_a_kvbm_that_closes_in_the_middle_of_a_frame_is_down_and_nothing_stays_awaited(peer: Peer) -> None:
    with peer.up() as stream:
        peer.client.send(ASK, 0.0)
        read_asked(stream)
        stream.sendall(encode_frame(Answered(1, b"a" * 100))[:50])
    [down] = peer.client.poll(0.0)
    assert isinstance(down, KvbmDown)
    assert "closed the connection" in down.reason
    assert peer.client.poll(RETRY_S / 2) == []
    with peer.accept(now_s=RETRY_S) as stream:
        stream.sendall(encode_frame(Hello(PROTOCOL, "k2")))
        assert peer.client.poll(1.0) == [KvbmUp("k2")], "the rest of the old frame is not awaited"
        assert peer.client.poll(100.0) == []


def test_a_hello_and_an_end_at_once_are_up_and_down(peer: Peer) -> None:
    with peer.accept() as stream:
        stream.sendall(encode_frame(Hello(PROTOCOL, "k1")))
    assert [type(each) for each in peer.client.poll(0.0)] == [KvbmUp, KvbmDown]


def test_a_peer_that_does_not_read_is_given_up_at_the_bound(peer: Peer) -> None:
    with peer.up():
        said: list[KvbmDown | KvbmReply] = []
        sent = 0
        large = b"q" * (1 << 18)
        while not said:
            sent += 1
            said = peer.client.send(KvbmAsk(sent, "store", large, timeout_s=3.0), 0.0)
            assert sent < 4 * MOST_UNSENT_BYTES // len(large)
        assert (sent - 1) * len(large) >= MOST_UNSENT_BYTES - len(large), "not before it"
        assert said == [KvbmDown(peer.client.trouble)]
        assert "has not read" in peer.client.trouble
        assert not peer.client._unsent
    peer.accept(now_s=100.0).close()  # and no question of before is awaited


def test_what_the_socket_did_not_take_follows_when_the_peer_reads(peer: Peer) -> None:
    with peer.up() as stream:
        large = b"q" * (1 << 19)
        for number in (1, 2, 3):
            assert peer.client.send(KvbmAsk(number, "store", large, timeout_s=3.0), 0.0) == []
        assert peer.client._unsent
        reader, numbers = FrameReader(), list[int]()
        while len(numbers) < 3:
            numbers.extend(TO_KVBM.decode(body).number for body in reader.feed(stream.recv(1 << 16)))
            assert peer.client.poll(0.0) == []
        assert numbers == [1, 2, 3]
        assert not peer.client._unsent


def test_a_question_that_no_frame_can_hold_ends_the_connection_and_raises_nothing(peer: Peer) -> None:
    with peer.up() as stream:
        [down] = peer.client.send(KvbmAsk(1, "store", b"q" * MOST_FRAME_BYTES, timeout_s=3.0), 0.0)
        assert isinstance(down, KvbmDown)
        assert "over the limit" in down.reason
        assert stream.recv(1) == b""


def test_a_flood_is_read_in_bounded_pieces(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that writes as fast as the client reads must not hold up the step in which it is read."""
    monkeypatch.setattr(socket_client, "MOST_READ_BYTES", 1 << 16)
    with peer.up() as stream:
        peer.client.send(KvbmAsk(7, "fetch", b"q", timeout_s=3.0), 0.0)
        frame = encode_frame(Answered(7, b"a" * 1000, last=False))
        whole = (1 << 17) // len(frame)
        stream.sendall(frame * whole)
        first = peer.client.poll(0.0)
        assert 0 < len(first) < whole
        news = list(first)
        while len(news) < whole:
            more = peer.client.poll(0.0)
            assert more
            news += more
        assert news == [KvbmReply(7, b"a" * 1000, last=False)] * whole


# --- what a loop waits for


def test_its_descriptor_is_readable_when_an_answer_has_come_and_when_the_kvbm_reads_again(peer: Peer) -> None:
    with peer.up() as stream:
        assert not select.select([peer.client], [], [], 0)[0]
        assert peer.client.wait_until_s is None
        large = b"q" * (1 << 19)
        for number in (1, 2, 3):
            peer.client.send(KvbmAsk(number, "store", large, timeout_s=3.0), 1.0)
        assert not select.select([peer.client], [], [], 0)[0], "the socket is full"
        assert peer.client.wait_until_s == 4.0
        reader, numbers = FrameReader(), list[int]()
        while len(numbers) < 3:
            numbers.extend(TO_KVBM.decode(body).number for body in reader.feed(stream.recv(1 << 16)))
            if peer.client._unsent and select.select([peer.client], [], [], 0)[0]:
                peer.client.poll(1.0)
        assert not select.select([peer.client], [], [], 0)[0], "all is sent"
        stream.sendall(encode_frame(Answered(1, b"a")))
        assert select.select([peer.client], [], [], LIMIT_S)[0]
        assert peer.client.poll(1.0) == [KvbmReply(1, b"a")]
        assert not select.select([peer.client], [], [], 0)[0]
    assert select.select([peer.client], [], [], LIMIT_S)[0], "the kvbm has gone"
    peer.client.poll(1.0)
    assert not select.select([peer.client], [], [], 0)[0]
    assert peer.client.wait_until_s == 1.0 + RETRY_S


def test_a_path_that_is_too_long_for_a_socket_is_reached(tmp_path: Path) -> None:
    directory = tmp_path / ("d" * 100)
    directory.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as listening, ExitStack() as opened:
        listening.bind(reachable(str(directory / SOCKET), opened))
        listening.listen()
        client = SocketClient(directory)
        assert client.poll(0.0) == []
        assert client.settling, "it has connected"
        client.close()


# --- metrics and traces


def test_each_request_is_counted_once_with_its_time_and_how_it_ended(peer: Peer) -> None:
    peer.client.send(ASK, 0.0)
    with peer.up() as stream:
        for number in (2, 3, 4):
            peer.client.send(KvbmAsk(number, "fetch", b"q", timeout_s=3.0), float(number))
        read_asked(stream)
        stream.sendall(encode_frame(Answered(2, b"a", last=False)) + encode_frame(Answered(3, b"a")))
        assert len(peer.client.poll(4.5)) == 2
        assert peer.client.poll(7.0) == [KvbmReply(4, b"", failed="no answer in 3 s")]
        stream.sendall(encode_frame(Answered(4, b"late")))
        peer.client.poll(7.2)
    peer.client.poll(7.25)
    away = "there is no kvbm"
    assert peer.client.take_asked() == [
        KvbmAsked("store", "away", 0.0, away),
        KvbmAsked("fetch", "answered", 1.5),
        KvbmAsked("fetch", "late", 3.0, "no answer in 3 s"),
        KvbmAsked("fetch", "away", 5.25, "the kvbm has closed the connection"),
    ]
    assert peer.client.take_asked() == []


def test_a_traced_fetch_carries_its_own_place_to_the_kvbm(peer: Peer) -> None:
    attempt = TraceParent("a" * 32, "b" * 16)
    with peer.up() as stream:
        peer.client.send(KvbmAsk(1, "fetch", b"q", 3.0, attempt.header), 0.0)
        asked = read_asked(stream)
        stream.sendall(encode_frame(Answered(1, b"a")))
        peer.client.poll(0.5)
    [ended] = peer.client.take_asked()
    assert ended.span is not None
    assert ended.span.place.header == asked.trace
    assert (ended.span.place.trace, ended.span.parent) == (attempt.trace, attempt.span)
    assert ended.span.place.span != attempt.span


# --- the end


def test_close_says_nothing_and_may_be_repeated(peer: Peer) -> None:
    with peer.up() as stream:
        peer.client.send(ASK, 0.0)
        peer.client.close()
        peer.client.close()
        assert read_asked(stream) == Asked(1, "store", b"q")
        assert stream.recv(1) == b""
    assert peer.client.send(ASK, 0.0) == [KvbmReply(1, b"", failed="there is no kvbm")]


def test_a_client_that_never_connected_can_be_closed(tmp_path: Path) -> None:
    SocketClient(tmp_path).close()
