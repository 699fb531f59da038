"""The servers that tests start."""

from __future__ import annotations

import socket

import pytest

from tests.servers import EtcdServer, NatsServer, Server


@pytest.fixture(params=["own_nats", "own_etcd"])
def server(request: pytest.FixtureRequest) -> Server:
    found: NatsServer | EtcdServer = request.getfixturevalue(request.param)
    return found


def test_a_server_restarts_on_its_port(server: Server) -> None:
    server.restart()
    server.kill()
    server.start()


def test_a_killed_server_refuses_connections(own_nats: NatsServer) -> None:
    own_nats.kill()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", own_nats.port), timeout=1.0)


def test_a_frozen_server_answers_after_a_thaw(own_nats: NatsServer) -> None:
    own_nats.freeze()
    with socket.create_connection(("127.0.0.1", own_nats.port), timeout=10.0) as connection:
        own_nats.thaw()
        assert connection.recv(4) == b"INFO"


def test_a_wiped_etcd_starts_again(own_etcd: EtcdServer) -> None:
    own_etcd.wipe()
