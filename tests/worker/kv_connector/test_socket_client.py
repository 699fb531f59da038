"""services/worker/kv_connector/socket_client.py: its bounds, with peers on a real Unix socket that behave badly."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.worker.kv_connector import socket_client
from services.worker.kv_connector.socket_client import HELLO_S, MOST_UNSENT_BYTES, RETRY_S, SocketClient
from services.worker.messages import KvbmAsk, KvbmDown, KvbmReply, KvbmUp
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

LIMIT_S = 20.0
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
        made.sendall(encode_frame(Hello(PROTOCOL, "k1")))
        assert self.client.poll(0.0) == [KvbmUp("k1")]
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
    assert client.poll(0.0) == []
    assert not client.settling
    assert client.trouble == f"{tmp_path / SOCKET}: no kvbm listens"
    assert client.send(ASK, 0.0) == [KvbmReply(1, b"", failed="there is no kvbm")]
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / SOCKET))
        listening.listen()
        client.poll(RETRY_S / 2)
        assert not client.settling, "it has not connected"
        client.poll(RETRY_S)
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
    assert "No such file" in missing.trouble


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
        assert peer.client.poll(HELLO_S) == []
        assert "no Hello came" in peer.client.trouble
        assert not peer.client.settling
        assert stream.recv(1) == b""
    peer.accept(now_s=HELLO_S + RETRY_S).close()


def test_half_a_hello_is_no_hello(peer: Peer) -> None:
    with peer.accept() as stream:
        stream.sendall(encode_frame(Hello(PROTOCOL, "k1"))[:-1])
        assert peer.client.poll(0.0) == []
        assert peer.client.poll(HELLO_S) == []
        assert "no Hello came" in peer.client.trouble


@pytest.mark.parametrize(
    ("sent", "trouble"),
    [
        (encode_frame(Hello(PROTOCOL + 1, "k1")), f"kvbm k1 speaks protocol {PROTOCOL + 1}, this connector {PROTOCOL}"),
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
        assert peer.client.poll(0.0) == [], "no kvbm was up, so none is down"
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


def test_each_answer_has_its_time_and_a_late_one_is_still_passed_on(peer: Peer) -> None:
    with peer.up() as stream:
        peer.client.send(ASK, 0.0)
        stream.sendall(encode_frame(Answered(1, b"a", last=False)))
        assert len(peer.client.poll(2.0)) == 1
        assert peer.client.poll(4.9) == []
        assert peer.client.poll(5.0) == [KvbmReply(1, b"", failed="no answer in 3 s")]
        assert peer.client.poll(99.0) == []
        stream.sendall(encode_frame(Answered(1, b"late")))
        assert peer.client.poll(99.0) == [KvbmReply(1, b"late")]


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
        frame = encode_frame(Answered(7, b"a" * 1000))
        whole = (1 << 17) // len(frame)
        stream.sendall(frame * whole)
        first = peer.client.poll(0.0)
        assert 0 < len(first) < whole
        news = list(first)
        while len(news) < whole:
            more = peer.client.poll(0.0)
            assert more
            news += more
        assert news == [KvbmReply(7, b"a" * 1000)] * whole


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
